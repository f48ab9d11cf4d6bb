"""The observer: what each hook does to the numbers."""

import asyncio
import math
from types import SimpleNamespace
from typing import cast

import pytest

from quiesce.barrier import KINDS, DataPlaneCheckpointBarrier
from quiesce.observers import HOOKS, Hub
from quiesce.telemetry import names
from quiesce.telemetry.deferred import DEFERRED_HOOKS
from quiesce.telemetry.families import CHECK_LIMIT
from quiesce.telemetry.histogram import HistogramFamily, NumberFamily
from quiesce.telemetry.metrics import KIND_LIMIT, MetricsObserver, blame_ns


class Clock:
    """A clock that a test sets."""

    def __init__(self, now: float = 1_000.0) -> None:
        self.now = now

    def __call__(self) -> float:
        """Return the time that was set."""
        return self.now


@pytest.fixture
def clock() -> Clock:
    """A clock that stands until the test moves it."""
    return Clock()


@pytest.fixture
def observer(clock: Clock) -> MetricsObserver:
    """An observer on the test's clock."""
    return MetricsObserver(clock=clock, monotonic=clock)


def number(observer: MetricsObserver, metric: names.Metric, *labels: str) -> float:
    """The value of one counter or gauge."""
    return cast("NumberFamily", observer.families[metric.name]).values[labels]


def count(observer: MetricsObserver, metric: names.Metric, *labels: str) -> int:
    """How many values one histogram has."""
    return cast("HistogramFamily", observer.families[metric.name]).children[labels].count


def save(
    observer: MetricsObserver, cut_id: str, outcome: str = "completed", reason: str = "", step: int = 1
) -> None:
    """Report the end of an attempt to save."""
    observer.checkpoint_ended(cut_id, step, outcome, reason, {"ledger": 2, "buffer": 3}, 40, 5_000)


def step(observer: MetricsObserver, number: int, outcome: str = "completed", **metrics: float) -> None:
    """Report the end of a step of 4 groups."""
    observer.train_step_ended(number, number, 2_000_000_000, 4, outcome, metrics)


def test_the_observer_has_hooks_only() -> None:
    """Every public method is a hook of the hub's, counts many calls of one, sets it up, or is called by a scrape."""
    public = {name for name in vars(MetricsObserver) if not name.startswith("_")}

    assert public - {"add_kinds", "audited", "expect_checkpoints", *DEFERRED_HOOKS.values()} <= set(HOOKS)
    assert "slot_opened" not in public  # one call per slot is enough


