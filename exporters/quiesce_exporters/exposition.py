"""Writes a registry as text, and writes again only what has changed.

Rule: the text is, byte for byte, what prometheus_client's encoder makes of the whole registry; it is the encoder that is
called, for one family at a time, or for one child of a histogram. Most series of a scrape are buckets of histograms in
which nothing has happened since the one before. For one thread at a time. Nothing here suspends.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Final

from prometheus_client.metrics_core import Metric

from quiesce.telemetry.exposed import Child, HistogramSnapshot

if TYPE_CHECKING:
    from prometheus_client.registry import Collector
    from prometheus_client.samples import Sample

__all__ = ["Encode", "Renderer", "Renderers"]

Encode = Callable[["Collector"], bytes]
"""An encoder of prometheus_client: writes all that a registry, or anything like it, collects."""

_FORMATS: Final = 4
"""Formats of which the text is kept."""

_About = tuple[str, str, str]


class Renderer:
    """Writes one format.

    Args:
        encode: Writes it.
    """

    def __init__(self, encode: Encode) -> None:
        self._encode = encode
        self._end = encode(_Only(()))
        self._families: dict[str, tuple[_About, list[Sample], bytes]] = {}
        self._heads: dict[str, tuple[_About, bytes]] = {}
        self._children: dict[str, dict[tuple[str, ...], tuple[Child, bytes]]] = {}

    def render(self, registry: Collector) -> bytes:
        """Return the text of a registry."""
        texts: list[bytes] = []
        for family in registry.collect():
            if isinstance(family, HistogramSnapshot):
                self._add_children(family, texts)
            else:
                texts.append(self._text(family))
        texts.append(self._end)
        return b"".join(texts)

    def _text(self, family: Metric) -> bytes:
        about, samples = _about(family), family.samples
        kept = self._families.get(family.name)
        if kept is not None and kept[0] == about and kept[1] == samples:
            return kept[2]
        text = self._alone(family)
        # A copy, because whoever made the family may go on with its list.
        self._families[family.name] = (about, list(samples), text)
        return text

    def _add_children(self, family: HistogramSnapshot, texts: list[bytes]) -> None:
        head = self._head(family)
        texts.append(head)
        known = self._children.setdefault(family.name, {})
        for labels, child in family.children.items():
            kept = known.get(labels)
            if kept is None or kept[0] is not child:
                part = Metric(family.name, family.documentation, family.type, family.unit)
                part.samples = family.samples_of(labels)
                kept = known[labels] = (child, self._alone(part).removeprefix(head))
            texts.append(kept[1])

    def _head(self, family: Metric) -> bytes:
        """Return the lines that come before a family's samples."""
        about = _about(family)
        kept = self._heads.get(family.name)
        if kept is None or kept[0] != about:
            empty = Metric(family.name, family.documentation, family.type, family.unit)
            kept = self._heads[family.name] = (about, self._alone(empty))
            self._children.pop(family.name, None)
        return kept[1]

    def _alone(self, family: Metric) -> bytes:
        return self._encode(_Only((family,))).removesuffix(self._end)


class Renderers:
    """Writes whatever format is asked for, and remembers the last few."""

    def __init__(self) -> None:
        self._known: dict[str, Renderer] = {}

    def render(self, registry: Collector, content_type: str, encode: Encode) -> bytes:
        """Return the text of a registry.

        Args:
            registry: What to collect.
            content_type: Names the format.
            encode: Writes it.
        """
        renderer = self._known.pop(content_type, None) or Renderer(encode)
        self._known[content_type] = renderer  # as the last one
        while len(self._known) > _FORMATS:
            del self._known[next(iter(self._known))]
        return renderer.render(registry)


class _Only:
    """A registry of given families."""

    def __init__(self, families: Iterable[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        """Return them."""
        return self._families


def _about(family: Metric) -> _About:
    return family.documentation, family.type, family.unit
