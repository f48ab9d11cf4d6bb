"""Ledger, spares, buffer and account against a model that only knows who owns each group."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, TypeVar

import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from quiesce.accounting import Accounting
from quiesce.barrier import Cut
from quiesce.buffer import Claim, ReplayBuffer
from quiesce.errors import OwnershipError
from quiesce.ledger import RolloutLedger
from quiesce.spares import SparePool
from quiesce.testing import VirtualTimeLoop
from quiesce.types import DROP_REASONS, GroupRecord, PromptRef
from tests.owners import Owners, keys_of

T = TypeVar("T")
AT = st.integers(0, 400)


class Ownership(RuleBasedStateMachine):
    """Every legal move, and every illegal one, in any order; each group has one owner after each."""

    def __init__(self) -> None:
        super().__init__()
        self.runner = asyncio.Runner(loop_factory=VirtualTimeLoop)
        self.owners = Owners()
        self.owner: dict[str, str] = {}  # the model: who owns each group that was read
        self.refs: dict[str, PromptRef] = {}
        self.attempt: dict[str, int] = {}
        self.admitted: set[str] = set()
        self.claims: list[tuple[Claim, tuple[str, ...]]] = []
        self.dropped: dict[str, int] = dict.fromkeys(DROP_REASONS, 0)
        self.position = 0
        self.epoch = 0

    def teardown(self) -> None:
        """Close the loop."""
        self.runner.close()

    # ------------------------------------------------------------------------------------------ tools

    def slot(self, move: Callable[[Cut], T]) -> T:
        """Make a move in a slot."""

        async def inside() -> T:
            async with self.owners.barrier.mutation("retry") as cut:
                return move(cut)

        return self.runner.run(inside())

    def refused(self, move: Callable[[Cut], object]) -> None:
        """Make a move that must be refused, and that must then have changed nothing."""
        before = self.picture()
        try:
            self.slot(move)
        except OwnershipError:
            assert self.picture() == before
        else:
            raise AssertionError("a move against the rules was made")

    def picture(self) -> tuple[object, ...]:
        """Return all that is owned and counted."""
        owners = self.owners
        return (
            owners.ledger.records(),
            owners.spares.refs(),
            owners.buffer.ready(),
            owners.buffer.entries(),
            owners.accounting.capture(),
            owners.accounting.statistics(),
        )

    def of(self, owner: str) -> list[str]:
        """Return the groups of one owner."""
        return [group for group, found in self.owner.items() if found == owner]

    def pick(self, at: int, owner: str) -> str:
        """Return a group: mostly one of that owner, so that the move is legal, at times any."""
        everything = list(self.owner)
        some = self.of(owner) if at % 4 else everything
        return (some or everything)[at // 4 % len(some or everything)]

    def read(self, count: int) -> list[PromptRef]:
        """Make the next prompts."""
        refs = [PromptRef(self.epoch, self.position + at, at) for at in range(count)]
        self.position += count
        return refs

    # ------------------------------------------------------------------------------------------ reading

    @initialize()
    def start(self) -> None:
        """Begin with a few groups of each kind, so that every move finds something to move."""
        self.read_prompts(4, spare=False, ends=False)
        self.read_prompts(2, spare=True, ends=False)

    @rule(count=st.integers(1, 5), spare=st.booleans(), ends=st.booleans())
    def read_prompts(self, count: int, *, spare: bool, ends: bool) -> None:
        """Read a batch into the ledger, or into the pool; a position that does not follow is refused."""
        self.refused(
            lambda cut: self.owners.accounting.read(cut, [PromptRef(self.epoch, self.position + count, 0)])
        )
        refs = self.read(count)

        def move(cut: Cut) -> None:
            self.owners.accounting.read(cut, refs)
            if spare:
                self.owners.spares.add(cut, refs)
            else:
                for ref in refs:
                    self.owners.ledger.reserve_group(cut, GroupRecord(ref.group_id, 0, ref))
            if ends:
                self.owners.accounting.end_epoch(cut, self.epoch)

        self.slot(move)
        for ref in refs:
            self.owner[ref.group_id] = "spares" if spare else "ledger"
            self.refs[ref.group_id] = ref
            self.attempt[ref.group_id] = 0
        if ends:
            self.epoch += 1
            self.position = 0

    # -------------------------------------------------------------------------------------------- ledger

    @rule(at=AT)
    def admit(self, at: int) -> None:
        """A reserved group is admitted once."""
        group = self.pick(at, "ledger")

        def move(cut: Cut) -> object:
            return self.owners.ledger.mark_group_admitted(cut, group, target_step=1, start_version=0)

        if self.owner[group] == "ledger" and group not in self.admitted:
            self.slot(move)
            self.admitted.add(group)
        else:
            self.refused(move)
        if self.owner[group] == "ledger":
            again = GroupRecord(group, 1, self.refs[group])
            self.refused(lambda cut: self.owners.ledger.reserve_group(cut, again))

    @rule(at=AT)
    def retry(self, at: int) -> None:
        """An admitted group gets a new attempt."""
        group = self.pick(at, "ledger")
        if self.owner[group] == "ledger" and group in self.admitted:
            self.slot(lambda cut: self.owners.ledger.retry_group(cut, group))
            self.attempt[group] += 1
        else:
            self.refused(lambda cut: self.owners.ledger.retry_group(cut, group))

    @rule(at=AT, reason=st.sampled_from(DROP_REASONS))
    def drop(self, at: int, reason: str) -> None:
        """A group of the ledger is dropped, with its account."""
        group = self.pick(at, "ledger")

        def move(cut: Cut) -> None:
            self.owners.ledger.take_group(cut, group, target="dropped", reason=reason)
            self.owners.accounting.dropped(cut, [self.refs[group]], reason)

        if self.owner[group] == "ledger":
            self.slot(move)
            self.owner[group] = "dropped"
            self.dropped[reason] += 1
        else:
            self.refused(move)

    @rule(at=AT)
    def substitute(self, at: int) -> None:
        """A spare takes the place of a failed group, in one step."""
        group = self.pick(at, "ledger")
        spares = self.of("spares")
        if self.owner[group] != "ledger" or group not in self.admitted or not spares:
            return

        def move(cut: Cut) -> PromptRef:
            old = self.owners.ledger.take_group(cut, group, target="dropped", reason="failed")
            self.owners.accounting.dropped(cut, [old.prompt], "failed")
            ref = self.owners.spares.take(cut)
            new = GroupRecord(
                ref.group_id, old.admission_id, ref, "admitted", old.target_step, old.start_version
            )
            self.owners.ledger.reserve_group(cut, new, source="spares")
            return ref

        ref = self.slot(move)
        assert ref.group_id == spares[0]
        self.owner[group] = "dropped"
        self.dropped["failed"] += 1
        self.owner[ref.group_id] = "ledger"
        self.admitted.add(ref.group_id)

    # -------------------------------------------------------------------------------------------- buffer

    @rule(at=AT, stale=st.booleans(), rows=st.booleans())
    def commit(self, at: int, *, stale: bool, rows: bool) -> None:
        """A finished attempt is buffered if it is the one waited for and its rows are there."""
        group = self.pick(at, "ledger")
        attempt = self.attempt[group] + stale

        def move(cut: Cut) -> object:
            return self.owners.buffer.commit_group(
                cut, group, attempt, keys=keys_of(group, attempt), generated_from=0, generated_to=0, stats={}
            )

        if rows:
            self.owners.rows.there.update(keys_of(group, attempt))
        there = not self.owners.rows.missing(keys_of(group, attempt))
        if self.owner[group] == "ledger" and group in self.admitted and not stale and there:
            self.slot(move)
            self.owner[group] = "buffer"
        elif self.owner[group] == "ledger" and group in self.admitted and not stale:
            before = self.picture()
            try:
                self.slot(move)
            except KeyError:
                assert self.picture() == before
            else:
                raise AssertionError("committed without its rows")
        else:
            self.refused(move)

    @rule(at=AT)
    def evict(self, at: int) -> None:
        """A ready group is evicted, with its account."""
        group = self.pick(at, "buffer")

        def move(cut: Cut) -> None:
            self.owners.buffer.evict(cut, [group])
            self.owners.accounting.dropped(cut, [self.refs[group]], "evicted")

        if self.owner[group] == "buffer":
            self.slot(move)
            self.owner[group] = "dropped"
            self.dropped["evicted"] += 1
        else:
            self.refused(move)

    @rule(count=st.integers(1, 4))
    def finish_rollouts(self, count: int) -> None:
        """Groups of the ledger are admitted and committed, as in a run."""
        for group in self.of("ledger")[:count]:
            at = 4 * list(self.owner).index(group)  # what pick() takes for this group
            if group not in self.admitted:
                self.admit(at)
            self.commit(at, stale=False, rows=True)

    @precondition(lambda self: self.of("buffer"))
    @rule(count=st.integers(1, 4), oldest=st.booleans())
    def claim(self, count: int, *, oldest: bool) -> None:
        """Ready groups are claimed together."""
        ready = self.of("buffer")
        chosen = tuple(ready[:count] if oldest else ready[::-1][:count])
        claim = self.slot(lambda cut: self.owners.buffer.claim_for_training(cut, chosen))
        self.claims.append((claim, chosen))
        for group in chosen:
            self.owner[group] = "training"

    @rule(at=AT, trained=st.booleans())
    def end_again(self, at: int, *, trained: bool) -> None:
        """What was trained or dropped does not end again."""
        group = self.pick(at, "trained")
        if self.owner[group] in {"trained", "dropped"}:
            again = [self.refs[group]]
            if trained:
                self.refused(lambda cut: self.owners.accounting.trained(cut, again))
            else:
                self.refused(lambda cut: self.owners.accounting.dropped(cut, again, "failed"))

    @rule(at=AT)
    def claim_what_is_not_ready(self, at: int) -> None:
        """Anything else is not claimed."""
        group = self.pick(at, "ledger")
        if self.owner[group] != "buffer":
            self.refused(lambda cut: self.owners.buffer.claim_for_training(cut, [group]))

    @precondition(lambda self: self.claims)
    @rule(train=st.sampled_from([True, True, False]))
    def end_a_claim(self, *, train: bool) -> None:
        """The oldest claim is trained, or given back."""
        claim, chosen = self.claims.pop(0)
        if not train:
            self.slot(lambda cut: self.owners.buffer.unclaim(cut, claim))
            self.owner |= dict.fromkeys(chosen, "buffer")
            return
        self.owners.buffer.begin(claim)
        self.refused(lambda _: self.owners.buffer.capture())

        def move(cut: Cut) -> None:
            self.owners.buffer.finish(cut, claim)
            self.owners.accounting.trained(cut, [one.prompt for one in claim.entries])

        self.slot(move)
        self.owner |= dict.fromkeys(chosen, "trained")
        self.refused(lambda cut: self.owners.buffer.finish(cut, claim))

    # ---------------------------------------------------------------------------------- save and restore

    @rule()
    def save_and_restore(self) -> None:
        """Everything goes on in new owners; claims that had not begun are ready again."""

        async def saved() -> tuple[object, ...]:
            async with self.owners.barrier.checkpoint() as cut:
                cut.check(self.owners.barrier, "checkpoint", changes=False)
                return self.owners.buffer.capture()

        old, new = self.owners, Owners()
        ready, unstarted = old.buffer.capture()
        assert self.runner.run(saved()) == (ready, unstarted)
        new.rows.there = set(old.rows.there)

        def move(cut: Cut) -> None:
            new.accounting.restore(cut, old.accounting.capture())
            new.spares.restore(cut, old.spares.refs())
            new.ledger.restore(cut, old.ledger.records())
            new.buffer.restore(cut, (*ready, *unstarted))

        self.owners = new
        self.slot(move)
        self.claims.clear()
        self.owner |= dict.fromkeys(self.of("training"), "buffer")

    # -------------------------------------------------------------------------------------------- truths

    @invariant()
    def each_group_has_the_owner_of_the_model(self) -> None:
        """Exactly one, and the right one."""
        owners = self.owners
        training = {one.group_id for claim in owners.buffer.claims() for one in claim.entries}
        found = {
            "ledger": {one.group_id for one in owners.ledger.records()},
            "spares": {one.group_id for one in owners.spares.refs()},
            "buffer": {one.group_id for one in owners.buffer.ready()},
            "training": training,
        }
        assert found == {owner: set(self.of(owner)) for owner in found}
        assert len(owners.buffer) == len(found["buffer"]) + len(training)

    @invariant()
    def every_position_is_owned_trained_or_dropped(self) -> None:
        """The account agrees with the owners, in total and position by position."""
        state = self.owners.accounting.capture()
        ended = self.of("trained"), self.of("dropped")
        assert (state.trained, state.dropped) == tuple(map(len, ended))
        assert state.read == len(self.owner)
        for group, ref in self.refs.items():
            assert self.owners.accounting.ended(ref) == (self.owner[group] in {"trained", "dropped"})
        now = self.owners.accounting.statistics()
        assert (now.read, now.trained, dict(now.dropped)) == (state.read, state.trained, self.dropped)

    @invariant()
    def statistics_agree(self) -> None:
        """Each owner counts what it has."""
        owners = self.owners
        ledger = owners.ledger.statistics()
        admitted = sum(group in self.admitted for group in self.of("ledger"))
        assert (ledger.admitted, owners.ledger.admitted) == (admitted, admitted)
        assert ledger.reserved + ledger.admitted == len(owners.ledger)
        assert owners.buffer.statistics().ready == len(self.of("buffer"))
        assert owners.spares.statistics().spares == len(self.of("spares"))


Ownership.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestOwnership = Ownership.TestCase


# ------------------------------------------------------------------- the same machine, with one rule taken away


def _commit_leaves_the_ledger(self: RolloutLedger, cut: Cut, group_id: str, **how: Any) -> GroupRecord:  # noqa: ANN401
    record = self.get(group_id)
    if how["target"] != "buffer":
        del self._records[group_id]
        self._admitted -= record.phase == "admitted"
    return record


def _stale_is_fine(self: ReplayBuffer, cut: Cut, group_id: str, attempt: int, **how: Any) -> object:  # noqa: ANN401
    record = self._ledger.get(group_id)
    return COMMIT(self, cut, group_id, record.attempt, **how)


def _ends_twice(self: Accounting, refs: list[PromptRef], how: str) -> list[object]:
    return [(self._open[ref.epoch], ref.position) for ref in refs]


def _retry_keeps_the_attempt(self: RolloutLedger, cut: Cut, group_id: str) -> GroupRecord:
    return self.get(group_id)


def _takes_the_youngest(self: SparePool, cut: Cut) -> PromptRef:
    return self._refs.popitem()[1]


def _claims_stay_ready(self: ReplayBuffer, cut: Cut, group_ids: tuple[str, ...]) -> Claim:
    claim = CLAIM(self, cut, group_ids)
    self._ready |= {entry.group_id: entry for entry in claim.entries}
    return claim


def _captures_ready_only(self: ReplayBuffer) -> tuple[tuple[object, ...], tuple[object, ...]]:
    return CAPTURE(self)[0], ()


COMMIT, CLAIM, CAPTURE = ReplayBuffer.commit_group, ReplayBuffer.claim_for_training, ReplayBuffer.capture


@pytest.mark.parametrize(
    "cls, name, broken",
    [
        (RolloutLedger, "take_group", _commit_leaves_the_ledger),
        (ReplayBuffer, "commit_group", _stale_is_fine),
        (Accounting, "_ending", _ends_twice),
        (RolloutLedger, "retry_group", _retry_keeps_the_attempt),
        (SparePool, "take", _takes_the_youngest),
        (ReplayBuffer, "claim_for_training", _claims_stay_ready),
        (ReplayBuffer, "capture", _captures_ready_only),
    ],
    ids=lambda given: getattr(given, "__name__", given),
)
def test_an_owner_without_a_rule_is_noticed(
    cls: type, name: str, broken: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The machine finds a sequence of moves that shows it: its truths can fail."""
    monkeypatch.setattr(cls, name, broken)
    quick = settings(
        max_examples=200,
        stateful_step_count=30,
        deadline=None,
        derandomize=True,
        phases=[Phase.generate],
        database=None,
    )
    with pytest.raises((AssertionError, LookupError, OwnershipError)):
        run_state_machine_as_test(Ownership, settings=quick)
