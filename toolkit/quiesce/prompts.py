"""Where prompts come from, and how far reading them counts.

A source is pulled ahead of time, outside any slot: a pull holds the prompts of one batch and the loader's position after
them. Only when the pump commits the pull, in a ``prompt_reservation`` slot, does that position count. A checkpoint reads
the committed position and never the live loader, whose ``state_dict()`` can take a fifth of a second.

Rule: a pull that was not committed is as if it had never been made. Yield rule: ``pull`` and ``payload`` suspend; the
loader itself runs in a thread of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import functools
import random
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final, ParamSpec, Protocol, TypeVar

from quiesce.checkpoint.cut import CommittedPosition
from quiesce.errors import ConfigError, PromptSourceError
from quiesce.threads import DaemonExecutor
from quiesce.types import PromptRef

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = [
    "IndexedDataset",
    "PromptSource",
    "Pull",
    "SequenceSource",
    "SizedDataset",
    "StatefulLoader",
    "StatefulLoaderSource",
]

T_co = TypeVar("T_co", covariant=True)
P = ParamSpec("P")
R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class Pull:
    """One batch that was read ahead.

    Attributes:
        refs: Its prompts by reference; may be empty when the pull only finds the epoch's end.
        payloads: The dataset items, in the same order.
        ends_epoch: Whether this pull reached the end of its epoch.
        epoch: The epoch that was read.
        position: The position that counts once the pull is committed.
    """

    refs: tuple[PromptRef, ...]
    payloads: tuple[Any, ...]
    ends_epoch: bool
    epoch: int
    position: CommittedPosition


class SizedDataset(Protocol[T_co]):
    """A map-style dataset."""

    def __len__(self) -> int:
        """How many items there are."""
        ...

    def __getitem__(self, index: int, /) -> T_co:
        """Return one item; always the same one for an index."""
        ...


class PromptSource(Protocol):
    """What the rollout pump reads from."""

    @property
    def start(self) -> CommittedPosition:
        """The position before the first prompt."""
        ...

    async def pull(self) -> Pull | None:
        """Read the next batch ahead, or return None when every epoch was read."""
        ...

    async def seek(self, position: CommittedPosition) -> CommittedPosition:
        """Go to a committed position; what was pulled after it is read again.

        Returns:
            The same position, ``exhausted`` or not by the epochs that this run reads.
        """
        ...

    async def payload(self, ref: PromptRef) -> Any:  # noqa: ANN401 - a dataset item is whatever the dataset holds
        """Read one prompt's payload again, for a group that a checkpoint brought back."""
        ...

    async def close(self) -> None:
        """Let workers and threads go."""
        ...


class SequenceSource:
    """Reads a map-style dataset in a seeded order, without a loader.

    The order of each epoch depends on the seed, the epoch and the dataset's size alone, so the position is all the state.

    Args:
        dataset: The prompts.
        batch_size: Prompts of one pull; the last of an epoch may be shorter.
        epochs: How often the dataset is read.
        seed: Seeds the order; None reads in index order.
    """

    def __init__(
        self, dataset: SizedDataset[Any], *, batch_size: int, epochs: int = 1, seed: int | None = 0
    ) -> None:
        _check_sizes(len(dataset), batch_size, epochs)
        self._dataset = dataset
        self._batch_size = batch_size
        self._epochs = epochs
        self._seed = seed
        self._executor = DaemonExecutor("quiesce-prompts", 1)
        self._epoch = 0
        self._next = 0
        self._order = self._order_of(0)

    @property
    def start(self) -> CommittedPosition:
        """The position before the first prompt."""
        return CommittedPosition(0, 0, exhausted=False, loader=self._fingerprint())

    async def pull(self) -> Pull | None:
        """Read the next batch ahead, or return None when every epoch was read.

        Raises:
            PromptSourceError: If the dataset fails to give an item, naming its index.
        """
        if self._epoch >= self._epochs:
            return None
        epoch, first = self._epoch, self._next
        indices = self._order[first : first + self._batch_size]
        refs = tuple(PromptRef(epoch, first + offset, index) for offset, index in enumerate(indices))
        payloads = await _in(self._executor, self._items, indices)
        self._next += len(indices)
        ends = self._next >= len(self._order)
        if ends:
            self._epoch, self._next = epoch + 1, 0
            self._order = self._order_of(self._epoch)
        position = CommittedPosition(
            self._epoch, self._next, exhausted=self._epoch >= self._epochs, loader=self._fingerprint()
        )
        return Pull(refs, payloads, ends, epoch, position)

    async def seek(self, position: CommittedPosition) -> CommittedPosition:
        """Go to a committed position; see :meth:`PromptSource.seek`.

        Raises:
            PromptSourceError: If the position was saved with another dataset size or seed.
        """
        if position.loader != self._fingerprint():
            raise PromptSourceError(
                "position",
                f"the checkpoint was reading {position.loader}, but the dataset of this run is {self._fingerprint()}",
            )
        self._epoch, self._next = position.epoch, position.position
        self._order = self._order_of(self._epoch)
        return replace(position, exhausted=self._epoch >= self._epochs)

    async def payload(self, ref: PromptRef) -> Any:  # noqa: ANN401 - a dataset item is whatever the dataset holds
        """Read one prompt's payload again.

        Raises:
            PromptSourceError: If the dataset does not have it.
        """
        return (await _in(self._executor, self._items, [ref.index]))[0]

    async def close(self) -> None:
        """Let the thread go."""
        self._executor.shutdown(wait=False)

    def _items(self, indices: list[int]) -> tuple[Any, ...]:
        return tuple(_item(self._dataset, index) for index in indices)

    def _order_of(self, epoch: int) -> list[int]:
        order = list(range(len(self._dataset)))
        if self._seed is not None:
            random.Random(f"quiesce-{self._seed}-{epoch}").shuffle(order)
        return order

    def _fingerprint(self) -> dict[str, int | None]:
        return {"size": len(self._dataset), "seed": self._seed}


