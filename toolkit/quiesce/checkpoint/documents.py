"""The control state of a cut as JSON documents, one per part, and the manifest that binds them.

Rule: strict both ways. Reading refuses whatever the schema does not name: unknown and missing fields, a bool
where an integer belongs, other types, numbers out of range, ids that come twice; the error names the file and
the path in it. Writing reads its own output back before it returns, so that a checkpoint that could not be
read is never published.
Bytes are canonical: equal states give equal bytes. Nothing here suspends; it runs outside the window.

===================  ==================================================================================
document             holds
===================  ==================================================================================
``sampler.json``     name, dispatch cursor, committed admissions
``position.json``    how far the dataset counts as read, with the loader's own state
``accounting.json``  what became of every prompt that was read, same instant as the position
``spares.json``      the spare pool
``buffer.json``      finished groups with the keys of their rows; unstarted claims apart
``ledger.json``      groups in flight, without those that the buffer owns
``manifest.json``    what the checkpoint is, and size and SHA-256 of every file in it
===================  ==================================================================================
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final, TypeVar

from quiesce.accounting import AccountingState, ClosedEpochs, EpochAccount
from quiesce.checkpoint import codec
from quiesce.checkpoint.cut import CommittedPosition, CutState, PartStamp, SamplerState
from quiesce.checkpoint.reader import Node
from quiesce.dataplane.interface import FileDigest
from quiesce.errors import DocumentError, RowKeyError
from quiesce.types import DROP_REASONS, OWNERS, BufferEntry, GroupRecord, PromptRef, RowKey

__all__ = [
    "DOCUMENTS",
    "LEDGER_COUNT_KEY",
    "LEDGER_DIGEST_KEY",
    "MANIFEST",
    "SCHEMA_VERSION",
    "Manifest",
    "from_documents",
    "groups_by_owner",
    "ledger_digest",
    "parse_manifest",
    "rows_metadata",
    "seal_manifest",
    "to_documents",
]

SCHEMA_VERSION: Final = 1
"""Of every document; another version is refused, never guessed at."""

MANIFEST: Final = "manifest.json"
DOCUMENTS: Final = (
    "sampler.json",
    "position.json",
    "accounting.json",
    "spares.json",
    "buffer.json",
    "ledger.json",
)
"""The control documents, in the order of the cut."""

LEDGER_DIGEST_KEY: Final = "ledger_digest"
LEDGER_COUNT_KEY: Final = "ledger_count"

MAX_ATTEMPT: Final = 999_999
"""The largest that a row key can spell."""

T = TypeVar("T", PromptRef, BufferEntry, GroupRecord)

_STAMPED_BY: Final = {
    "cursor": "sampler.json",
    "position": "position.json",
    "spares": "spares.json",
    "buffer": "buffer.json",
    "ledger": "ledger.json",
}
_GENERATIONS: Final = 1_000_000  # what a row key can number
_GROUP_ID: Final = r"[A-Za-z0-9_.:-]{1,96}"
_CUT_ID: Final = r"[A-Za-z0-9_.:-]{1,128}"
_FILE_NAME: Final = (
    r"(?!\.\.?(?:/|$))[A-Za-z0-9._=+@-]{1,128}(?:/(?!\.\.?(?:/|$))[A-Za-z0-9._=+@-]{1,128}){0,7}"
)
_SHA256: Final = r"[0-9a-f]{64}"


@dataclass(frozen=True, slots=True)
class Manifest:
    """What a checkpoint is.

    Attributes:
        cut_id: The cut.
        incarnation: The incarnation of the run that captured it.
        parent_cut: The last published cut of the lineage, or None for the first.
        restored_from: The cut that this incarnation was restored from, or None.
        step: Trained steps.
        trainer_version: The trainer version.
        mutation_version: The barrier's mutation version.
        created: When it was written, ISO 8601 in UTC; for people only.
        files: Every file but the manifest: name relative to the folder, size, digest.
        ledger_digest: See :func:`ledger_digest`.
        ledger_count: Groups in the ledger's document.
        rows_count: Rows in all shards.
        rows_bytes: Bytes of all shards.
        rows_stamp: What proves that the rows belong to this cut.
        groups: Groups by owner.
    """

    cut_id: str
    incarnation: int
    parent_cut: str | None
    restored_from: str | None
    step: int
    trainer_version: int
    mutation_version: int
    created: str
    files: tuple[FileDigest, ...]
    ledger_digest: str
    ledger_count: int
    rows_count: int
    rows_bytes: int
    rows_stamp: PartStamp
    groups: Mapping[str, int] = field(hash=False)

    @property
    def row_files(self) -> tuple[str, ...]:
        """Names of the row shards, in order."""
        return tuple(sorted(file.name for file in self.files if _is_row_file(file.name)))

    def to_bytes(self) -> bytes:
        """Return the manifest's canonical bytes, sealed."""
        return seal_manifest(
            {
                "schema_version": SCHEMA_VERSION,
                "cut_id": self.cut_id,
                "lineage": {
                    "incarnation": self.incarnation,
                    "parent_cut": self.parent_cut,
                    "restored_from": self.restored_from,
                },
                "step": self.step,
                "trainer_version": self.trainer_version,
                "mutation_version": self.mutation_version,
                "created": self.created,
                "files": {
                    file.name: {"size": file.size, "sha256": file.sha256}
                    for file in sorted(self.files, key=lambda file: file.name)
                },
                "ledger": {"digest": self.ledger_digest, "count": self.ledger_count},
                "rows": {
                    "count": self.rows_count,
                    "bytes": self.rows_bytes,
                    "cut_id": self.rows_stamp.cut_id,
                    "mutation_version": self.rows_stamp.mutation_version,
                },
                "groups": {owner: self.groups[owner] for owner in OWNERS},
            }
        )


