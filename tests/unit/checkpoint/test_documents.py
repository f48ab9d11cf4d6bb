"""The documents of a cut: exact both ways, and strict about everything else."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from quiesce.checkpoint.cut import PARTS, PartStamp
from quiesce.checkpoint.documents import (
    DOCUMENTS,
    from_documents,
    groups_by_owner,
    ledger_digest,
    parse_manifest,
    rows_metadata,
    seal_manifest,
    to_documents,
)
from quiesce.errors import DocumentError, UnencodableStateError
from tests.unit.checkpoint.cuts import admitted, base64_of, clean_cut, entry, manifest_for, ref, reserved

Body = Any


def resealed(body: Body) -> bytes:
    """Return a manifest's bytes after a change to its body, with a digest that fits."""
    return seal_manifest({key: value for key, value in body.items() if key != "sha256"})


def broken(name: str, change: Callable[[Body], object]) -> DocumentError:
    """Return the error that reading ends in after a change to one document of a whole cut."""
    state = clean_cut()
    contents = to_documents(state)
    body = json.loads(contents[name])
    change(body)
    contents[name] = json.dumps(body).encode()
    with pytest.raises(DocumentError) as caught:
        from_documents(contents.__getitem__, manifest_for(state))
    return caught.value


def setter(*path: str | int, to: object) -> Callable[[Body], None]:
    """Return a change that sets a value at a path."""

    def change(body: Body) -> None:
        for step in path[:-1]:
            body = body[step]
        body[path[-1]] = to

    return change


def test_a_cut_comes_back_exactly() -> None:
    """Everything that a restore needs survives, the loader's own state included."""
    state = clean_cut()

    found = from_documents(to_documents(state).__getitem__, manifest_for(state))

    assert found == state


def test_a_loader_state_with_tensors_comes_back() -> None:
    """A torch loader's state holds tensors, which JSON does not know."""
    import torch

    state = clean_cut()
    generator = torch.Generator().manual_seed(5).get_state()
    state = replace(state, position=replace(state.position, loader={"rng": generator}))

    found = from_documents(to_documents(state).__getitem__, manifest_for(state))

    assert torch.equal(found.position.loader["rng"], generator)


def test_equal_cuts_give_equal_bytes() -> None:
    """Mappings whose order means nothing are sorted, so digests can be compared."""
    one, other = clean_cut(), clean_cut()
    shuffled = replace(other.ready[0], stats=dict(reversed(list(other.ready[0].stats.items()))))
    other = replace(other, ready=(shuffled, *other.ready[1:]))

    assert to_documents(one) == to_documents(other)


def test_the_ledger_is_written_without_what_the_buffer_owns() -> None:
    """The buffer's copy always wins, on disk as well."""
    state = clean_cut()
    overlap = admitted(4, target_step=7, admission_id=7)

    written = to_documents(replace(state, ledger=(overlap, *state.ledger)))

    assert written["ledger.json"] == to_documents(state)["ledger.json"]


def test_a_reward_that_is_not_finite_costs_no_save() -> None:
    """NaN in a group's numbers is stored as what it is."""
    state = clean_cut()
    odd = replace(state.ready[0], stats={"reward": float("inf")})
    state = replace(state, ready=(odd, *state.ready[1:]))

    assert from_documents(to_documents(state).__getitem__, manifest_for(state)) == state


def test_a_loader_state_that_cannot_be_stored_is_named() -> None:
    """The error names the path in the state, before anything is published."""
    state = clean_cut()
    state = replace(state, position=replace(state.position, loader={"open": object()}))

    with pytest.raises(UnencodableStateError, match=r"\$\.loader\.open"):
        to_documents(state)


@pytest.mark.parametrize(
    "change",
    [
        {"ledger": (admitted(7), admitted(7))},
        {"ledger": (replace(admitted(7), start_version=None),)},
        {"ledger": (replace(reserved(7), target_step=3),)},
        {"ready": (replace(entry(4), attempt=1),)},
        {"ready": (replace(entry(4), keys=tuple(reversed(entry(4).keys))),)},
        {"incarnation": 4},
    ],
    ids=lambda change: next(iter(change)),
)
def test_a_cut_that_could_not_be_read_back_is_refused_when_it_is_written(change: dict[str, Any]) -> None:
    """Writing reads its own output, so an unreadable checkpoint is never published."""
    with pytest.raises(DocumentError):
        to_documents(replace(clean_cut(), **change))


