"""The tree of a save, the life of a group, and what is open when the process ends."""

import asyncio
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from quiesce.barrier import DataPlaneCheckpointBarrier
from quiesce.telemetry import names, story_groups, story_saves, story_windows
from quiesce.telemetry.finished import FinishedSpan
from quiesce.testing import in_virtual_time, settle
from tests.barriers import Visitor
from tests.save_rig import RecordingFence, Rig
from tests.unit.telemetry.telling import Kept, Telling


def tree(kept: Kept) -> set[tuple[str, str]]:
    """Return (name, parent's name) of every span but slots and syncs; "" for a root."""
    by_id = {span.span_id: span for span in kept.found}
    return {
        (span.name, by_id[span.parent_id].name if span.parent_id else "")
        for span in kept.found
        if span.name != "quiesce.slot"
    }


def status(span: FinishedSpan) -> tuple[str, object]:
    """Return how it ended, in both ways of saying it."""
    return span.status, span.attributes.get("quiesce.outcome")


class TestSave:
    """One trace."""

    async def test_a_save_is_one_trace_with_all_its_phases(self, tmp_path: Path) -> None:
        """A real one: on the loop, in tasks and in the saver's threads."""
        rig = Rig(tmp_path, lmdb=True, fence=RecordingFence())
        scene = Telling(hub=rig.hub, clock=time.perf_counter_ns)
        for _ in range(3):
            await rig.finished()
        rig.step = 4
        result = await rig.save()
        await rig.saver.wait()
        assert result.step == 4

        kept = scene.told()

        assert tree(kept) == {
            ("quiesce.checkpoint", ""),
            ("quiesce.checkpoint.fence", "quiesce.checkpoint"),
            ("quiesce.window", "quiesce.checkpoint"),
            ("quiesce.checkpoint.drain", "quiesce.window"),
            ("quiesce.checkpoint.exclusive", "quiesce.window"),
            ("quiesce.checkpoint.part", "quiesce.checkpoint.exclusive"),
            ("quiesce.checkpoint.verify", "quiesce.checkpoint"),
            ("quiesce.checkpoint.stage", "quiesce.checkpoint"),
            ("quiesce.checkpoint.write", "quiesce.checkpoint"),
            ("quiesce.checkpoint.fsync", "quiesce.checkpoint.write"),
            ("quiesce.checkpoint.publish", "quiesce.checkpoint"),
        }
        root = kept.one("quiesce.checkpoint")
        family = [span for span in kept.found if span.trace_id == root.trace_id]
        assert {span.attributes["quiesce.cut_id"] for span in family} == {rig.saver.last.cut_id}  # type: ignore[union-attr] # it ended
        assert (root.attributes["quiesce.step"], status(root)) == (4, ("ok", "completed"))
        parts = kept.named("quiesce.checkpoint.part")
        assert tuple(part.attributes["quiesce.part"] for part in parts) == names.CUT_PARTS
        assert all(root.start_ns <= span.start_ns <= span.end_ns <= root.end_ns for span in family)
        synced = kept.named("quiesce.checkpoint.fsync")
        assert len(synced) >= 4
        assert sum(int(span.attributes["quiesce.bytes"]) for span in synced) > 0
        scene.over()
        await rig.close()

    async def test_a_save_that_hops_through_every_kind_of_thread_is_one_trace(self) -> None:
        """Executors and threads do not inherit context variables; parents are found by the cut's name."""
        scene = Telling()
        loop = asyncio.get_running_loop()

        def phase(name: str) -> None:
            scene.hub.fire("phase_started", "cut", name)
            scene.hub.fire("phase_ended", "cut", name, 5, "completed")

        async def in_task() -> None:
            phase("fence")
            scene.hub.fire("window_requested", "cut", 1)
            scene.hub.fire("window_opened", "cut", 1, (), 2)
            scene.hub.fire("window_closed", "cut", 1, 1, "completed", 3)

        await asyncio.create_task(in_task())
        await asyncio.to_thread(phase, "stage")
        await loop.run_in_executor(None, phase, "verify")
        with ThreadPoolExecutor(1) as pool:
            pool.submit(phase, "write").result()
        thread = threading.Thread(target=phase, args=("publish",))
        thread.start()
        thread.join()
        scene.hub.fire("checkpoint_ended", "cut", 1, "completed", "", {}, 0, 0)

        kept = scene.told()

        root = kept.one("quiesce.checkpoint")
        assert {span.trace_id for span in kept.found} == {root.trace_id}
        children = {span.name for span in kept.found if span.parent_id == root.span_id}
        assert children == {
            "quiesce.window",
            *(f"quiesce.checkpoint.{name}" for name in ("fence", "stage", "verify", "write", "publish")),
        }
        scene.over()

    @pytest.mark.parametrize("where", ["stage", "write"])
    async def test_a_save_that_fails_says_where_and_why(self, tmp_path: Path, where: str) -> None:
        """The phase and the whole are errors; what came before is not."""
        rig = Rig(tmp_path)
        scene = Telling(hub=rig.hub, clock=time.perf_counter_ns)
        setattr(rig.trainer, f"{where}_error", OSError(28, "No space left on device"))
        await rig.save()
        await rig.saver.wait()

        kept = scene.told()

        root = kept.one("quiesce.checkpoint")
        assert status(root) == ("error", "failed")
        assert root.attributes["quiesce.error"] == root.attributes["quiesce.reason"] == "disk"
        assert status(kept.one(f"quiesce.checkpoint.{where}")) == ("error", "failed")
        assert status(kept.one("quiesce.checkpoint.exclusive")) == ("ok", "completed")
        assert kept.named("quiesce.checkpoint.publish") == []
        scene.over()
        await rig.close()

    async def test_a_save_that_is_cancelled_is_no_error(self, tmp_path: Path) -> None:
        """Cancelled is told apart from failed."""
        rig = Rig(tmp_path)
        scene = Telling(hub=rig.hub, clock=time.perf_counter_ns)
        rig.trainer.stage_may_end.clear()
        task = asyncio.create_task(rig.save())
        await rig.trainer.staging.wait()
        task.cancel()
        await asyncio.wait({task})

        kept = scene.told()

        assert status(kept.one("quiesce.checkpoint.stage")) == ("", "cancelled")
        assert status(kept.one("quiesce.checkpoint")) == ("", "cancelled")
        assert not any(span.cut_off for span in kept.found)
        scene.over()
        await rig.close()

    async def test_an_attempt_that_ends_before_its_first_phase_is_a_span_all_the_same(self) -> None:
        """It says what it waited for."""
        scene = Telling()
        scene.clock.advance(9.0)
        scene.hub.fire("trainer_stalled", "previous_write", 3_000_000_000)
        scene.hub.fire("checkpoint_ended", "", 7, "refused", "previous_write", {}, 0, 0)

        span = scene.told().one("quiesce.checkpoint")

        assert span.end_ns - span.start_ns == 3_000_000_000
        assert status(span) == ("error", "refused")
        assert span.attributes["quiesce.step"] == 7
        scene.over()

    def test_gates_close_within_the_fence(self) -> None:
        """Whatever thread tells of it; without a save they are spans of their own."""
        scene = Telling()
        scene.hub.fire("gate_closed", "0", 1, "1.1", 5, "superseded")
        scene.hub.fire("phase_started", "cut", "fence")
        scene.hub.fire("gate_closed", "1", 2, "1.2", 5, "closed")
        scene.hub.fire("gate_closed", "2", 3, "1.2", 5, "failed")
        scene.hub.fire("phase_ended", "cut", "fence", 5, "failed")

        kept = scene.told()

        fence = kept.one("quiesce.checkpoint.fence")
        alone, closed, failed = kept.named("quiesce.gate.close")
        assert (alone.parent_id, closed.parent_id, failed.parent_id) == (0, fence.span_id, fence.span_id)
        assert [status(span) for span in (alone, closed, failed)] == [
            ("", "cancelled"),
            ("ok", "completed"),
            ("error", "failed"),
        ]
        scene.over()

    def test_a_violation_is_an_event_of_its_save(self) -> None:
        """With what it says."""
        scene = Telling()

        class Violated:
            cut_id = "cut"
            invariant = "single_owner"

            def __str__(self) -> str:
                return "two owners"

        scene.hub.fire("phase_started", "cut", "verify")
        scene.hub.fire("invariant_violated", Violated())
        scene.hub.fire("checkpoint_ended", "cut", 1, "refused", "invariant", {}, 0, 0)

        (event,) = scene.told().one("quiesce.checkpoint").events

        assert event[0] == "invariant violated"
        assert event[2] == {"quiesce.invariant": "single_owner", "quiesce.message": "two owners"}
        scene.over()


