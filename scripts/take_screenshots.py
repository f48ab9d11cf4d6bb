"""Take the pictures of the documentation anew: a real run, a real drill, `quiesce view`, and a browser that looks at it.

`take_screenshots.py` writes those that the pages show into docs/how-to/; `--all DIR` also writes every dashboard in full,
light and dark, into a folder of yours. It takes three to four minutes and both cores of a small machine. What it needs is
fetched into .tools/ first, as `make tools` and the tests of the page do. Look at each picture before you commit it.
"""

import argparse
import contextlib
import io
import json
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from playwright.sync_api import Browser, Page, sync_playwright

from quiesce_dashboards.rules import GENERATED

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs/how-to"
CHROMIUM = ROOT / ".tools/browser/chromium"
UIDS = sorted(path.stem for path in (GENERATED / "dashboards").glob("*.json"))

RUN = "runs/mine"
"""Where the pages have the run, below the folder that they start from."""

TRAIN = ("train", "tiny", "--run-dir", RUN)
SETTINGS = ("controller.max_steps=100000", "controller.save_every_steps=10", "controller.audit.drills=true")
"""It ends when it is told to, saves often enough for two minutes to show something, and may be broken on purpose."""

DRILL = "early-cursor"
ALERT = "QuiesceCursorBufferSkew"
SHOWN_SECONDS = 110
"""How much of the run there is before the first picture; the pictures show the last two minutes."""

RANGE = "var-run=tiny&from=now-2m&to=now&refresh="
PATIENCE_SECONDS = 120.0

SETTLED = """() => {
  if (location.pathname.startsWith('/runbooks')) return true;
  if (!document.querySelector('#content')?.children.length || document.querySelector('.notice')) return false;
  const seen = [...document.querySelectorAll('.panel')].filter(panel => {
    const { top, bottom } = panel.getBoundingClientRect();
    return bottom > 0 && top < innerHeight;
  });
  return seen.every(panel => !['idle', 'loading'].includes(panel.dataset.state) && !panel.querySelector('.spin.on'));
}"""
"""Whether nothing in view waits for an answer."""

MOST_BYTES = 250_000
"""What a picture of the documentation may weigh."""


def main() -> int:
    """Take the pictures.

    Returns:
        The exit status: 1 if the run, the drill or the page did not do what the pictures are to show.
    """
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--all", type=Path, metavar="DIR", help="also write every dashboard in full, light and dark"
    )
    every: Path | None = parser.parse_args().all
    for script in ("fetch_tools.sh", "fetch_browser.sh"):
        subprocess.run([ROOT / "scripts" / script], check=True)
    with tempfile.TemporaryDirectory(prefix="quiesce-pictures-") as folder, contextlib.ExitStack() as stack:
        here = Path(folder)
        try:
            base = begin(here, stack)
            browser = stack.enter_context(opened_browser())
            take(Camera(browser, base, DOCS, every), here)
        except (TroubleError, subprocess.CalledProcessError) as error:
            print(error, file=sys.stderr)
            for log in sorted(here.glob("*.log")):
                print(f"--- {log.name}", *log.read_text().splitlines()[-15:], sep="\n", file=sys.stderr)
            return 1
    return 0


class TroubleError(Exception):
    """Something is not there that the pictures are to show."""


