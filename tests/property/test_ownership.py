"""Ledger, spares, buffer and account against a model that only knows who owns each group."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, multiple, precondition, rule

from quiesce.barrier import Cut
from quiesce.buffer import Claim
from quiesce.errors import OwnershipError
from quiesce.testing import VirtualTimeLoop
from quiesce.types import DROP_REASONS, GroupRecord, PromptRef
from tests.owners import Owners, keys_of

T = TypeVar("T")


class Ownership(RuleBasedStateMachine):
    """Every legal move, and every illegal one, in any order; each group has one owner after each."""

    groups = Bundle("groups")

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

    def read(self, count: int) -> list[PromptRef]:
        """Make the next prompts."""
        refs = [PromptRef(self.epoch, self.position + at, at) for at in range(count)]
        self.position += count
        return refs

    # ------------------------------------------------------------------------------------------ reading

    @rule(target=groups, count=st.integers(1, 5), spare=st.booleans())
    def read_prompts(self, count: int, *, spare: bool) -> object:
        """Read a batch into the ledger, or into the pool."""
        refs = self.read(count)

        def move(cut: Cut) -> None:
            self.owners.accounting.read(cut, refs)
            if spare:
                self.owners.spares.add(cut, refs)
            else:
                for ref in refs:
                    self.owners.ledger.reserve_group(cut, GroupRecord(ref.group_id, 0, ref))

        self.slot(move)
        for ref in refs:
            self.owner[ref.group_id] = "spares" if spare else "ledger"
            self.refs[ref.group_id] = ref
            self.attempt[ref.group_id] = 0
        return multiple(*(ref.group_id for ref in refs))

    @rule()
    def end_the_epoch(self) -> None:
        """Go on to the next epoch."""
        self.slot(lambda cut: self.owners.accounting.end_epoch(cut, self.epoch))
        self.epoch += 1
        self.position = 0

    @rule(skip=st.integers(1, 3))
    def read_out_of_order(self, skip: int) -> None:
        """A position that does not follow is refused."""
        self.refused(lambda cut: self.owners.accounting.read(cut, [PromptRef(self.epoch, self.position + skip, 0)]))

    # -------------------------------------------------------------------------------------------- ledger

    @rule(group=groups)
    def reserve_again(self, group: str) -> None:
        """What the ledger owns is not reserved again."""
        if self.owner[group] == "ledger":
            self.refused(
                lambda cut: self.owners.ledger.reserve_group(cut, GroupRecord(group, 1, self.refs[group]))
            )

    @rule(group=groups)
    def admit(self, group: str) -> None:
        """A reserved group is admitted once."""

        def move(cut: Cut) -> object:
            return self.owners.ledger.mark_group_admitted(cut, group, target_step=1, start_version=0)

        if self.owner[group] == "ledger" and group not in self.admitted:
            self.slot(move)
            self.admitted.add(group)
        else:
            self.refused(move)

    @rule(group=groups)
    def retry(self, group: str) -> None:
        """An admitted group gets a new attempt."""
        if self.owner[group] == "ledger" and group in self.admitted:
            self.slot(lambda cut: self.owners.ledger.retry_group(cut, group))
            self.attempt[group] += 1
        else:
            self.refused(lambda cut: self.owners.ledger.retry_group(cut, group))

    @rule(group=groups, reason=st.sampled_from(DROP_REASONS))
    def drop(self, group: str, reason: str) -> None:
        """A group of the ledger is dropped, with its account."""

        def move(cut: Cut) -> None:
            self.owners.ledger.take_group(cut, group, target="dropped", reason=reason)
            self.owners.accounting.dropped(cut, [self.refs[group]], reason)

        if self.owner[group] == "ledger":
            self.slot(move)
            self.owner[group] = "dropped"
            self.dropped[reason] += 1
        else:
            self.refused(move)

    @rule(group=groups)
    def substitute(self, group: str) -> None:
        """A spare takes the place of a failed group, in one step."""
        spares = self.of("spares")
        if self.owner[group] != "ledger" or group not in self.admitted or not spares:
            return

        def move(cut: Cut) -> PromptRef:
            old = self.owners.ledger.take_group(cut, group, target="dropped", reason="failed")
            self.owners.accounting.dropped(cut, [old.prompt], "failed")
            ref = self.owners.spares.take(cut)
            new = GroupRecord(ref.group_id, old.admission_id, ref, "admitted", old.target_step, old.start_version)
            self.owners.ledger.reserve_group(cut, new, source="spares")
            return ref

        ref = self.slot(move)
        assert ref.group_id == spares[0]
        self.owner[group] = "dropped"
        self.dropped["failed"] += 1
        self.owner[ref.group_id] = "ledger"
        self.admitted.add(ref.group_id)

    # -------------------------------------------------------------------------------------------- buffer

    @rule(group=groups, stale=st.booleans(), rows=st.booleans())
    def commit(self, group: str, *, stale: bool, rows: bool) -> None:
        """A finished attempt is buffered if it is the one waited for and its rows are there."""
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

    @rule(group=groups)
    def evict(self, group: str) -> None:
        """A ready group is evicted, with its account."""

        def move(cut: Cut) -> None:
            self.owners.buffer.evict(cut, [group])
            self.owners.accounting.dropped(cut, [self.refs[group]], "evicted")

        if self.owner[group] == "buffer":
            self.slot(move)
            self.owner[group] = "dropped"
            self.dropped["evicted"] += 1
        else:
            self.refused(move)

    @rule(data=st.data())
    def claim(self, data: st.DataObject) -> None:
        """Ready groups are claimed together."""
        ready = self.of("buffer")
        chosen = tuple(data.draw(st.lists(st.sampled_from(ready), unique=True))) if ready else ()
        claim = self.slot(lambda cut: self.owners.buffer.claim_for_training(cut, chosen))
        self.claims.append((claim, chosen))
        for group in chosen:
            self.owner[group] = "training"

    @rule(group=groups)
    def claim_what_is_not_ready(self, group: str) -> None:
        """Anything else is not claimed."""
        if self.owner[group] != "buffer":
            self.refused(lambda cut: self.owners.buffer.claim_for_training(cut, [group]))

    @precondition(lambda self: self.claims)
    @rule(train=st.booleans())
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
