"""The table of the four samplers row by row, and building samplers from configuration."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from quiesce.barrier import DataPlaneCheckpointBarrier
from quiesce.errors import ConfigError, SamplerContractError
from quiesce.observers import Hub
from quiesce.sampler_config import (
    BUILT_IN_SAMPLERS,
    OnePieceCustomSampler,
    SamplerConfig,
    TwoStepCustomSampler,
    adapt_sampler,
    build_sampler,
)
from quiesce.samplers import (
    InOrderSampler,
    OnePieceAdmissionSampler,
    OwnersView,
    ReadyFirstSampler,
    Sampler,
    TransactionalAdmissionSampler,
    WeightFifoSampler,
    WindowedSampler,
    plan_step,
)
from quiesce.signals import TrainerVersion
from tests.sampler_cases import OnePiece, OnPolicy, admitted, entry, gids, reserved, view


@pytest.fixture
def barrier() -> DataPlaneCheckpointBarrier:
    """Return a barrier with a hub of its own."""
    return DataPlaneCheckpointBarrier(hub=Hub(strict=True))


class TestWindowed:
    """Trains what is fresh, gives up what is not."""

    def test_it_selects_starts_within_the_window(self, barrier: DataPlaneCheckpointBarrier) -> None:
        """max(0, W-S) <= start <= W, both ends included, in the buffer's order."""
        owners = view(*[entry(start, start) for start in (6, 2, 3, 5, 4)])
        assert WindowedSampler(barrier, 2).select(owners, 5, 9) == gids(3, 5, 4)

    def test_the_window_does_not_reach_below_version_zero(self, barrier: DataPlaneCheckpointBarrier) -> None:
        """A staleness limit beyond the run's age evicts and aborts nothing."""
        sampler = WindowedSampler(barrier, 9)
        assert sampler.select(view(entry(0, 0)), 3, 9) == gids(0)
        assert sampler.evictable(view(entry(0, 0)), 3) == ()
        assert not sampler.aborts(admitted(1, 0), 3)

    def test_freshest_first_keeps_the_buffer_s_order_within_a_start(
        self, barrier: DataPlaneCheckpointBarrier
    ) -> None:
        """Sorted by W - start, then by place."""
        groups = [entry(0, 4), entry(1, 5), entry(2, 4), entry(3, 5)]
        sampler = WindowedSampler(barrier, 2, sample_freshest_first=True)
        assert sampler.select(view(*groups), 5, 3) == gids(1, 3, 0)

    def test_it_evicts_ready_and_aborts_unfinished_groups_below_the_window(
        self, barrier: DataPlaneCheckpointBarrier
    ) -> None:
        """The window's own end stays; a reserved group has no age."""
        sampler = WindowedSampler(barrier, 2)
        assert sampler.evictable(view(entry(0, 2), entry(1, 3), admitted(2, 2)), 5) == gids(0)
        assert sampler.aborts(admitted(0, 2), 5)
        assert not sampler.aborts(admitted(1, 3), 5)
        assert not sampler.aborts(reserved(2), 5)

    def test_a_step_takes_what_is_owned_when_the_next_batch_does_not_fit(
        self, barrier: DataPlaneCheckpointBarrier
    ) -> None:
        """With a buffer of G and one group lost, the pump waits for room that only this step can make."""
        sampler = WindowedSampler(barrier, 1)
        left = [entry(position, 0) for position in range(3)]
        waiting = [reserved(position, admission_id=1) for position in range(4, 8)]
        assert plan_step(sampler, view(*left, *waiting, capacity=4), 0, 4) == gids(0, 1, 2)
        assert plan_step(sampler, view(*left, *waiting, capacity=7), 0, 4) is None
        assert plan_step(sampler, view(*left, capacity=4), 0, 4) == gids(0, 1, 2)

    def test_only_the_batch_that_comes_next_has_to_fit(self, barrier: DataPlaneCheckpointBarrier) -> None:
        """A short batch with the lower admission id fits, so its group is waited for."""
        short = reserved(4, admission_id=1)
        full = [reserved(position, admission_id=2) for position in range(5, 9)]
        left = [entry(position, 0) for position in range(3)]
        assert plan_step(WindowedSampler(barrier, 1), view(*left, *full, short, capacity=4), 0, 4) is None

    def test_stale_unfinished_groups_are_not_part_of_a_step(
        self, barrier: DataPlaneCheckpointBarrier
    ) -> None:
        """They are about to be aborted: the step neither counts them nor waits for them."""
        owners = view(admitted(0, 0), entry(1, 5), exhausted=True)
        assert plan_step(WindowedSampler(barrier, 1), owners, 5, 4) == gids(1)

    def test_no_step_is_passed_while_only_stale_groups_are_owned(
        self, barrier: DataPlaneCheckpointBarrier
    ) -> None:
        """They leave by themselves, and the version must not run ahead meanwhile."""
        sampler = WindowedSampler(barrier, 1)
        assert plan_step(sampler, view(admitted(0, 0), reserved(1, 1), capacity=1), 5, 1) is None
        assert plan_step(sampler, view(admitted(0, 0), reserved(1), reserved(2), capacity=1), 5, 1) is None