class Camera:
    """Opens places of the page and writes pictures.

    Args:
        browser: The browser.
        base: The page's address.
        docs: Where pictures of the documentation go.
        every: Where all the others go; None if nobody wants them.
    """

    def __init__(self, browser: Browser, base: str, docs: Path, every: Path | None) -> None:
        self.base = base
        self.every = every
        self._browser = browser
        self._docs = docs

    @contextlib.contextmanager
    def open(self, place: str, *, theme: str, width: int = 1280, height: int = 900) -> Iterator[Page]:
        """Open a place of the page, and wait until all that is in view is drawn."""
        context = self._browser.new_context(
            viewport={"width": width, "height": height},
            color_scheme="dark" if theme == "dark" else "light",
            reduced_motion="reduce",
            device_scale_factor=1,
        )
        try:
            page = context.new_page()
            page.goto(f"{self.base}/{place}")
            self.settle(page)
            yield page
        finally:
            context.close()

    def settle(self, page: Page) -> None:
        """Wait until nothing in view waits for an answer."""
        until(lambda: page.evaluate(SETTLED), f"{page.url} to be drawn")
        page.wait_for_timeout(300)  # the browser paints after the script that drew

    def whole(self, page: Page) -> None:
        """Make the window as high as the page."""
        size = page.viewport_size or {"width": 1280, "height": 900}
        for _ in range(2):  # panels that come into view may be higher than those that were not
            height = page.evaluate(
                "Math.ceil(document.querySelector('#content').getBoundingClientRect().bottom) + 16"
            )
            page.set_viewport_size({"width": size["width"], "height": int(height)})
            self.settle(page)

    def shoot(self, page: Page, name: str, *, height: int | None = None, docs: bool = True) -> None:
        """Write a picture: the window, or its upper part."""
        folder = self._docs if docs else self.every
        if folder is None:
            return
        size = page.viewport_size or {"width": 1280, "height": 900}
        clip = {
            "x": 0.0,
            "y": 0.0,
            "width": float(size["width"]),
            "height": float(min(height or size["height"], size["height"])),
        }
        picture = smaller(page.screenshot(clip=clip))  # type: ignore[arg-type]  # a TypedDict of playwright's own
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{name}.png").write_bytes(picture)
        print(f"wrote {folder / name}.png ({len(picture) / 1024:.0f} KiB)")


def begin(here: Path, stack: contextlib.ExitStack) -> str:
    """Start the run and the page, as a reader would.

    Args:
        here: Where to start them.
        stack: Ends them.

    Returns:
        The page's address, once enough of the run is in Prometheus.
    """
    run = start(here, stack, "train", *TRAIN, *SETTINGS)
    until((here / RUN / "metrics.json").exists, "the run to serve its metrics", run)
    view = start(here, stack, "view", "view", RUN, "--no-browser", "--port", "0")
    log = here / "view.log"
    until(lambda: "open http://" in log.read_text(), "the page's address", view)
    base = log.read_text().partition("open ")[2].split()[0].rstrip("/")
    until(
        lambda: query(base, f"time() - min(quiesce_run_started_timestamp_seconds) > {SHOWN_SECONDS}"),
        f"{SHOWN_SECONDS} seconds of the run",
        run,
        patience=2 * PATIENCE_SECONDS,
    )
    return base


def start(here: Path, stack: contextlib.ExitStack, name: str, *command: str) -> subprocess.Popen[bytes]:
    """Start a command of Quiesce; it ends with the stack, and its lines are in a log of that name."""
    with (here / f"{name}.log").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "quiesce.cli", *command], cwd=here, stdout=log, stderr=log
        )

    def end() -> None:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    stack.callback(end)
    return process


@contextlib.contextmanager
def opened_browser() -> Iterator[Browser]:
    """Start the browser."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
        )
        try:
            yield browser
        finally:
            browser.close()


def take(camera: Camera, here: Path) -> None:
    """Take every picture: first those of a run that is well, then those of one that is broken."""
    with camera.open(f"#/d/quiesce-windows?{RANGE}", theme="light", height=1500) as page:
        camera.shoot(page, "window-dashboard", height=below(page, "Who made windows slow, and who paid"))
    with camera.open(f"#/d/quiesce-training?{RANGE}", theme="dark", height=1500) as page:
        camera.shoot(page, "view-training", height=below(page, "How fast, and what does it wait for?"))
    with camera.open(f"#/trace/{telling_save(camera.base)}", theme="light") as page:
        page.locator("[role=treeitem]").first.press("Enter")  # its details take half of the window
        camera.whole(page)
        camera.shoot(page, "view-trace", height=bottom(page, ".trace"))
    if camera.every is not None:
        for uid in UIDS:
            for theme in ("light", "dark"):
                with camera.open(f"#/d/{uid}?{RANGE}", theme=theme) as page:
                    camera.whole(page)
                    camera.shoot(page, f"{uid}-{theme}", docs=False)
    drill = [sys.executable, "-m", "quiesce.cli", "drill", DRILL, "--run-dir", RUN]
    with (here / "drill.log").open("wb") as log:
        subprocess.run(drill, cwd=here, stdout=log, stderr=log, timeout=PATIENCE_SECONDS, check=True)
    firing = f'ALERTS{{alertname="{ALERT}",alertstate="firing"}}'
    until(lambda: query(camera.base, firing), f"{ALERT} to fire")
    pending = 'ALERTS{alertstate="pending"}'  # of a scrape that a busy machine was late for
    until(lambda: not query(camera.base, pending), "no other alert to be on its way")
    with camera.open(f"#/d/quiesce-ownership?{RANGE}", theme="light", height=760) as page:
        page.locator("button.badge").click()
        page.locator(f".alert[data-name={ALERT}]").first.wait_for()
        camera.shoot(page, "view-alert")
    with camera.open(f"runbooks/{ALERT}", theme="light", width=1000, height=900) as page:
        camera.shoot(page, "view-runbook")
    if camera.every is not None:
        for theme in ("light", "dark"):
            with camera.open(f"#/d/quiesce-ownership?{RANGE}", theme=theme) as page:
                camera.whole(page)
                camera.shoot(page, f"after-the-drill-{theme}", docs=False)
            with camera.open("#/violations/", theme=theme) as page:
                page.locator(".violation summary").first.click()
                camera.shoot(page, f"violations-{theme}", docs=False)


def below(page: Page, row: str) -> int:
    """Return where the dashboard's row of that title begins."""
    top = page.locator("section.row", has=page.get_by_role("button", name=row)).evaluate(
        "section => section.getBoundingClientRect().top"
    )
    return int(top)