def seal_manifest(body: Mapping[str, Any]) -> bytes:
    """Return the canonical bytes of a manifest with its own SHA-256, which nothing else could carry."""
    return codec.to_bytes({**body, "sha256": hashlib.sha256(codec.to_bytes(dict(body))).hexdigest()})


def groups_by_owner(state: CutState) -> dict[str, int]:
    """Count the groups of a cut by owner; unstarted claims count as ``training``."""
    return {**state.captured_groups(), "ledger": len(state.ledger_minus_buffer())}


def ledger_digest(records: Iterable[GroupRecord]) -> str:
    """Return the SHA-256, in hex, of ledger records' canonical bytes, in order."""
    return hashlib.sha256(codec.to_bytes([_record(record) for record in records])).hexdigest()


def rows_metadata(state: CutState) -> dict[str, str]:
    """Return what every row shard carries in its own metadata: which cut, and which ledger, it belongs to."""
    records = state.ledger_minus_buffer()
    stamp = state.stamps["rows"]
    return {
        "cut_id": stamp.cut_id,
        "mutation_version": str(stamp.mutation_version),
        LEDGER_DIGEST_KEY: ledger_digest(records),
        LEDGER_COUNT_KEY: str(len(records)),
    }


# ---------------------------------------------------------------------------------------------------- writing


def to_documents(state: CutState) -> dict[str, bytes]:
    """Return the control documents of a cut: file name to canonical bytes.

    The ledger is written without the groups that the buffer owns.

    Raises:
        UnencodableStateError: If the loader's state holds something that is not stored.
        DocumentError: If the state could not be read back.
    """
    bodies: dict[str, tuple[str, dict[str, Any]]] = {
        "sampler.json": (
            "cursor",
            {
                "name": state.sampler.name,
                "cursor": state.sampler.cursor,
                "stamps_target_steps": state.sampler.stamps_target_steps,
                "admissions": state.sampler.admissions,
                "next_admission_id": state.sampler.next_admission_id,
            },
        ),
        "position.json": (
            "position",
            {
                "epoch": state.position.epoch,
                "position": state.position.position,
                "exhausted": state.position.exhausted,
                "loader": codec.encode(state.position.loader, path="$.loader"),
            },
        ),
        "accounting.json": ("position", _accounting(state.accounting)),
        "spares.json": ("spares", {"spares": [_prompt(ref) for ref in state.spares]}),
        "buffer.json": (
            "buffer",
            {
                "ready": [_entry(entry) for entry in state.ready],
                "claimed": [_entry(entry) for entry in state.claimed],
            },
        ),
        "ledger.json": ("ledger", {"groups": [_record(record) for record in state.ledger_minus_buffer()]}),
    }
    documents = {
        name: codec.to_bytes(
            {
                "schema_version": SCHEMA_VERSION,
                "document": name.removesuffix(".json"),
                "cut_id": state.stamps[part].cut_id,
                "mutation_version": state.stamps[part].mutation_version,
                **body,
            }
        )
        for name, (part, body) in bodies.items()
    }
    _parse(documents.__getitem__, state.incarnation)
    return documents


def _prompt(ref: PromptRef) -> dict[str, Any]:
    return {"epoch": ref.epoch, "position": ref.position, "index": ref.index}


