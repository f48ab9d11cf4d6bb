"""The auditor's own book of who owns what."""

from quiesce.accounting import AccountingState, ClosedEpochs, EpochAccount
from quiesce.auditor.shadow import BUFFER, DROPPED, LEDGER, NONE, PAGE, SPARES, TRAINED, Shadow
from quiesce.types import GroupRecord, PromptRef
from tests.owners import entry


def test_a_move_returns_where_the_group_was() -> None:
    """From never read to its end, also when epochs take turns."""
    shadow = Shadow()
    groups = [PromptRef(epoch, position, 0).group_id for position in range(3) for epoch in (0, 1)]

    firsts = [shadow.move(group, LEDGER) for group in groups]
    seconds = [shadow.move(group, BUFFER) for group in groups]

    assert firsts == [NONE] * 6
    assert seconds == [LEDGER] * 6
    assert shadow.owned() == 6
    assert [shadow.get(group) for group in groups] == [BUFFER] * 6


def test_a_position_takes_one_byte_of_a_page() -> None:
    """However many there are, and whatever became of them; pages are looked up by what their ids share."""
    shadow = Shadow()
    for position in range(2000):
        shadow.move(PromptRef(0, position, 0).group_id, LEDGER)
    shadow.move(PromptRef(0, 1234, 0).group_id, BUFFER)

    assert shadow.epochs == {0: 2000}
    assert shadow.page(0, 1234) == shadow.page(0, 1200) == bytes([*[LEDGER] * 34, BUFFER, *[LEDGER] * 65])
    assert shadow.page(0, 2000) == bytes(PAGE)


def test_ids_that_only_look_like_a_position_are_none() -> None:
    """Two spellings of one position would be two groups in one place."""
    shadow = Shadow()
    shadow.move(PromptRef(0, 1, 0).group_id, LEDGER)

    for other in (
        "e0000-p0000001",
        "e000-p00000001",
        "e000-p00000 1",
        "e000-p0000001x",
        f"e000-p00000{chr(0x661)}",
    ):
        assert shadow.move(other, BUFFER) == NONE
        assert shadow.get(other) == BUFFER

    assert shadow.get(PromptRef(0, 1, 0).group_id) == LEDGER
    assert shadow.owned() == 6


def test_positions_that_come_in_any_order_are_kept() -> None:
    """Pages need not begin in order, and those between are blank."""
    shadow = Shadow()
    for position in (1234, 7, 99_999_999 % (1 << 20)):
        assert shadow.move(PromptRef(3, position, 0).group_id, SPARES) == NONE

    assert shadow.get(PromptRef(3, 500, 0).group_id) == NONE
    assert shadow.owned() == 3


def test_ids_of_another_form_are_kept_until_they_end() -> None:
    """Somebody's own ids work too, and do not pile up."""
    shadow = Shadow()
    mine = ("mine", "e1-p2", "eabc-p0000001", "e000-p00000x1", "e000-p9999999")

    assert [shadow.move(group, LEDGER) for group in mine] == [NONE] * 5
    assert [shadow.get(group) for group in mine] == [LEDGER] * 5
    assert [shadow.move(group, TRAINED) for group in mine] == [LEDGER] * 5
    assert shadow.foreign == {}
    assert shadow.owned() == 0
    assert shadow.epochs.get(0, 0) == 0


def test_long_epochs_and_positions_are_positions_too() -> None:
    """Numbers are padded to a least width only."""
    shadow = Shadow()
    group = PromptRef(1234, 5, 0).group_id

    assert shadow.move(group, LEDGER) == NONE
    assert shadow.move(group, DROPPED) == LEDGER
    assert shadow.page(1234, 5)[5] == DROPPED
    ten_million = PromptRef(1234, 10_000_005, 0).group_id
    shadow.epochs[1234] = 10_000_000
    assert shadow.move(ten_million, LEDGER) == NONE
    assert shadow.get(ten_million) == LEDGER
    assert shadow.get(group) == DROPPED


def test_an_epoch_is_forgotten_once_everything_before_it_ended() -> None:
    """Its bytes go, and a group of it that comes back is one that ended."""
    shadow = Shadow()
    for epoch in (0, 1):
        shadow.move(PromptRef(epoch, 0, 0).group_id, LEDGER)
    shadow.move(PromptRef(1, 0, 0).group_id, TRAINED)

    assert not shadow.forget(1)
    assert not shadow.forget(0)
    shadow.move(PromptRef(0, 0, 0).group_id, TRAINED)
    assert shadow.forget(0)
    assert shadow.forget(1)
    assert shadow.epochs == {}
    assert shadow.move(PromptRef(0, 0, 0).group_id, LEDGER) == TRAINED


def test_it_takes_over_what_a_restore_brought_and_tells_what_is_owned_twice() -> None:
    """Account, ledger, pool and buffer become codes; a group in two of them is named."""
    shadow = Shadow()
    account = EpochAccount(2, 6, False, bytes([0b1]), bytes([0b10]), {"failed": 1})
    state = AccountingState(ClosedEpochs(2, 10, 10, {}), (account,))
    refs = [PromptRef(2, position, 0) for position in range(6)]
    twice = entry(3)

    found = shadow.seed(
        state,
        [GroupRecord(refs[2].group_id, 0, refs[2]), GroupRecord(twice.group_id, 0, twice.prompt)],
        [refs[4]],
        [twice],
        [],
    )

    assert shadow.page(2, 0)[:6] == bytes([TRAINED, DROPPED, LEDGER, NONE, SPARES, NONE])
    assert shadow.epochs == {2: PAGE}
    assert shadow.owned() == 3
    assert found == [(twice.group_id, TRAINED, LEDGER), (twice.group_id, LEDGER, BUFFER)]
