"""A trace out of what runs recorded."""

import gzip
from pathlib import Path

import pytest

from quiesce.view.traces import NotRecordedError, find_trace
from tests.unit.view.rig import span, write_recording

NOON = 1_800_000_000.0
TRACE = "e" * 32


def test_a_trace_is_put_together_from_all_files(tmp_path: Path) -> None:
    """Spans and slots, plain and compressed, in the order in which they began."""
    write_recording(
        tmp_path,
        spans=[
            span("quiesce.checkpoint", NOON + 2, 1.0, trace=TRACE, ident="2" * 16),
            span("quiesce.checkpoint", NOON, 1.0, trace="f" * 32),
            span("quiesce.slot", NOON + 1, 0.5, trace=TRACE, ident="1" * 16, kind="retry"),
        ],
    )
    plain = tmp_path / "telemetry" / "slots-0000.jsonl"
    plain.with_suffix(".jsonl.gz").write_bytes(gzip.compress(plain.read_bytes()))
    plain.unlink()

    found = find_trace([tmp_path / "nothing", tmp_path], TRACE)

    assert [(one["name"], one["span_id"][0]) for one in found["spans"]] == [
        ("quiesce.slot", "1"),
        ("quiesce.checkpoint", "2"),
    ]
    assert found["run"] == "mine"
    assert found["spans"][0] == {
        "trace_id": TRACE,
        "span_id": "1" * 16,
        "parent_id": "",
        "name": "quiesce.slot",
        "start": NOON + 1,
        "end": NOON + 1.5,
        "status": "ok",
        "cut_off": False,
        "attributes": {"quiesce.kind": "retry"},
        "links": [{"trace_id": "c" * 32, "span_id": "d" * 16}],
        "events": [{"name": "seen", "time": NOON + 1, "attributes": {"n": 1}}],
    }


def test_a_torn_line_and_a_text_that_looks_like_a_trace_cost_nothing(tmp_path: Path) -> None:
    """A killed process leaves half a line; an attribute may hold anything."""
    write_recording(
        tmp_path,
        spans=[
            span("quiesce.checkpoint", NOON, 1.0, trace=TRACE),
            span("quiesce.restore", NOON, 1.0, trace="f" * 32, note=f'"t":"{TRACE}"'),
        ],
    )
    with (tmp_path / "telemetry" / "spans-0000.jsonl").open("a") as file:
        file.write(f'{{"n":"quiesce.checkpoint","t":"{TRACE}","s":"')

    assert [one["name"] for one in find_trace([tmp_path], TRACE)["spans"]] == ["quiesce.checkpoint"]


def test_a_trace_that_is_not_there_says_why(tmp_path: Path) -> None:
    """No recording, one that lost its oldest files, or a span that is still to be written."""
    with pytest.raises(NotRecordedError, match="no folder telemetry"):
        find_trace([tmp_path], TRACE)
    write_recording(tmp_path, spans=[span("quiesce.checkpoint", NOON, 1.0)])
    with pytest.raises(NotRecordedError, match="a second or two"):
        find_trace([tmp_path], TRACE)
    (tmp_path / "telemetry" / "removed.json").write_text('{"slots": {"files": 3, "bytes": 9}}')
    with pytest.raises(NotRecordedError, match="the recording was full"):
        find_trace([tmp_path], TRACE)
