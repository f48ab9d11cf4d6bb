"""The page of ``quiesce view`` in a real browser, beside two live runs: what it draws, and how it takes trouble."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, Route, expect, sync_playwright

from quiesce_dashboards.rules import GENERATED
from tests.integration.browser import CHROMIUM, ROOT

pytestmark = [pytest.mark.distribution, pytest.mark.xdist_group("view-page"), pytest.mark.timeout(180)]

PATIENCE_MS = 20_000
GAP_SECONDS = 4.0
UIDS = sorted(path.stem for path in (GENERATED / "dashboards").glob("*.json"))
AWAY = ("502", "refused", "reset by peer", "does not answer", "gone", "closed", "started again")
"""What the page and the browser say while Prometheus is away."""

EXPECTED_ERROR = "400 (Bad Request)"  # the browser's own line about the query that is wrong on purpose


class Scene:
    """Two runs, the server, a browser."""

    def __init__(self, folder: Path, browser: Browser) -> None:
        self.browser = browser
        self.shots = Path(os.environ.get("QUIESCE_SCREENSHOTS", folder / "screenshots"))
        self.first, self.second = folder / "first", folder / "second"
        self.processes: list[subprocess.Popen[str]] = []
        self.run = self._start("page_run", "one", str(self.first))
        self._start("page_run", "two", str(self.second))
        self.server = self._start("page_server", str(self.first), str(self.second))
        self.base = self.line(self.server)

    def _start(self, module: str, *arguments: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-m", f"tests.integration.{module}", *arguments],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.processes.append(process)
        if module == "page_run":
            assert self.line(process).startswith("http://")
        return process

    @staticmethod
    def line(process: subprocess.Popen[str]) -> str:
        """Return what a process says next."""
        assert process.stdout is not None
        return process.stdout.readline().strip()

    def restart(self) -> None:
        """Kill the first run, and resume it once Prometheus has missed it."""
        self.run.kill()
        self.run.wait(20)
        self.until_answered(with_data=False)
        time.sleep(GAP_SECONDS)  # long enough to be seen on the page: the time itself is what is tested
        self.run = self._start("page_run", "one", str(self.first), "resume")

    def until_answered(self, *, with_data: bool) -> None:
        """Wait until Prometheus answers, and has a sample of the first run now, or has none."""
        asked = f"{self.base}/api/prometheus/query?query=quiesce_trainer_version%7Brun%3D%22one%22%7D"
        end = time.monotonic() + 60
        while time.monotonic() < end:
            try:
                with urllib.request.urlopen(asked, timeout=10) as answer:  # noqa: S310 - our loopback
                    if bool(json.load(answer)["data"]["result"]) == with_data:
                        return
            except urllib.error.HTTPError:
                pass  # it is away
            time.sleep(0.1)
        raise AssertionError(f"no answer {'with' if with_data else 'without'} data within a minute")

    def until_exemplars(self) -> None:
        """Wait until both runs are scraped, and slots of the first one have exemplars."""
        self.until_answered(with_data=True)
        asked = f"{self.base}/api/prometheus/query_exemplars?query=quiesce_mutation_hold_seconds_bucket&start={{}}&end={{}}"
        end = time.monotonic() + 60
        while time.monotonic() < end:
            now = time.time()
            with urllib.request.urlopen(asked.format(now - 300, now), timeout=10) as answer:  # noqa: S310 - our loopback
                runs = {
                    each["seriesLabels"]["run"] for each in json.load(answer)["data"] if each["exemplars"]
                }
            if runs == {"one", "two"}:
                return
            time.sleep(0.2)
        raise AssertionError("no exemplars within a minute")

    def child(self, name: str, *, other_than: int = 0) -> int:
        """Return the process that the server started under a name; wait for it, should there be none yet."""
        end = time.monotonic() + PATIENCE_MS / 1000
        while time.monotonic() < end:
            for status in Path("/proc").glob("[0-9]*/status"):
                try:
                    text = status.read_text()
                except OSError:
                    continue
                mine = f"Name:\t{name}\n" in text and f"PPid:\t{self.server.pid}\n" in text
                if mine and int(status.parent.name) != other_than:
                    return int(status.parent.name)
            time.sleep(0.1)
        raise AssertionError(f"the server has no such child {name}")

    def close(self) -> None:
        """End everything."""
        for process in reversed(self.processes):
            process.terminate()
        for process in self.processes:
            try:
                process.communicate(timeout=15)
            except subprocess.TimeoutExpired:
                process.kill()
                process.communicate()


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    """The scene, once for all tests: it is there when the page has drawn both runs."""
    expect.set_options(timeout=PATIENCE_MS)
    subprocess.run(["scripts/fetch_browser.sh"], cwd=ROOT, check=True, timeout=600)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
        )
        made = Scene(tmp_path_factory.mktemp("view"), browser)
        try:
            made.until_exemplars()
            yield made
        finally:
            made.close()
            browser.close()


class Visit:
    """A page that is open, and what it complained about."""

    def __init__(self, scene: Scene, page: Page) -> None:
        self.scene = scene
        self.page = page
        self.complaints: list[str] = []
        self.expected: tuple[str, ...] = (EXPECTED_ERROR,)
        self.foreign: list[str] = []
        page.on("console", lambda said: self._said(said.type, said.text))
        page.on("pageerror", lambda error: self.complaints.append(str(error)))
        page.on("request", lambda asked: self._asked(asked.url))
        page.set_default_timeout(PATIENCE_MS)

    def _said(self, kind: str, text: str) -> None:
        if kind in {"error", "warning"}:
            self.complaints.append(text)

    def _asked(self, url: str) -> None:
        if not url.startswith((f"{self.scene.base}/", "data:", "blob:")):
            self.foreign.append(url)

    def until(self, expression: str, arg: object = None) -> None:
        """Wait until an expression holds in the page, whose policy lets no string become a function there."""
        end = time.monotonic() + PATIENCE_MS / 1000
        while not self.page.evaluate(expression, arg):
            if time.monotonic() > end:
                raise AssertionError(f"it never came to hold: {expression} with {arg!r}; {self.panels()}")
            self.page.wait_for_timeout(100)

    def go(self, fragment: str) -> None:
        """Open a place in the page, and wait until it has been refreshed once."""
        self.page.goto(f"{self.scene.base}/{fragment}")
        if "/trace/" not in fragment:
            self.fresh()

    def fresh(self) -> None:
        """Wait for the next refresh that ends."""
        before = self.page.evaluate("document.documentElement.dataset.freshAt ?? ''")
        self.until("before => document.documentElement.dataset.freshAt !== before", arg=before)

    def panel(self, title: str) -> Any:  # noqa: ANN401 - a locator
        """Return a panel."""
        return self.page.locator(f'.panel[data-title="{title}"]')

    def settled(self) -> dict[str, dict[str, str]]:
        """Return what every panel says of itself, at a moment when none of them waits for an answer."""
        end = time.monotonic() + 2 * PATIENCE_MS / 1000
        while True:
            found = self.panels()
            waiting = {title for title, told in found.items() if told["state"] in {"idle", "loading"}}
            if found and not waiting:
                return found
            assert time.monotonic() < end, f"these still wait: {waiting}"
            self.page.wait_for_timeout(100)

    def panels(self) -> dict[str, dict[str, str]]:
        """Return what every panel says of itself, by title."""
        found: dict[str, dict[str, str]] = self.page.evaluate(
            "Object.fromEntries([...document.querySelectorAll('.panel')].map(p => [p.dataset.title, {...p.dataset}]))"
        )
        return found

    def wait_drawn(self, title: str, *, least: int = 1) -> None:
        """Wait until a panel has drawn at least so many points."""
        self.until(
            '([title, least]) => { const p = document.querySelector(`.panel[data-title="${title}"]`);'
            " return p && p.dataset.state === 'drawn' && Number(p.dataset.points) >= least; }",
            arg=[title, least],
        )

    def shoot(self, name: str) -> None:
        """Keep a picture."""
        self.scene.shots.mkdir(parents=True, exist_ok=True)
        self.page.screenshot(path=self.scene.shots / f"{name}.png")


@pytest.fixture
def visit(scene: Scene, request: pytest.FixtureRequest) -> Iterator[Visit]:
    """A new page; afterwards, nothing was complained about and nothing asked of anybody else."""
    theme, width, height = getattr(request, "param", ("dark", 1280, 900))
    context = scene.browser.new_context(
        viewport={"width": width, "height": height},
        color_scheme="dark" if theme == "dark" else "light",
        reduced_motion="reduce",
    )
    made = Visit(scene, context.new_page())
    try:
        yield made
    finally:
        made.shoot(re.sub(r"\W+", "-", request.node.name))
        context.close()
    assert [text for text in made.complaints if not any(each in text for each in made.expected)] == []
    assert made.foreign == []


LOOKS = (("dark", 1280, 4200), ("light", 1920, 3600))
PLACES = [
    pytest.param(uid, LOOKS[number % 2], id=f"{uid}-{LOOKS[number % 2][0]}")
    for number, uid in enumerate(UIDS)
]


@pytest.mark.parametrize("uid,visit", PLACES, indirect=["visit"])
def test_every_panel_of_every_dashboard_is_answered_and_most_have_data(visit: Visit, uid: str) -> None:
    """No panel shows an error, stays unasked or is unknown, and seven of ten have something of a live run to draw."""
    visit.go(f"#/d/{uid}?from=now-5m&to=now")
    found = visit.settled()

    states = {title: told["state"] for title, told in found.items()}
    assert set(states.values()) <= {"drawn", "empty"}, states
    assert sum(state == "drawn" for state in states.values()) >= 0.7 * len(states), states
    for title, told in found.items():
        if told["state"] == "drawn" and told["type"] in {"timeseries", "state-timeline"}:
            assert int(told["points"]) > 0, title
    assert visit.page.evaluate("document.documentElement.scrollWidth <= innerWidth")


def test_each_panel_type_draws_what_prometheus_answers(visit: Visit) -> None:
    """Lines, cells, numbers, rows and states are in the page, and Markdown never becomes a script."""
    visit.page.set_viewport_size({"width": 1280, "height": 1800})
    visit.go("#/d/mechanics?var-run=one")
    for title in ("Steps", "Holds", "Version", "Owners", "Checks"):
        visit.wait_drawn(title)

    assert visit.panel("Steps").locator(".scatterlayer .trace path.js-line").count() == 1
    assert visit.panel("Holds").locator(".heatmaplayer image").count() == 1
    assert visit.panel("Checks").locator(".barlayer path").count() >= 8
    expect(visit.panel("Version").locator(".stat-value")).to_have_text(re.compile(r"^\d+$"))
    expect(visit.panel("Owners").locator("tbody tr")).to_have_count(4)
    expect(visit.panel("Words").locator(".text-panel strong")).to_have_text("bold")
    expect(visit.panel("Words")).to_contain_text("<script>")
    assert visit.page.evaluate("window.bad") is None


def test_a_wrong_query_is_shown_in_its_panel_and_an_empty_one_says_so(visit: Visit) -> None:
    """The panel has Prometheus' own words and the query; the others are drawn."""
    visit.page.set_viewport_size({"width": 1280, "height": 1800})
    visit.go("#/d/mechanics?var-run=one")
    expect(visit.panel("Wrong")).to_have_attribute("data-state", "error")

    expect(visit.panel("Wrong")).to_contain_text("parse error")
    expect(visit.panel("Wrong").locator("pre")).to_have_text("sum(rate(quiesce_trainer_version[1m])")
    expect(visit.panel("Nothing")).to_have_attribute("data-state", "empty")
    visit.wait_drawn("Steps")