class TestRestore:
    """A restore and its parts."""

    def test_parts_follow_each_other(self) -> None:
        """And a refused one says why."""
        scene = Telling()
        scene.clock.advance(10.0)
        scene.hub.fire("restore_ended", "completed", "", {"verify": 4, "rows": 6}, {"ledger": 3})
        scene.hub.fire("restore_ended", "refused", "schema", {"verify": 4}, {})

        kept = scene.told()

        done, refused = kept.named("quiesce.restore")
        assert done.end_ns - done.start_ns == 10
        assert (status(done), done.attributes["quiesce.groups"]) == (("ok", "completed"), 3)
        assert (status(refused), refused.attributes["quiesce.error"]) == (("error", "refused"), "schema")
        first, second, _ = kept.named("quiesce.restore.part")
        assert (first.start_ns, first.end_ns, second.end_ns) == (
            done.start_ns,
            second.start_ns,
            done.end_ns,
        )
        assert first.parent_id == done.span_id
        scene.over()

    def test_a_restore_whose_beginning_was_told_lasts_from_there(self) -> None:
        """Its first part begins with it and its last one ends with it, whatever was done between them."""
        scene = Telling()
        scene.hub.fire("restore_started")
        scene.clock.advance(10.0)
        parts = {"verify": 2_000_000_000, "trainer": 3_000_000_000, "rows": 1_000_000_000}
        scene.hub.fire("restore_ended", "completed", "", parts, {"ledger": 3})

        kept = scene.told()

        whole = kept.one("quiesce.restore")
        assert whole.end_ns - whole.start_ns == 10_000_000_000
        told = {
            span.attributes["quiesce.part"]: (span.start_ns - whole.start_ns, span.end_ns - whole.start_ns)
            for span in kept.named("quiesce.restore.part")
        }
        assert {part: (since / 1e9, until / 1e9) for part, (since, until) in told.items()} == {
            "verify": (0.0, 2.0),
            "trainer": (6.0, 9.0),
            "rows": (9.0, 10.0),
        }
        scene.over()

    @pytest.mark.parametrize(
        "outcome, reason, expected",
        [("refused", "rows", "error"), ("failed", "error", "error"), ("cancelled", "", "")],
    )
    def test_the_part_in_which_a_restore_ended_ended_as_it_did(
        self, outcome: str, reason: str, expected: str
    ) -> None:
        """Those before it are completed."""
        scene = Telling()
        scene.hub.fire("restore_started")
        scene.hub.fire("restore_ended", outcome, reason, {"verify": 4, "trainer": 5, "rows": 6}, {})

        kept = scene.told()

        verify, trainer, rows = kept.named("quiesce.restore.part")
        assert status(verify) == status(trainer) == ("ok", "completed")
        assert status(rows) == status(kept.one("quiesce.restore")) == (expected, outcome)
        assert rows.attributes.get("quiesce.error", "") == reason
        scene.over()

    def test_a_restore_of_which_nobody_told_the_end_is_cut_off_by_the_next(self) -> None:
        """A checkpoint that was only looked at, say."""
        scene = Telling()
        scene.hub.fire("restore_started")
        scene.hub.fire("restore_started")
        scene.hub.fire("restore_ended", "completed", "", {"verify": 4}, {})

        first, second = scene.told().named("quiesce.restore")

        assert (first.cut_off, second.cut_off) == (True, False)
        scene.over()

    def test_lines_of_the_log_about_groups_steps_and_restores_know_their_spans(self) -> None:
        """A restore's at once; the others' once they are made."""
        scene = Telling()
        fire, link_of = scene.hub.fire, scene.run.converter.link_of
        named = []
        for reason in ("corrupt", "rows"):
            fire("restore_started")
            named.append(link_of("restore"))
            fire("restore_ended", "refused", reason, {"verify": 4}, {})
        fire("owner_moved", "g1", "read", "ledger", "")
        fire("train_step_started", 3, 2)
        assert (link_of("g1"), link_of("step 3")) == (None, None)
        scene.told()
        group, step = link_of("g1"), link_of("step 3")
        assert link_of("step 2") is None
        fire("train_step_ended", 3, 2, 4, 1, "completed", {})
        fire("owner_moved", "g1", "training", "trained", "")

        kept = scene.told()

        assert [(span.trace_id, span.span_id) for span in kept.named("quiesce.restore")] == named
        assert (kept.one("quiesce.group").trace_id, kept.one("quiesce.group").span_id) == group
        assert (kept.one("quiesce.train.step").trace_id, kept.one("quiesce.train.step").span_id) == step
        assert link_of("g1") is None
        fire("restore_started")
        cut = link_of("restore")
        (last,) = (span for span in scene.over().named("quiesce.restore") if span.cut_off)
        assert (last.trace_id, last.span_id) == cut

    def test_a_restored_group_lives_from_its_restore_on_whatever_is_told_of_it_first(self) -> None:
        """Its rollouts are parts of it; one that is trained first is no span without a length."""
        scene = Telling()
        fire = scene.hub.fire
        fire("restore_ended", "completed", "", {"rows": 5}, {"ledger": 1, "training": 1})
        restored = scene.clock.now_ns
        scene.clock.advance(1.0)
        fire("rollout_started", "generated", 1)
        fire("owner_moved", "trained", "training", "trained", "")
        fire("rollout_ended", "generated", 1, 5, "completed", 1)
        fire("owner_moved", "generated", "ledger", "buffer", "")
        fire("owner_moved", "new", "read", "ledger", "")
        scene.clock.advance(1.0)
        fire("owner_moved", "generated", "training", "trained", "")
        fire("owner_moved", "new", "training", "trained", "")

        kept = scene.told()

        groups = {str(span.attributes["quiesce.group_id"]): span for span in kept.named("quiesce.group")}
        rollout = kept.one("quiesce.rollout")
        assert (rollout.trace_id, rollout.parent_id) == (
            groups["generated"].trace_id,
            groups["generated"].span_id,
        )
        assert {name: span.attributes["quiesce.from"] for name, span in groups.items()} == {
            "generated": "ledger",
            "trained": "training",
            "new": "read",
        }
        ended = kept.one("quiesce.restore").end_ns
        assert groups["generated"].start_ns == groups["trained"].start_ns == ended
        assert groups["trained"].end_ns - ended == scene.clock.now_ns - restored - 1_000_000_000
        assert groups["new"].start_ns == ended + 1_000_000_000
        scene.over()


