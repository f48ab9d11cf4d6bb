"""The reference page."""

from pathlib import Path

from quiesce.telemetry import names, reference, span_reference
from quiesce.telemetry.reference import page

COMMITTED = Path(__file__).parents[3] / "docs" / "reference"


def test_the_committed_pages_are_what_the_catalogue_says() -> None:
    """Run `python -m quiesce.telemetry.reference > docs/reference/metrics.md` after a change; so for the spans."""
    assert (COMMITTED / "metrics.md").read_text() == reference.page()
    assert (COMMITTED / "spans.md").read_text() == span_reference.page()


def test_every_span_and_attribute_is_on_its_page() -> None:
    """Each span has a section of its own."""
    text = span_reference.page()

    for spec in names.SPANS.values():
        (section,) = (part for part in text.split("\n## ") if part.startswith(f"`{spec.name}`\n"))
        assert all(f"`{attribute}`" in section for attribute in spec.attributes)
        assert spec.help in section
        assert not spec.parent or f"`{spec.parent}`" in section


def test_every_metric_and_event_is_on_the_page_once() -> None:
    """Each has one row."""
    text = page()

    for metric in names.METRICS.values():
        assert text.count(f"\n| `{metric.name}` |") == 1
    for event in names.LOG_EVENTS:
        assert text.count(f"\n| `{event}` |") == 1