def test_panels_that_nobody_sees_ask_nothing_and_few_questions_are_open_at_once(visit: Visit) -> None:
    """A folded row asks once it is opened, a panel below the fold once it is scrolled to."""
    asked: list[str] = []
    visit.page.set_viewport_size({"width": 1280, "height": 420})
    visit.page.on("request", lambda request: asked.append(request.url))
    visit.go("#/d/mechanics?var-run=one&refresh=")
    assert not [url for url in asked if "quiesce_folded_away" in url or "nobody" in url]

    visit.page.get_by_role("button", name="Folded").click()
    visit.panel("Folded away").scroll_into_view_if_needed()
    visit.wait_drawn("Folded away")
    assert [url for url in asked if "quiesce_folded_away" in url]
    assert visit.page.evaluate("quiesceView.server.queue.peak") <= 4


def test_an_exemplar_opens_its_trace_by_mouse_and_by_keyboard(visit: Visit) -> None:
    """A dot on the heatmap leads to the waterfall of the span that it came from, and back."""
    visit.go("#/d/mechanics?var-run=one&refresh=")
    visit.until("document.querySelectorAll('.panel-heatmap .exemplar').length > 0")
    dot = visit.panel("Holds").locator(".exemplar").last
    wanted = dot.get_attribute("data-trace-id")
    dot.focus()
    visit.page.keyboard.press("Enter")

    expect(visit.page.locator(".trace")).to_have_attribute("data-trace-id", wanted or "")
    expect(visit.page.locator(".span-bar").first).to_be_visible()
    row = visit.page.locator("[role=treeitem]").first
    expect(row).to_have_attribute("aria-selected", "true")
    expect(row.locator(".span-detail")).to_contain_text("quiesce.")
    row.focus()
    visit.page.keyboard.press("Enter")
    expect(row.locator(".span-detail")).to_have_count(0)
    visit.page.get_by_role("link", name="Back to the dashboard").click()
    visit.wait_drawn("Holds")

    visit.panel("Holds").locator(".exemplar").last.click()
    expect(visit.page.locator(".span-bar").first).to_be_visible()