class TestWeightFifo:
    """Trains in the order of the weights that groups started from."""

    def test_the_oldest_start_ranges_over_ledger_and_buffer(
        self, barrier: DataPlaneCheckpointBarrier
    ) -> None:
        """A ready batch waits while an older one is still in flight."""
        sampler = WeightFifoSampler(barrier, 1)
        fast = [entry(position, 5) for position in range(4, 8)]
        assert sampler.select(view(admitted(0, 4), *fast), 5, 4) == ()
        assert plan_step(sampler, view(admitted(0, 4), *fast), 5, 4) is None
        assert sampler.select(view(reserved(0), *fast), 5, 4) == gids(4, 5, 6, 7)

    def test_the_oldest_start_is_sought_within_the_window(self, barrier: DataPlaneCheckpointBarrier) -> None:
        """A straggler that is too old to be trained holds nobody up."""
        owners = view(admitted(0, 1), entry(1, 5), entry(2, 4))
        assert WeightFifoSampler(barrier, 1).select(owners, 5, 4) == gids(2)

    def test_a_step_is_at_most_what_the_oldest_start_has_left(
        self, barrier: DataPlaneCheckpointBarrier
    ) -> None:
        """min(G, owned groups with the oldest start): what was lost of it is not waited for."""
        sampler = WeightFifoSampler(barrier, 2)
        assert sampler.step_target(view(entry(0, 3), admitted(1, 3), admitted(2, 4)), 4, 4) == 2
        assert sampler.step_target(view(*[admitted(position, 3) for position in range(6)]), 4, 4) == 4

    def test_it_evicts_below_the_window_and_aborts_nothing(self, barrier: DataPlaneCheckpointBarrier) -> None:
        """An unfinished group finishes first, however old it is."""
        sampler = WeightFifoSampler(barrier, 1)
        assert sampler.evictable(view(entry(0, 3), entry(1, 4), admitted(2, 0)), 5) == gids(0)
        assert not sampler.aborts(admitted(2, 0), 5)

    def test_a_step_without_groups_is_passed_only_behind_a_shut_gate(
        self, barrier: DataPlaneCheckpointBarrier
    ) -> None:
        """While the gate is open the next batch comes by itself; when all is admitted, none ever does."""
        sampler = WeightFifoSampler(barrier, 1)
        sampler.restore_cursor(4)
        assert sampler.step_target(view(reserved(0)), 4, 4) is None
        sampler.restore_cursor(5)
        assert sampler.step_target(view(reserved(0)), 4, 4) == 0
        assert sampler.step_target(view(admitted(0, 1)), 4, 4) == 0
        assert sampler.step_target(view(admitted(0, 1), exhausted=True), 4, 4) is None


