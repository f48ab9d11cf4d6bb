"""A hundred thousand finishing calls, clears that fail now and then, and checkpoints at random: an account of every key."""

from __future__ import annotations

import random
import threading
from collections import Counter
from collections.abc import Sequence

import pytest

from quiesce.cleanup import BackgroundCleanup
from quiesce.invariants.gate_events import GateEventLog, gate_is_respected
from quiesce.observers import Hub
from quiesce.snapshot_gate import Epoch, SnapshotGate
from quiesce.types import RowKey

CALLS = 100_000
THREADS = 8
PATIENCE = 60.0


class Store:
    """Counts what is put and cleared, and notices either while the gate is closed."""

    def __init__(self, seed: int) -> None:
        self.put: Counter[RowKey] = Counter()
        self.cleared: Counter[RowKey] = Counter()
        self.failures = 0
        self.reading = False
        self.intruders = 0
        self._random = random.Random(seed)
        self._lock = threading.Lock()

    def put_final(self, key: RowKey) -> None:
        """Make a row final."""
        self.intruders += self.reading
        with self._lock:
            self.put[key] += 1
        self.intruders += self.reading

    def clear(self, keys: Sequence[RowKey]) -> int:
        """Clear rows, or fail before any is."""
        self.intruders += self.reading
        if self._random.random() < 0.05:
            self.failures += 1
            raise OSError("the store is away")
        self.cleared.update(keys)
        self.intruders += self.reading
        return len(keys)


@pytest.mark.parametrize("seed", [1])
@pytest.mark.timeout(180)
def test_every_key_of_a_hundred_thousand_calls_is_accounted_for(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each final row is put once, each obsolete one cleared once or given up by name, nothing while the gate is closed."""
    monkeypatch.setattr("quiesce.cleanup.RETRY_PAUSE_SECONDS", 0.0)
    store, log = Store(seed), GateEventLog()
    hub = Hub(strict=True)
    hub.subscribe(log)
    gate = SnapshotGate("0", hub=hub)
    cleanup = BackgroundCleanup(gate, store.clear, linger_seconds=0.0, hub=hub)
    cleanup.start()
    done = threading.Semaphore(0)
    problems: list[BaseException] = []

    def finish(first: int) -> None:
        chance = random.Random(seed * 1000 + first)
        try:
            for number in range(first, CALLS, THREADS):
                group = f"g{number}"
                with gate.permit(PATIENCE):
                    store.put_final(RowKey(1, group, 0, 0))
                cleanup.submit(RowKey(1, group, 0, 0, chunk) for chunk in range(chance.randrange(4)))
                done.release()
        except BaseException as error:  # noqa: BLE001 - told by the test
            problems.append(error)

    def checkpoints() -> int:
        """Close and reopen after a random number of calls, again and again."""
        chance = random.Random(seed)
        taken, left = 0, CALLS
        while left > 0:
            wait = min(left, chance.randrange(1, 400))
            for _ in range(wait):
                if not done.acquire(timeout=PATIENCE):
                    return taken
            left -= wait
            taken += 1
            epoch = Epoch(1, taken)
            assert gate.close_and_wait(epoch, PATIENCE) == "closed"
            store.reading = True
            assert gate.closed_in(epoch)
            store.reading = False
            gate.reopen(epoch)
            gate.reopen(Epoch(1, chance.randrange(1, taken + 1)))  # late, and late again
        return taken

    workers = [threading.Thread(target=finish, args=(first,), daemon=True) for first in range(THREADS)]
    for worker in workers:
        worker.start()
    taken = checkpoints()
    for worker in workers:
        worker.join(PATIENCE)
    left = cleanup.close(PATIENCE)

    assert problems == []
    assert taken > CALLS // 400
    assert store.failures > 100
    assert store.intruders == 0
    assert len(store.put) == CALLS
    assert set(store.put.values()) == {1}
    wanted = Counter(
        RowKey(1, f"g{number}", 0, 0, chunk)
        for first in range(THREADS)
        for chance in [random.Random(seed * 1000 + first)]
        for number in range(first, CALLS, THREADS)
        for chunk in range(chance.randrange(4))
    )
    given_up = Counter(cleanup.outstanding())
    assert left == given_up.total()
    assert store.cleared + given_up == wanted
    assert gate_is_respected(log.events) == []
    assert gate.statistics().permits == 0
