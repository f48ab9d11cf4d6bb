"""A strict cursor over parsed JSON: every access says what it expects, and names the place that differs.

Rule: a bool is never an integer, and an object has exactly the fields that the schema names. Nothing here
suspends.
"""

from __future__ import annotations

import base64
import binascii
import math
import re
from collections.abc import Callable, Iterator
from typing import Any, Final, NoReturn, TypeVar

from quiesce.errors import DocumentError

__all__ = ["MAX_COUNTER", "Node"]

MAX_COUNTER: Final = (1 << 53) - 1
"""Larger counters are refused: other readers of JSON could not tell them apart."""

T = TypeVar("T")


class Node:
    """One value of a document.

    Args:
        file: The document's file name.
        path: Where the value stands in it.
        value: The parsed value.
    """

    __slots__ = ("file", "path", "value")

    def __init__(self, file: str, path: str, value: Any) -> None:  # noqa: ANN401 - any value
        self.file = file
        self.path = path
        self.value = value

    def refuse(self, problem: str) -> NoReturn:
        """Raise the error that names this place."""
        raise DocumentError(self.file, self.path, problem)

    def fields(self, names: str) -> dict[str, Node]:
        """Return the fields of an object that has exactly those that ``names`` lists, separated by spaces."""
        wanted = names.split()
        if not isinstance(self.value, dict):
            self.refuse(f"expected an object, not {_shown(self.value)}")
        for name in wanted:
            if name not in self.value:
                self.refuse(f"field {name} is missing")
        for name in self.value:
            if name not in wanted:
                self.refuse(f"unknown field {name[:80]!r}")
        return {name: Node(self.file, f"{self.path}.{name}", self.value[name]) for name in wanted}

    def mapping(self, key: str) -> Iterator[tuple[str, Node]]:
        """Yield the entries of an object whose keys all match the regular expression ``key``."""
        if not isinstance(self.value, dict):
            self.refuse(f"expected an object, not {_shown(self.value)}")
        for name, value in self.value.items():
            if not re.fullmatch(key, name, re.ASCII):
                self.refuse(f"unexpected name {name[:80]!r}")
            yield name, Node(self.file, f"{self.path}.{name}", value)

    def items(self) -> Iterator[Node]:
        """Yield the items of a list."""
        for number, value in enumerate(self.values()):
            yield Node(self.file, f"{self.path}[{number}]", value)

    def values(self) -> list[Any]:
        """Return the items of a list as they were parsed, for whoever needs no place to blame for most of them."""
        if not isinstance(self.value, list):
            self.refuse(f"expected a list, not {_shown(self.value)}")
        found: list[Any] = self.value
        return found

    def integer(self, low: int = 0, high: int = MAX_COUNTER) -> int:
        """Return an integer in a range; a bool is none."""
        if type(self.value) is not int:
            self.refuse(f"expected an integer, not {_shown(self.value)}")
        if not low <= self.value <= high:
            self.refuse(f"{self.value} is not in {low} … {high}")
        return self.value

    def number(self) -> int | float:
        """Return a finite number; a bool is none."""
        if type(self.value) not in {int, float} or not math.isfinite(self.value):
            self.refuse(f"expected a finite number, not {_shown(self.value)}")
        found: int | float = self.value
        return found

    def boolean(self) -> bool:
        """Return a bool."""
        if not isinstance(self.value, bool):
            self.refuse(f"expected true or false, not {_shown(self.value)}")
        return self.value

    def text(self, pattern: str = r"[\s\S]{0,1000}") -> str:
        """Return a string that matches a regular expression as a whole."""
        if not isinstance(self.value, str):
            self.refuse(f"expected a string, not {_shown(self.value)}")
        if not re.fullmatch(pattern, self.value, re.ASCII):
            self.refuse(f"{self.value[:80]!r} is not of the expected form")
        return self.value

    def data(self) -> bytes:
        """Return the bytes that a canonical base64 string stands for."""
        text = self.text(r"[A-Za-z0-9+/]*={0,2}")
        try:
            found = base64.b64decode(text, validate=True)
        except (binascii.Error, ValueError):
            self.refuse("not base64")
        if base64.b64encode(found).decode("ascii") != text:
            self.refuse("not base64 in canonical form")
        return found

    def optional(self, read: Callable[[Node], T]) -> T | None:
        """Return None for null, or what ``read`` makes of the value."""
        return None if self.value is None else read(self)

    def version(self, wanted: int) -> None:
        """Check an object's ``schema_version`` before anything else of it is looked at."""
        if not isinstance(self.value, dict):
            self.refuse(f"expected an object, not {_shown(self.value)}")
        found = self.value.get("schema_version")
        if type(found) is not int or found != wanted:
            raise DocumentError(
                self.file, f"{self.path}.schema_version", f"version {_shown(found)} is not version {wanted}"
            )


def _shown(value: object) -> str:
    """Return a short text for a value that was not expected."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}…"  # noqa: PLR2004 - keeps a message on one line