class TestReadyFirst:
    """Trains whatever is ready first."""

    def test_it_has_no_lower_bound_and_gives_nothing_up(self, barrier: DataPlaneCheckpointBarrier) -> None:
        """The oldest group is as good as any; one that starts in the future is not."""
        sampler = ReadyFirstSampler(barrier, 1)
        owners = view(entry(0, 9), entry(1, 0), entry(2, 5))
        assert sampler.select(owners, 5, 9) == gids(1, 2)
        assert sampler.evictable(owners, 5) == ()
        assert not sampler.aborts(admitted(3, 0), 5)

    def test_a_step_waits_for_a_full_one_only_while_more_can_come(
        self, barrier: DataPlaneCheckpointBarrier
    ) -> None:
        """Behind a shut gate it takes all that is owned, in flight included."""
        sampler = ReadyFirstSampler(barrier, 1)
        sampler.restore_cursor(5)
        assert sampler.step_target(view(entry(0, 5), admitted(1, 5)), 5, 4) == 4
        sampler.restore_cursor(6)
        assert sampler.step_target(view(entry(0, 5), admitted(1, 5)), 5, 4) == 2
        assert sampler.step_target(view(*[admitted(position, 5) for position in range(6)]), 5, 4) == 4


class TestInOrder:
    """Trains each batch at the step that it is stamped with."""

    def test_it_selects_and_evicts_by_the_stamp(self, barrier: DataPlaneCheckpointBarrier) -> None:
        """Target = W is trained, target < W is evicted, target > W waits."""
        sampler = InOrderSampler(barrier, 2)
        owners = view(*[entry(target, 0, target=target) for target in (6, 4, 5, 3)])
        assert sampler.select(owners, 5, 9) == gids(5)
        assert sampler.evictable(owners, 5) == gids(4, 3)
        assert not sampler.aborts(admitted(0, 0, target=3), 5)

    def test_a_step_is_undecided_until_it_is_admitted_and_its_ledger_groups_are_gone(
        self, barrier: DataPlaneCheckpointBarrier
    ) -> None:
        """D >= W and no ledger group stamped W; then it is whatever is ready with that stamp."""
        sampler = InOrderSampler(barrier, 1)
        sampler.restore_cursor(4)
        assert sampler.step_target(view(reserved(0)), 5, 4) is None
        sampler.restore_cursor(5)
        later = admitted(9, 5, target=6)
        assert sampler.step_target(view(admitted(0, 5, target=5), later), 5, 4) is None
        assert sampler.step_target(view(entry(0, 5, target=5), later), 5, 4) == 1
        assert sampler.step_target(view(later), 5, 4) == 0

    def test_a_step_may_be_larger_than_a_full_one(self, barrier: DataPlaneCheckpointBarrier) -> None:
        """A run resumed with fewer groups a step still trains the whole batch that was stamped."""
        sampler = InOrderSampler(barrier, 1)
        sampler.restore_cursor(5)
        stamped = [entry(position, 5, target=5) for position in range(6)]
        assert plan_step(sampler, view(*stamped), 5, 4) == gids(0, 1, 2, 3, 4, 5)

    def test_steps_stamped_before_the_lookahead_was_lowered_are_trained_one_by_one(
        self, barrier: DataPlaneCheckpointBarrier
    ) -> None:
        """A restored cursor far ahead keeps the gate shut and the steps going, empty ones included."""
        sampler = InOrderSampler(barrier, 1)
        sampler.restore_cursor(6)
        groups = [entry(target, 2, target=target) for target in (3, 5, 6)]
        plans = []
        for version in (3, 4, 5, 6):
            plans.append(plan_step(sampler, view(*groups, reserved(9)), version, 1))
            assert sampler.is_admissible(version) is (version == 6)
        assert plans == [gids(3), (), gids(5), gids(6)]
        assert plan_step(sampler, view(reserved(9)), 7, 1) is None


