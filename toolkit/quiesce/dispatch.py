"""The rollout pump: read, reserve, wait for room, admit, launch; restored groups first.

=====================  =============================  ========================================
the rollout pump       waits for                      unblocked by
=====================  =============================  ========================================
pulling                the loader                     it
reserving              a ``prompt_reservation`` slot  the checkpoint that asked before it
wanting room           buffer capacity                groups leaving the buffer, or dropped
at the gate            the sampler's admission gate   the trainer version advancing
admitting              an ``admission`` slot          the checkpoint that asked before it
=====================  =============================  ========================================

Rule: only this task admits. A batch is owned from the step in which its prompts count as read, so a checkpoint at any of
the waits above finds an owner for every prompt. Yield rule: nothing is held while it waits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from quiesce.errors import CapacityError, PromptSourceError, UnknownGroupError
from quiesce.owners import reserved_batches

if TYPE_CHECKING:
    from quiesce.admission import Admission
    from quiesce.controller_config import ControllerConfig
    from quiesce.owners import Owners
    from quiesce.prompts import PromptSource, Pull
    from quiesce.rollouts import Rollouts

__all__ = ["RolloutPump"]


class RolloutPump:
    """Keeps admitted groups coming until every epoch was read.

    Args:
        owners: The owners of the groups.
        source: Where prompts come from.
        admission: Admits reserved batches.
        rollouts: Runs the workers of admitted groups.
        config: Sizes.
    """

    def __init__(
        self,
        owners: Owners,
        source: PromptSource,
        admission: Admission,
        rollouts: Rollouts,
        config: ControllerConfig,
    ) -> None:
        self._owners = owners
        self._source = source
        self._admission = admission
        self._rollouts = rollouts
        self._config = config

    async def run(self) -> None:
        """Pump until nothing is left to read and every spare is admitted."""
        await self._redispatch()
        while True:
            pull = await self._source.pull()
            if pull is None:
                self._check_end()
                break
            self._check_room(pull)
            async with self._owners.barrier.mutation("prompt_reservation") as cut:
                records = self._owners.commit_pull(cut, pull, to_spares=self._wants_spares())
            if records:
                payloads = {
                    ref.group_id: payload for ref, payload in zip(pull.refs, pull.payloads, strict=True)
                }
                await self._admit([record.group_id for record in records], payloads)
        while len(self._owners.spares):
            async with self._owners.barrier.mutation("prompt_reservation") as cut:
                records = self._owners.drain_spares(cut)
            await self._admit([record.group_id for record in records], {})

    def _wants_spares(self) -> bool:
        """Whether the next batch fills the pool: once training has something to do, and never the only batch."""
        owners = self._owners
        return len(owners.spares) < self._config.spare_prompts and owners.sampler.dispatch_cursor >= 0

    async def _redispatch(self) -> None:
        """Start over with what a checkpoint brought back: admitted groups first, for only they can open the gate."""
        for record in self._owners.ledger.records():
            if record.phase == "admitted":
                payload = await self._source.payload(record.prompt)
                if self._owners.ledger.find(record.group_id) == record:
                    self._rollouts.launch(record, payload)
        for batch in reserved_batches(self._owners.ledger.records()):
            await self._admit(batch, {})

    async def _admit(self, batch: Sequence[str], payloads: dict[str, Any]) -> None:
        owners = self._owners
        while batch:
            size = len(batch)
            await owners.room_for(size)
            try:
                admitted = await self._admission.admit(batch)
            except UnknownGroupError:
                # A checkpoint's verification condemned one of them during the wait; the others are as good as before.
                still_owned = [group_id for group_id in batch if group_id in owners.ledger]
                if len(still_owned) == size:
                    raise
                batch = still_owned
                continue
            owners.changed.notify()
            for group_id in admitted.group_ids:
                record = owners.ledger.find(group_id)
                if record is not None:
                    payload = payloads.get(group_id)
                    if payload is None:
                        payload = await self._source.payload(record.prompt)
                        if owners.ledger.find(group_id) != record:
                            continue  # it aged out while its prompt was read
                    self._rollouts.launch(record, payload)
            return

    def _check_room(self, pull: Pull) -> None:
        """Refuse a batch that the buffer can never hold, before any of it counts as read."""
        size, capacity = len(pull.refs), self._owners.capacity
        if size > capacity:
            raise CapacityError(f"buffer_capacity: a batch of {size} prompts of the source", size, capacity)

    def _check_end(self) -> None:
        """Refuse a source that stops reading without having said so: the run would wait for its end for ever."""
        if not self._owners.position.exhausted:
            raise PromptSourceError(
                "end", "nothing more was pulled, but the last position is not marked exhausted"
            )