class TestSlots:
    """Slots, by kind."""

    def test_a_slot_is_counted_once_in_wait_hold_and_outcome(self, observer: MetricsObserver) -> None:
        """Wait 0 lands in the lowest bucket, and every kind has its own numbers."""
        observer.slot_closed("admission", 0, 4_000, "completed", 0)
        observer.slot_closed("admission", 2_000_000, 30_000, "failed", 0)

        slots = observer.slots["admission"]
        assert (slots.wait.count, slots.hold.count) == (2, 2)
        assert slots.wait.buckets()[0] == ("1e-06", 1)
        assert slots.wait.sum == pytest.approx(0.002)
        assert slots.hold.sum == pytest.approx(34e-6)
        assert slots.ended == {"completed": 1, "failed": 1, "cancelled": 0}
        assert observer.slots["group_commit"].hold.count == 0

    def test_a_wait_that_is_given_up_has_no_hold(self, observer: MetricsObserver) -> None:
        """It counts as cancelled, with what it waited."""
        observer.slot_wait_abandoned("retry", 5_000_000_000, "cancelled", 0)

        slots = observer.slots["retry"]
        assert (slots.wait.count, slots.hold.count) == (1, 0)
        assert slots.wait.sum == 5.0
        assert slots.ended["cancelled"] == 1

    def test_an_outcome_that_cannot_be_is_heard(self, observer: MetricsObserver) -> None:
        """The hub counts what a hook raises; a new label value is not made up."""
        with pytest.raises(KeyError):
            observer.slot_closed("retry", 0, 1, "exploded", 0)

    def test_kinds_past_the_limit_share_one_label(self, observer: MetricsObserver) -> None:
        """A program that makes kinds up cannot make series without end."""
        for index in range(100):
            observer.slot_closed(f"own_{index}", 0, 1_000, "completed", 0)

        assert len(observer.slots) == KIND_LIMIT + 1
        assert observer.slots["own_0"].hold.count == 1
        assert observer.slots[names.OTHER].hold.count == 100 - (KIND_LIMIT - len(KINDS))

    async def test_a_cancelled_slot_keeps_its_hold_time_and_its_outcome(self) -> None:
        """A body that is cancelled is a cancelled slot, not a completed one."""
        hub = Hub(strict=True)
        observer = MetricsObserver()
        hub.subscribe(observer)
        barrier = DataPlaneCheckpointBarrier(hub=hub, clock=iter(range(0, 10_000, 500)).__next__)

        async def hold() -> None:
            async with barrier.mutation("admission"):
                await asyncio.Event().wait()

        cancelled = asyncio.create_task(hold())
        await asyncio.sleep(0)
        cancelled.cancel()
        await asyncio.wait({cancelled})
        slots = observer.slots["admission"]
        alone = (slots.ended, slots.hold.count, slots.hold.sum > 0)
        with pytest.raises(ZeroDivisionError):
            async with barrier.mutation("admission"):
                _ = 1 / 0
        async with barrier.mutation("admission"):
            pass

        assert cancelled.cancelled()
        assert alone == ({"completed": 0, "failed": 0, "cancelled": 1}, 1, True)
        assert slots.ended == {"completed": 1, "failed": 1, "cancelled": 1}
        assert slots.hold.count == 3


class TestWindows:
    """Checkpoint windows, and what they cost."""

    def test_a_window_is_two_phases_and_closed_time(self, observer: MetricsObserver, clock: Clock) -> None:
        """Drain and exclusive are counted, and shown while they last."""
        observer.window_requested("w1", 0)
        assert number(observer, names.CHECKPOINT_PHASE, "drain") == 1
        assert number(observer, names.CHECKPOINT_PHASE_STARTED, "drain") == 1_000.0
        clock.now = 1_002.0
        observer.window_opened("w1", 2_000_000_000, (), 0)
        assert number(observer, names.CHECKPOINT_PHASE, "drain") == 0
        assert number(observer, names.CHECKPOINT_PHASE, "exclusive") == 1
        observer.window_closed("w1", 2_000_000_000, 400_000, "completed", 0)

        assert number(observer, names.CHECKPOINT_PHASE, "exclusive") == 0
        assert count(observer, names.CHECKPOINT_PHASE_SECONDS, "drain", "completed") == 1
        assert count(observer, names.CHECKPOINT_PHASE_SECONDS, "exclusive", "completed") == 1
        assert number(observer, names.CHECKPOINT_PHASE_LAST, "exclusive") == pytest.approx(0.0004)
        assert number(observer, names.WINDOW_CLOSED) == pytest.approx(2.0004)

    def test_only_phases_over_their_objective_are_breaches(self, observer: MetricsObserver) -> None:
        """A drain of 2 s is one, an exclusive phase of 0.4 ms is none."""
        observer.window_requested("w1", 0)
        observer.window_opened("w1", 2_000_000_000, (), 0)
        observer.window_closed("w1", 2_000_000_000, 400_000, "completed", 0)

        assert number(observer, names.WINDOW_OVER_OBJECTIVE, "drain") == 1
        assert number(observer, names.WINDOW_OVER_OBJECTIVE, "exclusive") == 0

    def test_a_window_that_is_given_up_costs_its_drain(self, observer: MetricsObserver) -> None:
        """The phase has its outcome, writers their loss, and nothing stays in progress."""
        observer.window_requested("w1", 0)
        observer.window_abandoned("w1", 3_000_000_000, "failed", (("retry", "t", 0, 3_000_000_000),), 0)

        assert count(observer, names.CHECKPOINT_PHASE_SECONDS, "drain", "failed") == 1
        assert number(observer, names.CHECKPOINT_PHASE, "drain") == 0
        assert number(observer, names.WINDOW_CLOSED) == 3.0
        assert number(observer, names.WINDOW_BLAME, "retry") == 3.0

    def test_a_phase_that_a_checkpointer_reports_too_is_counted_once(self, observer: MetricsObserver) -> None:
        """The barrier is the source of drain and exclusive, whoever else names them."""
        observer.window_requested("w1", 0)
        observer.phase_started("w1", "drain")
        observer.window_opened("w1", 1_000, (), 0)
        observer.phase_ended("w1", "drain", 1_000, "completed")

        assert count(observer, names.CHECKPOINT_PHASE_SECONDS, "drain", "completed") == 1

    def test_overlapping_slots_of_a_kind_are_blamed_once(self) -> None:
        """A kind is charged for the time in which one of its slots was open, each kind for its own."""
        blame = blame_ns(
            [
                ("admission", "a", 0, 50),
                ("admission", "b", 20, 80),
                ("admission", "c", 90, 100),
                ("retry", "d", 0, 100),
            ]
        )

        assert blame == {"admission": 90, "retry": 100}

    def test_windows_that_nobody_saves_with_are_forgotten(self, observer: MetricsObserver) -> None:
        """A program that uses the barrier alone does not fill memory with cuts."""
        for index in range(1_000):
            observer.window_opened(f"w{index}", 0, (), 0)

        assert len(observer._work_at_cut) <= 64  # noqa: SLF001 - the bound is what is claimed


