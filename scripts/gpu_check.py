"""Train, kill, resume, audit and drill the reference run on a CUDA device; print one JSON object.

Rule: it needs no network and no package index: the model's weights are random, and the `quiesce` beside this file is used
even where it is not installed. It ends within ``--seconds``, whatever happens, and its exit code is 0 only if the run
was killed, resumed and audited without a finding, and then found a fault that was injected. ``--dry`` does the same with
the tiny preset on the CPU, to check this script itself; it says so in its JSON, and proves nothing about a GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).resolve().parent.parent
ROOTS: Final = [str(ROOT / name) for name in ("toolkit", "exporters", "dashboards")]

MIN_SECONDS: Final = 120.0
MAX_SECONDS: Final = 360.0
POLL_SECONDS: Final = 0.05
STOP_SECONDS: Final = 45.0
"""Time that is kept back for the stop's save and the audit."""
DRILL_SECONDS: Final = 60.0
"""Time that is kept back for a last start, and a drill in it."""
DRILL: Final = "early-cursor"
"""What is broken on purpose in the end: the bug that the atomic cut prevents."""

GPU: Final = ("gpu", "model.device=cuda", "warmup.steps=50", "controller.save_every_steps=5")
DRY: Final = (
    "tiny",
    "model.device=cpu",
    "warmup.steps=10",
    "controller.save_every_steps=5",
    "task.size=4000",
)
ALWAYS: Final = ("metrics.enabled=false", "log_level=debug", "controller.max_steps=null")

SAVES_BEFORE_KILL: Final = 3
"""The run is killed once so many checkpoints are published and one more step was taken."""


class CheckError(Exception):
    """Raised when a part of the check did not happen; says which, and what the run printed last."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the check.

    Args:
        argv: Arguments without the program's name; None takes the process's.

    Returns:
        The exit code.
    """
    args = _parser().parse_args(argv)
    if not MIN_SECONDS <= args.seconds <= MAX_SECONDS:
        _parser().error(f"--seconds must be from {MIN_SECONDS:g} to {MAX_SECONDS:g}")
    deadline = time.monotonic() + args.seconds
    report: dict[str, Any] = {"ok": False, "dry": args.dry, "preset": "tiny" if args.dry else "gpu"}
    report |= {"python": platform.python_version(), "problem": ""}
    with tempfile.TemporaryDirectory(prefix="quiesce-gpu-check-") as scratch:
        run_dir = args.run_dir or Path(scratch) / "run"
        try:
            _check(report, run_dir, [*(DRY if args.dry else GPU), *ALWAYS, *args.overrides], args, deadline)
        except CheckError as error:
            report["problem"] = str(error)
    print(json.dumps(report, indent=2, allow_nan=False))
    return 0 if report["ok"] else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description="Train the gpu preset with random weights, kill -9 it, resume it, audit it, drill it; print JSON.",
        epilog="Exit code: 0 if everything happened, the audit found nothing and the drill was caught, 1 otherwise.",
    )
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="as in quiesce train")
    parser.add_argument(
        "--seconds", type=float, default=300.0, help="time for everything, 120 to 360 (default: %(default)g)"
    )
    parser.add_argument(
        "--run-dir", type=Path, metavar="DIR", help="keep the run here (default: a temporary one)"
    )
    parser.add_argument(
        "--dry", action="store_true", help="the tiny preset on the CPU: checks only this script"
    )
    return parser