def test_runs_are_chosen_one_at_a_time_and_the_address_keeps_the_choice(visit: Visit) -> None:
    """Both runs are offered; another one shows other numbers, and goes along to the next dashboard."""
    visit.go("#/d/mechanics?var-run=one")
    select = visit.page.locator("select[data-variable=run]")
    expect(select.locator("option")).to_have_text(["one", "two"])
    visit.wait_drawn("Steps")
    select.select_option("two")
    visit.page.wait_for_url(re.compile("var-run=two"))
    visit.fresh()

    visit.panel("Steps").get_by_role("button", name="Data and queries").click()
    expect(visit.page.locator("dialog pre").first).to_contain_text('run="two"')
    visit.page.keyboard.press("Escape")
    expect(visit.page.locator("dialog")).to_have_count(0)
    for link in visit.page.locator("#tabs a").all():
        assert "var-run=two" in (link.get_attribute("href") or "")


def test_dragging_zooms_and_the_back_button_undoes_it(visit: Visit) -> None:
    """The range is in the address; a double click zooms out."""
    visit.go("#/d/mechanics?var-run=one&from=now-5m&to=now&refresh=")
    visit.wait_drawn("Steps")
    box = visit.panel("Steps").locator(".plot").bounding_box()
    assert box is not None
    middle = box["y"] + box["height"] / 2
    visit.page.mouse.move(box["x"] + box["width"] * 0.5, middle)
    visit.page.mouse.down()
    visit.page.mouse.move(box["x"] + box["width"] * 0.9, middle, steps=5)
    visit.page.mouse.up()
    visit.page.wait_for_url(re.compile(r"from=\d{13}&to=\d{13}"))
    ends = re.search(r"from=(\d+)&to=(\d+)", visit.page.url)
    assert ends is not None
    assert 60_000 < int(ends[2]) - int(ends[1]) < 200_000

    visit.page.go_back()
    visit.page.wait_for_url(re.compile("from=now-5m&to=now"))


