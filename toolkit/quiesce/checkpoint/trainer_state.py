"""The trainer's part of a checkpoint, and an adapter for plain ``state_dict`` objects.

Rule: staging copies (on the CPU too), so that training may go on while the copy is written; nothing of it
runs on the event loop; and nothing is ever pickled: tensors go into safetensors files through
``torch.distributed.checkpoint``, everything else into one JSON document. Yield rule: ``stage``, ``write`` and
``load`` suspend; a call that is cancelled waits for its thread to end before it passes the cancellation on.

A trainer that is remote or sharded implements :class:`TrainerState` itself; its workers then write their own
shards into the folder, each file by one worker only.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol, cast, runtime_checkable

from quiesce.checkpoint import codec, files
from quiesce.checkpoint.shielding import in_thread
from quiesce.errors import TrainerStateError
from quiesce.threads import DaemonExecutor

if TYPE_CHECKING:
    import torch

__all__ = ["NoTrainerState", "RandomState", "Staged", "StateDictTrainerState", "Stateful", "TrainerState"]

SHARD_BYTES: Final = 512 << 20
"""Tensors are gathered into files of about this size; torch's writer holds one in memory at a time."""

_DOCUMENT: Final = "state.json"
_SCHEMA_VERSION: Final = 1

Path_ = tuple[str | int, ...]


class Staged(Protocol):
    """A copy of the trainer's state that training cannot change any more."""

    async def write(self, directory: Path) -> None:
        """Write it into an empty folder; the caller syncs and hashes whatever is in there then."""
        ...


class TrainerState(Protocol):
    """What a save and a restore need of a trainer."""

    async def stage(self) -> Staged:
        """Copy the state as it is now; the trainer does not step until this returns."""
        ...

    async def load(self, directory: Path) -> None:
        """Take over the state that :meth:`Staged.write` wrote; its files were verified before."""
        ...


@runtime_checkable
class Stateful(Protocol):
    """What torch calls stateful: a module, an optimizer, a scheduler."""

    def state_dict(self) -> Mapping[str, Any]:
        """Return the state."""
        ...

    def load_state_dict(self, state_dict: dict[str, Any], /) -> Any:  # noqa: ANN401 - torch's return values differ
        """Take over a state."""
        ...


class NoTrainerState:
    """For runs without a trainer of their own."""

    async def stage(self) -> Staged:
        """Nothing to copy."""
        return self

    async def write(self, directory: Path) -> None:
        """Nothing to write."""

    async def load(self, directory: Path) -> None:
        """Nothing to load."""


class RandomState:
    """The state of this process's random generators, so that a resumed run draws what it would have drawn.

    Covers ``random``, torch's generators of the CPU and of every CUDA device that is in use, numpy's global
    one if numpy is imported, and the generators that are passed in.

    Args:
        generators: Further torch generators, by name.
    """

    def __init__(self, generators: Mapping[str, torch.Generator] | None = None) -> None:
        self._generators = dict(generators or {})

    def state_dict(self) -> dict[str, Any]:
        """Return the states."""
        import torch

        state: dict[str, Any] = {
            "python": random.getstate(),
            "torch": torch.get_rng_state(),
            "cuda": torch.cuda.get_rng_state_all() if _uses_cuda() else [],
            "generators": {name: generator.get_state() for name, generator in self._generators.items()},
        }
        if "numpy" in sys.modules:
            import numpy as np

            # The global generator, on purpose: it is what libraries draw from that know nothing of ours.
            kind, keys, *rest = cast("tuple[Any, ...]", np.random.get_state())  # noqa: NPY002
            state["numpy"] = (kind, tuple(int(key) for key in keys), *rest)
        return state

    def load_state_dict(self, state_dict: dict[str, Any], /) -> None:
        """Take over the states; those of CUDA devices only where as many devices are there.

        Raises:
            TrainerStateError: If the generators that were passed in are not those that were saved.
        """
        import torch

        saved = set(state_dict["generators"])
        if saved != set(self._generators):
            raise TrainerStateError(
                "generators",
                f"saved {sorted(saved) or 'none'}, but there are {sorted(self._generators) or 'none'}",
            )
        random.setstate(state_dict["python"])
        torch.set_rng_state(state_dict["torch"])
        if torch.cuda.is_available() and len(state_dict["cuda"]) == torch.cuda.device_count():
            torch.cuda.set_rng_state_all(state_dict["cuda"])
        for name, generator in self._generators.items():
            generator.set_state(state_dict["generators"][name])
        if "numpy" in state_dict:
            import numpy as np

            kind, keys, *rest = state_dict["numpy"]
            np.random.set_state((kind, np.array(keys, dtype=np.uint32), *rest))  # noqa: NPY002 - as above


