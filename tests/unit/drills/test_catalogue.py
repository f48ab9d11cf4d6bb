"""The catalogue of drills, as values."""

from __future__ import annotations

import re

import pytest

from quiesce.auditor import AUDITED
from quiesce.drills import DRILLS, Drill, DrillResult, Fired, find_drill
from quiesce.errors import ConfigError


@pytest.mark.parametrize("drill", DRILLS.values(), ids=DRILLS)
def test_a_drill_says_what_it_does(drill: Drill) -> None:
    """A name for the command line, a sentence, a clause, invariants that there are."""
    assert re.fullmatch(r"[a-z]+(-[a-z]+)+", drill.name)
    assert DRILLS[drill.name] is drill
    assert drill.summary[0].isupper()
    assert drill.summary.endswith(".")
    assert not drill.hole.endswith(".")
    assert set(drill.expected) <= set(AUDITED)
    assert len(set(drill.expected)) == len(drill.expected) > 0
    assert drill.mentions
    assert drill.when


def test_a_name_that_is_none_is_refused_with_the_one_that_was_meant() -> None:
    """Nobody has to read the list for a slip of a finger."""
    with pytest.raises(ConfigError, match="did you mean 'early-cursor'"):
        find_drill("early-curser")
    with pytest.raises(ConfigError, match="--list"):
        find_drill("zzz")


def a_record(invariant: str, key: str = "1.0") -> Fired:
    """Return a record of an invariant."""
    return Fired(invariant, "critical", 0.5, key, "cut", "it does not hold", ("e000-p0000001",))


@pytest.mark.parametrize(
    "fired, missing, surplus",
    [
        (("single_owner", "conservation"), (), ()),
        (("conservation", "single_owner"), (), ()),
        (("single_owner",), ("conservation",), ()),
        (("single_owner", "conservation", "rows_present"), (), ("rows_present",)),
        (("single_owner", "conservation", "single_owner"), (), ("single_owner",)),
        ((), ("single_owner", "conservation"), ()),
    ],
)
def test_only_exactly_the_expected_once_each_is_right(
    fired: tuple[str, ...], missing: tuple[str, ...], surplus: tuple[str, ...]
) -> None:
    """One that is missing, one more, or the same one twice is wrong."""
    records = tuple(a_record(name, f"1.{number}") for number, name in enumerate(fired))
    result = DrillResult("d", ("single_owner", "conservation"), records)

    assert result.missing == missing
    assert tuple(record.invariant for record in result.surplus) == surplus
    assert result.ok == (not missing and not surplus)


def test_a_result_survives_json() -> None:
    """What the desk writes is what the command reads."""
    result = DrillResult("d", ("single_owner",), (a_record("single_owner"),), {"a": "b"}, 2.5, ("g",))

    assert DrillResult.from_json(result.to_json()) == result
    with pytest.raises(KeyError):
        DrillResult.from_json({"fired": []})