@pytest.mark.parametrize("kind", [WindowedSampler, WeightFifoSampler, ReadyFirstSampler, InOrderSampler])
def test_a_negative_limit_is_refused_with_its_key(
    kind: type[WindowedSampler], barrier: DataPlaneCheckpointBarrier
) -> None:
    """The message starts with the configuration key."""
    with pytest.raises(ConfigError, match=r"^sampler\.max_(staleness|lookahead)_versions: .*-1"):
        kind(barrier, -1)


# ---------------------------------------------------------------------------------------- configuration


@pytest.mark.parametrize("name", BUILT_IN_SAMPLERS)
def test_each_built_in_name_builds_its_sampler(name: str, barrier: DataPlaneCheckpointBarrier) -> None:
    """What a configuration calls it is what it calls itself, and collectors find it."""
    hub = Hub(strict=True)
    sampler = build_sampler(SamplerConfig(name=name), barrier, hub)
    assert sampler.name == name
    assert hub.sources("sampler") == [sampler]
    assert isinstance(sampler, TransactionalAdmissionSampler)


@pytest.mark.parametrize(
    "name, window",
    [("windowed", None), ("weight_fifo", 2), ("ready_first", 2), ("in_order", 3), ("my:S", None)],
)
def test_the_gate_window_is_where_the_sampler_s_gate_shuts(
    name: str, window: int | None, barrier: DataPlaneCheckpointBarrier
) -> None:
    """The auditor's number and the sampler's gate cannot drift apart."""
    config = SamplerConfig(name=name, max_staleness_versions=2, max_lookahead_versions=3)
    assert config.gate_window == window
    if window is not None:
        sampler = build_sampler(config, barrier)
        sampler.restore_cursor(5 + window - 1)
        assert sampler.is_admissible(5)
        sampler.restore_cursor(5 + window)
        assert not sampler.is_admissible(5)


def test_limits_reach_the_sampler_that_they_are_for(barrier: DataPlaneCheckpointBarrier) -> None:
    """Staleness is for the three, lookahead for in_order."""
    config = SamplerConfig(name="in_order", max_staleness_versions=5, max_lookahead_versions=2)
    assert build_sampler(config, barrier).required_capacity(4) == 12
    config = SamplerConfig(name="ready_first", max_staleness_versions=5, max_lookahead_versions=2)
    assert build_sampler(config, barrier).required_capacity(4) == 24
    config = SamplerConfig(name="windowed", max_staleness_versions=1, sample_freshest_first=True)
    owners = view(entry(0, 4), entry(1, 5))
    assert build_sampler(config, barrier).select(owners, 5, 1) == gids(1)


@pytest.mark.parametrize(
    "config, message",
    [
        (SamplerConfig(name="fifo"), r"^sampler\.name: .*'fifo'.*windowed"),
        (SamplerConfig(name="in_order", options={"a": 1}), r"^sampler\.options: .*a"),
        (SamplerConfig(name="in_order", sample_freshest_first=True), r"^sampler\.sample_freshest_first: "),
        (SamplerConfig(name="windowed", max_staleness_versions=-2), r"^sampler\.max_staleness_versions: "),
        (SamplerConfig(name="in_order", max_lookahead_versions=-2), r"^sampler\.max_lookahead_versions: "),
        (SamplerConfig(name="no.such.module:Sampler"), r"^sampler\.name: .*no\.such\.module"),
        (SamplerConfig(name=":Sampler"), r"^sampler\.name: "),
        (SamplerConfig(name="tests.sampler_cases:Nothing"), r"^sampler\.name: .*'Nothing'"),
        (SamplerConfig(name="tests.sampler_cases:annotations"), r"^sampler\.name: .*'annotations'"),
    ],
)
def test_an_impossible_configuration_is_refused_with_its_key(
    config: SamplerConfig, message: str, barrier: DataPlaneCheckpointBarrier
) -> None:
    """Unknown names, options and switches for samplers that have none, negative limits."""
    with pytest.raises(ConfigError, match=message):
        build_sampler(config, barrier)