def _record(record: GroupRecord) -> dict[str, Any]:
    return {
        "group_id": record.group_id,
        "admission_id": record.admission_id,
        "prompt": _prompt(record.prompt),
        "phase": record.phase,
        "target_step": record.target_step,
        "start_version": record.start_version,
        "attempt": record.attempt,
    }


def _entry(entry: BufferEntry) -> dict[str, Any]:
    return {
        "group_id": entry.group_id,
        "admission_id": entry.admission_id,
        "prompt": _prompt(entry.prompt),
        "attempt": entry.attempt,
        "target_step": entry.target_step,
        "start_version": entry.start_version,
        "generated_from": entry.generated_from,
        "generated_to": entry.generated_to,
        "keys": [key.encode() for key in entry.keys],
        # A reward that is not finite must not cost the save: the codec spells it out.
        "stats": {
            name: value if type(value) is int else codec.encode(float(value))
            for name, value in sorted(entry.stats.items())
        },
    }


def _accounting(account: AccountingState) -> dict[str, Any]:
    return {
        "closed": {
            "epochs": account.closed.epochs,
            "read": account.closed.read,
            "trained": account.closed.trained,
            "dropped": dict(sorted(account.closed.dropped.items())),
        },
        "open": [
            {
                "epoch": epoch.epoch,
                "read": epoch.read,
                "ended": epoch.ended,
                "trained": base64.b64encode(epoch.trained).decode("ascii"),
                "dropped": base64.b64encode(epoch.dropped).decode("ascii"),
                "reasons": dict(sorted(epoch.reasons.items())),
            }
            for epoch in account.open
        ],
    }


# ---------------------------------------------------------------------------------------------------- reading


def from_documents(read: Callable[[str], bytes], manifest: Manifest) -> CutState:
    """Read a cut back.

    Args:
        read: Returns the bytes of a control document by its file name; its errors pass through.
        manifest: The checkpoint's manifest.

    Raises:
        DocumentError: If a document is not exactly what its schema says.
    """
    parts = _parse(read, manifest.incarnation)
    return CutState(
        cut_id=manifest.cut_id,
        mutation_version=manifest.mutation_version,
        incarnation=manifest.incarnation,
        parent_cut=manifest.parent_cut,
        step=manifest.step,
        trainer_version=manifest.trainer_version,
        sampler=parts.sampler,
        position=parts.position,
        accounting=parts.accounting,
        spares=parts.spares,
        ready=parts.ready,
        claimed=parts.claimed,
        ledger=parts.ledger,
        stamps={**parts.stamps, "rows": manifest.rows_stamp},
    )


def parse_manifest(data: bytes, *, file: str = MANIFEST) -> Manifest:
    """Read a manifest.

    Args:
        data: Its bytes.
        file: Named in errors.

    Raises:
        DocumentError: If it is not exactly what its schema says, its own digest included; also for a file name
            that leaves the folder.
    """
    root = Node(file, "$", codec.parse_json(data, file=file))
    root.version(SCHEMA_VERSION)
    fields = root.fields(
        "schema_version cut_id lineage step trainer_version mutation_version created files ledger rows groups "
        "sha256"
    )
    if seal_manifest({name: value for name, value in root.value.items() if name != "sha256"}) != data:
        fields["sha256"].refuse("the manifest has changed since it was written")
    lineage = fields["lineage"].fields("incarnation parent_cut restored_from")
    ledger = fields["ledger"].fields("digest count")
    rows = fields["rows"].fields("count bytes cut_id mutation_version")
    files = []
    for name, node in fields["files"].mapping(_FILE_NAME):
        if name == MANIFEST:
            node.refuse("a manifest does not list itself")
        of_file = node.fields("size sha256")
        files.append(FileDigest(name, of_file["size"].integer(), of_file["sha256"].text(_SHA256)))
    known = {file.name for file in files}
    for name in DOCUMENTS:
        if name not in known:
            fields["files"].refuse(f"{name} is missing")
    groups = fields["groups"].fields(" ".join(OWNERS))
    return Manifest(
        cut_id=fields["cut_id"].text(_CUT_ID),
        incarnation=lineage["incarnation"].integer(),
        parent_cut=lineage["parent_cut"].optional(lambda node: node.text(_CUT_ID)),
        restored_from=lineage["restored_from"].optional(lambda node: node.text(_CUT_ID)),
        step=fields["step"].integer(),
        trainer_version=fields["trainer_version"].integer(),
        mutation_version=fields["mutation_version"].integer(),
        created=fields["created"].text(r"[0-9T:.+Z-]{1,40}"),
        files=tuple(files),
        ledger_digest=ledger["digest"].text(_SHA256),
        ledger_count=ledger["count"].integer(),
        rows_count=rows["count"].integer(),
        rows_bytes=rows["bytes"].integer(),
        rows_stamp=PartStamp(rows["cut_id"].text(_CUT_ID), rows["mutation_version"].integer()),
        groups={owner: node.integer() for owner, node in groups.items()},
    )


