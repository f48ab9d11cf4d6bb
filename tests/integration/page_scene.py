"""What the tests of the page stand in: runs, ``quiesce view``, a browser, and a page that is open in it.

Rule: whoever waits here waits for something to come to hold, for as long as :data:`PATIENCE_MS`; nothing waits for a
time to pass. What stands on the page is read in one call of the page, since a refresh may come between two.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from playwright.sync_api import Browser, Locator, Page, expect, sync_playwright

from quiesce_dashboards.rules import GENERATED
from tests.integration.browser import CHROMIUM, ROOT

UIDS = sorted(path.stem for path in (GENERATED / "dashboards").glob("*.json"))

PATIENCE_MS = 60_000
"""How long something may take to come to hold: a machine may be busy with other tests."""

EXPECTED_ERROR = "400 (Bad Request)"
"""The browser's own line about the query that is wrong on purpose."""

_BIRTHS = "quiesce_mutation_hold_seconds_bucket"  # what has exemplars first


def until(condition: Callable[[], object], what: str) -> None:
    """Wait until something holds outside the page."""
    end = time.monotonic() + PATIENCE_MS / 1000
    while not condition():
        assert time.monotonic() < end, f"it never came to hold: {what}"
        time.sleep(0.1)


class Scene:
    """Runs by name, the server that shows them, and a browser.

    Attributes:
        base: The page's address.
        browser: The browser.
        folders: The run folders by the runs' names.
        server: The process that serves the page.
    """

    def __init__(self, folder: Path, browser: Browser, names: Sequence[str]) -> None:
        self.browser = browser
        self.shots = Path(os.environ.get("QUIESCE_SCREENSHOTS", folder / "screenshots"))
        self.folders = {name: folder / name for name in names}
        self._processes: list[subprocess.Popen[str]] = []
        try:
            self._runs = {name: self._start("page_run", name, str(at)) for name, at in self.folders.items()}
            for run in self._runs.values():
                assert self._line(run).startswith("http://")
            self.server = self._start("page_server", *map(str, self.folders.values()))
            self.base = self._line(self.server)
            for name in names:
                self._until_exemplars(name)
        except BaseException:
            self.close()
            raise

    def _start(self, module: str, *arguments: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-m", f"tests.integration.{module}", *arguments],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._processes.append(process)
        return process

    @staticmethod
    def _line(process: subprocess.Popen[str]) -> str:
        assert process.stdout is not None
        return process.stdout.readline().strip()

    def kill(self, name: str) -> None:
        """Kill a run."""
        self._runs[name].kill()
        self._runs[name].wait(20)

    def resume(self, name: str) -> None:
        """Go on with a run that was killed."""
        self._runs[name] = self._start("page_run", name, str(self.folders[name]), "resume")
        assert self._line(self._runs[name]).startswith("http://")

    def query(self, expression: str) -> list[float] | None:
        """Ask Prometheus through the server; return the values, or None while it is away."""
        try:
            told = self.get(f"/api/prometheus/query?query={urllib.parse.quote(expression)}")
        except OSError:
            return None
        return [float(one["value"][1]) for one in told["data"]["result"]]

    def get(self, path: str) -> Any:  # noqa: ANN401 - what JSON can say
        """Ask the server for a JSON document."""
        with urllib.request.urlopen(f"{self.base}{path}", timeout=20) as answer:  # noqa: S310 - our loopback
            return json.load(answer)

    def until_scraped(self, name: str) -> None:
        """Wait until Prometheus is there, and has a sample of a run from the last few seconds."""
        fresh = f'time() - timestamp(quiesce_trainer_version{{run="{name}"}}) < 3'
        until(lambda: self.query(fresh), f"a sample of {name}")

    def _until_exemplars(self, name: str) -> None:
        """Wait until a run is scraped, a slot of it has an exemplar whose trace is recorded, and its rate can be drawn.

        One scrape makes no rate, and a page whose range stands still never gets another.
        """
        self.until_scraped(name)
        grown = f'sum(increase({_BIRTHS}{{run="{name}"}}[5s] offset 5s)) > 0'
        until(lambda: self.query(grown), f"an increase of {_BIRTHS} of {name}")

        def recorded() -> bool:
            now = time.time()
            asked = urllib.parse.urlencode(
                {"query": f'{_BIRTHS}{{run="{name}"}}', "start": now - 300, "end": now}
            )
            told = self.get(f"/api/prometheus/query_exemplars?{asked}")["data"]
            return any(
                self.has_trace(one["labels"]["trace_id"]) for each in told for one in each["exemplars"]
            )

        until(recorded, f"an exemplar of {name}")

    def has_trace(self, trace_id: str) -> bool:
        """Say whether a trace is in the recording."""
        try:
            return bool(self.get(f"/api/trace/{trace_id}")["spans"])
        except OSError:
            return False

    def child(self, name: str, *, other_than: int = 0) -> int:
        """Return the process that the server started under a name; wait for it, should there be none yet."""
        found: list[int] = []

        def there() -> bool:
            for status in Path("/proc").glob("[0-9]*/status"):
                try:
                    text = status.read_text()
                except OSError:
                    continue
                if f"Name:\t{name}\n" in text and f"PPid:\t{self.server.pid}\n" in text:
                    found.append(int(status.parent.name))
            return bool(found) and found[-1] != other_than

        until(there, f"a child {name} of the server")
        return found[-1]

    def close(self) -> None:
        """End everything."""
        for process in reversed(self._processes):
            process.terminate()
        for process in self._processes:
            try:
                process.communicate(timeout=15)
            except subprocess.TimeoutExpired:
                process.kill()
                process.communicate()


@contextmanager
def opened_scene(folder: Path, *names: str) -> Iterator[Scene]:
    """Start runs of these names, the server and a browser; yield them once Prometheus has numbers and exemplars of each."""
    expect.set_options(timeout=PATIENCE_MS)
    subprocess.run(["scripts/fetch_browser.sh"], cwd=ROOT, check=True, timeout=600)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=CHROMIUM,
            timeout=PATIENCE_MS,
            args=["--no-sandbox", "--disable-gpu", "--hide-scrollbars"],
        )
        try:
            made = Scene(folder, browser, names)
            try:
                yield made
            finally:
                made.close()
        finally:
            browser.close()


