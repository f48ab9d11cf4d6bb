"""A recording of a run that nobody has to wait for: a day of training, the same one every time.

The numbers are like those of a middling run: a save every five minutes, a step every twelve seconds, hundreds
of slots a second, a crash in the morning with a restore, a disk that was full for a while, and in the evening a
scheduler that takes the machine away while a drain is stuck, so that a save is cut off.
"""

import gzip
import json
import math
import random
from bisect import bisect_left
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Protocol

from quiesce.auditor import ViolationJournal
from quiesce.auditor.record import Records
from quiesce.barrier import KINDS
from quiesce.invariants import Violation
from quiesce.telemetry import names
from quiesce.telemetry.recording import FOLDER, FORMAT, VERSION
from quiesce.types import OWNERS

START = datetime(2026, 3, 2, 6, 0, tzinfo=UTC).timestamp()
FILE_BYTES = 4 << 20

PHASES: Mapping[str, tuple[float, float]] = {  # median seconds, spread of the logarithm
    "fence": (0.004, 0.5),
    "drain": (0.030, 0.9),
    "exclusive": (0.0004, 0.3),
    "verify": (0.012, 0.3),
    "stage": (0.080, 0.3),
    "write": (2.5, 0.4),
    "publish": (0.020, 0.5),
}
RATES: Mapping[str, float] = dict(zip(KINDS, (8, 8, 60, 60, 60, 40, 0.5, 0.2, 0.01, 0), strict=True))


class Files:
    """Files of one stream, as a recorder leaves them."""

    def __init__(self, folder: Path, stream: str, incarnation: int) -> None:
        self._folder, self._stream, self._incarnation = folder, stream, incarnation
        self._lines: list[str] = []
        self._size = 0
        self._sequence = 0

    def put(self, record: Mapping[str, object], unix_time: float) -> None:
        """Add a line."""
        if not self._lines:
            header = {"format": FORMAT, "version": VERSION, "stream": self._stream, "run": "synthetic"}
            header |= {"role": "controller", "incarnation": self._incarnation, "sequence": self._sequence}
            header |= {"writer": f"w{self._incarnation}", "unix_ns": int(unix_time * 1e9)}
            self._lines.append(json.dumps(header))
        self._lines.append(json.dumps(record, separators=(",", ":")))
        self._size += len(self._lines[-1])
        if self._size > FILE_BYTES:
            self.close()

    @property
    def is_new(self) -> bool:
        """Whether the next line begins a file."""
        return not self._lines

    def close(self, *, torn: bool = False) -> None:
        """Write the file."""
        if not self._lines:
            return
        number = len(list(self._folder.glob(f"{self._stream}-*")))
        data = ("\n".join(self._lines) + "\n").encode()
        data = data[:-20] if torn else data
        name = f"{self._stream}-{number:04d}.jsonl"
        if torn:
            (self._folder / name).write_bytes(data)
        else:
            with gzip.open(self._folder / f"{name}.gz", "wb", compresslevel=1) as file:
                file.write(data)
        self._lines, self._size, self._sequence = [], 0, self._sequence + 1


class Metrics:
    """The state of all series, and what of it changed."""

    def __init__(self) -> None:
        self.values: dict[str, float] = {}
        self._changed: dict[str, float | str] = {}

    def set(self, metric: names.Metric, value: float, **labels: str) -> None:
        """Set a series."""
        self._put(_key(metric.name, labels), value)

    def add(self, metric: names.Metric, amount: float, **labels: str) -> None:
        """Add to a counter."""
        key = _key(metric.name, labels)
        self._put(key, self.values.get(key, 0.0) + amount)

    def observe(self, metric: names.Metric, seconds: float, count: int = 1, **labels: str) -> None:
        """Add equal observations to a histogram."""
        buckets, number, total = _histogram_keys(metric.name, tuple(labels.items()))
        for key in (*buckets[bisect_left(metric.buckets, seconds) :], number):
            self._put(key, self.values[key] + count)
        self._put(total, self.values[total] + count * seconds)

    def line(self, unix_time: float, *, complete: bool) -> dict[str, object]:
        """Return the line of a sample."""
        changed = {key: _json(value) for key, value in self.values.items()} if complete else self._changed
        self._changed = {}
        return {"u": unix_time, "m": changed}

    def _put(self, key: str, value: float) -> None:
        if self.values.get(key) != value:
            self.values[key] = value
            self._changed[key] = _json(value)