def bottom(page: Page, selector: str) -> int:
    """Return where an element ends, with a margin."""
    return (
        int(page.locator(selector).first.evaluate("element => element.getBoundingClientRect().bottom")) + 14
    )


def telling_save(base: str) -> str:
    """Return the trace of the save whose window is the largest part of it: there most is to be seen."""
    now = time.time()
    asked = {"query": "quiesce_checkpoint_phase_seconds_bucket", "start": f"{now - 300}", "end": f"{now}"}
    told = ask(base, f"/api/prometheus/query_exemplars?{urllib.parse.urlencode(asked)}")
    shares: list[tuple[float, str]] = []
    for trace in sorted({one["labels"]["trace_id"] for each in told["data"] for one in each["exemplars"]}):
        with contextlib.suppress(urllib.error.HTTPError):  # the newest is not written yet
            took = {
                span["name"]: span["end"] - span["start"]
                for span in ask(base, f"/api/trace/{trace}")["spans"]
            }
            shares.append((took.get("quiesce.window", 0.0) / took.get("quiesce.checkpoint", 1.0), trace))
    if not shares:
        raise TroubleError("no save has an exemplar whose trace is recorded")
    return max(shares)[1]


def ask(base: str, path: str) -> Any:  # noqa: ANN401 - what JSON can say
    """Ask the page's server for a JSON document."""
    with urllib.request.urlopen(f"{base}{path}", timeout=30) as answer:  # noqa: S310 - our loopback
        return json.load(answer)


def query(base: str, expression: str) -> list[Any]:
    """Ask Prometheus; return what it found, which is nothing while it is not there."""
    try:
        told = ask(base, f"/api/prometheus/query?{urllib.parse.urlencode({'query': expression})}")
    except urllib.error.HTTPError:
        return []
    found: list[Any] = told["data"]["result"]
    return found


def until(
    condition: Callable[[], Any],
    what: str,
    process: subprocess.Popen[bytes] | None = None,
    *,
    patience: float = PATIENCE_SECONDS,
) -> None:
    """Wait until something holds.

    Args:
        condition: Says whether it does.
        what: In words.
        process: Has to live meanwhile.
        patience: For how long, in seconds.

    Raises:
        TroubleError: If it does not come to hold.
    """
    end = time.monotonic() + patience
    while not condition():
        if process is not None and process.poll() is not None:
            raise TroubleError(f"waited for {what}, and the process ended with {process.returncode}")
        if time.monotonic() > end:
            raise TroubleError(f"waited for {what} for {patience:.0f} s")
        time.sleep(0.2)


def smaller(picture: bytes) -> bytes:
    """Return a PNG as small as it gets without a change, if Pillow is there; one that is too large has fewer colours."""
    try:
        from PIL import Image
    except ImportError:
        return picture
    with Image.open(io.BytesIO(picture)) as opened:
        image = opened.convert("RGB")
    written = io.BytesIO()
    image.save(written, "png", optimize=True)
    if written.tell() > MOST_BYTES:  # keeps the extremes: small marks have the strongest colours
        written = io.BytesIO()
        image.quantize(256, method=Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE).save(
            written, "png", optimize=True
        )
    return min(picture, written.getvalue(), key=len)


if __name__ == "__main__":
    sys.exit(main())
