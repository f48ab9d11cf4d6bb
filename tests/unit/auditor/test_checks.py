"""The users' own checks."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from quiesce.auditor import UserCheck, load_checks
from quiesce.errors import ConfigError
from quiesce.invariants.violation import Violation
from tests.unit.auditor.rig import Rig, kinds, only


class NoLongReads:
    """A check of one hook, with an option."""

    name = "no_long_reads"
    severity = "critical"

    def __init__(self, most: int = 2) -> None:
        self.most = most

    def prompts_read(self, count: int) -> str | None:
        """No more than so many at once."""
        return f"{count} prompts at once" if count > self.most else None


class LooksAndJudges:
    """A check of the owners and of cuts."""

    name = "looks_and_judges"

    def sweep(self, owners: Any) -> list[Violation]:  # noqa: ANN401 - see UserCheck
        """Find every spare."""
        return [Violation(self.name, "warning", "a spare", (ref.group_id,)) for ref in owners.spares.refs()]

    def check_cut(self, state: object, facts: object) -> tuple[str, str]:
        """Find two things."""
        return f"{state}", f"{facts}"


class Raises:
    """A check that fails."""

    name = "raises"

    def prompts_read(self, count: int) -> None:
        """Fail."""
        raise RuntimeError(f"no {count}")


async def test_a_check_reports_what_its_hooks_and_its_sweep_return() -> None:
    """A sentence or a violation, under the check's own name and severity."""
    rig = Rig(checks=[f"{__name__}:NoLongReads", LooksAndJudges])
    auditor = rig.auditor()
    await rig.read(2, to_spares=True)
    await auditor.sweep.once()
    await rig.read(3)
    await rig.read(3)

    assert kinds(auditor) == {"looks_and_judges": 2, "no_long_reads": 1}
    last = auditor.records.all()[-1]
    assert (last.message, last.severity, last.count) == ("3 prompts at once", "critical", 2)
    assert [status.policy for status in auditor.status()[-2:]] == ["refuse_checkpoints", "warn"]


async def test_a_check_of_cuts_returns_its_findings_to_whoever_judges() -> None:
    """It reports nothing by itself: the verdict over a cut is one."""
    rig = Rig(checks=[LooksAndJudges()])
    auditor = rig.auditor()
    state: Any = "a cut"
    facts: Any = "its facts"

    found = auditor.check_cut(state, facts)

    assert [violation.message for violation in found] == ["a cut", "its facts"]
    assert kinds(auditor) == {}


async def test_a_check_that_raises_is_switched_off_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    """The run goes on, the hub hears of no error, the others go on too."""
    rig = Rig(checks=[Raises, NoLongReads])
    auditor = rig.auditor()
    with caplog.at_level(logging.ERROR):
        await rig.read(3)
        await rig.read(3)

    assert only(auditor).invariant == "no_long_reads"
    *_, raises, fine = auditor.status()
    assert (raises.state, fine.state) == ("inactive", "active")
    assert "prompts_read() raised RuntimeError: no 3" in raises.why
    assert len([record for record in caplog.records if record.name.startswith("quiesce.auditor")]) == 1
    assert rig.hub.errors == {}


@pytest.mark.parametrize(
    "given, says",
    [
        (["nowhere"], "not module:ClassName"),
        (["nowhere_at_all:Check"], "cannot be loaded"),
        ([f"{__name__}:Missing"], "cannot be loaded"),
        ([f"{__name__}:__name__"], "is not a class"),
        ([object()], "has no name"),
        ([type("Bare", (), {"name": "bare"})], "neither"),
        ([type("Odd", (), {"name": "odd", "severity": "fatal", "sweep": print})], "not critical or warning"),
        ([NoLongReads, NoLongReads()], "two checks are named"),
    ],
)
def test_a_check_that_cannot_be_one_is_refused(given: list[object], says: str) -> None:
    """Before the run starts, by name."""
    with pytest.raises(ConfigError, match=says):
        load_checks(given)


def test_a_check_takes_its_options_by_reference() -> None:
    """A wrong one is a refusal that names the class."""
    reference = f"{__name__}:NoLongReads"
    found: list[Violation] = []

    (check,) = load_checks([reference], {reference: {"most": 9}})
    check.bind(found.append)
    hook: Any = check
    hook.prompts_read(8)
    hook.prompts_read(10)

    assert [violation.message for violation in found] == ["10 prompts at once"]
    with pytest.raises(ConfigError, match="cannot be built"):
        load_checks([reference], {reference: {"least": 9}})


def test_an_answer_of_another_kind_switches_a_check_off() -> None:
    """It is a slip of the check's author, and is said as one."""
    check = UserCheck(type("Counts", (), {"name": "counts", "sweep": lambda _self, _owners: 3})())
    owners: Any = None
    check.sweep(owners)

    assert "returned int" in check.problem