def test_the_theme_follows_the_system_until_somebody_chooses(visit: Visit) -> None:
    """Dark from the system, light from the switch, and the choice stays."""
    visit.go("#/d/mechanics?var-run=one&refresh=")
    html = visit.page.locator("html")
    expect(html).to_have_attribute("data-theme", "dark")
    visit.page.get_by_role("button", name="Switch to the light theme").click()
    expect(html).to_have_attribute("data-theme", "light")
    visit.page.goto(f"{visit.scene.base}/#/d/mechanics")
    visit.page.reload()
    expect(html).to_have_attribute("data-theme", "light")


def test_everything_is_reached_by_keyboard_and_has_a_name(visit: Visit) -> None:
    """The first tab stop skips to the panels; whatever takes the focus tells what it is."""
    visit.go("#/d/mechanics?var-run=one&refresh=")
    visit.wait_drawn("Steps")
    visit.page.keyboard.press("Tab")
    expect(visit.page.locator(":focus")).to_have_text("Skip to the panels")
    visit.page.keyboard.press("Enter")
    expect(visit.page.locator("#content")).to_be_focused()

    nameless = visit.page.evaluate(
        """[...document.querySelectorAll('a, button, input, select, [tabindex="0"]')]
        .filter(e => e.checkVisibility() && !(e.textContent.trim() || e.getAttribute('aria-label') || e.labels?.length
          || e.getAttribute('aria-labelledby'))).map(e => e.outerHTML.slice(0, 120))"""
    )
    assert nameless == []
    chart = visit.panel("Steps").locator(".chart")
    chart.focus()
    visit.page.keyboard.press("ArrowLeft")
    expect(visit.panel("Steps").locator(".tip")).to_be_visible()
    visit.page.keyboard.press("Escape")
    expect(visit.panel("Steps").locator(".tip")).to_be_hidden()


