"""The desk of a run that allows drills."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from quiesce import GenerationRequest, GroupResult, RunSummary
from quiesce.audit_config import AuditConfig
from quiesce.auditor import read_violations
from quiesce.drills.requests import (
    DESK_FILE,
    FOLDER,
    Answer,
    Request,
    answer_file,
    ask,
    desk_of,
    read_answer,
    write_json,
)
from quiesce.errors import DrillRefusedError
from quiesce.testing import in_virtual_time
from quiesce.training import TrainBatch
from tests.run_rig import Run, result_of, sampler, until


async def _generate(request: GenerationRequest) -> GroupResult:
    await asyncio.sleep(0.5)
    return result_of(request)


async def _step(_: TrainBatch) -> None:
    await asyncio.sleep(1.0)


@asynccontextmanager
async def a_run(path: Path, *, drills: bool = True, **options: object) -> AsyncIterator[Run]:
    """Run something that answers drills, until the end of the block."""
    given = {"save_every_steps": 3, "audit": AuditConfig(drills=drills), **options}
    run = Run(path, sampler("in_order"), prompts=400, generate=_generate, before_step=_step, options=given)
    controller = run.start()
    running = asyncio.create_task(controller.run())
    try:
        await until(lambda: controller.auditor)
        await controller.owners.steps_taken(4)
        yield run
    finally:
        controller.request_stop()
        summary: RunSummary = await running
        run.folder.close()
        assert not summary.save_failed


async def answered(path: Path, request: Request) -> Answer:
    """Wait for the last answer to a request."""
    while True:
        answer = read_answer(path / FOLDER, request.id)
        if answer is not None and answer.final:
            return answer
        await asyncio.sleep(0.1)


@in_virtual_time
async def test_a_request_is_done_and_the_run_goes_on(tmp_path: Path) -> None:
    """The answer has what fired; the record says by which drill; the desk goes with the run."""
    async with a_run(tmp_path):
        desk = desk_of(tmp_path)
        answer = await answered(tmp_path, ask(tmp_path, "early-cursor", patience=60.0))

    assert (desk["pid"], desk["incarnation"]) == (os.getpid(), 1)
    assert answer.state == "done"
    assert answer.result is not None
    assert answer.result.ok
    assert {record.evidence["drill"] for record in read_violations(tmp_path)} == {"early-cursor"}
    assert not (tmp_path / FOLDER / DESK_FILE).exists()


@in_virtual_time
async def test_requests_are_done_one_after_the_other(tmp_path: Path) -> None:
    """Two at once would be each other's surplus."""
    async with a_run(tmp_path):
        requests = [
            ask(tmp_path, name, patience=60.0)
            for name in ("trainer-version-goes-back", "mutation-version-goes-back")
        ]
        answers = [await answered(tmp_path, request) for request in requests]

    assert [answer.result is not None and answer.result.ok for answer in answers] == [True, True]


@in_virtual_time
async def test_what_cannot_be_done_is_refused_with_the_reason(tmp_path: Path) -> None:
    """No such drill, and nothing to break: the run is none the worse."""
    async with a_run(tmp_path):
        unknown = await answered(tmp_path, ask(tmp_path, "no-such-thing", patience=60.0))
        spares = await answered(tmp_path, ask(tmp_path, "popped-spare-is-lost", patience=60.0))

    assert (unknown.state, spares.state) == ("refused", "refused")
    assert "no-such-thing" in unknown.error
    assert "spare_prompts" in spares.error
    assert read_violations(tmp_path) == []


@in_virtual_time
async def test_a_request_of_an_earlier_incarnation_is_refused(tmp_path: Path) -> None:
    """What somebody asked of a run that was killed does not break the resumed one."""
    (tmp_path / FOLDER).mkdir()
    old = Request("d0000000000001-00000000", "early-cursor", 60.0, 1.0)
    async with a_run(tmp_path):
        write_json(
            tmp_path / FOLDER / f"{old.id}.json", {"drill": old.drill, "patience": 60, "asked_unix": 1.0}
        )
        answer = await answered(tmp_path, old)

    assert answer.state == "refused"
    assert "earlier incarnation" in answer.error
    assert read_violations(tmp_path) == []


@in_virtual_time
async def test_a_drill_that_the_end_of_the_run_cuts_short_is_answered(tmp_path: Path) -> None:
    """Whoever waits for it is told; nothing stays open."""
    async with a_run(tmp_path, save_every_steps=1000) as run:
        request = ask(tmp_path, "group-is-restored-twice", patience=60.0)
        sources = run.controller.drill_target().sources
        own = sources.sampler_state
        armed = ask(tmp_path, "part-of-another-cut", patience=6000.0)
        await answered(tmp_path, request)
        await until(lambda: sources.sampler_state is not own)

    answer = read_answer(tmp_path / FOLDER, armed.id)
    assert answer is not None
    assert answer.final
    assert sources.sampler_state is own


@in_virtual_time
async def test_a_run_without_drills_has_no_desk(tmp_path: Path) -> None:
    """It is refused where it is asked for, and nothing is left in its folder."""
    async with a_run(tmp_path, drills=False):
        with pytest.raises(DrillRefusedError, match=r"controller\.audit\.drills=true"):
            ask(tmp_path, "early-cursor", patience=60.0)

    assert not (tmp_path / FOLDER).exists()


@in_virtual_time
async def test_an_answer_is_whole_while_it_is_rewritten(tmp_path: Path) -> None:
    """A reader sees one state after the other, never half of one."""
    states = []
    async with a_run(tmp_path):
        request = ask(tmp_path, "early-cursor", patience=60.0)
        path = answer_file(tmp_path / FOLDER, request.id)
        while "done" not in states:
            if path.exists():
                states.append(json.loads(path.read_text())["state"])
            await asyncio.sleep(0.02)

    seen = list(dict.fromkeys(states))
    assert seen == [state for state in ("looking", "armed", "fired", "done") if state in seen]
    assert {"armed", "fired", "done"} <= set(seen)