class StateDictTrainerState:
    """Saves and loads objects that have ``state_dict`` and ``load_state_dict``, in this process.

    Args:
        parts: Models, optimizers, schedulers, generators, by name; names become file content, not file names.
        shard_bytes: Tensors are gathered into files of about this size.

    Raises:
        TrainerStateError: If a part lacks one of the two methods, or a name holds a ``/``.
    """

    def __init__(self, parts: Mapping[str, Stateful], *, shard_bytes: int = SHARD_BYTES) -> None:
        for name, part in parts.items():
            if not isinstance(part, Stateful):
                raise TrainerStateError(
                    name, f"{type(part).__name__} has no state_dict() and load_state_dict()"
                )
            if not name or "/" in name:
                raise TrainerStateError(name, "a part needs a name without '/'")
        self._parts = dict(parts)
        self._shard_bytes = shard_bytes
        # One thread: two stagings at once would only fight for memory, and a cancelled one must end before
        # the next.
        self._executor = DaemonExecutor("quiesce-trainer-state", max_workers=1)

    async def stage(self) -> Staged:
        """Clone every tensor to host memory.

        Raises:
            TrainerStateError: If something in a state is neither a dense tensor nor can be stored as JSON.
        """
        tree, tensors = await in_thread(self._executor, self._copy)
        return _StagedStateDict(tree, tensors, self._shard_bytes, self._executor)

    async def load(self, directory: Path) -> None:
        """Read a state back and hand each part its own.

        Raises:
            TrainerStateError: If parts, keys, shapes or types are not those that the trainer has.
            DocumentError: If the document is damaged.
            OSError: If a file cannot be read.
        """
        await in_thread(self._executor, self._load, directory)

    def _copy(self) -> tuple[bytes, dict[str, torch.Tensor]]:
        import torch

        tensors: dict[str, torch.Tensor] = {}
        listed: list[dict[str, Any]] = []
        skeleton: dict[str, Any] = {}
        _wait_for_devices()
        with torch.no_grad():
            for name, part in self._parts.items():

                def keep(path: Path_, tensor: torch.Tensor, name: str = name) -> None:
                    where = f"{name}{_shown(path)}"
                    if tensor.layout is not torch.strided or tensor.is_quantized:
                        raise TrainerStateError(
                            where, f"a {tensor.layout} tensor of {tensor.dtype} cannot be stored"
                        )
                    key = f"{len(tensors):06d}/{name}/{'.'.join(str(step) for step in path)}"
                    # copy=True: on the CPU too, .to() would hand out the trainer's own memory.
                    copied = tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
                    tensors[key] = copied.contiguous()
                    listed.append({"name": key, "path": [name, *path]})

                skeleton[name] = _take_tensors(dict(part.state_dict()), (), keep)
        return codec.dumps({"schema_version": _SCHEMA_VERSION, "parts": skeleton, "tensors": listed}), tensors

    def _load(self, directory: Path) -> None:
        states = _read(directory)
        missing, unexpected = set(self._parts) - set(states), set(states) - set(self._parts)
        if missing or unexpected:
            problem = f"missing {sorted(missing) or 'none'}, unexpected {sorted(unexpected) or 'none'}"
            raise TrainerStateError("parts", problem)
        for name, part in self._parts.items():  # all are checked before the first is changed
            _check_fit(name, part, states[name])
        for name, part in self._parts.items():
            part.load_state_dict(states[name])


