"""Where prompts come from: the order, the position, and going on where a checkpoint was."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from quiesce.checkpoint import codec
from quiesce.checkpoint.cut import CommittedPosition
from quiesce.errors import ConfigError, PromptSourceError
from quiesce.prompts import IndexedDataset, PromptSource, Pull, SequenceSource, StatefulLoaderSource

ITEMS = [f"prompt {index}" for index in range(10)]


async def pulled(source: PromptSource, *, limit: int = 100) -> list[Pull]:
    """Pull until the end."""
    pulls: list[Pull] = []
    while len(pulls) < limit and (pull := await source.pull()) is not None:
        pulls.append(pull)
    return pulls


def order(pulls: list[Pull]) -> list[tuple[int, int, int]]:
    """Return epoch, position and dataset index of everything that was pulled."""
    return [(ref.epoch, ref.position, ref.index) for pull in pulls for ref in pull.refs]


# -------------------------------------------------------------------------------------------------- sequence


async def test_every_epoch_reads_every_prompt_once_in_an_order_of_its_own() -> None:
    """Each epoch is a permutation of the dataset, the same for the same seed, another for another epoch."""
    pulls = await pulled(SequenceSource(ITEMS, batch_size=4, epochs=2, seed=3))
    again = await pulled(SequenceSource(ITEMS, batch_size=4, epochs=2, seed=3))
    other = await pulled(SequenceSource(ITEMS, batch_size=4, epochs=2, seed=4))

    first, second = order(pulls)[:10], order(pulls)[10:]
    assert [ref[:2] for ref in first] == [(0, position) for position in range(10)]
    assert [ref[:2] for ref in second] == [(1, position) for position in range(10)]
    assert sorted(index for *_, index in first) == sorted(index for *_, index in second) == list(range(10))
    assert [index for *_, index in first] != [index for *_, index in second]
    assert order(again) == order(pulls)
    assert order(other) != order(pulls)


async def test_the_last_batch_of_an_epoch_is_short_and_ends_it() -> None:
    """A batch never reaches into the next epoch; the position after it is the next epoch's beginning."""
    pulls = await pulled(SequenceSource(ITEMS, batch_size=4, epochs=2))

    assert [len(pull.refs) for pull in pulls] == [4, 4, 2, 4, 4, 2]
    assert [pull.ends_epoch for pull in pulls] == [False, False, True] * 2
    assert [(pull.position.epoch, pull.position.position) for pull in pulls] == [
        (0, 4), (0, 8), (1, 0), (1, 4), (1, 8), (2, 0),
    ]  # fmt: skip
    assert [pull.position.exhausted for pull in pulls] == [False] * 5 + [True]


async def test_payloads_are_the_items_and_can_be_read_again() -> None:
    """What a pull hands out is what a restored group finds under the same reference."""
    source = SequenceSource(ITEMS, batch_size=4)
    (first, *_) = await pulled(source)

    assert list(first.payloads) == [ITEMS[ref.index] for ref in first.refs]
    assert [await source.payload(ref) for ref in first.refs] == list(first.payloads)
    await source.close()


@pytest.mark.parametrize("seed", [None, 5])
@pytest.mark.parametrize("batches", range(7))
async def test_seeking_goes_on_with_exactly_what_was_not_committed(batches: int, seed: int | None) -> None:
    """From any committed position, the rest is what the uninterrupted source would have read; pulls ahead are undone."""
    source = SequenceSource(ITEMS, batch_size=4, epochs=2, seed=seed)
    whole = await pulled(SequenceSource(ITEMS, batch_size=4, epochs=2, seed=seed))
    committed = source.start
    for _ in range(batches):
        pull = await source.pull()
        committed = committed if pull is None else pull.position
    await source.pull()  # pulled ahead and never committed

    resumed = SequenceSource(ITEMS, batch_size=4, epochs=2, seed=seed)
    position = await resumed.seek(committed)

    assert position == committed
    assert order(await pulled(resumed)) == order(whole[batches:])


async def test_a_position_of_another_dataset_or_seed_is_refused() -> None:
    """The order would be another one, so prompts would be lost and repeated."""
    position = SequenceSource(ITEMS, batch_size=4, seed=1).start

    for other in (
        SequenceSource(ITEMS[:-1], batch_size=4, seed=1),
        SequenceSource(ITEMS, batch_size=4, seed=2),
    ):
        with pytest.raises(PromptSourceError, match="position"):
            await other.seek(position)