@pytest.mark.parametrize("name", DOCUMENTS)
def test_every_document_refuses_unknown_and_missing_fields(name: str) -> None:
    """Both name the file and the field, for the common fields and the document's own."""
    fields = list(json.loads(to_documents(clean_cut())[name]))

    unknown = broken(name, setter("surprise", to=1))
    missing = [broken(name, lambda body, field=field: body.pop(field)) for field in fields]  # type: ignore[misc]  # a lambda's default has no type

    assert (unknown.file, "surprise" in unknown.problem) == (name, True)
    assert all(
        error.file == name and field in str(error) for field, error in zip(fields, missing, strict=True)
    )


@pytest.mark.parametrize("name", DOCUMENTS)
@pytest.mark.parametrize("version", [0, 2, True, "1", None, 1.0])
def test_another_schema_version_is_refused_before_anything_else(name: str, version: object) -> None:
    """Fields of a version that is not known mean nothing."""
    error = broken(name, lambda body: (body.clear(), body.update(schema_version=version)))

    assert (error.file, error.path) == (name, "$.schema_version")


@pytest.mark.parametrize(
    "name, path, value, where",
    [
        ("sampler.json", ("cursor",), True, "$.cursor"),
        ("sampler.json", ("cursor",), -2, "$.cursor"),
        ("sampler.json", ("cursor",), 1.0, "$.cursor"),
        ("sampler.json", ("admissions",), -1, "$.admissions"),
        ("sampler.json", ("admissions",), 1 << 60, "$.admissions"),
        ("sampler.json", ("stamps_target_steps",), 1, "$.stamps_target_steps"),
        ("sampler.json", ("name",), "../x", "$.name"),
        ("sampler.json", ("name",), None, "$.name"),
        ("sampler.json", ("document",), "ledger", "$.document"),
        ("sampler.json", ("cut_id",), "a b", "$.cut_id"),
        ("sampler.json", ("mutation_version",), False, "$.mutation_version"),
        ("position.json", ("epoch",), False, "$.epoch"),
        ("position.json", ("position",), -1, "$.position"),
        ("position.json", ("exhausted",), 0, "$.exhausted"),
        ("position.json", ("loader",), {"$": "nothing"}, "$.loader.$"),
        ("accounting.json", ("closed", "epochs"), True, "$.closed.epochs"),
        ("accounting.json", ("closed", "dropped"), {"bored": 1}, "$.closed.dropped"),
        ("accounting.json", ("closed", "dropped"), {"failed": -1}, "$.closed.dropped.failed"),
        ("accounting.json", ("open", 0, "epoch"), 2, "$.open[0]"),
        ("accounting.json", ("open", 0, "read"), 1 << 40, "$.open[0].trained"),
        ("accounting.json", ("open", 0, "read"), 8, "$.open[0].trained"),
        ("accounting.json", ("open", 0, "trained"), base64_of(b"\x00"), "$.open[0].trained"),
        ("accounting.json", ("open", 0, "dropped"), base64_of(b"\x00\x08"), "$.open[0].dropped"),
        ("accounting.json", ("open", 0, "trained"), "AB==", "$.open[0].trained"),
        ("accounting.json", ("open",), {}, "$.open"),
        ("accounting.json", ("mutation_version",), 40, "$.cut_id"),
        ("spares.json", ("spares", 0, "index"), True, "$.spares[0].index"),
        ("spares.json", ("spares", 0), [1, 9, 91], "$.spares[0]"),
        ("spares.json", ("spares",), None, "$.spares"),
        ("buffer.json", ("ready", 0, "group_id"), "a/b", "$.ready[0].group_id"),
        ("buffer.json", ("ready", 0, "attempt"), 1 << 20, "$.ready[0].attempt"),
        ("buffer.json", ("ready", 0, "start_version"), None, "$.ready[0].start_version"),
        ("buffer.json", ("ready", 0, "target_step"), "7", "$.ready[0].target_step"),
        ("buffer.json", ("ready", 0, "keys", 1), "i00000003/x", "$.ready[0].keys[1]"),
        (
            "buffer.json",
            ("ready", 0, "keys", 1),
            "i00000003/e001-p0000004/a00/g000/final",
            "$.ready[0].keys[1]",
        ),
        (
            "buffer.json",
            ("ready", 0, "keys", 0),
            "i00000003/e001-p0000004/a00/g000/c000000",
            "$.ready[0].keys[0]",
        ),
        (
            "buffer.json",
            ("ready", 0, "keys", 0),
            "i00000002/e001-p0000004/a00/g000/final",
            "$.ready[0].keys[0]",
        ),
        ("buffer.json", ("ready", 0, "stats", "reward"), True, "$.ready[0].stats.reward"),
        (
            "buffer.json",
            ("ready", 0, "stats", "reward"),
            {"$": "bytes", "base64": ""},
            "$.ready[0].stats.reward",
        ),
        ("buffer.json", ("claimed", 0, "prompt"), {"epoch": 1, "position": 6}, "$.claimed[0].prompt"),
        ("ledger.json", ("groups", 0, "phase"), "done", "$.groups[0].phase"),
        ("ledger.json", ("groups", 0, "phase"), "reserved", "$.groups[0].target_step"),
        ("ledger.json", ("groups", 2, "phase"), "admitted", "$.groups[2].start_version"),
        ("ledger.json", ("groups", 0, "admission_id"), True, "$.groups[0].admission_id"),
        ("ledger.json", ("groups", 0, "group_id"), "é", "$.groups[0].group_id"),
    ],
)
def test_a_value_of_the_wrong_kind_is_refused_by_file_and_path(
    name: str, path: tuple[str | int, ...], value: object, where: str
) -> None:
    """A bool is no integer, counters are not negative, bitmaps fit, keys belong to their group."""
    error = broken(name, setter(*path, to=value))

    assert (error.file, error.path) == (name, where)


