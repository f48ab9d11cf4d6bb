"""The page of ``quiesce view`` in a real browser, beside two live runs: what it draws, and how it is used.

Nothing here disturbs the runs or Prometheus, so the tests share them, in any order. What does is in ``test_view_trouble``.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Route, expect

from tests.integration.page_scene import UIDS, Scene, Visit, opened_page, opened_scene

pytestmark = [pytest.mark.distribution, pytest.mark.xdist_group("view-page"), pytest.mark.timeout(300)]

AWAY = ("502", "refused", "gone")
"""What the page and the browser say when Prometheus is said to be away."""


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    """Two runs, once for all tests."""
    with opened_scene(tmp_path_factory.mktemp("view"), "one", "two") as made:
        yield made


@pytest.fixture
def visit(scene: Scene, request: pytest.FixtureRequest) -> Iterator[Visit]:
    """A new page; a parameter gives the theme, and the window's width and height."""
    theme, width, height = getattr(request, "param", ("dark", 1280, 900))
    with opened_page(scene, request.node.name, theme=theme, width=width, height=height) as made:
        yield made


NOT_HERE = {
    "quiesce-gate": {
        "Reply, p99": "replies are those of an inference engine, and this run has none",
        "Reply latency": "as Reply, p99",
    },
    "quiesce-ownership": {},
    "quiesce-slots": {},
    "quiesce-training": {
        "GPU memory": "there is no GPU",
        "GPU utilization": "there is no GPU",
    },
    "quiesce-windows": {
        "The last restore": "this process was not resumed",
        "Groups that were restored": "this process was not resumed",
    },
}
"""By dashboard, the panels that must have nothing of this run to draw, and why."""

NOW_AND_THEN = {
    "quiesce-ownership": {
        "Alerts that fire": "none should; a machine that is too busy to let the run go on may make one",
        "Violations": "as the alerts",
    },
    "quiesce-windows": {"Phase under way": "a phase lasts milliseconds, and a scrape seldom meets one"},
}
"""By dashboard, the panels that may have something or nothing, and why."""

LOOKS = (("dark", 1280, 900), ("light", 1920, 900))
PLACES = [
    pytest.param(uid, LOOKS[number % 2], id=f"{uid}-{LOOKS[number % 2][0]}")
    for number, uid in enumerate(UIDS)
]


@pytest.mark.parametrize("uid,visit", PLACES, indirect=["visit"])
def test_every_panel_of_every_dashboard_draws_a_live_run_but_those_named(visit: Visit, uid: str) -> None:
    """What is not named above as empty has points of the run; what is named is there, and says that it is empty."""
    absent, either = NOT_HERE[uid], NOW_AND_THEN.get(uid, {})

    visit.go(f"#/d/{uid}?var-run=one&from=now-5m&to=now&refresh=2s")
    visit.show_all()
    visit.until_all_drawn(but={*absent, *either})

    found = visit.panels()
    assert {*absent, *either} <= set(found), "a panel is excused that is not there"
    assert {title: found[title]["points"] for title in absent} == dict.fromkeys(absent, "0")
    assert visit.page.evaluate("document.documentElement.scrollWidth <= innerWidth")


def test_each_panel_type_draws_what_prometheus_answers(visit: Visit) -> None:
    """Lines, cells, numbers, rows and states are in the page, and Markdown never becomes a script."""
    visit.go("#/d/mechanics?var-run=one")
    visit.show_all()
    for title in ("Steps", "Holds", "Version", "Owners", "Checks"):
        visit.wait_drawn(title)

    for inside in (
        '[data-title="Steps"] .scatterlayer .trace path.js-line',
        '[data-title="Holds"] .heatmaplayer image',
    ):
        visit.until("inside => document.querySelector(inside) !== null", arg=inside)
    visit.until("document.querySelectorAll('[data-title=\"Checks\"] .barlayer path').length >= 8")
    expect(visit.panel("Version").locator(".stat-value")).to_have_text(re.compile(r"^\d+$"))
    expect(visit.panel("Owners").locator("tbody tr")).to_have_count(4)
    expect(visit.panel("Words").locator(".text-panel strong")).to_have_text("bold")
    expect(visit.panel("Words")).to_contain_text("<script>")
    assert visit.page.evaluate("window.bad") is None


