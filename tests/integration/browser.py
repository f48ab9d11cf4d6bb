"""A page in a real browser: what it asks of the network, and whether it looks as it should."""

from __future__ import annotations

import html
import json
import re
import subprocess
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
CHROMIUM = ROOT / ".tools/browser/chromium"

_CHECK = """
<script>
(() => {
  const problems = [];
  const inside = (part, whole, slack) => part.left >= whole.left - slack && part.right <= whole.right + slack
    && part.top >= whole.top - slack && part.bottom <= whole.bottom + slack;
  const overlap = (one, two) => one.left < two.right - 1 && two.left < one.right - 1
    && one.top < two.bottom - 1 && two.top < one.bottom - 1;
  function look() {
    const root = document.documentElement;
    if (root.scrollWidth > root.clientWidth) problems.push(`the page is ${root.scrollWidth} wide`);
    const charts = [...document.querySelectorAll(".chart")];
    for (const chart of charts) {
      const name = chart.id;
      const own = chart.getBoundingClientRect();
      const marks = chart.querySelectorAll(".scatterlayer path, .barlayer path").length;
      if (!marks) problems.push(`${name}: nothing is drawn`);
      const plot = chart.querySelector(".plot, .bglayer")?.getBoundingClientRect();
      if (plot && plot.height < 60) problems.push(`${name}: the plot is ${plot.height} high`);
      for (const text of chart.querySelectorAll("text"))
        if (text.getBoundingClientRect().width && !inside(text.getBoundingClientRect(), own, 2))
          problems.push(`${name}: "${text.textContent}" is cut off`);
      for (const axis of [".xtick", ".ytick"]) {
        const ticks = [...chart.querySelectorAll(`${axis} text`)].map((tick) => tick.getBoundingClientRect());
        if (!ticks.length) problems.push(`${name}: ${axis} has no labels`);
        for (let i = 1; i < ticks.length; i++)
          if (overlap(ticks[i - 1], ticks[i])) problems.push(`${name}: labels of ${axis} overlap`);
      }
      const legend = chart.querySelector(".legend")?.getBoundingClientRect();
      const area = chart.querySelector(".bglayer rect, .plotbg, .nsewdrag")?.getBoundingClientRect();
      if (legend && area && overlap(legend, area)) problems.push(`${name}: the legend lies on the plot`);
      for (const tick of chart.querySelectorAll(".xtick text"))
        if (legend && overlap(tick.getBoundingClientRect(), legend)) problems.push(`${name}: the legend lies on labels`);
    }
    for (const card of document.querySelectorAll(".card, .tile, h1, nav"))
      if (card.scrollWidth > card.clientWidth + 1) problems.push(`"${card.textContent.slice(0, 40)}" is cut off`);
    const asked = performance.getEntriesByType("resource").map((entry) => entry.name)
      .filter((name) => !name.startsWith("data:"));
    const told = document.createElement("pre");
    told.id = "told";
    told.textContent = JSON.stringify({
      problems, asked, charts: charts.length, theme: root.dataset.theme,
      background: getComputedStyle(document.body).backgroundColor,
      scripts: Math.round(performance.now()),
    });
    document.body.append(told);
  }
  const timer = setInterval(() => {
    if (document.documentElement.dataset.ready === "yes") { clearInterval(timer); setTimeout(look, 200); }
  }, 50);
})();
</script>
"""


def look_at(page: Path, scratch: Path, *, theme: str, width: int) -> dict[str, Any]:
    """Open a page and return what a script found on it.

    Args:
        page: The page.
        scratch: A folder for a copy and the browser's profile.
        theme: ``light`` or ``dark``.
        width: Of the window, in pixels.
    """
    copy = scratch / f"{theme}-{width}.html"
    copy.write_text(page.read_text().replace("</body>", f"{_CHECK}</body>"))
    done = browse(copy, scratch, theme, width, "--dump-dom")
    told = re.search(r'<pre id="told">(.*?)</pre>', done)
    assert told is not None, done[-2000:]
    found: dict[str, Any] = json.loads(html.unescape(told[1]))
    return found


def browse(page: Path, scratch: Path, theme: str, width: int, *more: str) -> str:
    """Run the browser without a screen, and return what it prints."""
    return subprocess.run(
        [
            CHROMIUM,
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--hide-scrollbars",
            f"--user-data-dir={scratch / f'profile-{theme}-{width}'}",
            f"--window-size={width},1000",
            "--virtual-time-budget=60000",
            *more,
            f"file://{page}?theme={theme}",
        ],
        capture_output=True,
        text=True,
        timeout=200,
        check=True,
    ).stdout