class TestCheckpoints:
    """Attempts to save, and what a crash would cost."""

    def test_a_published_checkpoint_is_described(self, observer: MetricsObserver, clock: Clock) -> None:
        """Size, rows, groups by owner, and when."""
        clock.now = 2_000.0
        save(observer, "c1")

        assert number(observer, names.CHECKPOINT_ATTEMPTS, "completed", "") == 1
        assert number(observer, names.CHECKPOINT_LAST_SUCCESS) == 2_000.0
        assert number(observer, names.CHECKPOINT_ROWS) == 40
        assert number(observer, names.CHECKPOINT_BYTES, "all") == 5_000
        assert number(observer, names.CHECKPOINT_GROUPS, "buffer") == 3
        assert number(observer, names.CHECKPOINT_GROUPS, "spares") == 0

    def test_a_checkpoint_is_told_by_part_where_its_parts_are_known(self, observer: MetricsObserver) -> None:
        """A checkpointer says what it wrote; what a program of one's own saves is told as a whole."""
        save(observer, "c1")
        assert number(observer, names.CHECKPOINT_BYTES, "rows") == 0

        observer.saved({"rows": 3_000, "trainer": 1_500, "documents": 500})

        parts = [number(observer, names.CHECKPOINT_BYTES, part) for part in names.CHECKPOINT_PARTS]
        assert parts == [5_000, 3_000, 1_500, 500]

    def test_a_failed_attempt_leaves_the_last_success_alone(self, observer: MetricsObserver) -> None:
        """It is counted by its reason; a reason that nobody foresaw is counted as other."""
        save(observer, "c1", "failed", "disk")
        save(observer, "c2", "failed", "gremlins")

        assert number(observer, names.CHECKPOINT_ATTEMPTS, "failed", "disk") == 1
        assert number(observer, names.CHECKPOINT_ATTEMPTS, "failed", "other") == 1
        assert number(observer, names.CHECKPOINT_LAST_SUCCESS) == 0
        assert number(observer, names.CHECKPOINT_ROWS) == 0

    def test_failures_are_counted_from_success_to_success(self, observer: MetricsObserver) -> None:
        """What failed or was refused adds up until something is published; what was skipped or cancelled is neither."""
        for outcome, reason, since in (
            ("failed", "io", 1),
            ("refused", "invariant", 2),
            ("skipped", "nothing_changed", 2),
            ("completed", "", 0),
            ("cancelled", "cancelled", 0),
        ):
            save(observer, "c", outcome, reason)
            assert number(observer, names.CHECKPOINT_FAILURES) == since

    def test_phases_outside_the_window_are_counted(self, observer: MetricsObserver, clock: Clock) -> None:
        """Write is shown while it lasts, with its start, and counted when it ends."""
        clock.now = 1_500.0
        observer.phase_started("c1", "write")
        assert number(observer, names.CHECKPOINT_PHASE, "write") == 1
        assert number(observer, names.CHECKPOINT_PHASE_STARTED, "write") == 1_500.0
        observer.phase_ended("c1", "write", 7_000_000_000, "completed")

        assert number(observer, names.CHECKPOINT_PHASE, "write") == 0
        assert number(observer, names.CHECKPOINT_PHASE_LAST, "write") == 7.0

    def test_a_refused_phase_is_a_failed_one(self, observer: MetricsObserver) -> None:
        """Phases have three outcomes; refusing a cut is what the attempt is counted as."""
        observer.phase_started("c1", "verify")
        observer.phase_ended("c1", "verify", 1_000_000, "refused")

        assert count(observer, names.CHECKPOINT_PHASE_SECONDS, "verify", "failed") == 1

    def test_the_end_of_an_attempt_ends_its_phases(self, observer: MetricsObserver) -> None:
        """A phase whose end was never reported does not look stuck for ever."""
        observer.phase_started("c1", "stage")
        save(observer, "c1", "failed", "error")

        assert number(observer, names.CHECKPOINT_PHASE, "stage") == 0

    def test_work_at_risk_is_what_came_after_the_published_cut(self, observer: MetricsObserver) -> None:
        """Steps and groups after the cut count, also those that were done while it was written."""
        step(observer, 1)
        observer.owner_moved("g1", "ledger", "buffer", "")
        observer.window_opened("c1", 0, (), 0)
        step(observer, 2)
        observer.owner_moved("g2", "ledger", "buffer", "")
        assert number(observer, names.STEPS_SINCE_CHECKPOINT) == 2
        save(observer, "c1")

        assert number(observer, names.STEPS_SINCE_CHECKPOINT) == 1
        assert number(observer, names.GROUPS_SINCE_CHECKPOINT) == 1

    def test_a_failed_save_keeps_its_work_at_risk(self, observer: MetricsObserver) -> None:
        """A cut that was not published protects nothing."""
        step(observer, 1)
        observer.window_opened("c1", 0, (), 0)
        save(observer, "c1", "failed", "disk")

        assert number(observer, names.STEPS_SINCE_CHECKPOINT) == 1

    def test_the_expected_interval_follows_the_pace_of_steps(
        self, observer: MetricsObserver, clock: Clock
    ) -> None:
        """Every 5 steps at 2 s a step is 10 s; before two steps nothing can be said."""
        observer.expect_checkpoints(steps=5)
        assert number(observer, names.CHECKPOINT_EXPECTED_INTERVAL) == 0
        for index in range(3):
            clock.now += 2.0
            step(observer, index)

        assert number(observer, names.CHECKPOINT_EXPECTED_INTERVAL) == pytest.approx(10.0)
        observer.expect_checkpoints(seconds=60)
        assert number(observer, names.CHECKPOINT_EXPECTED_INTERVAL) == 60

    def test_a_cut_part_keeps_its_last_time(self, observer: MetricsObserver) -> None:
        """Each of the six artifacts has one number."""
        observer.cut_part_captured("c1", "rows", 12_000)

        assert number(observer, names.CUT_PART, "rows") == pytest.approx(12e-6)

    def test_stalls_and_idling_add_up_by_cause(self, observer: MetricsObserver) -> None:
        """Every cause of the closed sets is taken."""
        for cause in names.STALL_CAUSES:
            observer.trainer_stalled(cause, 500_000_000)
        for cause in names.IDLE_CAUSES:
            observer.train_idled(cause, 250_000_000)

        assert [number(observer, names.TRAINER_STALL, cause) for cause in names.STALL_CAUSES] == [0.5] * 4
        assert [number(observer, names.TRAIN_IDLE, cause) for cause in names.IDLE_CAUSES] == [0.25] * 2