def test_a_wrong_query_is_shown_in_its_panel_and_an_empty_one_says_so(visit: Visit) -> None:
    """The panel has Prometheus' own words and the query; the others are drawn."""
    visit.go("#/d/mechanics?var-run=one")
    visit.show_all()
    expect(visit.panel("Wrong")).to_have_attribute("data-state", "error")

    expect(visit.panel("Wrong")).to_contain_text("parse error")
    expect(visit.panel("Wrong").locator("pre")).to_have_text("sum(rate(quiesce_trainer_version[1m])")
    expect(visit.panel("Nothing")).to_have_attribute("data-state", "empty")
    visit.wait_drawn("Steps")


@pytest.mark.parametrize("visit", [pytest.param(("dark", 1280, 420), id="low")], indirect=True)
def test_panels_that_nobody_sees_ask_nothing_and_few_questions_are_open_at_once(visit: Visit) -> None:
    """A folded row asks once it is opened, a panel below the fold once it is scrolled to."""
    asked: list[str] = []
    visit.page.on("request", lambda request: asked.append(request.url))
    visit.go("#/d/mechanics?var-run=one&refresh=")
    assert not [url for url in asked if "quiesce_folded_away" in url or "nobody" in url]

    visit.page.get_by_role("button", name="Folded").click()
    visit.panel("Folded away").scroll_into_view_if_needed()
    visit.wait_drawn("Folded away")
    assert [url for url in asked if "quiesce_folded_away" in url]
    assert visit.page.evaluate("quiesceView.server.queue.peak") <= 4


def recorded_dot(visit: Visit) -> str:
    """Return the trace of an exemplar on the heatmap that can be pressed, and whose trace is recorded already."""
    visit.until("document.querySelectorAll('[data-title=\"Holds\"] .exemplar').length > 0")
    traces: list[str] = visit.page.evaluate(
        """[...document.querySelectorAll('[data-title="Holds"] .exemplar')].filter(dot => {
          const { x, y, width, height } = dot.getBoundingClientRect();
          return document.elementFromPoint(x + width / 2, y + height / 2) === dot;
        }).map(dot => dot.dataset.traceId)"""
    )
    return next(trace for trace in traces if visit.scene.has_trace(trace))


def test_an_exemplar_opens_its_trace_by_mouse_and_by_keyboard(visit: Visit) -> None:
    """A dot on the heatmap leads to the waterfall of the span that it came from, and back."""
    visit.go("#/d/mechanics?var-run=one&refresh=")
    wanted = recorded_dot(visit)
    dot = visit.panel("Holds").locator(f'.exemplar[data-trace-id="{wanted}"]').first
    dot.focus()
    visit.page.keyboard.press("Enter")

    expect(visit.page.locator(".trace")).to_have_attribute("data-trace-id", wanted)
    expect(visit.page.locator(".span-bar").first).to_be_visible()
    row = visit.page.locator("[role=treeitem]").first
    expect(row).to_have_attribute("aria-selected", "true")
    expect(row.locator(".span-detail")).to_contain_text("quiesce.")
    row.focus()
    visit.page.keyboard.press("Enter")
    expect(row.locator(".span-detail")).to_have_count(0)
    visit.page.get_by_role("link", name="Back to the dashboard").click()
    visit.wait_drawn("Holds")

    wanted = recorded_dot(visit)
    visit.panel("Holds").locator(f'.exemplar[data-trace-id="{wanted}"]').first.click()
    expect(visit.page.locator(".trace")).to_have_attribute("data-trace-id", wanted)
    expect(visit.page.locator(".span-bar").first).to_be_visible()