def _check(
    report: dict[str, Any], run_dir: Path, words: list[str], args: argparse.Namespace, deadline: float
) -> None:
    report["device"] = _device(dry=args.dry)
    end, deadline = deadline, deadline - DRILL_SECONDS
    log = run_dir / "log.jsonl"

    first = _Train(run_dir, words)
    first.until(
        lambda: ripe(read_log(log)),
        deadline - 2 * STOP_SECONDS,
        f"{SAVES_BEFORE_KILL} checkpoints and a step after them",
    )
    first.kill()
    killed = read_log(log)
    report["killed_at_step"] = _last_step(killed)
    report["audit_after_kill"] = _audit(run_dir, deadline)["ok"]

    resumed_at = time.monotonic()
    second = _Train(run_dir, ["--resume"])
    second.until(
        lambda: any(line["event"] == "train.step" for line in read_log(log)[len(killed) :]),
        deadline - STOP_SECONDS,
        "a step after the resume",
    )
    report["resume_to_first_step_s"] = round(time.monotonic() - resumed_at, 3)
    target = deadline - STOP_SECONDS
    while time.monotonic() < target and second.process.poll() is None:
        if args.dry and _last_step(read_log(log)) >= report["killed_at_step"] + 5:
            break
        time.sleep(POLL_SECONDS)
    code = second.stop(deadline)
    if code != 0:
        raise CheckError(f"the resumed run ended with code {code}: {second.tail()}")

    found = _audit(run_dir, deadline)
    lines = read_log(log)
    report |= measured(lines, lines[len(killed) :])
    report["audit"] = {"ok": found["ok"], "prompts": found["prompts"], "violations": found["violations"]}
    report["drill"] = _drill(run_dir, end)
    report["ok"] = bool(
        found["ok"]
        and report["audit_after_kill"]
        and report["steps"] > report["killed_at_step"]
        and report["drill"]["ok"]
    )


def _drill(run_dir: Path, deadline: float) -> dict[str, Any]:
    """Start the run once more, with drills allowed, and break it: exactly what that breaks has to be found."""
    log = run_dir / "log.jsonl"
    before = len(read_log(log))
    run = _Train(run_dir, ["--resume", "controller.audit.drills=true"])
    try:
        run.until(
            lambda: any(line["event"] == "train.step" for line in read_log(log)[before:]),
            deadline - STOP_SECONDS / 3,
            "a step before the drill",
        )
        left = max(5.0, deadline - time.monotonic())
        told = _json(
            ["drill", DRILL, "--run-dir", str(run_dir), "--timeout", f"{left:.0f}"], deadline, "drill"
        )
    finally:
        run.kill()  # what the drill broke is not worth a save
    fired = [each["invariant"] for each in told.get("fired", ())]
    return {"name": DRILL, "ok": bool(told.get("ok")), "expected": told.get("expected"), "fired": fired}


class _Train:
    """One ``quiesce train`` in a process of its own."""

    def __init__(self, run_dir: Path, words: list[str]) -> None:
        run_dir.parent.mkdir(parents=True, exist_ok=True)
        self._output = run_dir.with_name(f"{run_dir.name}.out")
        with self._output.open("ab") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "quiesce.cli", "train", "--run-dir", str(run_dir), *words],
                stdout=output,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                env=_environment(),
            )

    def until(self, reached: Callable[[], bool], deadline: float, what: str) -> None:
        """Wait for something that the run's log tells."""
        while not reached():
            if self.process.poll() is not None:
                raise CheckError(
                    f"the run ended with code {self.process.returncode} before {what}: {self.tail()}"
                )
            if time.monotonic() > deadline:
                self.kill()
                raise CheckError(f"no time was left for {what}: {self.tail()}")
            time.sleep(POLL_SECONDS)

    def kill(self) -> None:
        """End it as a lost machine would."""
        self.process.kill()
        self.process.wait()

    def stop(self, deadline: float) -> int:
        """Ask it to save and stop."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(max(1.0, deadline - time.monotonic() - STOP_SECONDS / 3))
        except subprocess.TimeoutExpired:
            self.kill()
            raise CheckError(f"the stop's save did not end in time: {self.tail()}") from None

    def tail(self) -> str:
        """Return the last lines that it printed."""
        lines = self._output.read_text(encoding="utf-8", errors="replace").splitlines()
        return " | ".join(lines[-6:])


def _environment() -> dict[str, str]:
    known = os.environ.get("PYTHONPATH")
    return {**os.environ, "PYTHONPATH": os.pathsep.join([*ROOTS, *([known] if known else [])])}


def _device(*, dry: bool) -> dict[str, Any]:
    code = (
        "import json, torch; g = torch.cuda.is_available(); p = torch.cuda.get_device_properties(0) if g else None;"
        "print(json.dumps({'torch': torch.__version__, 'cuda': torch.version.cuda,"
        "'name': p.name if g else 'cpu', 'memory_gib': round(p.total_memory / 2**30, 1) if g else None}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise CheckError(
            f"torch cannot be imported by {sys.executable}: {done.stderr.strip().splitlines()[-1:]}"
        )
    told: dict[str, Any] = json.loads(done.stdout)
    if not dry and told["name"] == "cpu":
        raise CheckError(f"torch {told['torch']} sees no CUDA device; --dry checks this script without one")
    return told


def _json(words: list[str], deadline: float, what: str) -> dict[str, Any]:
    """Run a command of the command line that prints JSON, and return that."""
    try:
        done = subprocess.run(
            [sys.executable, "-m", "quiesce.cli", *words, "--json"],
            capture_output=True,
            text=True,
            check=False,
            timeout=max(5.0, deadline - time.monotonic() + 5.0),
            env=_environment(),
        )
    except subprocess.TimeoutExpired:
        raise CheckError(f"the {what} did not end in time") from None
    try:
        told: dict[str, Any] = json.loads(done.stdout)
    except ValueError:
        raise CheckError(f"the {what} said no JSON: {done.stderr.strip()}") from None
    return told


def _audit(run_dir: Path, deadline: float) -> dict[str, Any]:
    told = _json(["audit", str(run_dir)], deadline, "audit")
    if "checkpoints" not in told:
        raise CheckError(f"the audit found nothing to audit: {told.get('error')}")
    return told


def read_log(log: Path) -> list[dict[str, Any]]:
    """Return the complete lines of a run's log; a torn last one is not there yet."""
    if not log.is_file():
        return []
    content = log.read_bytes()
    return [json.loads(line) for line in content[: content.rfind(b"\n") + 1].splitlines()]