class TestTheRest:
    """Restores, ownership, data plane, invariants, training, run."""

    def test_a_restore_has_parts_and_groups(self, observer: MetricsObserver) -> None:
        """Times by part (unknown ones together), groups by the owner they were saved with."""
        parts = {"rows": 2_000_000_000, "surprise": 1_000_000_000}
        observer.restore_ended("completed", "", parts, {"buffer": 3, "ledger": 2})

        assert number(observer, names.RESTORE_SECONDS, "rows") == 2.0
        assert number(observer, names.RESTORE_SECONDS, names.OTHER) == 1.0
        assert number(observer, names.RESTORE_GROUPS, "buffer") == 3
        assert not any(number(observer, names.RESTORE_REFUSALS, reason) for reason in names.RESTORE_REASONS)

    def test_a_refused_restore_restores_nothing(self, observer: MetricsObserver) -> None:
        """It is counted by its reason."""
        observer.restore_ended("refused", "corrupt", {}, {"buffer": 3})

        assert number(observer, names.RESTORE_REFUSALS, "corrupt") == 1
        assert number(observer, names.RESTORE_GROUPS, "buffer") == 0

    def test_moves_are_counted_by_both_ends(self, observer: MetricsObserver) -> None:
        """Groups themselves are not labels."""
        observer.owner_moved("g1", "read", "ledger", "")
        observer.owner_moved("g1", "ledger", "dropped", "stale_abort")

        assert number(observer, names.GROUPS_MOVED, "read", "ledger") == 1
        assert number(observer, names.GROUPS_MOVED, "ledger", "dropped") == 1

    def test_admissions_and_operations_are_counted(self, observer: MetricsObserver) -> None:
        """Waits at the gate, commits by path, operations by name."""
        observer.admission_waited(90_000_000_000)
        observer.admission_committed("fallback", 3, 4, 2)
        observer.dataplane_operated("put", 50_000, 8, "completed")

        assert count(observer, names.ADMISSION_WAIT) == 1
        assert number(observer, names.ADMISSION_COMMITS, "fallback") == 1
        assert count(observer, names.DATAPLANE_OP, "put") == 1

    def test_an_invariant_is_grey_until_it_is_checked(self, observer: MetricsObserver, clock: Clock) -> None:
        """Checked is not violated, and a violation has its time."""
        assert number(observer, names.INVARIANT_ACTIVE, "single_owner") == 0
        observer.invariant_checked("single_owner")
        assert number(observer, names.INVARIANT_ACTIVE, "single_owner") == 1
        assert number(observer, names.INVARIANT_VIOLATIONS, "single_owner") == 0
        clock.now = 1_234.0
        observer.invariant_violated(SimpleNamespace(invariant="single_owner"))

        assert number(observer, names.INVARIANT_CHECKS, "single_owner") == 1
        assert number(observer, names.INVARIANT_VIOLATIONS, "single_owner") == 1
        assert number(observer, names.INVARIANT_LAST_VIOLATION, "single_owner") == 1_234.0

    def test_a_users_own_check_is_counted_under_its_own_name(self, observer: MetricsObserver) -> None:
        """Its series exist from its first check; of too many, the rest is one more."""
        observer.invariant_checked("rewards_are_finite")
        observer.invariant_violated(SimpleNamespace(invariant="rewards_are_finite"))
        for serial in range(2 * CHECK_LIMIT):
            observer.invariant_violated(SimpleNamespace(invariant=f"check {serial}"))

        assert number(observer, names.INVARIANT_ACTIVE, "rewards_are_finite") == 1
        assert number(observer, names.INVARIANT_VIOLATIONS, "rewards_are_finite") == 1
        assert number(observer, names.INVARIANT_VIOLATIONS, "check 0") == 1
        assert number(observer, names.INVARIANT_VIOLATIONS, names.OTHER) == CHECK_LIMIT + 1
        series = cast("NumberFamily", observer.families[names.INVARIANT_VIOLATIONS.name]).values
        assert len(series) == len(names.INVARIANTS) + CHECK_LIMIT + 1

    def test_what_an_auditor_knows_prolongs_a_violation(
        self, observer: MetricsObserver, clock: Clock
    ) -> None:
        """An open record of an earlier incarnation has its time; one that is seen again a later one, and none goes back."""
        clock.now = 2_000.0
        observer.invariant_violated(SimpleNamespace(invariant="versions_grow"))

        observer.audited(["single_owner"], {"conservation": 900.0, "versions_grow": 1_000.0})
        observer.audited(["single_owner"], {"conservation": 1_100.0, "versions_grow": 1_000.0})

        assert number(observer, names.INVARIANT_LAST_VIOLATION, "conservation") == 1_100.0
        assert number(observer, names.INVARIANT_LAST_VIOLATION, "versions_grow") == 2_000.0
        assert number(observer, names.INVARIANT_VIOLATIONS, "conservation") == 0
        active = {name for name in names.INVARIANTS if number(observer, names.INVARIANT_ACTIVE, name)}
        assert active == {"single_owner", "conservation", "versions_grow"}

    def test_a_step_reports_what_it_measured(self, observer: MetricsObserver) -> None:
        """Unknown before the first step, then the last value; a skipped step trains nothing."""
        assert math.isnan(number(observer, names.TRAIN_REWARD))
        step(observer, 1, reward=0.5, loss=1.25, staleness=1.0, other=9.0)
        step(observer, 2, "skipped")

        assert number(observer, names.TRAIN_REWARD) == 0.5
        assert number(observer, names.TRAIN_LOSS) == 1.25
        assert math.isnan(number(observer, names.TRAIN_KL))
        assert count(observer, names.STALENESS) == 1
        assert count(observer, names.TRAIN_STEP_SECONDS) == 1
        assert number(observer, names.GROUPS_TRAINED) == 4
        assert number(observer, names.STEPS_SINCE_CHECKPOINT) == 2

    def test_a_failed_step_is_no_work(self, observer: MetricsObserver) -> None:
        """It trained nothing, so nothing of it is at risk."""
        step(observer, 1, "failed")

        assert number(observer, names.STEPS_SINCE_CHECKPOINT) == 0
        assert count(observer, names.TRAIN_STEP_SECONDS) == 0

    def test_tokens_add_up_and_the_run_has_one_state(self, observer: MetricsObserver) -> None:
        """Tokens of every rollout, and the last state alone."""
        observer.rollout_ended("g1", 0, 1_000, "completed", 70)
        observer.rollout_ended("g2", 0, 1_000, "failed", 7)
        for state in names.RUN_STATES:
            observer.run_state_changed(state)

        assert number(observer, names.TOKENS_GENERATED) == 77
        assert [number(observer, names.RUN_STATE, state) for state in names.RUN_STATES] == [0, 0, 0, 0, 1]


