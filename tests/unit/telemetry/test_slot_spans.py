"""Spans of ordinary slots: columns on their way, finished spans for whoever asks."""

import random

from quiesce.telemetry import slot_spans
from quiesce.telemetry.finished import FinishedSpan
from quiesce.telemetry.slot_spans import IDS_BYTES, SlotColumns, SlotSpans, SpanParts, parts_of


def collected(*kinds: str) -> SlotSpans:
    """Collect a span of each kind, a microsecond long, one a millisecond."""
    columns = SlotColumns(random.Random(5).getrandbits)
    for index, kind in enumerate(kinds):
        number = columns.number(kind)
        assert number is not None
        columns.which.append(number)
        columns.times.extend((index * 1_000_000, index * 1_000_000 + 1_000))
    spans = columns.take()
    assert spans is not None
    return spans


class TestSlotSpans:
    """A batch."""

    def test_it_is_a_sequence_of_finished_spans(self) -> None:
        """Whatever is asked of it."""
        batch = collected("retry", "admission", "retry")

        first, second, third = batch

        assert len(batch) == 3
        assert (batch[0], batch[-1], batch[1:]) == (first, third, [second, third])
        assert isinstance(first, FinishedSpan)
        assert [span.attributes["quiesce.kind"] for span in batch] == ["retry", "admission", "retry"]
        assert [(span.start_ns, span.end_ns) for span in batch] == [
            (0, 1_000),
            (1_000_000, 1_001_000),
            (2_000_000, 2_001_000),
        ]
        assert {(s.name, s.status, s.parent_id, s.links, s.events, s.cut_off) for s in batch} == {
            ("quiesce.slot", "ok", 0, (), (), False)
        }

    def test_identifiers_are_its_own_and_the_same_each_time(self) -> None:
        """A link to a span, for an exemplar, names what the span is sent with."""
        batch = collected(*["retry"] * 50)

        links = [(span.trace_id, span.span_id) for span in batch]

        assert len(set(links)) == 50
        assert links == [batch.link(index) for index in range(50)]
        assert links == [(span.trace_id, span.span_id) for span in batch]

    def test_an_identifier_is_never_zero(self) -> None:
        """Zeros are drawn again."""
        draws = iter((0, (1 << 8 * IDS_BYTES) - 1))
        columns = SlotColumns(lambda _: next(draws))
        columns.which.append(columns.number("retry") or 0)
        columns.times.extend((1, 2))

        batch = columns.take()

        assert batch is not None
        assert batch.link(0) == ((1 << 128) - 1, (1 << 64) - 1)

    def test_taking_begins_a_new_batch(self) -> None:
        """And where nothing was collected there is none."""
        columns = SlotColumns(random.Random(5).getrandbits)
        columns.which.append(columns.number("retry") or 0)
        columns.times.extend((1, 2))

        assert columns.take() is not None
        assert columns.take() is None

    def test_kinds_past_the_limit_have_no_shape(self) -> None:
        """Their spans are made one by one."""
        columns = SlotColumns(random.Random(5).getrandbits)

        numbers = [columns.number(f"kind{index}") for index in range(slot_spans.MOST_SHAPES + 2)]

        assert numbers == [*range(slot_spans.MOST_SHAPES), None, None]
        assert columns.number("kind0") == 0


class TestParts:
    """Several batches as one."""

    def test_batches_follow_each_other(self) -> None:
        """As lists where all are, else as parts of which one can ask for each."""
        columns, other = collected("retry", "retry"), FinishedSpan("quiesce.group", 1, 2, 0, 3, 4)

        mixed = SpanParts.of([columns, [other]])

        assert list(mixed) == [*columns, other]
        assert len(mixed) == 3
        assert mixed[2] == other
        assert list(parts_of(mixed)) == [columns, [other]]
        assert SpanParts.of([columns]) is columns
        assert SpanParts.of([[other], [other]]) == [other, other]
        assert list(parts_of([other])) == [[other]]