@pytest.mark.parametrize("visit", [pytest.param(("light", 390, 800), id="phone")], indirect=True)
def test_a_narrow_window_shows_one_column_without_sideways_scrolling(visit: Visit) -> None:
    """Nothing is wider than the window."""
    visit.go("#/d/mechanics?var-run=one&refresh=")
    visit.wait_drawn("Steps")
    assert visit.page.evaluate("document.documentElement.scrollWidth") <= 390
    box = visit.panel("Steps").bounding_box()
    assert box is not None
    assert box["width"] > 340


def test_prometheus_away_is_told_and_the_page_recovers_by_itself(visit: Visit) -> None:
    """A banner while it is away, what was drawn stays, and without a reload everything goes on."""
    visit.expected += AWAY
    visit.go("#/d/mechanics?var-run=one&refresh=1s")
    visit.wait_drawn("Steps")
    gone = {"status": "error", "errorType": "unavailable", "error": "connection refused"}

    def refuse(route: Route) -> None:
        route.fulfill(status=502, json=gone)

    visit.page.route("**/api/prometheus/**", refuse)
    visit.page.route(
        "**/api/info", lambda route: route.fulfill(json={"prometheus": {"ok": False, "error": "gone"}})
    )
    banner = visit.page.locator("#banner")
    expect(banner).to_be_visible()
    expect(banner).to_contain_text("Prometheus does not answer")
    expect(visit.panel("Steps")).to_have_attribute("data-state", "drawn")
    visit.page.unroute_all()
    expect(banner).to_be_hidden()
    visit.fresh()


@pytest.mark.soak  # as the other that takes something away
def test_a_prometheus_that_dies_is_there_again(visit: Visit) -> None:
    """The server starts another one on the same data, and the page draws on."""
    visit.go("#/d/mechanics?var-run=one&refresh=1s")
    visit.wait_drawn("Steps")
    visit.expected += AWAY
    killed = visit.scene.child("prometheus")
    os.kill(killed, signal.SIGKILL)
    visit.fresh()
    visit.until("document.documentElement.dataset.away === 'no' && document.querySelector('#banner').hidden")
    visit.fresh()
    visit.wait_drawn("Steps")
    assert visit.scene.child("prometheus", other_than=killed)
    visit.scene.until_answered(with_data=True)  # the tests after this one find it as it was