def test_an_exemplar_stays_the_same_element_through_a_refresh(visit: Visit) -> None:
    """A dot that is drawn anew, elsewhere since time went on, is the node that it was, and keeps the focus."""
    visit.go("#/d/mechanics?var-run=one&refresh=")
    visit.until("document.querySelectorAll('[data-title=\"Holds\"] .exemplar').length > 0")
    focused = visit.page.evaluate(
        """() => {
          window.before = new Map();
          for (const dot of document.querySelectorAll('[data-title="Holds"] .exemplar'))
            window.before.set(`${dot.dataset.traceId} ${dot.title}`, { dot, left: parseFloat(dot.style.left) });
          const last = [...window.before.keys()].at(-1);
          window.before.get(last).dot.focus();
          return last;
        }"""
    )
    drawn_at = visit.panels()["Holds"]["drawnAt"]

    visit.refresh()
    visit.until("at => document.querySelector('[data-title=\"Holds\"]').dataset.drawnAt > at", arg=drawn_at)
    told = visit.page.evaluate(
        """focused => {
          const dots = [...document.querySelectorAll('[data-title="Holds"] .exemplar')]
            .map(dot => ({ dot, key: `${dot.dataset.traceId} ${dot.title}` })).filter(({ key }) => window.before.has(key));
          return {
            kept: dots.length, same: dots.filter(({ dot, key }) => window.before.get(key).dot === dot).length,
            moved: dots.every(({ dot, key }) => parseFloat(dot.style.left) < window.before.get(key).left),
            there: dots.some(({ key }) => key === focused),
            focused: document.activeElement === window.before.get(focused).dot,
          };
        }""",
        focused,
    )

    assert told["kept"] > 0
    assert told["same"] == told["kept"]
    assert told["moved"], "nothing was drawn anew"
    assert told["focused"] == told["there"]


def test_a_press_that_is_held_through_a_refresh_still_opens_the_trace(visit: Visit) -> None:
    """The button goes down on a dot before a redraw and up after it, and that is a click."""
    end = time.time_ns() // 1_000_000  # a range that stands still, so that the dot does
    visit.go(f"#/d/mechanics?var-run=one&refresh=&from={end - 120_000}&to={end}")
    wanted = recorded_dot(visit)
    box = visit.panel("Holds").locator(f'.exemplar[data-trace-id="{wanted}"]').first.bounding_box()
    assert box is not None
    visit.page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    visit.page.mouse.down()
    visit.refresh()
    visit.page.mouse.up()

    expect(visit.page.locator(".trace")).to_have_attribute("data-trace-id", wanted)


def test_runs_are_chosen_one_at_a_time_and_the_address_keeps_the_choice(visit: Visit) -> None:
    """Both runs are offered; another one shows other numbers, and goes along to the next dashboard."""
    visit.go("#/d/mechanics?var-run=one")
    select = visit.page.locator("select[data-variable=run]")
    expect(select.locator("option")).to_have_text(["one", "two"])
    visit.wait_drawn("Steps")
    select.select_option("two")
    visit.page.wait_for_url(re.compile("var-run=two"))
    visit.until(
        "quiesceView.dashboard.panels.find(({ json }) => json.title === 'Steps').queries[0].expr.includes('run=\"two\"')"
    )

    visit.panel("Steps").get_by_role("button", name="Data and queries").click()
    expect(visit.page.locator("dialog pre").first).to_contain_text('run="two"')
    visit.page.keyboard.press("Escape")
    expect(visit.page.locator("dialog")).to_have_count(0)
    tabs = visit.page.evaluate("[...document.querySelectorAll('#tabs a')].map(a => a.getAttribute('href'))")
    assert len(tabs) == len(UIDS) + 1
    assert all("var-run=two" in href for href in tabs)


def test_dragging_zooms_and_the_back_button_undoes_it(visit: Visit) -> None:
    """The range that was dragged across is in the address, and the one before it is a step back."""
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
    assert 60_000 < int(ends[2]) - int(ends[1]) < 200_000  # 0.4 of what is a little wider than five minutes

    visit.page.go_back()
    visit.page.wait_for_url(re.compile("from=now-5m&to=now"))


def test_the_theme_follows_the_system_until_somebody_chooses(visit: Visit) -> None:
    """Dark from the system, light from the switch, and the choice stays."""
    visit.go("#/d/mechanics?var-run=one&refresh=")
    html = visit.page.locator("html")
    expect(html).to_have_attribute("data-theme", "dark")
    visit.page.get_by_role("button", name="Switch to the light theme").click()
    expect(html).to_have_attribute("data-theme", "light")
    visit.go("#/d/mechanics?refresh=")
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
    visit.panel("Steps").locator(".chart").focus()
    tip = visit.panel("Steps").locator(".tip")
    for _ in range(100):  # from the right edge: a run that answered late has no point there
        visit.page.keyboard.press("ArrowLeft")
        if tip.is_visible():
            break
    expect(tip).to_be_visible()
    visit.page.keyboard.press("Escape")
    expect(tip).to_be_hidden()


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
