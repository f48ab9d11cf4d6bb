"""What is written down about a slot: counts, and one record in a ring."""

import threading
from collections.abc import Sequence
from typing import Any

import pytest

from quiesce.observers import Hub
from quiesce.telemetry.slots import NEVER_HELD, RING_SLOTS, SlotBook, SlotRecord, SlotRecorder


def close_many(recorder: SlotRecorder, count: int, first: int = 0) -> None:
    """Close slots whose hold tells their number."""
    for number in range(first, first + count):
        recorder.slot_closed("retry", 0, number, "completed", number)


def numbers(records: Sequence[tuple[Any, ...]]) -> list[int]:
    """Return the sequence numbers of records."""
    return [SlotRecord(*record).sequence for record in records]


class TestCounts:
    """The book and the recorder count alike."""

    @pytest.mark.parametrize("make", [SlotBook, SlotRecorder])
    def test_waits_holds_and_outcomes_are_counted(self, make: type[SlotBook]) -> None:
        """Each slot once in each, a given-up wait without a hold."""
        book = make()

        book.slot_closed("admission", 0, 4_000, "completed", 1)
        book.slot_closed("admission", 2_000_000, 30_000, "failed", 2)
        book.slot_wait_abandoned("admission", 5_000, "cancelled", 3)

        found = book.numbers["admission"]
        assert found.ended == {"completed": 1, "failed": 1, "cancelled": 1}
        assert (found.wait.count, found.hold.count) == (3, 2)
        assert found.wait.sum == pytest.approx(0.002005)
        assert book.closed == 3

    @pytest.mark.parametrize("make", [SlotBook, SlotRecorder])
    def test_an_outcome_that_nobody_knows_is_an_error(self, make: type[SlotBook]) -> None:
        """The hub counts it; it is not counted as something else."""
        with pytest.raises(KeyError):
            make().slot_closed("retry", 0, 1, "exploded", 0)

    def test_a_new_kind_is_told_to_whoever_keeps_numbers_by_kind(self) -> None:
        """By its label."""
        book, heard = SlotBook(), list[str]()
        book.added = heard.append

        book.slot_closed("mine", 0, 1, "completed", 0)
        book.slot_closed("mine", 0, 1, "completed", 0)

        assert heard == ["mine"]
        assert (book.label("mine"), book.label("yours")) == ("mine", "other")

    def test_slots_of_several_threads_add_up(self) -> None:
        """Loops of several threads may share a hub: every slot is counted and has a number of its own."""
        recorder = SlotRecorder()
        threads = [threading.Thread(target=close_many, args=(recorder, 4_000)) for _ in range(4)]

        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

        records, lost = recorder.take(RING_SLOTS, recorder.position)
        assert recorder.closed == recorder.position == 16_000
        assert numbers(records) == list(range(16_000))
        assert lost == 0


class TestRecords:
    """A record of each slot, until the converter takes it."""

    def test_a_record_says_what_its_slot_was(self) -> None:
        """Also of a slot that was never held."""
        recorder = SlotRecorder()
        recorder.current = lambda: "context"

        recorder.slot_closed("retry", 5, 7, "failed", 90)
        recorder.slot_wait_abandoned("admission", 4, "cancelled", 91)

        records, lost = recorder.take(10, recorder.position)
        assert [SlotRecord(*record) for record in records] == [
            SlotRecord(0, "retry", 5, 7, "failed", 90, "context"),
            SlotRecord(1, "admission", 4, NEVER_HELD, "cancelled", 91, "context"),
        ]
        assert lost == 0

    def test_records_are_taken_once_in_order_and_in_portions(self) -> None:
        """Also around the end of the ring."""
        recorder = SlotRecorder()
        found = []

        for first in range(0, 5 * RING_SLOTS, RING_SLOTS // 2):
            close_many(recorder, RING_SLOTS // 2, first)
            while recorder.waiting:
                records, lost = recorder.take(1_000, recorder.position)
                assert lost == 0
                found += numbers(records)

        assert found == list(range(5 * RING_SLOTS))

    def test_records_that_were_overwritten_unread_are_counted(self) -> None:
        """What was taken and what is lost are all slots, whatever happened."""
        recorder = SlotRecorder()
        close_many(recorder, RING_SLOTS + 100)

        records, lost = recorder.take(2 * RING_SLOTS, recorder.position)

        assert lost == 100
        assert numbers(records) == list(range(100, RING_SLOTS + 100))

    def test_a_writer_that_comes_round_while_records_are_taken_is_noticed(self) -> None:
        """A newer record in an older one's place is neither taken for it nor counted twice."""
        recorder = SlotRecorder()
        close_many(recorder, RING_SLOTS)
        ring, taken, lost = recorder._ring, 0, 0  # noqa: SLF001 - the race is made by hand
        assert ring is not None

        class Racing(list[Any]):
            def __getitem__(self, key: Any) -> Any:  # noqa: ANN401 - as the base class
                if isinstance(key, slice) and not raced:
                    raced.append(True)
                    close_many(recorder, 50)
                return super().__getitem__(key)

        raced: list[bool] = []
        recorder._ring = Racing(ring)  # noqa: SLF001 - as above
        while recorder.waiting:
            records, gone = recorder.take(1_000, recorder.position)
            taken += len(records)
            lost += gone

        assert lost == 50
        assert taken + lost == recorder.position == RING_SLOTS + 50

    def test_taken_records_are_let_go_of(self) -> None:
        """A context that a slot was in is not kept alive by the ring."""
        recorder = SlotRecorder()
        recorder.current = object
        close_many(recorder, 10)

        recorder.take(10, recorder.position)

        ring = recorder._ring  # noqa: SLF001 - what it still refers to
        assert ring is not None
        assert not any(ring)

    def test_it_records_from_when_it_is_told_to(self) -> None:
        """Until then it counts."""
        recorder = SlotRecorder(recording=False)
        close_many(recorder, 3)
        assert (recorder.position, recorder.take(10, 10)) == (0, ([], 0))

        recorder.record()
        close_many(recorder, 2)

        assert recorder.closed == 5
        assert len(recorder.take(10, recorder.position)[0]) == 2

    def test_a_recorder_is_an_observer(self) -> None:
        """Its two hooks are the slots'."""
        hub, recorder = Hub(strict=True), SlotRecorder()
        hub.subscribe(recorder)

        hub.fire("slot_closed", "retry", 0, 5, "completed", 9)

        assert recorder.closed == 1