@pytest.mark.soak  # it takes the run away from the other tests
def test_a_run_that_restarts_is_drawn_on_with_the_gap_left_open(visit: Visit) -> None:
    """After a kill and a resume the same run goes on as a second piece of line; nothing is drawn for the time between."""
    # A minute, so that there is a point for each second, and the seconds without a run are a gap.
    visit.go("#/d/mechanics?var-run=one&refresh=1s&from=now-1m&to=now")
    visit.wait_drawn("Steps", least=3)
    visit.scene.restart()
    visit.until(
        """() => {
          const lines = document.querySelectorAll('.panel[data-title="Steps"] .scatterlayer path.js-line');
          return lines.length > 1 || (lines.length === 1 && lines[0].getAttribute('d').split('M').length > 2);
        }"""
    )
    visit.scene.until_answered(with_data=True)  # the tests after this one find it as it was


def test_a_drill_turns_the_badge_and_the_alert_panel_red(visit: Visit) -> None:
    """A broken invariant is a firing alert in the header and in the dashboard, with a runbook that opens here."""
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "quiesce.cli",
            "drill",
            "early-cursor",
            "--run-dir",
            str(visit.scene.first),
            "--json",
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=40,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    uid = "quiesce-ownership" if "quiesce-ownership" in UIDS else "mechanics"
    visit.page.set_viewport_size({"width": 1280, "height": 4000})
    visit.go(f"#/d/{uid}?var-run=one&from=now-5m&to=now&refresh=1s")
    badge = visit.page.locator(".badge")
    expect(badge).to_have_attribute("data-state", "critical")
    badge.click()
    alert = visit.page.locator(".alert[data-name=QuiesceCursorBufferSkew]").first
    expect(alert).to_be_visible()
    href = alert.get_by_role("link").get_attribute("href")
    assert href == "/runbooks/QuiesceCursorBufferSkew"
    with urllib.request.urlopen(f"{visit.scene.base}{href}", timeout=10) as answer:  # noqa: S310 - our loopback
        assert "QuiesceCursorBufferSkew" in answer.read().decode()
    visit.page.keyboard.press("Escape")
    if uid != "mechanics":
        row = visit.page.locator(".panel-table tr", has_text="QuiesceCursorBufferSkew").first
        expect(row).to_be_visible()
        assert row.locator("[data-colour=red], [data-colour*=red], td[style*=color], .chip").count() > 0


EXPECTED = r"""{
  "piled": [4, 2, 4],
  "units": ["123 µs", "1.50 min", "1.50 hours", "1.23 K", "12.3%", "1.50 KiB", "12.5 ops/s", "0 s", "NaN", "7"],
  "ago": "1 min 5 s ago",
  "steps": [[2000, 4000], [15000, 60000], [120000, 135000], [30000, 120000]],
  "built": {"__interval": "15s", "__interval_ms": "15000", "__rate_interval": "1m", "__range": "900s", "__range_s": "900",
    "__range_ms": "900000", "__from": "0", "__to": "900000"},
  "promql": ["{a=\"q\\\"r\",b=~\"(a\\\\.b|c)\",c=~\".*\"}[1m] $none"],
  "gap": [["x", [1, 2, null, 3]]],
  "buckets": [[2], [2], [1]],
  "range": [{"from": 999999100000, "to": 1000000000000}, null, "now-15m"],
  "address": ["#/d/quiesce-slots?from=now-1h&to=now&var-run=a", "/runbooks/QuiesceDrainSlow",
    "#/d/a?from=1&to=2&var-k=x&var-k=y&refresh=5s"],
  "organised": ["B"]
}"""


def test_units_intervals_and_variables_are_computed_as_grafana_does(visit: Visit) -> None:
    """The page's pure functions, in the browser that runs them."""
    visit.go("#/d/mechanics?var-run=one&refresh=")
    told = visit.page.evaluate(Path(__file__).with_name("page_functions.js").read_text())
    assert told == json.loads(EXPECTED)