def _last_step(lines: list[dict[str, Any]]) -> int:
    return max((int(line["step"]) for line in lines if line["event"] == "train.step"), default=0)


def ripe(lines: list[dict[str, Any]]) -> bool:
    """Whether a kill would lose something: enough checkpoints are there, and a step that none of them has."""
    saved = [int(line["step"]) for line in lines if line["event"] == "checkpoint.published"]
    return len(saved) >= SAVES_BEFORE_KILL and _last_step(lines) > max(saved)


def measured(lines: list[dict[str, Any]], resumed: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the numbers: of all saves, and of the steps after the resume but the first, which pays for warming up."""
    phases: dict[str, list[float]] = {}
    for line in lines:
        if line["event"] == "checkpoint.published":
            told = {**line["phases"], "drain": line["drain_seconds"], "exclusive": line["exclusive_seconds"]}
            for phase, seconds in told.items():
                phases.setdefault(phase, []).append(float(seconds) * 1e3)
    saves = [line for line in lines if line["event"] == "checkpoint.published"]
    of_all = [line["metrics"].get("reward", 0.0) for line in lines if line["event"] == "train.step"]
    timed = [line for line in resumed if line["event"] == "train.step"]
    tokens = sum(line["metrics"].get("tokens", 0.0) for line in timed[1:])
    seconds = _time(timed[-1]) - _time(timed[0]) if len(timed) > 1 else 0.0
    return {
        "steps": _last_step(lines),
        "saves": len(saves),
        "checkpoint_mib": round(saves[-1]["bytes"] / 2**20, 1) if saves else None,
        "reward_first_10": round(statistics.fmean(of_all[:10]), 4) if of_all else None,
        "reward_last_10": round(statistics.fmean(of_all[-10:]), 4) if of_all else None,
        "milliseconds": {
            phase: {"median": round(statistics.median(values), 4), "largest": round(max(values), 4)}
            for phase, values in sorted(phases.items())
        },
        "trained_tokens_per_s": round(tokens / seconds, 1) if seconds > 0 else None,
        "step_s": round(seconds / (len(timed) - 1), 4) if len(timed) > 1 else None,
    }


def _time(line: dict[str, Any]) -> float:
    from datetime import datetime

    return datetime.fromisoformat(line["timestamp"]).timestamp()


if __name__ == "__main__":
    sys.exit(main())