def write_recording(
    run_dir: Path,
    *,
    hours: float = 24.0,
    period: float = 15.0,
    save_every: float = 300.0,
    seed: int = 7,
    crash_at: float | None = 0.4,
    preempt_at: float = 0.75,
) -> None:
    """Write a recording.

    Args:
        run_dir: The run's folder.
        hours: How long the run was.
        period: Seconds between two samples.
        save_every: Seconds between two saves.
        seed: What the run's luck depends on.
        crash_at: The share of the run after which it crashed and was restored; None for one that did not.
        preempt_at: The share of the run after which one that crashed was told to end, in a drain that was stuck.
    """
    folder = run_dir / FOLDER
    folder.mkdir(parents=True)
    luck = random.Random(seed)
    end = START + hours * 3600
    found: dict[str, float] = {}
    if crash_at is None:
        _live(folder, luck, found, 1, START, end, end, period, save_every)
        return
    crash, preempted = (START + share * (end - START) for share in (crash_at, preempt_at))
    _live(folder, luck, found, 1, START, crash, end, period, save_every, torn=True)
    _live(folder, luck, found, 2, crash + 95, preempted, end, period, save_every, cut_off=True)
    _live(folder, luck, found, 3, preempted + 140, end, end, period, save_every)
    _violations(run_dir, found)


STUCK_SECONDS = 97.0
"""How long the drain had taken that was cut off."""

_LATE = {"invariant": "checkpoint_progress"}


def _late(cut_id: str) -> str:
    return f"drain of cut {cut_id} has taken 60.2 s, its budget is 60 s"


def _violations(run_dir: Path, found: Mapping[str, float]) -> None:
    """Write what the auditor found, as it does in a run folder."""
    records = Records(2)
    if "single_owner" in found:
        groups = ("e000-p0000017",)
        owned = Violation("single_owner", "critical", _OWNED, groups, owners=("ledger", "buffer"))
        records.add(owned, origin="live", unix_time=found["single_owner"], events=[])
    cut_id = f"2-{int(found['cut off'])}"
    late = Violation(
        "checkpoint_progress", "warning", _late(cut_id), cut_id=cut_id, evidence={"phase": "drain"}
    )
    records.add(late, origin="sweep", unix_time=found["checkpoint_progress"], events=[])
    ViolationJournal(run_dir).append(record.to_json() for record in records.all())


def _live(
    folder: Path,
    luck: random.Random,
    found: dict[str, float],
    incarnation: int,
    start: float,
    stop: float,
    end: float,
    period: float,
    save_every: float,
    *,
    torn: bool = False,
    cut_off: bool = False,
) -> None:
    samples, events, spans, slots = (
        Files(folder, stream, incarnation) for stream in ("samples", "events", "spans", "slots")
    )
    metrics = Metrics()
    _zero(metrics)
    metrics.set(names.RUN_STARTED, start)
    metrics.set(names.RUN_STATE, 1, state="running")
    for invariant in found.keys() & set(names.INVARIANTS):  # read back from the run's folder
        metrics.set(names.INVARIANT_LAST_VIOLATION, found[invariant], invariant=invariant)
    stuck = stop - STUCK_SECONDS if cut_off else math.inf

    def log(when: float, event: str, level: str = "info", **fields: object) -> None:
        stamp = datetime.fromtimestamp(when, UTC).isoformat().replace("+00:00", "Z")
        events.put({"timestamp": stamp, "level": level, "event": event, "run": "synthetic", **fields}, when)

    log(start, "run.state", state="running")
    if incarnation > 1:
        parts = {"verify": 0.8, "documents": 0.05, "rows": 2.1, "prompts": 0.02, "trainer": 1.4}
        owners = {"ledger": 41, "spares": 3, "buffer": 22, "training": 0}
        log(start + 4.4, "restore.completed", groups=owners, parts=parts)
    next_save = start + save_every
    step = int((start - START) / 12)
    now = start
    while now < stop:
        now = min(now + period, stop)
        done = (now - START) / (end - START)
        step = max(step, int((now - START) / 12))
        _slots(metrics, luck, period)
        _training(metrics, luck, period, step, done)
        if now >= next_save and now < stuck:
            next_save += save_every
            _save(metrics, luck, found, now, step, incarnation, log, spans, slots)
        if now >= stuck + 62 and "checkpoint_progress" not in found:
            found |= {"cut off": stuck, "checkpoint_progress": stuck + 60.2}
            metrics.add(names.INVARIANT_VIOLATIONS, 1, **_LATE)
            metrics.set(names.INVARIANT_LAST_VIOLATION, stuck + 60.2, **_LATE)
            message = _late(f"{incarnation}-{int(stuck)}")
            log(stuck + 60.2, "invariant.violated", "warning", **_LATE, message=message)
        if now >= stuck:
            metrics.set(names.CHECKPOINT_PHASE, 1, phase="drain")
            metrics.set(names.CHECKPOINT_PHASE_STARTED, stuck, phase="drain")
        if incarnation > 1 and now - start < 3 * period:
            metrics.values[_key(_REUSED, {})] = 21_400.0 * min(1.0, (now - start) / (2 * period))
        samples.put(metrics.line(now, complete=samples.is_new), now)
    if cut_off:
        _cut_off(luck, stuck, stop, incarnation, spans, slots)
    for files in (samples, events, spans, slots):
        files.close(torn=torn and files is samples)


