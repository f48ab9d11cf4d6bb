"""Whole runs under the auditor: whatever is slow, fails, is dropped, stopped or killed, nothing is reported.

The schedules are those that the runs themselves are tested with, so they meet drops, substitutions, stale aborts, retries,
evictions, stops, kills and resumes; a second test says which of them it met.
"""

from __future__ import annotations

import functools
import os
from collections import Counter
from pathlib import Path

import pytest

from quiesce.auditor import AUDITED, Auditor, AuditorStatistics, Pace, read_violations
from quiesce.testing import in_virtual_time
from tests.auditor_rig import AuditedController
from tests.property.test_run_schedules import Schedule, Seen
from tests.run_rig import SAMPLERS

SEEDS = range(6)
QUICK = Pace(rest=0.0, least_seconds=0.0, between_seconds=0.2, orphan_seconds=0.5)


@pytest.mark.parametrize("name", SAMPLERS)
def test_a_sound_run_raises_no_alarm_whatever_happens_to_it(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No finding by event, sweep or cut, in any incarnation, with every move met; and none is written down."""
    monkeypatch.setattr(os, "fsync", lambda _: None)  # no power fails here, and there are many saves
    met: Counter[str] = Counter()
    ended: list[AuditorStatistics] = []
    auditors: list[Auditor] = []

    class Watched(AuditedController):
        audit_options = {"pace": QUICK}  # noqa: RUF012 - as its base says

        async def run(self, *, resume: bool = False):  # type: ignore[no-untyped-def] # noqa: ANN202 - as its base
            try:
                return await super().run(resume=resume)
            finally:
                if self.auditor is not None:
                    auditors.append(self.auditor)
                    ended.append(self.auditor.statistics())
                    met.update(
                        f"{source} {target} {reason}".strip()
                        for _, source, target, reason in schedule.run.recorder.of("owner_moved")
                    )

    schedule: Schedule

    @in_virtual_time
    async def play(seed: int) -> None:
        nonlocal schedule
        schedule = Schedule(seed, name, tmp_path / str(seed))
        monkeypatch.setattr(schedule.run, "start", functools.partial(schedule.run.start, controller=Watched))
        schedule.run.check_all_accounted(await schedule.play(Seen()))

    for seed in SEEDS:
        play(seed)
        assert read_violations(tmp_path / str(seed)) == []

    assert {record.message for auditor in auditors for record in auditor.records.all()} == set()
    assert [statistics.findings for statistics in ended] == [{}] * len(ended)
    assert sum(statistics.sweeps for statistics in ended) > 50
    assert not any(statistics.sweep_failures or statistics.write_failures for statistics in ended)
    assert len(ended) > len(SEEDS)  # stops and kills
    assert met["ledger buffer"]
    assert met["training trained"]
    assert met["ledger dropped failed"]
    assert met["spares ledger"]
    if name == "windowed":
        assert met["ledger dropped stale_abort"]
    active = {status.name for status in auditors[-1].status() if status.state == "active"}
    inactive = {status.name: status.why for status in auditors[-1].status() if status.state == "inactive"}
    if name == "in_order":
        assert inactive == {}
    else:
        assert set(inactive) == {"cursor_covers_buffer"}
        assert name in inactive["cursor_covers_buffer"]
    assert active | set(inactive) | {"digest_matches"} == set(AUDITED)
