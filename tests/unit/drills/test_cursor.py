"""Faults of admission, each at a moment of which there is little in a run."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from quiesce.auditor.record import Records
from quiesce.checkpoint.cut import SamplerState
from quiesce.drills import DRILLS
from quiesce.drills.holes import Holes


def state(cursor: int, next_admission_id: int) -> SamplerState:
    """Return a sampler at a cut."""
    return SamplerState("in_order", cursor, True, cursor + 1, next_admission_id)


async def test_an_early_cursor_takes_nothing_back_but_the_cursor() -> None:
    """A batch that was reserved before the cut in front is not unreserved by the one that is wrong."""
    now = state(3, 4)
    sources = SimpleNamespace(sampler_state=lambda: now)
    target: Any = SimpleNamespace(auditor=SimpleNamespace(records=Records()), sources=sources)
    holes = Holes("early-cursor", target)
    await DRILLS["early-cursor"].inject(target, holes)

    now = state(3, 5)  # reserved, not admitted yet
    before = sources.sampler_state()
    now = state(4, 6)
    wrong = sources.sampler_state()
    after = sources.sampler_state()
    await holes.close()

    assert before == state(3, 5)
    assert wrong == before
    assert after == now