def test_a_custom_class_is_built_with_its_options(barrier: DataPlaneCheckpointBarrier) -> None:
    """``module:ClassName`` and keyword arguments; both admission protocols are told apart."""
    config = SamplerConfig(name="tests.sampler_cases:OnePiece", options={"lookahead": 3})
    sampler = build_sampler(config, barrier)
    sampler.restore_cursor(2)
    assert sampler.name == "tests.sampler_cases:OnePiece"
    assert (sampler.is_admissible(0), sampler.is_admissible(-1)) == (True, False)
    assert isinstance(sampler, OnePieceAdmissionSampler)
    assert not isinstance(sampler, TransactionalAdmissionSampler)
    two_step = build_sampler(SamplerConfig(name="tests.sampler_cases:OnPolicy"), barrier)
    assert isinstance(two_step, TransactionalAdmissionSampler)
    assert not isinstance(two_step, OnePieceAdmissionSampler)


def test_options_that_a_custom_class_does_not_take_are_a_contract_error(
    barrier: DataPlaneCheckpointBarrier,
) -> None:
    """The message names the class and the options."""
    config = SamplerConfig(name="tests.sampler_cases:OnPolicy", options={"pace": 3})
    with pytest.raises(SamplerContractError, match=r"tests\.sampler_cases:OnPolicy.*\(pace\)"):
        build_sampler(config, barrier)


def test_a_missing_member_is_named_together_with_the_sampler(barrier: DataPlaneCheckpointBarrier) -> None:
    """Each required member in turn is taken away from a class that has all of them."""
    for missing, wanted in [
        ("select", "select"),
        ("restore_cursor", "restore_cursor"),
        ("is_admissible", r"is_admissible\(\) or step_target"),
        ("wait_until_admissible", "wait_until_admissible"),
        ("commit_admission", "commit_admission"),
    ]:
        members = {name: member for name, member in vars(OnPolicy).items() if name != missing}
        broken = type("Broken", (), members)
        with pytest.raises(SamplerContractError, match=rf"sampler my:Broken: lacks .*{wanted}"):
            adapt_sampler(broken(), barrier, "my:Broken")
    with pytest.raises(SamplerContractError, match="lacks dispatch_cursor"):
        adapt_sampler(type("Broken", (OnPolicy,), {"__init__": lambda _: None})(), barrier, "my:Broken")


def _with(**members: object) -> object:
    """Return an OnPolicy sampler with some members replaced."""
    return type("Custom", (OnPolicy,), members)()


@pytest.mark.parametrize("cursor", [0, True, "-1", None])
def test_a_custom_cursor_that_does_not_start_at_minus_one_is_refused(
    cursor: object, barrier: DataPlaneCheckpointBarrier
) -> None:
    """Its type counts too: True is no cursor."""
    broken = OnPolicy()
    broken.dispatch_cursor = cursor  # type: ignore[assignment] # the mistake under test
    with pytest.raises(SamplerContractError, match="dispatch_cursor must"):
        adapt_sampler(broken, barrier, "my:Custom")


def test_a_wait_or_an_admission_that_is_not_async_is_refused(barrier: DataPlaneCheckpointBarrier) -> None:
    """Otherwise the first admission would fail in the middle of a run."""
    with pytest.raises(SamplerContractError, match=r"wait_until_admissible\(\) must be an async"):
        adapt_sampler(_with(wait_until_admissible=lambda *_: None), barrier, "my:Custom")
    with pytest.raises(SamplerContractError, match=r"admit\(\) must be an async"):
        adapt_sampler(_with(commit_admission=None, admit=lambda *_: None), barrier, "my:Custom")