@pytest.mark.parametrize("epochs, exhausted", [(1, True), (2, True), (3, False)])
async def test_whether_reading_is_over_is_judged_by_this_run_s_epochs(
    epochs: int,
    exhausted: bool,  # noqa: FBT001 - a parameter of the test
) -> None:
    """A run that is resumed with more or fewer epochs than it was saved with is over when its own are read."""
    saved = CommittedPosition(2, 0, exhausted=True, loader={"size": 10, "seed": 0})
    source = SequenceSource(ITEMS, batch_size=4, epochs=epochs)

    position = await source.seek(saved)

    assert position == replace(saved, exhausted=exhausted)
    assert (await source.pull() is None) is exhausted


async def test_an_item_that_cannot_be_read_is_named_and_can_be_pulled_again() -> None:
    """A failed pull has not moved the source."""

    class Flaky(list[str]):
        broken = True

        def __getitem__(self, index: Any) -> Any:  # noqa: ANN401 - as a list's
            if index == 2 and self.broken:
                raise KeyError(index)
            return super().__getitem__(index)

    items = Flaky(ITEMS)
    source = SequenceSource(items, batch_size=4, seed=None)

    with pytest.raises(PromptSourceError, match="index 2"):
        await source.pull()

    items.broken = False
    pull = await source.pull()
    assert pull is not None
    assert [ref.position for ref in pull.refs] == [0, 1, 2, 3]


@pytest.mark.parametrize(
    "key, size, batch, epochs", [("dataset", 0, 1, 1), ("batch_size", 1, 0, 1), ("epochs", 1, 1, 0)]
)
def test_impossible_sizes_are_refused_by_name(key: str, size: int, batch: int, epochs: int) -> None:
    """An empty dataset, an empty batch and no epoch are refused at once."""
    with pytest.raises(ConfigError, match=rf"^{key}\b"):
        SequenceSource(ITEMS[:size], batch_size=batch, epochs=epochs)


# ---------------------------------------------------------------------------------------------------- loader


def loader_source(*, workers: int, shuffle: bool, epochs: int = 3, size: int = 10) -> StatefulLoaderSource:
    """Return a source over torchdata's loader, built as for a new process."""
    import torch
    from torchdata.stateful_dataloader import StatefulDataLoader

    return StatefulLoaderSource(
        StatefulDataLoader(
            IndexedDataset([f"prompt {index}" for index in range(size)]),
            batch_size=4,
            shuffle=shuffle,
            generator=torch.Generator().manual_seed(11) if shuffle else None,
            num_workers=workers,
            collate_fn=list,
        ),
        epochs=epochs,
    )


async def check_resumes(workers: int, *, shuffle: bool, cuts: range, epochs: int, size: int) -> None:
    """Assert that a resume after each pull reads on exactly as the uninterrupted source does, and a second one too."""
    source = loader_source(workers=workers, shuffle=shuffle, epochs=epochs, size=size)
    whole = await pulled(source)
    await source.close()
    indices = [index for *_, index in order(whole)]
    for epoch in range(epochs):
        assert sorted(indices[epoch * size : (epoch + 1) * size]) == list(range(size))
    if shuffle:
        assert indices[:size] != indices[size : 2 * size]
    for cut in cuts:
        first = loader_source(workers=workers, shuffle=shuffle, epochs=epochs, size=size)
        committed = first.start
        for pull in await pulled(first, limit=cut):
            committed = pull.position
        await first.pull()  # pulled ahead and never committed
        await first.close()
        saved = codec.decode(codec.encode(committed.loader), file="position.json", path="loader")

        second = loader_source(workers=workers, shuffle=shuffle, epochs=epochs, size=size)
        await second.seek(replace(committed, loader=saved))
        middle = await pulled(second, limit=2)
        await second.pull()
        await second.close()
        third = loader_source(workers=workers, shuffle=shuffle, epochs=epochs, size=size)
        await third.seek(middle[-1].position if middle else committed)
        rest = await pulled(third)
        await third.close()

        assert order(middle) + order(rest) == order(whole[cut:])
        assert [pull.ends_epoch for pull in (*middle, *rest)] == [pull.ends_epoch for pull in whole[cut:]]
        assert [pull.position.exhausted for pull in (*middle, *rest)][-1:] == [True][: len(whole) - cut]


@pytest.mark.parametrize("shuffle", [False, True])
async def test_a_resumed_loader_reads_on_as_if_it_had_never_stopped(
    shuffle: bool,  # noqa: FBT001 - a parameter of the test
) -> None:
    """From every committed position, across the ends of epochs, the order is that of the uninterrupted loader."""
    await check_resumes(0, shuffle=shuffle, cuts=range(13), epochs=3, size=10)