_REUSED = "quiesce_restore_tokens_reused_total"


_BROKEN = {"invariant": "single_owner"}
_OWNED = "group e000-p0000017 is owned by the ledger and by the buffer"


def _zero(metrics: Metrics) -> None:
    """Give every series that there is a value, as a collector does."""
    for metric in names.METRICS.values():
        if metric.type == "info":
            metrics.values[
                _key(
                    metric.name,
                    {
                        "sampler": "StepsAheadSampler",
                        "dataplane": "lmdb",
                        "engine": "tiny",
                        "version": "0.1.0",
                    },
                )
            ] = 1.0
            continue
        for labels in metric.label_sets(KINDS):
            named = dict(zip(metric.label_names, labels, strict=True))
            if metric.type == "histogram":
                for bound in (*map(repr, metric.buckets), "+Inf"):
                    metrics.values[_key(f"{metric.name}_bucket", {**named, "le": bound})] = 0.0
                metrics.values[_key(f"{metric.name}_count", named)] = 0.0
                metrics.values[_key(f"{metric.name}_sum", named)] = 0.0
            else:
                metrics.values[_key(metric.name, named)] = 0.0
    metrics.set(names.TRAIN_KL, math.nan)


def _slots(metrics: Metrics, luck: random.Random, period: float) -> None:
    for kind, rate in RATES.items():
        count = int(rate * period * luck.uniform(0.8, 1.2) + luck.random())
        if count:
            typical = 2e-5 if kind != "group_commit" else 6e-5
            metrics.observe(names.MUTATION_WAIT, 0.0, count, kind=kind)
            for share, factor in ((0.6, 1.0), (0.3, 2.5), (0.1, 9.0)):
                part = round(count * share) or 1
                metrics.observe(
                    names.MUTATION_HOLD, typical * factor * luck.lognormvariate(0, 0.4), part, kind=kind
                )
            metrics.add(names.MUTATION_SECTIONS, count, kind=kind, outcome="completed")


def _training(metrics: Metrics, luck: random.Random, period: float, step: int, done: float) -> None:
    ledger = 38 + luck.randrange(10)
    counts = (ledger, luck.randrange(5), max(0, 24 + luck.randrange(-8, 8)), luck.choice((0, 8, 8)))
    for owner, count in zip(OWNERS, counts, strict=True):
        metrics.set(names.GROUPS, count, owner=owner)
    metrics.set(names.TRAINER_VERSION, step)
    metrics.set(names.DISPATCH_CURSOR, step + 4)
    metrics.set(names.TARGET_STEP_MAX, step + 5, owner="ledger")
    metrics.set(names.TARGET_STEP_MAX, step + 2, owner="buffer")
    metrics.set(names.TRAIN_REWARD, round(0.3 + 0.5 * (1 - math.exp(-3 * done)) + luck.gauss(0, 0.02), 4))
    metrics.set(names.TRAIN_LOSS, round(luck.gauss(0.02, 0.01), 5))
    metrics.set(names.TRAIN_KL, round(0.002 + 0.01 * done + abs(luck.gauss(0, 0.001)), 5))
    metrics.add(names.TOKENS_GENERATED, int(period * luck.uniform(5200, 6400)))
    metrics.set(names.PROMPTS_TRAINED, 8 * step)
    metrics.set(names.PROMPTS_READ, 8 * step + sum(counts))
    metrics.add(names.TRAIN_IDLE, period * luck.uniform(0.01, 0.06), cause="groups")
    metrics.add(names.TRAIN_IDLE, period * luck.uniform(0.005, 0.01), cause="sync")


