"""What one generation call may stage: the rows of one attempt, from its first chunk to its final rows.

While a call generates, a worker puts the tokens so far as chunk rows, without a permit; when it is done, it puts the
final rows under a permit of its snapshot gate, after which the chunks are obsolete. A restored attempt brings the keys
of what an earlier call of it had put; they are read before it is generated, and it goes on from there.

==================  ==========================================  ===================================
who                 calls                                       from
==================  ==========================================  ===================================
the worker          ``put_chunks``, ``finish``                  its own thread; both block
whoever gives the   ``load``                                    a thread; blocks
call                ``abandon`` (the attempt is given up) or    the event loop; neither waits, also
                    ``commit`` (its rows have another owner)    not for a put that hangs
==================  ==========================================  ===================================

Rule: every key that was put is handed over to clearing exactly once, or belongs to whoever the group was committed to.
Once the attempt is given up nothing is put any more; a put that was running then is handed over when it is through,
not before, since a clear that overtakes a put leaves its row behind. Yield rule: nothing here suspends.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Final

from quiesce.errors import MapFullError, RolloutResultError, StagingRetiredError
from quiesce.types import RowKey

if TYPE_CHECKING:
    from quiesce.dataplane.interface import DataPlane, Row
    from quiesce.snapshot_gate import SnapshotGate

__all__ = ["Staging"]

ROOM_PAUSE_SECONDS: Final = 0.02
"""Between two attempts to put final rows into a full store; its own waiting for a release comes on top."""


class Staging:
    """The rows of one (group, attempt). Thread-safe.

    Args:
        dataplane: Where rows go.
        group_id: The prompt group.
        attempt: The attempt that the ledger waits for.
        num_generations: How many generations are wanted.
        hand_over: Takes keys whose rows nobody wants any more; called from any thread, never waits.
        making_room: Says whether rows are being cleared: a full store is waited for then, too. Called from any thread.
        found: Keys of what an earlier call of this very attempt left: of each generation its final row, or chunks from
            the first on without a gap. What belongs to no wanted generation is obsolete like any chunk.

    Attributes:
        group_id: The prompt group.
        attempt: The attempt.
        num_generations: How many generations are wanted.
        found: Once loaded, for each generation its chunk rows, in order, with the fields that were put.
        finals: Once loaded, for each generation its final row, or None.
    """

    def __init__(
        self,
        dataplane: DataPlane,
        group_id: str,
        attempt: int,
        num_generations: int,
        *,
        hand_over: Callable[[Sequence[RowKey]], None],
        making_room: Callable[[], bool] = lambda: False,
        found: Sequence[RowKey] = (),
    ) -> None:
        self.group_id = group_id
        self.attempt = attempt
        self.num_generations = num_generations
        self.found: tuple[tuple[Row, ...], ...] = ((),) * num_generations
        self.finals: tuple[Row | None, ...] = (None,) * num_generations
        self._dataplane = dataplane
        self._hand_over = hand_over
        self._making_room = making_room
        self._to_load = tuple(found)
        wanted = {self._key(generation) for generation in range(num_generations)}
        # Guards what follows; held for a few instructions, never over a put.
        self._lock = threading.Lock()
        self._over = False
        self._final_keys = [key for key in found if key in wanted]
        self._obsolete = [key for key in found if key not in wanted]
        self._next = [0] * num_generations
        self._running = 0
        self._full = False
        # Puts of one call follow each other, so that no chunk is missing in the middle. Worker threads alone wait here.
        self._order = threading.Lock()

    def __repr__(self) -> str:
        """Name group, attempt and state."""
        state = "over" if self._over else "open"
        return f"<staging of group {self.group_id} attempt {self.attempt}, {state}>"

    @property
    def over(self) -> bool:
        """Whether the attempt was given up or committed; whoever generates for it may stop."""
        return self._over

    @property
    def finished(self) -> bool:
        """Whether every generation has its final row."""
        with self._lock:
            return len(self._final_keys) == self.num_generations

    @property
    def waits_for_room(self) -> bool:
        """Whether a put waits because the store is full and something will make room: back-pressure, not a hung call."""
        with self._lock:
            full, running = self._full and not self._over, self._running
        return full or (running > 0 and self._dataplane.statistics().blocked_writers > 0)

    @property
    def to_load(self) -> bool:
        """Whether something was found that is not loaded yet."""
        return bool(self._to_load)

    def load(self) -> None:
        """Read what was found, before anything is put. Blocks.

        Raises:
            DataPlaneError: If a row is not there, or cannot be read.
        """
        with self._order:
            rows = dict(zip(self._to_load, self._dataplane.get(self._to_load), strict=True))
            found = []
            for generation in range(self.num_generations):
                chunks: list[Row] = []
                while (row := rows.get(self._key(generation, len(chunks)))) is not None:
                    chunks.append(row)
                found.append(tuple(chunks))
            self.finals = tuple(rows.get(self._key(generation)) for generation in range(self.num_generations))
            self.found = tuple(found)
            self._next = [len(chunks) for chunks in found]
            self._to_load = ()

    def put_chunks(self, rows: Mapping[int, Row]) -> None:
        """Put the next chunk row of some generations, all in one put. Blocks, without a permit.

        Args:
            rows: A row by generation. They become readable together.

        Raises:
            StagingRetiredError: If the attempt was given up before or meanwhile, or the generation is finished.
            DataPlaneError: What the store raises; nothing was put then, and the same chunks may be put again.
        """
        with self._order:
            with self._lock:
                if any(self._key(generation) in self._final_keys for generation in rows):
                    raise StagingRetiredError(self.group_id, self.attempt)
                keyed = {
                    self._key(generation, self._next[generation]): row for generation, row in rows.items()
                }
            self._put(keyed, self._obsolete)
            with self._lock:
                for generation in rows:
                    self._next[generation] += 1

    def finish(
        self, gate: SnapshotGate, rows: Mapping[int, Row], timeout: float | None = None
    ) -> tuple[RowKey, ...]:
        """Put the final rows under a permit, which is released before this returns. Blocks.

        A store that is full while a snapshot pins it, or while rows are being cleared, is waited for, with the permit
        released in between.

        Args:
            gate: The worker's snapshot gate.
            rows: A row for every generation that has no final row yet.
            timeout: Seconds to wait for each permit; None waits for ever.

        Returns:
            The keys of the chunks, obsolete now, which the caller hands to its cleanup once, after this call.

        Raises:
            StagingRetiredError: If the attempt was given up before or meanwhile.
            RolloutResultError: If other generations were given than those that lack their final row.
            GateError: If no permit was granted.
            DataPlaneError: What the store raises; nothing was put then.
        """
        with self._order:
            missing = [generation for generation, row in enumerate(self.finals) if row is None]
            if sorted(rows) != missing:
                raise RolloutResultError(
                    self.group_id, f"final rows of generations {sorted(rows)}, not of {missing}"
                )
            keyed = {self._key(generation): row for generation, row in rows.items()}
            while keyed:
                with gate.permit(timeout):
                    if self._put_if_there_is_room(keyed):
                        break
                time.sleep(ROOM_PAUSE_SECONDS)
            with self._lock:
                self._require_open()
                obsolete = tuple(self._obsolete)
                self._obsolete.clear()
        return obsolete

    def commit(self) -> tuple[RowKey, ...]:
        """End the staging of a group that has another owner now, who has its final rows; refuse whatever comes later.

        Returns:
            The keys of chunks that nobody took as obsolete yet, for the caller to hand over.
        """
        with self._lock:
            self._over = True
            obsolete = tuple(self._obsolete)
            self._obsolete.clear()
        return obsolete

    def abandon(self) -> None:
        """Give the attempt up: hand over every key that was put, now or when its put is through. Idempotent."""
        with self._lock:
            if self._over:
                return
            self._over = True
            gone = (*self._final_keys, *self._obsolete)
            self._final_keys.clear()
            self._obsolete.clear()
        if gone:
            self._hand_over(gone)

    # ------------------------------------------------------------------------------------------------- private

    def _key(self, generation: int, sequence: int | None = None) -> RowKey:
        return RowKey(self._dataplane.incarnation, self.group_id, generation, self.attempt, sequence)

    def _require_open(self) -> None:
        if self._over:
            raise StagingRetiredError(self.group_id, self.attempt)

    def _put(self, keyed: Mapping[RowKey, Row], kept: list[RowKey]) -> None:
        """Put rows and note their keys; if the attempt was given up meanwhile, hand them over instead."""
        with self._lock:
            self._require_open()
            self._running += 1
        done = False
        try:
            self._dataplane.put(keyed)
            done = True
        finally:
            with self._lock:
                self._running -= 1
                late = self._over
                if done and not late:
                    kept.extend(keyed)
        if late:
            self._hand_over(tuple(keyed))
            raise StagingRetiredError(self.group_id, self.attempt)

    def _put_if_there_is_room(self, keyed: Mapping[RowKey, Row]) -> bool:
        """Put final rows, and return False if the store is full and something will make room."""
        try:
            self._put(keyed, self._final_keys)
        except MapFullError as error:
            if not (error.pins or self._making_room()):
                raise
            self._full = True
            return False
        self._full = False
        return True
