"""The page of ``quiesce view`` when something goes wrong under its eyes: a run, Prometheus, an invariant.

Each test breaks the scene and leaves it mended, with traces of it in the past: no test may rely on a past without them.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest
from playwright.sync_api import Locator, expect

from tests.integration.browser import ROOT
from tests.integration.page_scene import Scene, Visit, opened_page, opened_scene

pytestmark = [pytest.mark.distribution, pytest.mark.xdist_group("view-trouble"), pytest.mark.timeout(300)]

AWAY = ("502", "refused", "reset by peer", "does not answer", "gone", "closed", "started again")
"""What the page and the browser say while Prometheus is away."""


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    """A run of its own, once for all tests."""
    with opened_scene(tmp_path_factory.mktemp("trouble"), "one") as made:
        yield made


@pytest.fixture
def visit(scene: Scene, request: pytest.FixtureRequest) -> Iterator[Visit]:
    """A new page, once Prometheus has fresh samples of the run."""
    scene.until_scraped("one")
    with opened_page(scene, request.node.name, theme="light", width=1280, height=900) as made:
        yield made


PIECES = """
  const plot = document.querySelector('.panel[data-title="Steps"] .plot');
  const { range: [low, high], _length: width } = plot._fullLayout.xaxis;
  const pieces = [...plot.querySelectorAll('.scatterlayer path.js-line')]
    .flatMap(path => path.getAttribute('d').split(/(?=M)/))
    .map(piece => [...piece.matchAll(/([MLH])([^MLHV]*)/g)].flatMap(([, kind, rest]) => {
      const found = rest.match(/-?[\\d.]+/g).map(Number);
      return kind === 'H' ? found : found.filter((_, index) => index % 2 === 0);
    }).map(x => low + x / width * (high - low)))
    .map(all => [Math.min(...all), Math.max(...all)]);
"""
"""Reads the line of the panel *Steps* off its path: from when to when each piece of it goes, in Unix ms."""


def pieces(visit: Visit) -> list[tuple[float, float]]:
    """Return from when to when each piece of the line of steps is drawn, in Unix ms."""
    told: list[tuple[float, float]] = visit.page.evaluate(f"() => {{ {PIECES} return pieces; }}")
    return told


def test_a_run_that_restarts_is_drawn_on_with_the_gap_left_open(visit: Visit) -> None:
    """A kill ends the line; after a resume it goes on, with nothing between, and the restore is on the dashboard."""
    visit.go("#/d/mechanics?var-run=one&refresh=1s&from=now-3m&to=now")
    visit.wait_drawn("Steps", least=3)
    visit.scene.kill("one")
    visit.until(f"() => {{ {PIECES} return high - Math.max(...pieces.flat()) > 3500; }}")
    ended = max(to for _, to in pieces(visit))
    visit.scene.resume("one")
    visit.until(f"ended => {{ {PIECES} return Math.max(...pieces.flat()) > ended + 3500; }}", arg=ended)

    drawn = pieces(visit)
    middle = ended + 1750
    assert [each for each in drawn if each[1] < middle], drawn
    assert [each for each in drawn if each[0] > middle], drawn
    assert not [each for each in drawn if each[0] <= middle <= each[1]], drawn
    visit.go("#/d/quiesce-windows?var-run=one&refresh=2s")
    visit.show_all()
    visit.wait_drawn("The last restore")
    visit.wait_drawn("Groups that were restored")


def test_a_prometheus_that_dies_is_there_again(visit: Visit) -> None:
    """The server starts another one on the same data, and the page draws on, from before the death to after it."""
    visit.go("#/d/mechanics?var-run=one&refresh=1s&from=now-3m&to=now")
    visit.wait_drawn("Steps", least=3)
    visit.expected += AWAY
    killed = visit.scene.child("prometheus")
    before = max(to for _, to in pieces(visit))
    os.kill(killed, signal.SIGKILL)

    assert visit.scene.child("prometheus", other_than=killed) != killed
    visit.scene.until_scraped("one")
    visit.until("document.documentElement.dataset.away === 'no' && document.querySelector('#banner').hidden")
    visit.until(f"before => {{ {PIECES} return Math.max(...pieces.flat()) > before + 2000; }}", arg=before)
    assert min(begin for begin, _ in pieces(visit)) < before


OF_CELL = """cell => {
  const chip = cell.querySelector('.chip');
  return chip ? getComputedStyle(chip).backgroundColor : getComputedStyle(cell).color;
}"""
"""The colour that a cell of a table has: of its chip, or of its text."""

OF_STAT = "stat => getComputedStyle(stat).backgroundColor"
"""The colour of a tile's ground."""