class TestGroups:
    """A group's life, findable by its id."""

    def live(self, scene: Telling, end: tuple[str, str, str]) -> None:
        """Tell of a group that is reserved, generated twice, and buffered."""
        fire = scene.hub.fire
        fire("owner_moved", "g1", "read", "ledger", "")
        for attempt, outcome in ((0, "failed"), (1, "completed")):
            scene.clock.advance(1.0)
            fire("rollout_started", "g1", attempt)
            scene.clock.advance(2.0)
            fire("rollout_ended", "g1", attempt, 2_000_000_000, outcome, 40)
        fire("tokens_reused", "g1", 12)
        fire("owner_moved", "g1", "ledger", "buffer", "")
        fire("owner_moved", "g1", *end)

    def test_from_reserved_to_trained(self) -> None:
        """Its rollouts are parts of it, its moves are events."""
        scene = Telling()
        self.live(scene, ("training", "trained", ""))

        kept = scene.told()

        group = kept.one("quiesce.group")
        assert group.attributes["quiesce.group_id"] == "g1"
        assert status(group) == ("ok", "completed")
        assert group.end_ns - group.start_ns == 6_000_000_000
        assert [event[0] for event in group.events] == [
            "owner moved",
            "tokens reused",
            "owner moved",
            "owner moved",
        ]
        failed, done = kept.named("quiesce.rollout")
        assert failed.parent_id == done.parent_id == group.span_id
        assert (status(failed), status(done)) == (("error", "failed"), ("ok", "completed"))
        assert (done.attributes["quiesce.attempt"], done.attributes["quiesce.tokens"]) == (1, 40)
        assert done.end_ns - done.start_ns == 2_000_000_000
        scene.over()

    @pytest.mark.parametrize(
        "reason, expected",
        [
            ("failed", ("error", "failed")),
            ("violation", ("error", "failed")),
            ("stale_abort", ("", "cancelled")),
            ("evicted", ("", "cancelled")),
        ],
    )
    def test_a_dropped_group_says_why(self, reason: str, expected: tuple[str, str]) -> None:
        """What went wrong is an error; what the sampler gave up is not."""
        scene = Telling()
        self.live(scene, ("buffer", "dropped", reason))

        group = scene.told().one("quiesce.group")

        assert status(group) == expected
        assert (group.attributes["quiesce.end"], group.attributes["quiesce.reason"]) == ("dropped", reason)
        scene.over()

    def test_cleanup_is_a_fresh_root_linked_to_the_calls_whose_keys_it_carries(self) -> None:
        """It serves many calls and belongs to none."""
        scene = Telling()
        for group in ("g1", "g2", "g3"):
            scene.hub.fire("owner_moved", group, "read", "ledger", "")
            scene.hub.fire("rollout_started", group, 0)
            scene.hub.fire("rollout_ended", group, 0, 5, "completed", 1)
        scene.hub.fire("clear_ended", "0", 2, 8, 900, "completed", (("g1", 0), ("g3", 0), ("unknown", 0)))

        kept = scene.told()

        batch = kept.one("quiesce.cleanup.batch")
        calls = {span.attributes["quiesce.group_id"]: span for span in kept.named("quiesce.rollout")}
        assert batch.links == tuple((calls[name].trace_id, calls[name].span_id) for name in ("g1", "g3"))
        assert batch.parent_id == 0
        assert batch.trace_id not in {span.trace_id for span in calls.values()}
        assert batch.attributes["quiesce.keys"] == 8
        scene.over()