@dataclass(frozen=True, slots=True)
class _StagedStateDict:
    document: bytes
    tensors: dict[str, torch.Tensor]
    shard_bytes: int
    executor: DaemonExecutor

    async def write(self, directory: Path) -> None:
        """Write the document and the tensors."""
        await in_thread(self.executor, self._write, directory)

    def _write(self, directory: Path) -> None:
        files.write_durable(directory / _DOCUMENT, self.document)
        if self.tensors:
            _save_tensors(directory, self.tensors, self.shard_bytes)


# ---------------------------------------------------------------------------------
# torch.distributed.checkpoint


def _save_tensors(directory: Path, tensors: dict[str, torch.Tensor], shard_bytes: int) -> None:
    """Write tensors with DCP's planner and its safetensors writer.

    ``torch.distributed.checkpoint.save(no_dist=True)`` does these very steps, but warns each time that there
    is no process group, which cannot be silenced for one thread alone.
    """
    from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter

    numbers: dict[str, int] = {}
    number, filled = 1, 0
    for key, tensor in tensors.items():
        size = tensor.numel() * tensor.element_size()
        if filled and filled + size > shard_bytes:
            number, filled = number + 1, 0
        numbers[key] = number
        filled += size
    writer = HuggingFaceStorageWriter(path=str(directory), fqn_to_index_mapping=numbers)
    planner = DefaultSavePlanner(flatten_state_dict=False)
    writer.reset(str(directory))
    planner.set_up_planner(tensors, writer.storage_meta(), is_coordinator=True)
    writer.set_up_storage_writer(is_coordinator=True)
    plan = writer.prepare_local_plan(planner.create_local_plan())
    plans, metadata = planner.create_global_plan([plan])
    (plan,) = writer.prepare_global_plan(plans)
    written = writer.write_data(planner.finish_plan(plan), planner)
    written.wait()
    writer.finish(metadata, [written.value()])


def _load_tensors(directory: Path) -> dict[str, torch.Tensor]:
    """Read what :func:`_save_tensors` wrote, into tensors of their own."""
    import torch
    from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    reader = HuggingFaceStorageReader(path=str(directory))
    reader.reset(str(directory))
    metadata = reader.read_metadata()
    tensors: dict[str, torch.Tensor] = {}
    for key, entry in metadata.state_dict_metadata.items():
        if not isinstance(entry, TensorStorageMetadata):
            raise TrainerStateError(key, "this entry is no tensor")
        tensors[key] = torch.empty(entry.size, dtype=entry.properties.dtype)
    planner = DefaultLoadPlanner(flatten_state_dict=False)
    planner.set_up_planner(tensors, metadata, is_coordinator=True)
    reader.set_up_storage_reader(metadata, is_coordinator=True)
    plan = reader.prepare_local_plan(planner.create_local_plan())
    (plan,) = reader.prepare_global_plan(planner.create_global_plan([plan]))
    reader.read_data(planner.finish_plan(plan), planner).wait()
    return tensors


# -------------------------------------------------------------------------------------------------------
# trees


def _uses_cuda() -> bool:
    """Whether this process has touched a CUDA device; asking must not be the first touch."""
    import torch

    return bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]  # torch has none for it


def _wait_for_devices() -> None:
    """Wait for what other threads launched: copies are ordered after this thread's own stream only."""
    import torch

    if _uses_cuda():
        for device in range(torch.cuda.device_count()):
            torch.cuda.synchronize(device)


def _shown(path: Path_) -> str:
    return "".join(f"[{step!r}]" for step in path)