@dataclass(frozen=True, slots=True)
class _Parts:
    sampler: SamplerState
    position: CommittedPosition
    accounting: AccountingState
    spares: tuple[PromptRef, ...]
    ready: tuple[BufferEntry, ...]
    claimed: tuple[BufferEntry, ...]
    ledger: tuple[GroupRecord, ...]
    stamps: dict[str, PartStamp]


def _parse(read: Callable[[str], bytes], incarnation: int) -> _Parts:
    bodies: dict[str, dict[str, Node]] = {}
    stamps: dict[str, PartStamp] = {}
    for name in DOCUMENTS:
        root = Node(name, "$", codec.parse_json(read(name), file=name))
        root.version(SCHEMA_VERSION)
        fields = root.fields(f"schema_version document cut_id mutation_version {_BODIES[name]}")
        if fields["document"].text() != name.removesuffix(".json"):
            fields["document"].refuse(f"this is document {fields['document'].text()!r}")
        stamps[name] = PartStamp(fields["cut_id"].text(_CUT_ID), fields["mutation_version"].integer())
        bodies[name] = fields
    if stamps["accounting.json"] != stamps["position.json"]:
        raise DocumentError("accounting.json", "$.cut_id", "captured at another instant than position.json")
    sampler, position, ids = bodies["sampler.json"], bodies["position.json"], set[str]()
    buffer = bodies["buffer.json"]
    return _Parts(
        sampler=SamplerState(
            name=sampler["name"].text(r"[A-Za-z0-9_.:]{1,200}"),
            cursor=sampler["cursor"].integer(low=-1),
            stamps_target_steps=sampler["stamps_target_steps"].boolean(),
            admissions=sampler["admissions"].integer(),
            next_admission_id=sampler["next_admission_id"].integer(),
        ),
        position=CommittedPosition(
            epoch=position["epoch"].integer(),
            position=position["position"].integer(),
            exhausted=position["exhausted"].boolean(),
            loader=codec.decode(position["loader"].value, file="position.json", path="$.loader"),
        ),
        accounting=_read_accounting(bodies["accounting.json"]),
        spares=_unique(bodies["spares.json"]["spares"], _read_prompt, set()),
        # One set for both lists: within one document, an id that comes twice is a broken document.
        ready=_unique(buffer["ready"], lambda node: _read_entry(node, incarnation), ids),
        claimed=_unique(buffer["claimed"], lambda node: _read_entry(node, incarnation), ids),
        ledger=_unique(bodies["ledger.json"]["groups"], _read_record, set()),
        stamps={part: stamps[name] for part, name in _STAMPED_BY.items()},
    )


_BODIES: Final = {
    "sampler.json": "name cursor stamps_target_steps admissions next_admission_id",
    "position.json": "epoch position exhausted loader",
    "accounting.json": "closed open",
    "spares.json": "spares",
    "buffer.json": "ready claimed",
    "ledger.json": "groups",
}


def _unique(node: Node, read: Callable[[Node], T], seen: set[str]) -> tuple[T, ...]:
    found = []
    for item in node.items():
        value = read(item)
        if value.group_id in seen:
            item.refuse(f"group {value.group_id} stands twice in this document")
        seen.add(value.group_id)
        found.append(value)
    return tuple(found)


def _read_prompt(node: Node) -> PromptRef:
    fields = node.fields("epoch position index")
    return PromptRef(fields["epoch"].integer(), fields["position"].integer(), fields["index"].integer())


def _read_record(node: Node) -> GroupRecord:
    fields = node.fields("group_id admission_id prompt phase target_step start_version attempt")
    record = GroupRecord(
        group_id=fields["group_id"].text(_GROUP_ID),
        admission_id=fields["admission_id"].integer(),
        prompt=_read_prompt(fields["prompt"]),
        phase="admitted" if fields["phase"].text("reserved|admitted") == "admitted" else "reserved",
        target_step=fields["target_step"].optional(Node.integer),
        start_version=fields["start_version"].optional(Node.integer),
        attempt=fields["attempt"].integer(high=MAX_ATTEMPT),
    )
    if record.phase == "admitted" and record.start_version is None:
        fields["start_version"].refuse("an admitted group has one")
    if record.phase == "reserved":
        for name in ("target_step", "start_version"):
            if fields[name].value is not None:
                fields[name].refuse("a reserved group has none")
    return record


