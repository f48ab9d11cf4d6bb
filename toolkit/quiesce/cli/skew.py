"""``quiesce skew``: the skew between cursor and buffer, with the early read and with the cut.

Rule: it prints what the replays returned and computes nothing. Exit code 0; 1 if a replay did not show what it
is for.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console

    from quiesce.skew import Replay

__all__ = ["add_parser", "main_skew", "print_replays"]


def add_parser(commands: Any) -> None:  # noqa: ANN401 - argparse's subparsers have no public type
    """Add the command to an argument parser's subcommands."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "skew",
        help="replay the bug that the atomic cut fixes",
        description=(
            "Replay a save that reads the dispatch cursor early, and the same save as one cut, through the "
            "real code: gate window 1, 4 prompts a step, trainer at step 7, cursor at 6."
        ),
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    parser.set_defaults(run=main_skew)


def main_skew(args: argparse.Namespace) -> int:
    """Run the command.

    Args:
        args: Has ``json``.

    Returns:
        The exit code.
    """
    early, cut = asyncio.run(_replays())
    if args.json:
        print(json.dumps({"early": asdict(early), "cut": asdict(cut)}, indent=2))
    else:
        print_replays(early, cut)
    shown = bool(early.dropped and early.refusal and not cut.dropped and not cut.refusal)
    return 0 if shown else 1


async def _replays() -> tuple[Replay, Replay]:
    from quiesce.skew import replay

    with tempfile.TemporaryDirectory(prefix="quiesce-skew-") as folder:
        places = {variant: Path(folder, variant) for variant in ("early", "cut")}
        for place in places.values():
            place.mkdir()
        return await replay("early", places["early"]), await replay("cut", places["cut"])


def print_replays(early: Replay, cut: Replay, console: Console | None = None) -> None:
    """Print both replays side by side, as the page that described the bug does.

    Args:
        early: The replay with the early read.
        cut: The replay with the cut.
        console: Where; None means standard output.
    """
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from quiesce.skew import GATE_WINDOW, GROUPS_PER_STEP, TRAINER_STEP

    console = Console(highlight=False) if console is None else console
    console.print(
        f"Gate window {GATE_WINDOW}, {GROUPS_PER_STEP} prompts a step, trainer at step {TRAINER_STEP}, "
        f"cursor at {TRAINER_STEP - 1}.",
        soft_wrap=True,
    )
    table = Table()
    table.add_column("", no_wrap=True)
    table.add_column("early read (the bug)")
    table.add_column("one cut")
    rows = (
        ("cursor read", "before the save's awaits", "inside the exclusive window"),
        ("pump admits during the save?", _pump(early), _pump(cut)),
        ("what disk says", _disk(early), _disk(cut)),
        ("resume", _resume(early), _resume(cut)),
        ("prompts by the end", _totals(early), _totals(cut)),
    )
    for row in rows:
        table.add_row(*map(Text, row))
    console.print(table)
    if early.collision:
        console.print(Text(f"The guard said: {early.collision}."), soft_wrap=True)
        console.print(
            Text(
                "Dropping the batch in answer is what the replay's own driver does, as the code of the bug did. "
                "Quiesce's pump does not."
            ),
            soft_wrap=True,
        )
    if early.refusal:
        console.print(Text(f"Quiesce itself does not get that far: {early.refusal}."), soft_wrap=True)


def _pump(replay: Replay) -> str:
    if replay.pump_admitted:
        return f"yes – stamps step {replay.buffered_step} mid-save"
    return "cannot – admission needs a slot, slots wait"


def _disk(replay: Replay) -> str:
    if replay.buffered_step is None:
        return f"cursor {replay.cursor_on_disk}, no group ahead of it"
    return f"cursor {replay.cursor_on_disk}, buffer already has step {replay.buffered_step}"


def _resume(replay: Replay) -> str:
    if replay.dropped:
        return f"guard sees step {replay.buffered_step} covered: a fresh batch of {replay.dropped} is dropped"
    return "nothing to reconcile, nothing dropped"


def _totals(replay: Replay) -> str:
    return f"{replay.read} read, {replay.trained} trained, {replay.dropped} dropped"