@pytest.mark.parametrize(
    "name, change, where",
    [
        ("ledger.json", lambda body: body["groups"].append(body["groups"][0]), "$.groups[3]"),
        ("spares.json", lambda body: body["spares"].append(body["spares"][0]), "$.spares[1]"),
        ("buffer.json", lambda body: body["ready"].append(body["ready"][0]), "$.ready[2]"),
        ("buffer.json", lambda body: body["claimed"].append(body["ready"][0]), "$.claimed[1]"),
    ],
)
def test_a_group_that_stands_twice_in_a_document_is_refused(
    name: str, change: Callable[[Body], object], where: str
) -> None:
    """The second place is named."""
    error = broken(name, change)

    assert (error.file, error.path) == (name, where)
    assert "twice" in error.problem


def test_parts_of_another_cut_come_back_with_their_own_stamps() -> None:
    """A mixed checkpoint is not repaired in silence: the invariant that judges the stamps sees them."""
    state = clean_cut()
    mixed = replace(state, stamps={**state.stamps, "ledger": PartStamp("cut-z", 40)})

    found = from_documents(to_documents(mixed).__getitem__, manifest_for(mixed))

    assert found.stamps["ledger"] == PartStamp("cut-z", 40)
    assert set(found.stamps) == set(PARTS)


def test_a_manifest_comes_back_exactly() -> None:
    """Files included, whatever order they were written in."""
    manifest = manifest_for(clean_cut())

    found = parse_manifest(manifest.to_bytes())

    assert replace(found, files=()) == replace(manifest, files=())
    assert sorted(found.files, key=lambda file: file.name) == sorted(
        manifest.files, key=lambda file: file.name
    )


@pytest.mark.parametrize(
    "name",
    [
        "/etc/passwd",
        "../step_6/ledger.json",
        "trainer/../../x",
        "trainer/..",
        "./x",
        "a//b",
        "a/",
        "",
        "a\\b",
        "a\x00b",
        "a b",
        "é",
        "x" * 129,
        "manifest.json",
    ],
)
def test_a_file_name_that_could_leave_the_folder_is_refused(name: str) -> None:
    """Absolute paths, parents, empty components and anything unusual; and the manifest itself."""
    body = json.loads(manifest_for(clean_cut()).to_bytes())
    body["files"][name] = {"size": 1, "sha256": "0" * 64}

    with pytest.raises(DocumentError) as caught:
        parse_manifest(resealed(body))

    assert caught.value.path.startswith("$.files")