def colour(place: Locator, of: str) -> str:
    """Return a computed colour. Panels are drawn anew each second: an element that was just taken out has none."""
    told = ""
    for _ in range(20):
        told = told or place.evaluate(of)
    return told


def is_red(computed: str) -> bool:
    """Say whether a computed colour is a red, as vermilion is."""
    found = [int(part) for part in re.findall(r"\d+", computed)[:3]]
    return len(found) == 3 and found[0] > 150 and found[0] > 1.4 * found[1] and found[0] > 2 * found[2]


ALERT = "QuiesceCursorBufferSkew"


@pytest.fixture(scope="module")
def broken(scene: Scene) -> list[str]:
    """The invariants that a drill has broken in the run, in order."""
    scene.until_scraped("one")
    command = (sys.executable, "-m", "quiesce.cli", "drill", "early-cursor", "--json", "--run-dir")
    done = subprocess.run(
        [*command, str(scene.folders["one"])],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    fired = sorted(each["invariant"] for each in json.loads(done.stdout)["fired"])
    assert fired == ["cursor_covers_buffer", "cursor_within_lookahead"]
    return fired


def test_a_drill_is_a_firing_alert_in_red_whose_runbook_opens(broken: list[str], visit: Visit) -> None:
    """The alert of exactly the broken invariants fires, in the header and on the dashboard, and leads to its page."""
    visit.go("#/d/quiesce-ownership?var-run=one&from=now-5m&to=now&refresh=1s")
    visit.show_all()
    badge = visit.page.locator("button.badge")
    expect(badge).to_have_attribute("data-state", "critical")
    visit.until(
        "alert => document.querySelector('button.badge').title.split(', ').includes(alert)", arg=ALERT
    )
    badge.click()
    listed = visit.page.locator(f".alert[data-name={ALERT}][data-severity=critical]")
    expect(listed).to_have_count(len(broken))
    texts = listed.all_text_contents()
    assert all(any(name in text for text in texts) for name in broken), texts
    for place in range(len(broken)):  # two alerts of one name, each with the record of its own invariant
        expect(listed.nth(place).locator(".alert-record")).to_have_count(1)
    expect(listed.first.get_by_role("link", name=f"Runbook: {ALERT}")).to_have_attribute(
        "href", f"/runbooks/{ALERT}"
    )
    visit.page.keyboard.press("Escape")

    rows = visit.panel("Alerts that fire").locator("tbody tr", has_text=ALERT)
    expect(rows).to_have_count(len(broken))
    for name in broken:
        severity = rows.filter(has_text=name).locator("td", has_text="critical")
        expect(severity).to_have_count(1)
        assert is_red(colour(severity, OF_CELL)), name
    names = visit.panel("Violations").locator("tbody tr td:first-child")
    expect(names).to_have_count(len(broken))
    assert sorted(names.all_text_contents()) == broken
    number = visit.panel("Invariants violated").locator(".stat")
    expect(number.locator(".stat-value")).to_have_text(str(len(broken)))
    assert is_red(colour(number, OF_STAT))
    visit.until(
        "() => document.querySelector('[data-title=\"Invariants\"]').dataset.states?.includes('=violated')"
    )
    states = dict(each.split("=") for each in visit.panels()["Invariants"]["states"].split(";"))
    assert sorted(name for name, state in states.items() if state == "violated") == broken

    rows.first.get_by_role("link", name=ALERT).click()
    visit.page.wait_for_url(f"**/runbooks/{ALERT}")
    expect(visit.page.get_by_role("heading", level=1)).to_have_text(ALERT)


def test_what_a_drill_has_broken_is_listed_with_its_evidence(broken: list[str], visit: Visit) -> None:
    """The alerts lead to the record of each violation: what, since when, what to do."""
    visit.go("#/d/quiesce-ownership?var-run=one&refresh=1s")
    badge = visit.page.locator("button.badge")
    expect(badge).to_have_attribute("data-state", "critical")
    badge.click()
    visit.page.locator('#alerts-panel a[href="#/violations/"]').click()

    for name in broken:
        record = visit.page.locator(f".violation[data-invariant={name}][data-open=yes]")
        expect(record).to_have_count(1)
        expect(record.locator(".violation-detail")).to_be_hidden()
        record.locator("summary").focus()
        visit.page.keyboard.press("Enter")
        expect(record.locator(".violation-detail")).to_be_visible()
        expect(record).to_contain_text("early-cursor")
        expect(record.get_by_role("link", name=f"Runbook: {ALERT}")).to_have_attribute(
            "href", f"/runbooks/{ALERT}"
        )
    visit.page.get_by_role("link", name="Back to the dashboard").click()
    visit.wait_drawn("Groups by owner")