class Visit:
    """A page that is open, and what it complained about.

    Attributes:
        page: The page.
        scene: Where it is.
        expected: Parts of complaints that are no trouble.
    """

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
            assert time.monotonic() < end, f"never: {expression} with {arg!r}; {self.panels()}"
            self.page.wait_for_timeout(100)

    def go(self, fragment: str) -> None:
        """Load the page at a place of it, and wait until it has been refreshed once."""
        self.page.goto("about:blank")  # so that another place of the page is a load, too
        self.page.goto(f"{self.scene.base}/{fragment}")
        if "/trace/" not in fragment:
            self.until("Boolean(document.documentElement.dataset.freshAt)")

    def fresh(self) -> None:
        """Wait for the next refresh that ends."""
        before = self.page.evaluate("document.documentElement.dataset.freshAt ?? ''")
        self.until("before => document.documentElement.dataset.freshAt !== before", arg=before)

    def refresh(self) -> None:
        """Have everything asked anew, and wait until it is drawn."""
        before = self.page.evaluate(
            "() => { const before = document.documentElement.dataset.freshAt;"
            " document.querySelector('[aria-label=\"Refresh now\"]').click(); return before; }"
        )
        self.until("before => document.documentElement.dataset.freshAt !== before", arg=before)

    def show_all(self) -> None:
        """Make the window as high as the dashboard, so that no panel of it is out of view."""
        width = self.page.evaluate("innerWidth")
        self.page.set_viewport_size(
            {"width": width, "height": self.page.evaluate("document.documentElement.scrollHeight")}
        )

    def panel(self, title: str) -> Locator:
        """Return a panel."""
        return self.page.locator(f'.panel[data-title="{title}"]')

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

    def until_all_drawn(self, *, but: set[str]) -> None:
        """Wait until every panel has drawn points, and those that are named have an answer, with points or without."""
        end = time.monotonic() + 2 * PATIENCE_MS / 1000
        while True:
            found = self.panels()
            missing = {
                title: f"{told['state']}, {told.get('points', 0)} points"
                for title, told in found.items()
                if told["state"] not in {"drawn", "empty"}
                or (title not in but and told["type"] != "text" and int(told.get("points", 0)) == 0)
            }
            if found and not missing:
                return
            assert time.monotonic() < end, f"never drawn: {missing}"
            self.page.wait_for_timeout(200)

    def shoot(self, name: str) -> None:
        """Keep a picture."""
        self.scene.shots.mkdir(parents=True, exist_ok=True)
        self.page.screenshot(path=self.scene.shots / f"{name}.png")


@contextmanager
def opened_page(scene: Scene, name: str, *, theme: str, width: int, height: int) -> Iterator[Visit]:
    """Open a page; afterwards, nothing was complained about and nothing asked of anybody else."""
    context = scene.browser.new_context(
        viewport={"width": width, "height": height},
        color_scheme="dark" if theme == "dark" else "light",
        reduced_motion="reduce",
    )
    made = Visit(scene, context.new_page())
    try:
        yield made
    finally:
        made.shoot(re.sub(r"\W+", "-", name))
        context.close()
    unexpected = [text for text in made.complaints if not any(each in text for each in made.expected)]
    assert not unexpected, f"the page complained: {unexpected}"
    assert not made.foreign, f"the page asked others: {made.foreign}"