class TestTraining:
    """Steps and weights."""

    def test_a_step_runs_from_its_start_to_its_end(self) -> None:
        """A step whose start nobody told (a trainer of one's own) is placed by its length."""
        scene = Telling()
        scene.hub.fire("train_step_started", 3, 2)
        scene.clock.advance(4.0)
        scene.hub.fire("train_step_ended", 3, 2, 3_900_000_000, 16, "completed", {"reward": 1.0})
        scene.hub.fire("train_step_ended", 4, 3, 1_000_000_000, 16, "failed", {})
        scene.hub.fire("weight_synced", 3, 500, "cancelled")

        kept = scene.told()

        whole, placed = kept.named("quiesce.train.step")
        assert whole.end_ns - whole.start_ns == 4_000_000_000
        assert placed.end_ns - placed.start_ns == 1_000_000_000
        assert whole.attributes["quiesce.groups"] == 16
        assert (status(whole), status(placed)) == (("ok", "completed"), ("error", "failed"))
        assert status(kept.one("quiesce.weight_sync")) == ("", "cancelled")
        scene.over()


class TestTheEnd:
    """What is open is exported, marked as cut off."""

    def test_everything_that_is_open_is_ended_there(self) -> None:
        """Save, phase, window, step, rollout and group; their durations say nothing, and the mark says so."""
        scene = Telling()
        fire = scene.hub.fire
        fire("owner_moved", "g1", "read", "ledger", "")
        fire("rollout_started", "g1", 0)
        fire("train_step_started", 3, 2)
        fire("phase_started", "cut", "fence")
        fire("window_requested", "cut", scene.clock.now_ns)
        fire("window_opened", "cut", 0, (), scene.clock.now_ns)
        scene.clock.advance(1.0)

        kept = scene.over()

        assert [span.name for span in kept.found] == [
            "quiesce.checkpoint.drain",
            "quiesce.checkpoint.exclusive",
            "quiesce.window",
            "quiesce.checkpoint.fence",
            "quiesce.checkpoint",
            "quiesce.train.step",
            "quiesce.rollout",
            "quiesce.group",
        ]
        cut = kept.found[1:]  # the drain was over
        assert all(span.cut_off and span.attributes["quiesce.cut_off"] is True for span in cut)
        assert not any("quiesce.outcome" in span.attributes or span.status for span in cut)
        assert not kept.found[0].cut_off

    def test_what_is_told_at_its_end_alone_is_cut_off_all_the_same(self) -> None:
        """Gates, cleanup, weights and a restore: from their beginning to here, and none that had ended."""
        scene = Telling()
        fire = scene.hub.fire
        for worker in ("0", "1"):
            fire("gate_closing", worker, 1, "1.1")
            fire("clear_started", worker, 2, 8)
        fire("weight_sync_started", 6)
        fire("weight_synced", 6, 5, "completed")
        fire("gate_closed", "1", 3, "1.1", 5, "closed")
        fire("clear_ended", "1", 2, 8, 5, "completed", ())
        fire("weight_sync_started", 7)
        fire("restore_started")
        fire("phase_started", "cut", "fence")
        scene.told()
        scene.clock.advance(3.0)

        cut = {span.name: span for span in scene.over().found if span.cut_off}

        fence = cut["quiesce.checkpoint.fence"]
        assert cut["quiesce.gate.close"].parent_id == fence.span_id
        told = {
            name: {key: value for key, value in span.attributes.items() if key != "quiesce.cut_off"}
            for name, span in cut.items()
        }
        assert told == {
            "quiesce.gate.close": {"quiesce.worker": "0", "quiesce.epoch": "1.1"},
            "quiesce.cleanup.batch": {"quiesce.worker": "0", "quiesce.keys": 8},
            "quiesce.weight_sync": {"quiesce.version": 7},
            "quiesce.restore": {},
            "quiesce.checkpoint.fence": {"quiesce.cut_id": "cut"},
            "quiesce.checkpoint": {"quiesce.cut_id": "cut"},
        }
        assert {span.end_ns - span.start_ns for span in cut.values()} == {3_000_000_000}
        assert {span.status for span in cut.values()} == {""}

    @in_virtual_time
    async def test_a_drain_that_hangs_names_who_holds_it_up(self) -> None:
        """It and its window name the holder, and the window is linked to the slots that are open and to one that left."""
        scene = Telling()
        barrier = DataPlaneCheckpointBarrier(hub=scene.hub, clock=scene.clock)
        other = DataPlaneCheckpointBarrier(hub=scene.hub, clock=scene.clock)
        order = list[str]()
        visitors = {
            name: Visitor(order, name, where.mutation(kind))
            for name, where, kind in (
                ("first", barrier, "retry"),
                ("leaves", barrier, "retry"),
                ("elsewhere", other, "admission"),
            )
        }
        await settle()
        scene.clock.advance(1.0)
        visitors["second"] = Visitor(order, "second", barrier.mutation("retry"))
        await settle()
        window = Visitor(order, "window", barrier.checkpoint())
        await settle()
        scene.clock.advance(2.0)
        visitors["leaves"].leave()
        await settle()
        scene.clock.advance(3.0)

        kept = scene.over()

        drain, asked = kept.one("quiesce.checkpoint.drain"), kept.one("quiesce.window")
        holder = {
            "quiesce.last_holder.kind": "retry",
            "quiesce.last_holder.task": "first",
            "quiesce.last_holder.seconds": 5.0,
        }
        assert drain.cut_off
        assert asked.cut_off
        assert drain.attributes.items() >= holder.items()
        assert asked.attributes.items() >= {"quiesce.delayed_by": 3, **holder}.items()
        delaying = {
            (span.trace_id, span.span_id)
            for span in kept.named("quiesce.slot")
            if span.attributes["quiesce.kind"] == "retry"
        }
        assert len(delaying) == 3
        assert set(asked.links) == delaying
        for visitor in (*visitors.values(), window):
            visitor.leave()
            await settle()

    @in_virtual_time
    async def test_a_capture_that_hangs_names_who_held_its_drain_up(self) -> None:
        """That was known before."""
        scene = Telling()
        barrier = DataPlaneCheckpointBarrier(hub=scene.hub, clock=scene.clock)
        order = list[str]()
        holder = Visitor(order, "holder", barrier.mutation("retry"))
        await settle()
        window = Visitor(order, "window", barrier.checkpoint())
        await settle()
        scene.clock.advance(2.0)
        holder.leave()
        await settle()

        kept = scene.over()

        told, slot = kept.one("quiesce.window"), kept.one("quiesce.slot")
        assert told.cut_off
        assert told.attributes["quiesce.last_holder.task"] == "holder"
        assert told.links == ((slot.trace_id, slot.span_id),)
        window.leave()
        await settle()

    @in_virtual_time
    async def test_slots_that_are_open_or_wait_are_told_as_cut_off(self) -> None:
        """With what they waited so far, and the window that they wait for."""
        scene = Telling()
        barrier = DataPlaneCheckpointBarrier(hub=scene.hub, clock=scene.clock)
        order = list[str]()
        held = Visitor(order, "held", barrier.mutation("admission"))
        await settle()
        scene.clock.advance(1.0)
        window = Visitor(order, "window", barrier.checkpoint())
        await settle()
        waits = Visitor(order, "waits", barrier.mutation("retry"))
        await settle()
        scene.clock.advance(2.0)

        kept = scene.over()

        slots = {span.attributes["quiesce.kind"]: span for span in kept.named("quiesce.slot")}
        assert {kind: (span.end_ns - span.start_ns) / 1e9 for kind, span in slots.items()} == {
            "admission": 3.0,
            "retry": 2.0,
        }
        assert all(span.cut_off and span.attributes["quiesce.cut_off"] is True for span in slots.values())
        asked = kept.one("quiesce.window")
        assert slots["retry"].links == ((asked.trace_id, asked.span_id),)
        assert slots["retry"].attributes["quiesce.held"] is False
        assert slots["admission"].links == ()
        for visitor in (held, window, waits):
            visitor.leave()
            await settle()

    def test_tables_are_bounded(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Groups, cuts and rollouts that never end do not pile up: the oldest is ended as cut off."""
        for module, limit in (
            (story_groups, "_GROUPS"),
            (story_groups, "_ROLLOUTS"),
            (story_saves, "_CUTS"),
            (story_windows, "_WINDOWS"),
        ):
            monkeypatch.setattr(module, limit, 4)
        scene = Telling()
        for number in range(10):
            scene.hub.fire("owner_moved", f"g{number}", "read", "ledger", "")
            scene.hub.fire("rollout_started", f"g{number}", 0)
            scene.hub.fire("phase_started", f"c{number}", "fence")
            scene.hub.fire("window_requested", f"c{number}", number)

        kept = scene.told()

        for name in ("quiesce.group", "quiesce.rollout", "quiesce.checkpoint", "quiesce.window"):
            assert len(kept.named(name)) == 6
        assert all(span.cut_off for span in kept.found)
        scene.over()


def everything(scene: Telling) -> None:
    """Have every kind of span told at least once, with every attribute."""
    fire, clock = scene.hub.fire, scene.clock
    fire("slot_wait_abandoned", "retry", 9, "cancelled", clock.now_ns)
    fire("owner_moved", "g1", "read", "ledger", "")
    fire("rollout_started", "g1", 0)
    fire("rollout_ended", "g1", 0, 5, "completed", 1)
    fire("owner_moved", "g1", "training", "trained", "")
    fire("train_step_started", 1, 0)
    fire(
        "train_step_ended",
        1,
        0,
        5,
        1,
        "completed",
        dict.fromkeys(("reward", "loss", "kl", "staleness", "speed"), 0.5),
    )
    fire("weight_synced", 1, 5, "completed")
    fire("clear_ended", "0", 1, 1, 5, "completed", (("g1", 0),))
    fire("restore_ended", "completed", "", {"rows": 5}, {})
    fire("phase_started", "cut", "fence")
    fire("gate_closed", "0", 1, "1.1", 5, "closed")
    fire("phase_ended", "cut", "fence", 5, "completed")
    fire("window_requested", "cut", 1)
    fire("window_opened", "cut", 1, (("retry", "task", 0, 1),), 2)
    fire("cut_part_captured", "cut", "rows", 1)
    fire("window_closed", "cut", 1, 1, "completed", 3)
    for phase in ("verify", "stage", "write", "publish"):
        fire("phase_started", "cut", phase)
        if phase == "write":
            fire("file_synced", "cut", 5, 9)
        fire("phase_ended", "cut", phase, 5, "completed")
    fire("checkpoint_ended", "cut", 1, "failed", "disk", {}, 0, 0)
    fire("phase_started", "open", "fence")


class TestCatalogue:
    """Spans and the catalogue say the same, both ways."""

    def test_every_span_of_the_catalogue_is_made_and_no_other(self) -> None:
        """With exactly its attributes."""
        scene = Telling()
        everything(scene)
        slots: Callable[..., None] = scene.hub.fire
        slots("slot_closed", "retry", 0, 5, "completed", scene.clock.now_ns)

        found: dict[str, set[str]] = {}
        for span in scene.over().found:
            found.setdefault(span.name, set()).update(span.attributes)

        common = set(names.COMMON_ATTRIBUTES)
        assert {name: keys - common for name, keys in found.items()} == {
            spec.name: set(spec.attributes) for spec in names.SPANS.values()
        }
        assert common <= set().union(*found.values())

    def test_parents_are_those_of_the_catalogue(self) -> None:
        """And links are where the catalogue says that there are some."""
        scene = Telling()
        everything(scene)

        kept = scene.over()

        by_id = {span.span_id: span.name for span in kept.found}
        for span in kept.found:
            assert by_id.get(span.parent_id, "") == names.SPANS[span.name].parent
            assert not span.links or names.SPANS[span.name].links
        assert all(names.span_spec(spec.parent) for spec in names.SPANS.values() if spec.parent)