def test_half_of_the_two_steps_beside_an_admit_is_the_one_piece_admission(
    barrier: DataPlaneCheckpointBarrier,
) -> None:
    """A one-piece ``admit()`` may well keep its wait in a method of that name."""
    half = type("Half", (OnePiece,), {"wait_until_admissible": OnPolicy.wait_until_admissible})
    assert isinstance(adapt_sampler(half(), barrier, "my:Half"), OnePieceCustomSampler)
    assert isinstance(adapt_sampler(OnPolicy(), barrier, "my:Both"), TwoStepCustomSampler)


@pytest.mark.parametrize(
    "members, message",
    [
        ({"commit_admission": lambda *_: None}, "must advance dispatch_cursor by one: it went from -1 to -1"),
        ({"commit_admission": lambda self, _: self.restore_cursor(1)}, "from -1 to 1"),
        ({"commit_admission": lambda self, _: self.restore_cursor(0) or 0}, "stamp 0 although"),
        ({"commit_admission": lambda self, _: self.restore_cursor(0), "stamps_target_steps": True}, "None"),
        ({"commit_admission": lambda self, _: self.restore_cursor(0) or 1, "stamps_target_steps": True}, "1"),
        (
            {"commit_admission": lambda self, _: self.restore_cursor(0) or True, "stamps_target_steps": 1},
            "True",
        ),
    ],
)
async def test_an_admission_that_breaks_the_cursor_s_contract_is_refused(
    members: dict[str, object], message: str, barrier: DataPlaneCheckpointBarrier
) -> None:
    """Cursor + 1 counts admissions; a stamp is a covered step, and comes exactly when promised."""
    sampler = adapt_sampler(_with(**members), barrier, "my:Custom")
    assert isinstance(sampler, TwoStepCustomSampler)
    async with barrier.mutation("admission") as cut:
        with pytest.raises(SamplerContractError, match=message):
            sampler.commit_admission(cut)


async def test_a_wait_that_moves_the_cursor_is_refused(barrier: DataPlaneCheckpointBarrier) -> None:
    """It runs outside the barrier, where a checkpoint may read the cursor."""

    async def wait(self: OnPolicy, _versions: TrainerVersion) -> None:
        self.dispatch_cursor += 1

    sampler = adapt_sampler(_with(wait_until_admissible=wait), barrier, "my:Custom")
    assert isinstance(sampler, TwoStepCustomSampler)
    with pytest.raises(SamplerContractError, match="only commit_admission"):
        await sampler.wait_until_admissible(TrainerVersion(hub=barrier.hub))


def test_a_restore_that_does_not_take_the_cursor_is_refused(barrier: DataPlaneCheckpointBarrier) -> None:
    """A cursor off by one would skip or repeat a step."""
    sampler = adapt_sampler(_with(restore_cursor=lambda *_: None), barrier, "my:Custom")
    with pytest.raises(SamplerContractError, match=r"restore_cursor\(4\)"):
        sampler.restore_cursor(4)


@pytest.mark.parametrize(
    "chosen, message",
    [(gids(0, 1, 2), "up to 2"), (gids(0, 0), "different"), (gids(0, 7), f"not ready: {gids(7)[0]}")],
)
def test_a_selection_of_anything_but_ready_groups_is_refused(
    chosen: tuple[str, ...], message: str, barrier: DataPlaneCheckpointBarrier
) -> None:
    """Too many, one twice, or a stranger: refused before anything is claimed."""
    sampler = adapt_sampler(_with(select=lambda *_: chosen), barrier, "my:Custom")
    with pytest.raises(SamplerContractError, match=message):
        sampler.select(view(entry(0, 0), entry(1, 0), entry(2, 0), admitted(7, 0)), 0, 2)