def _cut_off(
    luck: random.Random, begin: float, end: float, incarnation: int, spans: Files, slots: Files
) -> None:
    """Write what a process tells that is ended while a save drains: what is open, as cut off."""
    cut_id = f"{incarnation}-{int(begin)}"
    trace, save, window, drain = (luck.getrandbits(128), *(luck.getrandbits(64) for _ in range(3)))
    fence = 0.0041
    _span(spans, luck, "quiesce.checkpoint.fence", trace, save, begin - fence, begin, cut_id)
    for name, ident, parent, start in (
        ("quiesce.checkpoint.drain", drain, window, begin),
        ("quiesce.window", window, save, begin),
        ("quiesce.checkpoint", save, 0, begin - fence),
    ):
        about: dict[str, object] = {"quiesce.cut_id": cut_id, "quiesce.cut_off": True}
        spans.put({**_record(luck, name, trace, parent, start, end, about, ident), "c": True}, end)
    for kind, asked in (("group_commit", begin - 3.2), ("group_commit", begin - 0.9), ("retry", begin - 0.2)):
        about = {"quiesce.kind": kind, "quiesce.cut_off": True}
        slots.put(
            {**_record(luck, "quiesce.slot", luck.getrandbits(128), 0, asked, end, about), "c": True}, end
        )
    for kind, asked in (("admission", begin + 0.4), ("training_selection", begin + 9.0)):
        about = {"quiesce.kind": kind, "quiesce.held": False, "quiesce.cut_off": True}
        record = _record(luck, "quiesce.slot", luck.getrandbits(128), 0, asked, end, about)
        slots.put({**record, "l": [[f"{trace:032x}", f"{window:016x}"]], "c": True}, end)