class IndexedDataset:
    """Wraps a map-style dataset so that each item comes with its index.

    Args:
        dataset: The prompts.
    """

    def __init__(self, dataset: SizedDataset[Any]) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        """How many items there are."""
        return len(self.dataset)

    def __getitem__(self, index: int) -> tuple[int, Any]:
        """Return (index, item)."""
        return index, self.dataset[index]


class StatefulLoader(Protocol):
    """What is needed of torchdata's ``StatefulDataLoader``; a ``generator`` is used if there is one."""

    dataset: Any
    generator: Any

    def __iter__(self) -> Iterator[Any]:
        """Start (or go on with) an epoch."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Return the loader's state after the last batch."""
        ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from a state."""
        ...


_END: Final = object()

CLOSE_SECONDS: Final = 10.0
"""How long closing waits for a loader that is busy; its thread and its workers are daemons."""


class StatefulLoaderSource:
    """Reads a PyTorch ``StatefulDataLoader``, with worker processes if it has any.

    Left to itself, a resumed loader shuffles the epochs after the one that it resumed in otherwise than it would have
    without the interruption, because its generator is drawn from a different number of times. So the loader's own
    ``generator``, if it has one, is seeded anew for each epoch, from its initial seed and the epoch's number: the order
    then depends on these alone. A loader that shuffles without a generator reads every prompt once an epoch, but in
    an order that no resume can repeat.

    Args:
        loader: A loader over an :class:`IndexedDataset` with ``collate_fn=list``, so that a batch is a list of
            (index, item) pairs.
        epochs: How often it is read.
    """

    def __init__(self, loader: StatefulLoader, *, epochs: int = 1) -> None:
        if not isinstance(loader.dataset, IndexedDataset):
            raise ConfigError(
                "dataset", "the loader must read an IndexedDataset, so that items come with their index"
            )
        _check_sizes(len(loader.dataset), 1, epochs)
        self._loader = loader
        generator = getattr(loader, "generator", None)
        self._seed: int | None = None if generator is None else generator.initial_seed()
        self._epochs = epochs
        self._executor = DaemonExecutor("quiesce-loader", 1)
        self._epoch = 0
        self._next = 0
        self._iterator: Iterator[Any] | None = None

    @property
    def start(self) -> CommittedPosition:
        """The position before the first prompt."""
        return CommittedPosition(0, 0, exhausted=False, loader=self._saved(None))

    async def pull(self) -> Pull | None:
        """Read the next batch ahead, or return None when every epoch was read.

        Raises:
            PromptSourceError: If the loader fails, or a batch is not a list of (index, item) pairs.
        """
        if self._epoch >= self._epochs:
            return None
        batch, state = await _in(self._executor, self._advance)
        epoch = self._epoch
        refs: tuple[PromptRef, ...] = ()
        payloads: tuple[Any, ...] = ()
        ends = batch is _END
        if ends:
            self._epoch, self._next = epoch + 1, 0
        else:
            try:
                refs = tuple(
                    PromptRef(epoch, self._next + at, int(index)) for at, (index, _) in enumerate(batch)
                )
                payloads = tuple(item for _, item in batch)
            except (TypeError, ValueError) as error:
                raise PromptSourceError(
                    f"batch at position {self._next}",
                    "not a list of (index, item) pairs; pass collate_fn=list",
                ) from error
            self._next += len(refs)
        position = CommittedPosition(
            self._epoch, self._next, exhausted=self._epoch >= self._epochs, loader=self._saved(state)
        )
        return Pull(refs, payloads, ends, epoch, position)

    async def seek(self, position: CommittedPosition) -> CommittedPosition:
        """Go to a committed position; see :meth:`PromptSource.seek`.

        Raises:
            PromptSourceError: If the position was saved with another dataset size, or the loader refuses its state.
        """
        saved = position.loader
        size = saved.get("size") if isinstance(saved, dict) else None
        if not isinstance(saved, dict) or size != len(self._loader.dataset):
            raise PromptSourceError(
                "position",
                f"the checkpoint was reading a dataset of {size} prompts, but this run's has {len(self._loader.dataset)}",
            )
        self._epoch, self._next = position.epoch, position.position
        await _in(self._executor, self._load, saved.get("state"))
        return replace(position, exhausted=self._epoch >= self._epochs)

    async def payload(self, ref: PromptRef) -> Any:  # noqa: ANN401 - a dataset item is whatever the dataset holds
        """Read one prompt's payload again, from the dataset itself.

        Raises:
            PromptSourceError: If the dataset does not have it.
        """
        return await _in(self._executor, _item, self._loader.dataset.dataset, ref.index)

    async def close(self) -> None:
        """Let the loader's workers and the thread go; a loader that hangs is left behind after a deadline."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_SECONDS):
                await _in(self._executor, self._let_go)
        self._executor.shutdown(wait=False)

    def _advance(self) -> tuple[Any, dict[str, Any]]:
        try:
            if self._iterator is None:
                self._seed_epoch()  # a loaded state in the middle of an epoch overrides it
                self._iterator = iter(self._loader)
            batch = next(self._iterator, _END)
            if batch is _END:
                self._iterator = None
            # The loader may go on changing what it hands out, and the state is kept until the pull is committed.
            return batch, copy.deepcopy(self._loader.state_dict())
        except Exception as error:
            raise PromptSourceError(
                f"epoch {self._epoch}, position {self._next}", f"the loader failed: {error}"
            ) from error

    def _load(self, state: dict[str, Any] | None) -> None:
        self._iterator = None
        if state is None:
            return
        try:
            self._loader.load_state_dict(state)
            if self._next == 0:
                # Between epochs: let the loader take the state in now, or it would undo the seed of the next epoch.
                self._loader.state_dict()
        except Exception as error:
            raise PromptSourceError("position", f"the loader refuses the saved state: {error}") from error

    def _saved(self, state: dict[str, Any] | None) -> dict[str, Any]:
        """Return what a position holds: the loader's state, and what it is a state of."""
        return {"size": len(self._loader.dataset), "state": state}

    def _seed_epoch(self) -> None:
        if self._seed is not None:
            seeded = random.Random(f"quiesce-{self._seed}-{self._epoch}")
            self._loader.generator.manual_seed(seeded.getrandbits(63))

    def _let_go(self) -> None:
        self._iterator = None


def _check_sizes(size: int, batch_size: int, epochs: int) -> None:
    for key, value in (("dataset", size), ("batch_size", batch_size), ("epochs", epochs)):
        if value < 1:
            raise ConfigError(
                key, f"must be at least 1, not {value}" if key != "dataset" else "has no prompts"
            )


def _item(dataset: SizedDataset[Any], index: int) -> Any:  # noqa: ANN401 - a dataset item is whatever the dataset holds
    try:
        return dataset[index]
    except Exception as error:
        raise PromptSourceError(
            f"index {index}", f"the dataset failed to give the item: {error!r}"
        ) from error


async def _in(executor: DaemonExecutor, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    call = functools.partial(function, *args, **kwargs)
    return await asyncio.get_running_loop().run_in_executor(executor, call)