def test_an_eviction_of_a_group_that_is_not_ready_is_refused(barrier: DataPlaneCheckpointBarrier) -> None:
    """A group in flight is aborted, not evicted."""
    sampler = adapt_sampler(_with(evictable=lambda *_: gids(7)), barrier, "my:Custom")
    with pytest.raises(SamplerContractError, match=r"evictable\(\).*not ready"):
        sampler.evictable(view(admitted(7, 0)), 0)


@pytest.mark.parametrize("target", [-1, True, 1.5])
def test_a_step_target_that_is_no_number_of_groups_is_refused(
    target: object, barrier: DataPlaneCheckpointBarrier
) -> None:
    """A wrong target would claim too few groups, or none, without a word."""
    sampler = adapt_sampler(_with(step_target=lambda *_: target), barrier, "my:Custom")
    with pytest.raises(SamplerContractError, match="step_target"):
        sampler.step_target(view(), 0, 4)


def test_members_that_a_custom_sampler_has_replace_the_defaults(barrier: DataPlaneCheckpointBarrier) -> None:
    """Name, capacity, target, eviction and abort."""
    sampler = adapt_sampler(
        _with(
            name="mine",
            required_capacity=lambda _, groups: groups * 7,
            step_target=lambda *_: 3,
            evictable=lambda *_: list(gids(0, 0)),
            aborts=lambda _, record, version: record.start_version + 1 < version,
        ),
        barrier,
        "my:Custom",
    )
    assert sampler.name == "mine"
    assert sampler.required_capacity(2) == 14
    assert sampler.step_target(view(), 0, 4) == 3
    assert sampler.evictable(view(entry(0, 0)), 0) == gids(0)
    assert sampler.aborts(admitted(0, 3), 5)
    assert not sampler.aborts(admitted(0, 4), 5)


def test_the_defaults_of_a_custom_sampler_without_stamps(barrier: DataPlaneCheckpointBarrier) -> None:
    """G groups, nothing evicted, nothing aborted; all that is owned once no more can come."""
    sampler = adapt_sampler(OnPolicy(), barrier, "my:Custom")
    owners = view(entry(0, 0), admitted(1, 0))
    assert sampler.required_capacity(4) == 4
    assert sampler.evictable(owners, 9) == ()
    assert not sampler.aborts(admitted(1, 0), 9)
    assert sampler.step_target(owners, 0, 4) == 4
    sampler.restore_cursor(0)
    assert sampler.step_target(owners, 0, 4) == 2


def test_the_default_target_leaves_out_what_is_evicted_or_aborted(
    barrier: DataPlaneCheckpointBarrier,
) -> None:
    """Waiting for a group that will never be selected would be waiting for ever."""
    inner = _with(evictable=lambda *_: gids(0), aborts=lambda *_: True)
    sampler = adapt_sampler(inner, barrier, "my:Custom")
    assert sampler.step_target(view(entry(0, 0), entry(1, 0), admitted(2, 0), exhausted=True), 0, 4) == 1


def test_the_defaults_of_a_custom_sampler_with_stamps(barrier: DataPlaneCheckpointBarrier) -> None:
    """Those of in_order; it needs no is_admissible() then."""
    sampler = adapt_sampler(_with(stamps_target_steps=True, is_admissible=None), barrier, "my:Custom")
    reference: Sampler = InOrderSampler(barrier, 1)
    owners = [view(entry(0, 0, target=3), entry(1, 0, target=4)), view(admitted(0, 0, target=4)), view()]
    for cursor, version, groups in _grid(owners):
        sampler.restore_cursor(cursor)
        reference.restore_cursor(cursor)
        assert sampler.step_target(groups, version, 4) == reference.step_target(groups, version, 4)
        assert sampler.evictable(groups, version) == reference.evictable(groups, version)
    assert sampler.is_admissible(0)


def _grid(owners: list[OwnersView]) -> Iterator[tuple[int, int, OwnersView]]:
    """Yield every cursor and version around the stamps, with every view."""
    for cursor in (3, 4):
        for version in (3, 4, 5):
            for groups in owners:
                yield cursor, version, groups