@pytest.mark.timeout(300)  # some sixty forks
async def test_a_resumed_loader_with_workers_reads_on_as_if_it_had_never_stopped() -> None:
    """The same with worker processes, which have read ahead: in the middle of an epoch, at its end, and after it."""
    await check_resumes(2, shuffle=True, cuts=range(2, 6), epochs=3, size=10)


async def test_the_end_of_a_loader_s_epoch_is_an_empty_pull() -> None:
    """A loader tells its end only when asked, so the epoch ends with a pull that has no prompts."""
    source = loader_source(workers=0, shuffle=False, epochs=1)

    pulls = await pulled(source)

    assert [len(pull.refs) for pull in pulls] == [4, 4, 2, 0]
    assert [pull.ends_epoch for pull in pulls] == [False, False, False, True]
    assert pulls[-1].position == CommittedPosition(1, 0, exhausted=True, loader=pulls[-1].position.loader)
    assert await source.payload(pulls[2].refs[0]) == pulls[2].payloads[0] == "prompt 8"
    await source.close()


class FakeLoader:
    """A loader that does as it is told."""

    def __init__(self, batches: list[Any], state: dict[str, Any] | None = None) -> None:
        self.dataset: Any = IndexedDataset(ITEMS)
        self.generator: Any = None
        self.batches = batches
        self.state = {"at": []} if state is None else state
        self.loaded: list[dict[str, Any]] = []

    def __iter__(self) -> Iterator[Any]:
        for batch in self.batches:
            if isinstance(batch, Exception):
                raise batch
            self.state["at"].append(len(self.state["at"]))
            yield batch

    def state_dict(self) -> dict[str, Any]:
        """Return a state that the loader goes on changing."""
        return self.state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Refuse what is not a state."""
        if "at" not in state_dict:
            raise KeyError("at")
        self.loaded.append(state_dict)


async def test_a_committed_position_does_not_change_with_the_live_loader() -> None:
    """The state is the loader's after that pull, whatever the loader does to it afterwards."""
    source = StatefulLoaderSource(FakeLoader([[(0, "a")], [(1, "b")]]))

    first, second, _ = await pulled(source)

    assert first.position.loader["state"] == {"at": [0]}
    assert second.position.loader["state"] == {"at": [0, 1]}


@pytest.mark.parametrize("batch", [[("a",)], [0, 1], ["text"], [(None, "a")], 7])
async def test_a_batch_that_is_no_list_of_index_and_item_is_refused(batch: object) -> None:
    """A default collate function, for example, would turn the pairs into something else."""
    with pytest.raises(PromptSourceError, match="collate_fn=list"):
        await StatefulLoaderSource(FakeLoader([batch])).pull()


async def test_a_loader_that_fails_is_an_error_that_tells_where() -> None:
    """Whatever it raises, at reading or at loading a state, becomes an error of the prompt source."""
    failing = StatefulLoaderSource(FakeLoader([[(0, "a")], RuntimeError("worker died")]))
    await failing.pull()

    with pytest.raises(PromptSourceError, match=r"epoch 0, position 1.*worker died"):
        await failing.pull()
    with pytest.raises(PromptSourceError, match="refuses the saved state"):
        await failing.seek(CommittedPosition(0, 0, exhausted=False, loader={"size": len(ITEMS), "state": {}}))


async def test_a_loader_of_a_plain_dataset_is_refused() -> None:
    """Without indices nobody could read a prompt again."""
    loader = FakeLoader([])
    loader.dataset = ITEMS
    with pytest.raises(ConfigError, match="IndexedDataset"):
        StatefulLoaderSource(loader)


async def test_reading_does_not_run_on_the_event_loop() -> None:
    """The loop goes on while the dataset and the loader are busy, and the position can be read at once."""
    import threading

    names: set[str] = set()

    class Noting(list[str]):
        def __getitem__(self, index: Any) -> Any:  # noqa: ANN401 - as a list's
            names.add(threading.current_thread().name)
            return super().__getitem__(index)

    source = SequenceSource(Noting(ITEMS), batch_size=4)
    await asyncio.gather(source.pull())

    assert all(name.startswith("quiesce-prompts") for name in names)
    assert names


async def test_a_position_in_a_dataset_of_another_size_is_refused() -> None:
    """The same indices would name other prompts, so going on would train them without a word."""
    position = CommittedPosition(0, 0, exhausted=False, loader={"size": 11, "state": None})
    source = loader_source(workers=0, shuffle=False, epochs=1)

    with pytest.raises(PromptSourceError, match="a dataset of 11 prompts, but this run's has 10"):
        await source.seek(position)