def _save(
    metrics: Metrics,
    luck: random.Random,
    found: dict[str, float],
    now: float,
    step: int,
    incarnation: int,
    log: "Log",
    spans: Files,
    slots: Files,
) -> None:
    cut_id = f"{incarnation}-{int(now)}"
    outcome, reason = "completed", ""
    if luck.random() < 0.01:
        outcome, reason = luck.choice(
            (("failed", "disk"), ("failed", "drain_timeout"), ("skipped", "nothing_changed"))
        )
    phases = {
        name: luck.lognormvariate(math.log(median), spread) for name, (median, spread) in PHASES.items()
    }
    metrics.add(names.CHECKPOINT_ATTEMPTS, 1, outcome=outcome, reason=reason)
    if outcome == "skipped":
        log(now, "checkpoint.skipped", cut_id=cut_id, step=step, reason=reason)
        return
    if reason == "drain_timeout":
        phases = {"fence": phases["fence"], "drain": 30.0}
    ids = luck.getrandbits(128), luck.getrandbits(64), luck.getrandbits(64)
    begin = now - sum(phases.values())
    at = begin
    for phase, seconds in phases.items():
        inside = phase in {"drain", "exclusive"}
        _span(
            spans,
            luck,
            f"quiesce.checkpoint.{phase}",
            ids[0],
            ids[2 if inside else 1],
            at,
            at + seconds,
            cut_id,
        )
        at += seconds
    _span(spans, luck, "quiesce.window", ids[0], ids[1], begin, at, cut_id, span_id=ids[2], outcome=outcome)
    more = {"quiesce.step": step, "quiesce.reason": reason, "quiesce.rows": 512, "quiesce.bytes": 9_400_000}
    _span(
        spans,
        luck,
        "quiesce.checkpoint",
        ids[0],
        0,
        begin,
        at,
        cut_id,
        span_id=ids[1],
        outcome=outcome,
        **more,
    )
    closed = phases["drain"] + phases.get("exclusive", 0.0)
    metrics.add(names.WINDOW_CLOSED, closed)
    for kind in luck.sample(KINDS[:6], 3):
        metrics.add(names.WINDOW_BLAME, phases["drain"] * luck.uniform(0.3, 1.0), kind=kind)
        wait = closed * luck.uniform(0.2, 1.0)
        metrics.add(names.WINDOW_BLOCKED, wait * 4, kind=kind)
        metrics.observe(names.MUTATION_WAIT, wait, 4, kind=kind)
        record = _record(luck, "quiesce.slot", ids[0], 0, now, now + wait, {"quiesce.kind": kind})
        record["a"] |= {"quiesce.wait_seconds": wait, "quiesce.outcome": "completed"}
        slots.put({**record, "l": [[f"{ids[0]:032x}", f"{ids[2]:016x}"]]}, now)
    for cause, share in (("fence", 0.2), ("window", 1.0), ("stage", 0.5)):
        metrics.add(names.TRAINER_STALL, share * (closed + 0.02), cause=cause)
    for name in (*names.INVARIANTS[:9], _LATE["invariant"]):
        metrics.set(names.INVARIANT_ACTIVE, 1, invariant=name)
        metrics.add(names.INVARIANT_CHECKS, 1, invariant=name)
    if incarnation > 1 and "single_owner" not in found:
        found["single_owner"] = now
        metrics.add(names.INVARIANT_VIOLATIONS, 1, **_BROKEN)
        metrics.set(names.INVARIANT_LAST_VIOLATION, now, **_BROKEN)
        log(now, "invariant.violated", "critical", invariant="single_owner", message=_OWNED)
    groups = {"ledger": 41, "spares": 3, "buffer": 22, "training": 8}
    if outcome == "completed":
        log(
            now,
            "checkpoint.published",
            cut_id=cut_id,
            step=step,
            groups=groups,
            rows=512,
            bytes=9_400_000,
            phases=phases,
        )
    else:
        log(
            now,
            "checkpoint.not_published",
            "error",
            cut_id=cut_id,
            step=step,
            outcome=outcome,
            reason=reason,
            groups=groups,
        )


class Log(Protocol):
    """Writes a log event."""

    def __call__(self, when: float, event: str, level: str = "info", **fields: object) -> None:
        """Write one."""


def _record(
    luck: random.Random,
    name: str,
    trace_id: int,
    parent_id: int,
    start: float,
    end: float,
    attributes: dict[str, object],
    span_id: int = 0,
) -> dict[str, dict[str, object]]:
    record: dict[str, object] = {
        "n": name,
        "t": f"{trace_id:032x}",
        "s": f"{span_id or luck.getrandbits(64):016x}",
    }
    record |= {"p": f"{parent_id:016x}" if parent_id else "", "b": int(start * 1e9), "e": int(end * 1e9)}
    record |= {"a": attributes, "l": [], "v": [], "st": "", "c": False}
    return record  # type: ignore[return-value] # "a" is what tests look into


def _span(
    spans: Files,
    luck: random.Random,
    name: str,
    trace_id: int,
    parent_id: int,
    start: float,
    end: float,
    cut_id: str,
    span_id: int = 0,
    outcome: str = "completed",
    **more: object,
) -> None:
    attributes = {"quiesce.cut_id": cut_id, "quiesce.outcome": outcome, **more}
    spans.put(_record(luck, name, trace_id, parent_id, start, end, attributes, span_id), end)


@cache
def _histogram_keys(name: str, labels: tuple[tuple[str, str], ...]) -> tuple[list[str], str, str]:
    bounds = (*map(repr, names.METRICS[name].buckets), "+Inf")
    buckets = [_key(f"{name}_bucket", {**dict(labels), "le": bound}) for bound in bounds]
    return buckets, _key(f"{name}_count", dict(labels)), _key(f"{name}_sum", dict(labels))


def _key(name: str, labels: Mapping[str, str]) -> str:
    kept = ",".join(f'{label}="{value}"' for label, value in labels.items())
    return f"{name}{{{kept}}}" if kept else name


def _json(value: float) -> float | str:
    return "nan" if math.isnan(value) else int(value) if value == int(value) else value


def lines(run_dir: Path) -> Iterator[bytes]:
    """Every byte of a recording, for comparing two."""
    for path in sorted((run_dir / FOLDER).iterdir()):
        yield gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