@pytest.mark.parametrize(
    "name", ["trainer/.metadata", "trainer/__0_0.distcp", "rows-00000.safetensors", "a/b/c/d"]
)
def test_an_ordinary_file_name_is_taken(name: str) -> None:
    """Hidden files and folders of a trainer's own format are fine."""
    body = json.loads(manifest_for(clean_cut()).to_bytes())
    body["files"][name] = {"size": 1, "sha256": "0" * 64}

    assert name in {file.name for file in parse_manifest(resealed(body)).files}


@pytest.mark.parametrize(
    "path, value, where",
    [
        (("step",), True, "$.step"),
        (("step",), -1, "$.step"),
        (("trainer_version",), 1.0, "$.trainer_version"),
        (("mutation_version",), None, "$.mutation_version"),
        (("cut_id",), "", "$.cut_id"),
        (("created",), "yesterday", "$.created"),
        (("lineage", "parent_cut"), 3, "$.lineage.parent_cut"),
        (("lineage", "incarnation"), "3", "$.lineage.incarnation"),
        (("files", "ledger.json", "sha256"), "ABC", "$.files.ledger.json.sha256"),
        (("files", "ledger.json", "size"), -1, "$.files.ledger.json.size"),
        (("ledger", "count"), True, "$.ledger.count"),
        (("rows", "bytes"), [], "$.rows.bytes"),
        (("groups", "ledger"), False, "$.groups.ledger"),
        (("groups",), {"ledger": 1}, "$.groups"),
    ],
)
def test_a_manifest_value_of_the_wrong_kind_is_refused_by_path(
    path: tuple[str, ...], value: object, where: str
) -> None:
    """As strict as the documents."""
    body = json.loads(manifest_for(clean_cut()).to_bytes())
    setter(*path, to=value)(body)

    with pytest.raises(DocumentError) as caught:
        parse_manifest(resealed(body))

    assert (caught.value.file, caught.value.path) == ("manifest.json", where)


@pytest.mark.parametrize("name", DOCUMENTS)
def test_a_manifest_that_lists_no_such_document_is_refused_by_name(name: str) -> None:
    """A checkpoint without one of its parts is none."""
    body = json.loads(manifest_for(clean_cut()).to_bytes())
    del body["files"][name]

    with pytest.raises(DocumentError, match=name):
        parse_manifest(resealed(body))


@pytest.mark.parametrize("change", [{"trainer_version": 6}, {"created": "2026-01-02"}, {"sha256": "0" * 64}])
def test_a_manifest_that_was_changed_is_found_by_its_own_digest(change: dict[str, object]) -> None:
    """No other file carries the manifest's digest, so it carries its own: a flipped digit is no other version."""
    body = json.loads(manifest_for(clean_cut()).to_bytes()) | change

    with pytest.raises(DocumentError, match="has changed"):
        parse_manifest(json.dumps(body).encode())


def test_the_ledger_digest_tells_ledgers_apart() -> None:
    """Any field of any record, and their order, changes it; equal ledgers share it."""
    records = clean_cut().ledger
    changed = (replace(records[0], attempt=1), *records[1:])

    digests = {
        ledger_digest(ledger) for ledger in (records, changed, tuple(reversed(records)), records[:2], ())
    }

    assert len(digests) == 5
    assert ledger_digest(list(records)) in digests


def test_row_files_carry_the_cut_and_the_ledger() -> None:
    """The seal of the seed: digest and count of the ledger, beside the rows."""
    state = clean_cut()

    metadata = rows_metadata(state)

    assert metadata == {
        "cut_id": "cut-b",
        "mutation_version": "41",
        "ledger_digest": ledger_digest(state.ledger),
        "ledger_count": "3",
    }


def test_groups_are_counted_by_owner() -> None:
    """Each group once, under the owner that wins."""
    state = clean_cut()
    overlap = replace(state, ledger=(*state.ledger, admitted(4, target_step=7, admission_id=7)))

    assert groups_by_owner(overlap) == {"ledger": 3, "spares": 1, "buffer": 2, "training": 1}
    assert ref(9) in state.spares
