"""Noticing that nothing moves any more, and naming the group that the run waits for.

Rule: a stall is judged by the moves of groups between owners and by trained steps, not by how busy anything looks. Yield
rule: only :meth:`StallWatch.run` suspends.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from quiesce.errors import StallError

if TYPE_CHECKING:
    from quiesce.observers import Hub
    from quiesce.owners import Owners

__all__ = ["StallWatch"]

_LOG: Final = logging.getLogger("quiesce.stalls")

LOOKS_PER_LIMIT: Final = 10
"""How often a limit's length is sampled: a stall is reported at most a tenth of the limit late."""


class StallWatch:
    """Watches one run.

    Args:
        owners: The owners of the groups.
        report_seconds: Report once nothing has moved for so long, and again each time it doubles.
        abort_seconds: Halt the run once nothing has moved for so long; None never does.
        fail: Called with the error that halts the run.
        hub: Where ``stalled`` is reported.
    """

    def __init__(
        self,
        owners: Owners,
        *,
        report_seconds: float,
        abort_seconds: float | None,
        fail: Callable[[BaseException], None],
        hub: Hub,
    ) -> None:
        self._owners = owners
        self._report_seconds = report_seconds
        self._abort_seconds = abort_seconds
        self._fail = fail
        self._hub = hub
        self.halted = False
        """Whether this watch halted the run."""

    async def run(self) -> None:
        """Watch until cancelled, or until the run is halted."""
        loop = asyncio.get_running_loop()
        limits = [self._report_seconds, *([] if self._abort_seconds is None else [self._abort_seconds])]
        period = min(limits) / LOOKS_PER_LIMIT
        seen, since, next_report = self._progress(), loop.time(), self._report_seconds
        while True:
            await asyncio.sleep(period)
            now = loop.time()
            if (progress := self._progress()) != seen:
                seen, since, next_report = progress, now, self._report_seconds
                continue
            age = now - since
            what, group_id = self.waiting_for()
            if age >= next_report:
                next_report *= 2
                _LOG.warning("nothing has moved for %.1f s: %s (group %s)", age, what, group_id or "none")
                if self._hub.stalled:
                    self._hub.fire("stalled", what, group_id, age)
            if self._abort_seconds is not None and age >= self._abort_seconds:
                self.halted = True
                self._fail(StallError(what, group_id, age))
                return

    def waiting_for(self) -> tuple[str, str]:
        """Return what the run waits for, and the group to blame (empty if there is none)."""
        owners = self._owners
        claims = owners.buffer.claims()
        if claims:
            return "a train step has not ended", claims[0].entries[0].group_id if claims[0].entries else ""
        records = owners.ledger.records()
        admitted = [record for record in records if record.phase == "admitted"]
        if admitted:
            # Admission order is training order wherever there is one, so the oldest is what the next step needs.
            return "a rollout has not ended", min(admitted, key=lambda item: item.admission_id).group_id
        if records:
            return "a reserved batch was not admitted", records[0].group_id
        return "no prompt was read", ""

    def _progress(self) -> tuple[int, int]:
        return self._owners.moves, self._owners.step
