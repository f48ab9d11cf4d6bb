"""The audit: it proves a whole run from its files, and finds each way in which they can contradict each other."""

from __future__ import annotations

import argparse
import hashlib
import io
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from quiesce.checkpoint.audit import AuditReport, audit
from quiesce.checkpoint.documents import MANIFEST, seal_manifest
from quiesce.checkpoint.restore import RestoreTargets, load_newest, restore_into
from quiesce.cli.audit import main_audit, print_report
from quiesce.errors import UnusableAuditPathError
from quiesce.samplers import WindowedSampler
from quiesce.types import PromptRef
from tests.save_rig import Rig


async def resumed(path: Path) -> Rig:
    """Start the next incarnation of a run from its newest checkpoint."""
    rig = Rig(path, resume=True)
    loaded = load_newest(path)
    await restore_into(
        loaded,
        RestoreTargets(
            barrier=rig.barrier,
            sampler=WindowedSampler(rig.barrier),
            accounting=rig.accounting,
            spares=rig.spares,
            buffer=rig.buffer,
            ledger=rig.ledger,
            dataplane=rig.plane,
        ),
        incarnation=rig.run.incarnation,
    )
    state = loaded.state
    rig.run.record_restored(state)
    rig.cursor, rig.step, rig.position = state.sampler.cursor, state.step, state.position
    return rig


async def step(rig: Rig) -> None:
    """Read two prompts and train them."""
    await rig.train([await rig.finished(), await rig.finished()])


@pytest.fixture
async def run(tmp_path: Path) -> Path:
    """A run that was killed after an unsaved step, resumed and stopped; a group is ready, one in flight, one a spare."""
    path = tmp_path / "run"
    rig = Rig(path)
    await rig.save()
    await step(rig)
    await rig.save()
    await step(rig)  # never saved: the restore rolls it back, and its prompts are read again
    await rig.close()
    rig = await resumed(path)
    await step(rig)
    await step(rig)
    await rig.save()
    await step(rig)
    await rig.finished()
    await rig.read()
    ref = PromptRef(0, rig.position.position, 5)
    async with rig.barrier.mutation("prompt_reservation") as cut:
        rig.accounting.read(cut, [ref])
        rig.spares.add(cut, [ref])
        rig.position = type(rig.position)(0, ref.position + 1, exhausted=False, loader=None)
    await rig.save()
    await rig.close()
    return path


def newest(run: Path) -> Path:
    """Return the newest checkpoint's folder."""
    return run / "checkpoints" / "step_4"