class TestGates:
    """Snapshot gates, cleanup and replies."""

    def test_waits_closes_and_clears_are_counted(self, observer: MetricsObserver) -> None:
        """A try that failed counts as one, and its keys do not."""
        observer.permit_granted("0", 1, 2_000)
        observer.gate_closed("0", 2, "1.1", 5_000_000, "closed")
        observer.gate_closed("0", 3, "1.2", 7_000_000, "failed")
        observer.clear_ended("0", 3, 12, 900, "completed", (("g", 0),))
        observer.clear_ended("0", 2, 8, 900, "failed", ())
        observer.reply_sent("0", 4_000)
        observer.tokens_reused("g", 70)

        def counted(metric: names.Metric) -> float:
            family = observer.families[metric.name]
            return family.children[()].count if isinstance(family, HistogramFamily) else family.values[()]

        assert counted(names.GATE_WAIT) == 1
        assert counted(names.GATE_CLOSE) == 2
        assert counted(names.CLEANUP_CLEAR) == 2
        assert counted(names.CLEANUP_BATCH) == 1
        assert counted(names.CLEANUP_KEYS) == 12
        assert counted(names.CLEANUP_FAILURES) == 1
        assert counted(names.REPLY_SECONDS) == 1
        assert counted(names.RESTORE_TOKENS_REUSED) == 70