def _read_entry(node: Node, incarnation: int) -> BufferEntry:
    fields = node.fields(
        "group_id admission_id prompt attempt target_step start_version "
        "generated_from generated_to keys stats"
    )
    entry = BufferEntry(
        group_id=fields["group_id"].text(_GROUP_ID),
        admission_id=fields["admission_id"].integer(),
        prompt=_read_prompt(fields["prompt"]),
        attempt=fields["attempt"].integer(high=MAX_ATTEMPT),
        target_step=fields["target_step"].optional(Node.integer),
        start_version=fields["start_version"].integer(),
        generated_from=fields["generated_from"].integer(),
        generated_to=fields["generated_to"].integer(),
        keys=(),
        stats={name: _read_stat(stat) for name, stat in fields["stats"].mapping(r"[\s\S]{1,200}")},
    )
    return replace(entry, keys=_read_keys(fields["keys"], incarnation, entry))


def _read_keys(node: Node, incarnation: int, entry: BufferEntry) -> tuple[RowKey, ...]:
    """Return the final rows of a group, in generation order."""
    prefix = RowKey.prefix(incarnation, entry.group_id, entry.attempt)
    keys: list[RowKey] = []
    last = -1
    for number, value in enumerate(node.values()):
        following = last + 1
        if value == f"{prefix}g{following:03d}/final" and following < _GENERATIONS:
            # As in every group whose generations all finished: what is expected needs no parsing.
            key = RowKey(incarnation, entry.group_id, following, entry.attempt)
        else:
            item = Node(node.file, f"{node.path}[{number}]", value)
            key = _read_key(item)
            expected = RowKey(incarnation, entry.group_id, key.generation, entry.attempt)
            if key != expected or key.generation <= last:
                item.refuse(
                    f"{key.encode()} is not a final row of incarnation {incarnation}, group {entry.group_id}, "
                    f"attempt {entry.attempt}, in generation order"
                )
        keys.append(key)
        last = key.generation
    return tuple(keys)


def _read_key(node: Node) -> RowKey:
    try:
        return RowKey.decode(node.text(r"[!-~]{1,200}"))
    except RowKeyError as error:
        node.refuse(str(error))


def _read_stat(node: Node) -> float:
    if isinstance(node.value, dict):
        value = codec.decode(node.value, file=node.file, path=node.path)
        if type(value) is not float:
            node.refuse("expected a number")
        return value
    return node.number()


def _read_accounting(fields: Mapping[str, Node]) -> AccountingState:
    closed = fields["closed"].fields("epochs read trained dropped")
    state = AccountingState(
        closed=ClosedEpochs(
            epochs=closed["epochs"].integer(),
            read=closed["read"].integer(),
            trained=closed["trained"].integer(),
            dropped=_read_reasons(closed["dropped"]),
        ),
        open=tuple(_read_epoch(node) for node in fields["open"].items()),
    )
    for number, (account, node) in enumerate(zip(state.open, fields["open"].items(), strict=True)):
        if account.epoch != state.closed.epochs + number:
            node.refuse(f"epoch {account.epoch} where epoch {state.closed.epochs + number} comes next")
    return state


def _read_epoch(node: Node) -> EpochAccount:
    fields = node.fields("epoch read ended trained dropped reasons")
    account = EpochAccount(
        epoch=fields["epoch"].integer(),
        read=fields["read"].integer(),
        ended=fields["ended"].boolean(),
        trained=fields["trained"].data(),
        dropped=fields["dropped"].data(),
        reasons=_read_reasons(fields["reasons"]),
    )
    for name, bitmap in (("trained", account.trained), ("dropped", account.dropped)):
        if len(bitmap) != (account.read + 7) // 8:
            fields[name].refuse(f"a bitmap of {len(bitmap)} bytes does not fit {account.read} positions")
        if int.from_bytes(bitmap, "little") >> account.read:
            fields[name].refuse(f"a position beyond the {account.read} that were read")
    return account


def _read_reasons(node: Node) -> dict[str, int]:
    return {reason: count.integer() for reason, count in node.mapping("|".join(DROP_REASONS))}


def _is_row_file(name: str) -> bool:
    return name.startswith("rows-") and name.endswith(".safetensors")