def reseal(path: Path, name: str, change: Callable[[Any], object]) -> None:
    """Change a document, and give the manifest its new digest."""
    body = json.loads((path / name).read_bytes())
    change(body)
    content = json.dumps(body).encode()
    (path / name).write_bytes(content)
    manifest = json.loads((path / MANIFEST).read_bytes())
    del manifest["sha256"]
    manifest["files"][name] = {"size": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    (path / MANIFEST).write_bytes(seal_manifest(manifest))


def change_manifest(path: Path, change: Callable[[Any], object]) -> None:
    """Change a manifest, with a digest of its own that fits."""
    manifest = json.loads((path / MANIFEST).read_bytes())
    del manifest["sha256"]
    change(manifest)
    (path / MANIFEST).write_bytes(seal_manifest(manifest))


def names(report: AuditReport) -> set[str]:
    """Return the invariants that were found broken."""
    return {violation.invariant for violation in report.violations}


def contents(path: Path) -> dict[str, tuple[bytes, int]]:
    """Return every file under a folder with its content and its time of change."""
    return {
        str(file): (file.read_bytes(), file.stat().st_mtime_ns)
        for file in sorted(path.rglob("*"))
        if file.is_file()
    }


async def test_a_run_that_was_killed_and_resumed_is_whole(run: Path) -> None:
    """Nothing is found, every prompt is accounted for, and spares count as owned."""
    report = audit(run)

    assert report.ok
    assert report.violations == ()
    assert [item.path.name for item in report.checkpoints] == ["step_4", "step_3"]
    assert report.to_json()["prompts"] == {"read": 11, "trained": 8, "dropped": 0, "owned": 3}


async def test_an_audit_changes_nothing(run: Path) -> None:
    """Not a byte and not a time, also when it finds something."""
    (newest(run) / "ledger.json").write_bytes(b"{}")
    before = contents(run)

    audit(run)

    assert contents(run) == before
    assert newest(run).is_dir()


async def test_a_single_checkpoint_can_be_audited(run: Path) -> None:
    """By its own records, wherever it was copied to."""
    report = audit(newest(run))

    assert report.ok
    assert [item.step for item in report.checkpoints] == [4]
    assert report.prompts is not None
    assert report.prompts.owned == 3


async def test_the_folder_of_checkpoints_is_audited_with_the_runs_journal(run: Path) -> None:
    """As the run folder is."""
    assert audit(run / "checkpoints").to_json()["checkpoints"] == audit(run).to_json()["checkpoints"]


async def test_the_report_survives_json(run: Path) -> None:
    """With what a script needs to decide."""
    body = json.loads(json.dumps(audit(run).to_json(), allow_nan=False))

    assert set(body) >= {"ok", "violations", "checkpoints", "prompts"}
    assert body["checkpoints"][0]["groups"] == {"ledger": 1, "spares": 1, "buffer": 1, "training": 0}


@pytest.mark.parametrize(
    "name, change, invariant",
    [
        (
            "spares.json",
            lambda body: body["spares"].append({"epoch": 0, "position": 8, "index": 8}),
            "single_owner",
        ),
        ("spares.json", lambda body: body["spares"].clear(), "conservation"),
        ("ledger.json", lambda body: body["groups"].clear(), "conservation"),
        ("ledger.json", lambda body: body["groups"][0].update(target_step=99), "cursor_covers_buffer"),
        ("sampler.json", lambda body: body.update(admissions=2), "cursor_within_lookahead"),
        ("position.json", lambda body: body.update(mutation_version=1), "digest_matches"),
        ("buffer.json", lambda body: body.update(cut_id="another"), "cut_is_one_instant"),
        ("buffer.json", lambda body: body["ready"][0]["keys"].pop(), "rows_present"),
        ("ledger.json", lambda body: body["groups"][0].update(attempt=7), "digest_matches"),
    ],
)
async def test_a_contradiction_within_a_checkpoint_is_found(
    run: Path, name: str, change: Callable[[Any], object], invariant: str
) -> None:
    """Although every digest is right: the report names the invariant, and the run is not whole."""
    reseal(newest(run), name, change)

    report = audit(run)

    assert invariant in names(report)
    assert not report.ok


@pytest.mark.parametrize("part", ["ledger.json", "rows-00000.safetensors", "trainer/weights.bin", MANIFEST])
@pytest.mark.parametrize("how", ["damaged", "missing"])
async def test_a_broken_file_is_found_and_the_others_are_still_judged(run: Path, part: str, how: str) -> None:
    """An audit does not stop at the first finding, and prompts come from the newest readable checkpoint."""
    path = newest(run) / part
    if how == "missing":
        path.unlink()
    else:
        path.write_bytes(path.read_bytes() + b" ")

    report = audit(run)

    assert names(report) == {"digest_matches"}
    assert part in report.violations[0].message
    assert report.checkpoints[0].problem
    assert not report.checkpoints[1].problem
    assert report.to_json()["prompts"] == {"read": 6, "trained": 6, "dropped": 0, "owned": 0}


@pytest.mark.parametrize(
    "change, invariant",
    [
        (lambda body: body.update(trainer_version=1), "versions_grow"),
        (lambda body: body["lineage"].update(incarnation=1), "digest_matches"),
    ],
)
async def test_a_child_that_went_back_is_found(
    run: Path, change: Callable[[Any], object], invariant: str
) -> None:
    """Versions are compared with the parent that is kept."""
    change_manifest(newest(run), change)

    assert names(audit(run)) == {invariant}


async def test_a_child_that_forgot_a_trained_prompt_is_found(run: Path) -> None:
    """A bit that the parent has and the child lacks, although the child by itself adds up."""

    def forget(body: Any) -> None:  # noqa: ANN401 - any value
        epoch = body["open"][0]
        epoch["trained"], epoch["dropped"] = "/gA=", "AQA="
        epoch["reasons"] = {"failed": 1}

    reseal(newest(run), "accounting.json", forget)

    report = audit(run)

    assert names(report) == {"conservation"}
    assert any("no longer trained" in violation.message for violation in report.violations)


def edit_journal(run: Path, change: Callable[[list[dict[str, Any]]], object]) -> None:
    """Change the journal's records."""
    path = run / "lineage.jsonl"
    records = [json.loads(line) for line in path.read_text().splitlines()]
    change(records)
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


def trained(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the records of trained steps."""
    return [record for record in records if record["event"] == "trained"]


@pytest.mark.parametrize(
    "change, says",
    [
        (lambda records: records.remove(trained(records)[-1]), "no step of the lineage trained them"),
        (lambda records: trained(records)[-1]["groups"].append("e000-p0000000"), "trained more than once"),
        (lambda records: trained(records)[-1]["groups"].append("e000-p0000008"), "not counted as such"),
        (lambda records: trained(records)[-1]["groups"].append("stranger"), "not counted as such"),
        (
            lambda records: records.remove(next(r for r in records if r["event"] == "rolled_back")),
            "more than once",
        ),
        (lambda records: records.append({"event": "odd"}), "cannot be read"),
    ],
    ids=["unlisted", "twice", "uncounted", "stranger", "not rolled back", "unreadable"],
)
async def test_a_journal_that_contradicts_the_bitmaps_is_found(
    run: Path, change: Callable[[list[dict[str, Any]]], object], says: str
) -> None:
    """Exactly once along the surviving lineage, and equal to what the newest checkpoint counts."""
    edit_journal(run, change)

    report = audit(run)

    assert names(report) == {"conservation"}
    assert any(says in violation.message for violation in report.violations)


async def test_a_parent_that_the_journal_does_not_know_is_found(run: Path) -> None:
    """A checkpoint of another lineage under the right name."""
    edit_journal(
        run,
        lambda records: [
            r.update(parent_cut="other") for r in records if r["event"] == "published" and r["step"] == 4
        ],
    )

    assert names(audit(run)) == {"versions_grow"}


async def test_steps_after_the_newest_checkpoint_do_not_count_against_it(run: Path) -> None:
    """A run that was killed has trained what its next restore will roll back."""
    rig = await resumed(run)
    await step(rig)
    await rig.close()

    report = audit(run)

    assert report.ok
    assert report.to_json()["prompts"]["trained"] == 8


async def test_a_suspect_checkpoint_is_shown_and_does_not_count(run: Path) -> None:
    """It was never published; audited by itself, it fails."""
    import shutil

    suspect = run / "checkpoints" / "step_5.suspect"
    shutil.copytree(newest(run), suspect)
    change_manifest(suspect, lambda body: body.update(step=5))
    reseal(suspect, "spares.json", lambda body: body["spares"].clear())

    whole, alone = audit(run), audit(suspect)

    assert whole.ok
    assert [item.suspect for item in whole.checkpoints] == [True, False, False]
    assert any("step_5.suspect" in note for note in whole.notes)
    assert names(alone) == {"conservation"}


@pytest.mark.parametrize("what", ["nothing", "file", "empty", "other", "unreadable"])
async def test_a_path_that_cannot_be_audited_says_why(
    tmp_path: Path, what: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Exit code 2, one clear line, and the same in JSON."""
    path = tmp_path / "x"
    if what == "file":
        path.write_text("")
    elif what != "nothing":
        (path / "checkpoints").mkdir(parents=True)
    if what == "other":
        (path / "checkpoints").rmdir()
        (path / "data").mkdir()
    if what == "unreadable":

        def failing(path: object) -> None:
            raise PermissionError(13, "Permission denied")

        monkeypatch.setattr(os, "scandir", failing)

    with pytest.raises(UnusableAuditPathError):
        audit(path)
    code = main_audit(argparse.Namespace(path=path, json=True))

    out, err = capsys.readouterr()
    assert code == 2
    assert json.loads(out)["ok"] is False
    assert str(path) in err


async def test_the_command_exits_with_the_verdict(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """0 when everything holds, 1 on a violation; without a terminal there are no escape codes."""
    clean = main_audit(argparse.Namespace(path=run, json=False))
    said = capsys.readouterr().out
    reseal(newest(run), "spares.json", lambda body: body["spares"].clear())
    broken = main_audit(argparse.Namespace(path=run, json=True))
    body = json.loads(capsys.readouterr().out)

    assert (clean, broken) == (0, 1)
    assert "Everything holds." in said
    assert "11 read = 8 trained + 0 dropped + 3 owned" in said
    assert "\x1b" not in said
    assert (body["ok"], body["violations"][0]["invariant"]) == (False, "conservation")


async def test_the_table_names_what_is_wrong(run: Path) -> None:
    """For people: the checkpoint, the invariant and its sentence."""
    (newest(run) / "ledger.json").unlink()
    out = io.StringIO()

    print_report(audit(run), Console(file=out, width=200))

    assert "unreadable" in out.getvalue()
    assert "critical digest_matches: step_4: part ledger.json: it is missing" in out.getvalue()
    assert "1 critical violations, 0 warnings." in out.getvalue()
