"""Write docs/reference/drills.md: the catalogue of injected faults, with what came of each when they were done last.

`generate_drills.py` writes the page from the catalogue and from docs/reference/drills.json; `--measure` does every drill
first, each in a throw-away run, and keeps the results there; `--check` only says whether the page is stale.
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from quiesce.auditor import AUDITED
from quiesce.drills import Drill
from quiesce.drills.cursor import CURSOR
from quiesce.drills.gates import GATES
from quiesce.drills.ownership import OWNERSHIP
from quiesce.drills.rows import ROWS
from quiesce.drills.window import WINDOW
from quiesce_dashboards.alerts import alert_of

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs/reference/drills.md"
RESULTS = ROOT / "docs/reference/drills.json"

SECTIONS = {
    "Admission and the dispatch cursor": CURSOR,
    "Ownership and the account": OWNERSHIP,
    "Windows and phases": WINDOW,
    "Rows and seals": ROWS,
    "Snapshot gates and versions": GATES,
}

SEEN_BY = {"live": "an event", "sweep": "the sweep", "cut": "a cut"}

HEAD = """\
# Drills

What `quiesce drill NAME` breaks, through which hole, and what came of it. A drill is done to the live objects of a real
run, and it passes only if exactly the invariants that it breaks fire, once each. How to do one is on the page
[test your alerts](../how-to/test-your-alerts.md); how faults are found, on
[the auditor](../concepts/the-auditor.md).

"Fired" is what a throw-away run of each showed: after how many seconds, and who saw it first. "An event" is a hook's own
step, the sweep compares owners and rows in the background, a cut is the verification of a checkpoint. A throw-away run
saves about once a second; in a run of yours what only a cut shows takes until the next save.

"""

TAIL = """\
## By invariant

| invariant | severity | alert | drills |
| --- | --- | --- | --- |
"""


def main() -> int:
    """Write or check the page.

    Returns:
        The exit status: 1 if `--check` found it stale, or a drill does not do what the catalogue says.
    """
    if "--measure" in sys.argv[1:]:
        measure()
    results = {result["drill"]: result for result in json.loads(RESULTS.read_text(encoding="utf-8"))}
    drills = [drill for section in SECTIONS.values() for drill in section]
    wrong = [drill.name for drill in drills if not as_expected(drill, results.get(drill.name))]
    if wrong:
        print(f"docs/reference/drills.json has no good result of {', '.join(wrong)}: run with --measure")
        return 1
    page = render(results)
    if PAGE.exists() and PAGE.read_text(encoding="utf-8") == page:
        return 0
    if "--check" in sys.argv[1:]:
        print("docs/reference/drills.md is not what the catalogue and its results say now")
        return 1
    PAGE.write_text(page, encoding="utf-8")
    print("wrote docs/reference/drills.md")
    return 0


def measure() -> None:
    """Do every drill, and keep what came of it."""
    command = [sys.executable, "-m", "quiesce.cli", "drill", "--all", "--json"]
    done = subprocess.run(command, check=False, capture_output=True, text=True, cwd=ROOT)
    kept = [
        {
            "drill": result["drill"],
            "ok": result["ok"],
            "fired": [
                {
                    "invariant": fired["invariant"],
                    "seconds": round(fired["seconds"], 2),
                    "origin": fired["origin"],
                }
                for fired in result.get("fired", ())
            ],
            "error": result.get("error", ""),
        }
        for result in json.loads(done.stdout)
    ]
    RESULTS.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")


def as_expected(drill: Drill, result: dict[str, Any] | None) -> bool:
    """Return whether a result is one of this drill, and a good one."""
    return (
        result is not None
        and result["ok"]
        and {fired["invariant"] for fired in result["fired"]} == set(drill.expected)
    )


def render(results: dict[str, dict[str, Any]]) -> str:
    """Return the page."""
    parts = [HEAD]
    for title, section in SECTIONS.items():
        parts.append(
            f"## {title}\n\n| drill | what goes wrong | the hole | fired |\n| --- | --- | --- | --- |\n"
        )
        parts += [
            f"| `{drill.name}` | {drill.summary} | {drill.hole} | {fired_in_words(results[drill.name])} |\n"
            for drill in section
        ]
        parts.append("\n")
    parts.append(TAIL)
    drills = [drill for section in SECTIONS.values() for drill in section]
    for name, row in AUDITED.items():
        alert = alert_of(name)
        by = ", ".join(f"`{drill.name}`" for drill in drills if name in drill.expected)
        parts.append(f"| `{name}` | {row.severity} | [{alert}](../runbooks/{alert}.md) | {by} |\n")
    return "".join(parts)


def fired_in_words(result: dict[str, Any]) -> str:
    """Return what fired, when, and who saw it."""
    return "; ".join(
        f"`{fired['invariant']}` after {fired['seconds']:.2f} s, by {SEEN_BY[fired['origin']]}"
        for fired in result["fired"]
    )


if __name__ == "__main__":
    sys.exit(main())