def _take_tensors(value: Any, path: Path_, keep: Callable[[Path_, torch.Tensor], None]) -> Any:  # noqa: ANN401 - any state
    """Return the value with None in place of every tensor, which ``keep`` gets."""
    import torch

    if isinstance(value, torch.Tensor):
        keep(path, value)
        return None
    if isinstance(value, dict):
        for key in value:
            if type(key) not in {str, int}:
                raise TrainerStateError(_shown(path), f"key {key!r} is neither a string nor an integer")
        return {key: _take_tensors(item, (*path, key), keep) for key, item in value.items()}
    if type(value) in {list, tuple}:
        return type(value)(_take_tensors(item, (*path, number), keep) for number, item in enumerate(value))
    return value


def _put_tensors(value: Any, path: Path_, tensors: Mapping[Path_, torch.Tensor]) -> Any:  # noqa: ANN401 - any state
    if path in tensors:
        return tensors[path]
    if isinstance(value, dict):
        return {key: _put_tensors(item, (*path, key), tensors) for key, item in value.items()}
    if type(value) in {list, tuple}:
        return type(value)(_put_tensors(item, (*path, number), tensors) for number, item in enumerate(value))
    return value


def _leaves(value: Any, path: Path_) -> Iterator[tuple[Path_, torch.Tensor]]:  # noqa: ANN401 - any state
    import torch

    if isinstance(value, torch.Tensor):
        yield path, value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from _leaves(item, (*path, key))
    elif type(value) in {list, tuple}:
        for number, item in enumerate(value):
            yield from _leaves(item, (*path, number))


def _read(directory: Path) -> dict[str, Any]:
    """Return each part's state.

    Raises:
        TrainerStateError: If the document and the tensors do not belong together.
    """
    document = codec.loads(files.read(directory / _DOCUMENT), file=_DOCUMENT)
    if not isinstance(document, dict) or set(document) != {"schema_version", "parts", "tensors"}:
        raise TrainerStateError(_DOCUMENT, "this is no trainer state")
    if document["schema_version"] != _SCHEMA_VERSION:
        raise TrainerStateError(_DOCUMENT, f"schema version {document['schema_version']!r} is not known here")
    listed: dict[str, Path_] = {}
    for entry in document["tensors"]:
        if (
            not isinstance(entry, dict)
            or set(entry) != {"name", "path"}
            or not isinstance(entry["path"], list)
        ):
            raise TrainerStateError(_DOCUMENT, "an entry of 'tensors' is malformed")
        listed[str(entry["name"])] = tuple(entry["path"])
    tensors = _load_tensors(directory) if listed else {}
    if set(tensors) != set(listed):
        odd = sorted(set(tensors) ^ set(listed))
        raise TrainerStateError(odd[0], "this tensor is in the document or in the files, not in both")
    by_path = {path: tensors[name] for name, path in listed.items()}
    parts = document["parts"]
    if not isinstance(parts, dict):
        raise TrainerStateError(_DOCUMENT, "'parts' is no object")
    return {name: _put_tensors(state, (name,), by_path) for name, state in parts.items()}


def _check_fit(name: str, part: Stateful, saved: Any) -> None:  # noqa: ANN401 - any state
    """Compare a saved state with what the part has now, before anything is changed.

    A module has to have exactly the saved tensors. Other parts may have fewer now (an optimizer builds its
    state in its first step), but what they have has to be saved, with the same shape.
    """
    import torch

    now = dict(_leaves(dict(part.state_dict()), ()))
    then = dict(_leaves(saved, ()))
    for path, tensor in now.items():
        where = f"{name}{_shown(path)}"
        if path not in then:
            raise TrainerStateError(where, "this tensor is not in the checkpoint")
        if then[path].shape != tensor.shape:
            problem = f"the checkpoint has shape {tuple(then[path].shape)}, the trainer {tuple(tensor.shape)}"
            raise TrainerStateError(where, problem)
        if isinstance(part, torch.nn.Module) and then[path].dtype != tensor.dtype:
            raise TrainerStateError(
                where, f"the checkpoint has {then[path].dtype}, the trainer {tensor.dtype}"
            )
    if isinstance(part, torch.nn.Module):
        for path in then:
            if path not in now:
                raise TrainerStateError(f"{name}{_shown(path)}", "the trainer has no such tensor")
