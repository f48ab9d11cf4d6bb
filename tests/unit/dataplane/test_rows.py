"""The encoding of one row."""

import struct
import subprocess
import sys
import types
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quiesce.dataplane import rows
from quiesce.dataplane.rows import DTYPES, decode_layout, decode_row, encode_row, merge_rows
from quiesce.errors import MissingFieldError, RowCorruptError, RowExistsError, RowFormatError

# torch says this once a process, of any tensor of half-precision complex numbers; rows hold them all the
# same.
pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental:UserWarning")

names = st.text(st.characters(codec="utf-8"), min_size=1, max_size=20)


@st.composite
def fields(draw: st.DrawFn) -> tuple[str, tuple[int, ...], bytes]:
    """Draw an element type, a shape and that many bytes."""
    dtype = DTYPES[draw(st.sampled_from(sorted(DTYPES)))]
    shape = tuple(draw(st.lists(st.integers(0, 4), max_size=4)))
    size = dtype.size
    for dimension in shape:
        size *= dimension
    data = draw(st.binary(min_size=size, max_size=size))
    return dtype.name, shape, bytes(byte & 1 for byte in data) if dtype.name == "bool" else data


def tensor(dtype: str, shape: tuple[int, ...], data: bytes) -> torch.Tensor:
    """Return the tensor of these bytes."""
    wanted = getattr(torch, dtype)
    if not data:
        return torch.empty(shape, dtype=wanted)
    return torch.frombuffer(bytearray(data), dtype=wanted).reshape(shape)


def raw(value: Any) -> bytes:  # noqa: ANN401 - a tensor of either library
    """Return a tensor's bytes."""
    flat = value.contiguous().reshape(-1)
    return bytes(flat.view(torch.uint8).tolist()) if flat.numel() else b""


@given(st.dictionaries(names, fields(), min_size=1, max_size=5))
def test_a_row_comes_back_bit_for_bit(described: dict[str, tuple[str, tuple[int, ...], bytes]]) -> None:
    """Every element type, shape (0-d and empty too) and name survives, in order, NaN payloads included."""
    row = {name: tensor(*kind) for name, kind in described.items()}
    found = decode_row(encode_row(row))
    assert list(found) == list(row)
    for name, (dtype, shape, data) in described.items():
        value = found[name]
        assert (str(value.dtype), tuple(value.shape), raw(value)) == (f"torch.{dtype}", shape, data)


@given(st.binary(max_size=200))
def test_arbitrary_bytes_are_refused_as_corrupt(data: bytes) -> None:
    """Whatever is not a row is a RowCorruptError, never another error and never a row."""
    with pytest.raises(RowCorruptError):
        decode_row(data)


@settings(max_examples=400)
@given(st.data())
def test_a_damaged_row_is_corrupt_or_still_a_row(data: st.DataObject) -> None:
    """Flipped, cut and lengthened rows end in RowCorruptError or in a row of that length; nothing else."""
    described = data.draw(st.dictionaries(names, fields(), min_size=1, max_size=3))
    encoded = bytearray(encode_row({name: tensor(*kind) for name, kind in described.items()}))
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(encoded) - 1))
        encoded[at] = data.draw(st.integers(0, 255))
    length = data.draw(st.integers(0, len(encoded) + 8))
    damaged = bytes(encoded[:length]) + b"\0" * (length - len(encoded))
    try:
        layout = decode_layout(damaged)
        found = decode_row(damaged)
    except RowCorruptError:
        return
    assert layout[-1].stop == len(damaged)
    assert sum(value.nbytes for value in found.values()) == layout[-1].stop - layout[0].start


@given(
    st.dictionaries(names, fields(), min_size=1, max_size=3),
    st.dictionaries(names, fields(), min_size=1, max_size=3),
)
def test_merging_is_a_union_of_disjoint_fields(
    old: dict[str, tuple[str, tuple[int, ...], bytes]], new: dict[str, tuple[str, tuple[int, ...], bytes]]
) -> None:
    """A merged row is the row that would have been encoded with all fields; a shared field is refused."""
    first = {name: tensor(*kind) for name, kind in old.items()}
    second = {name: tensor(*kind) for name, kind in new.items()}
    if old.keys() & new.keys():
        with pytest.raises(RowExistsError):
            merge_rows(encode_row(first), encode_row(second))
    else:
        assert merge_rows(encode_row(first), encode_row(second)) == encode_row({**first, **second})


def test_every_dense_torch_type_is_known() -> None:
    """A new torch release's element type is noticed here; left out are those not of whole bytes."""
    left_out = ("quint", "qint", "bits", "uint", "int", "float4")
    every = {
        str(value).removeprefix("torch.") for value in vars(torch).values() if isinstance(value, torch.dtype)
    }
    sub_byte = {f"{kind}{bits}" for kind in ("int", "uint") for bits in range(1, 8)}
    unknown = {name for name in every - set(DTYPES) - sub_byte if not name.startswith(left_out)}
    assert unknown == set()
    for dtype in DTYPES.values():
        assert getattr(torch, dtype.name).itemsize == dtype.size
        if dtype.in_numpy:
            assert np.dtype(dtype.name).itemsize == dtype.size


@pytest.mark.parametrize(
    "value",
    [
        torch.arange(24).reshape(4, 6)[:, ::2],
        torch.arange(24).reshape(4, 6).T,
        torch.arange(24)[5:9],
        torch.arange(6).expand(3, 6),
        torch.tensor(3.5, requires_grad=True),
        torch.nn.Parameter(torch.ones(3)),
        torch.view_as_complex(torch.ones(3, 2)).conj(),
        torch.view_as_complex(torch.ones(3, 2)).conj().imag,
    ],
    ids=[
        "strided",
        "transposed",
        "slice",
        "expanded",
        "0-d with gradient",
        "parameter",
        "conjugate",
        "negative",
    ],
)
def test_views_are_stored_as_what_they_show(value: torch.Tensor) -> None:
    """Strided, shared, lazily conjugated or negated tensors come back as their values, compact."""
    encoded = encode_row({"x": value})
    found = torch.as_tensor(decode_row(encoded)["x"])
    assert torch.equal(found, value.detach())
    assert found.is_contiguous()
    assert len(encoded) < 80 + value.numel() * value.element_size()


@pytest.mark.parametrize(
    "value",
    [
        np.arange(24).reshape(4, 6)[:, ::2],
        np.asfortranarray(np.arange(6).reshape(2, 3)),
        np.array(2.5),
        np.empty((0, 3), dtype=np.int8),
        np.array([True, False]),
        np.array([1 + 2j]),
    ],
    ids=["strided", "column-major", "0-d", "empty", "bool", "complex"],
)
def test_numpy_arrays_come_back(value: np.ndarray[Any, Any]) -> None:
    """Arrays of any order and shape come back as arrays that can be written to."""
    found = decode_row(encode_row({"x": value}), "numpy")["x"]
    assert isinstance(found, np.ndarray)
    np.testing.assert_array_equal(found, value)
    assert (found.dtype, found.shape) == (value.dtype, value.shape)
    assert found.flags.writeable


@pytest.mark.parametrize(
    "value, problem",
    [
        ([1, 2], "field 'x' is a list, neither"),
        (1.0, "field 'x' is a float, neither"),
        (np.float32(1), "field 'x' is a float32, neither"),
        (np.array([1], dtype=">i4"), r"field 'x' is big-endian \(>i4\)"),
        (np.array([object()]), "array of object"),
        (np.array(["text"]), "array of <U4"),
        (np.array([1], dtype="datetime64[s]"), "array of datetime64"),
        (np.zeros(1, dtype=[("a", "i4")]), "array of"),
        (torch.eye(2).to_sparse(), "not plain and dense"),
        (torch.empty(2, device="meta"), r"\(meta\), which is not plain and dense"),
        (torch.zeros((1,) * 33), "33 dimensions, more than 32"),
    ],
    ids=[
        "list",
        "number",
        "numpy scalar",
        "big-endian",
        "objects",
        "text",
        "dates",
        "records",
        "sparse",
        "meta",
        "33-d",
    ],
)
def test_what_cannot_be_stored_is_named(value: object, problem: str) -> None:
    """A value that rows do not hold is refused with the row and the field."""
    with pytest.raises(RowFormatError, match=f"^the row: .*{problem}"):
        encode_row({"x": value}, "the row")  # type: ignore[dict-item] # wrong values are the point


@pytest.mark.parametrize("name", ["", "x" * 256, "\ud800", 7], ids=["empty", "long", "surrogate", "number"])
def test_a_name_that_cannot_be_stored_is_refused(name: str) -> None:
    """Field names are text of 1 to 255 bytes."""
    with pytest.raises(RowFormatError, match=r"^the row: "):
        encode_row({name: torch.ones(1)}, "the row")


def test_a_row_has_fields_but_not_endless_ones() -> None:
    """A row without a field would vanish in a checkpoint, and the header counts in 16 bits."""
    with pytest.raises(RowFormatError, match="it has no field"):
        encode_row({})
    with pytest.raises(RowFormatError, match="it has 4097 fields"):
        encode_row({str(number): torch.ones(1) for number in range(4097)})
    many = encode_row({str(number): torch.ones(1) for number in range(4096)})
    with pytest.raises(RowFormatError, match="it has 4097 fields"):
        merge_rows(many, encode_row({"one more": torch.ones(1)}))


def test_numpy_is_not_asked_for_what_it_lacks() -> None:
    """A bfloat16 field read as numpy is an error that names it, not wrong numbers."""
    encoded = encode_row({"x": torch.ones(2, dtype=torch.bfloat16)})
    with pytest.raises(RowFormatError, match="field 'x': numpy has no bfloat16; ask for torch tensors"):
        decode_row(encoded, "numpy")


def test_a_truth_value_is_zero_or_one() -> None:
    """Other bytes in a bool tensor would be undefined behaviour later on."""
    encoded = encode_row({"x": torch.tensor([True])})
    with pytest.raises(RowCorruptError, match="field 'x': a truth value is neither 0 nor 1"):
        decode_row(encoded[:-1] + b"\x02")


def test_asked_fields_come_in_the_asked_order() -> None:
    """Only the asked fields are decoded."""
    encoded = encode_row({"a": torch.ones(1), "b": torch.zeros(1), "c": torch.ones(2)})
    assert list(decode_row(encoded, fields=["c", "a"])) == ["c", "a"]
    with pytest.raises(MissingFieldError, match="row has no field 'd'; it has a, b, c"):
        decode_row(encoded, fields=["d"])


def test_an_impossible_shape_is_corrupt() -> None:
    """An empty tensor whose other dimensions overflow is refused before a library is asked to make it."""
    encoded = bytearray(encode_row({"x": torch.empty(0, 1)}))
    at = len(encoded) - len("x") - 8
    encoded[at : at + 8] = struct.pack("<Q", 1 << 63)
    with pytest.raises(RowCorruptError, match="impossible shape"):
        decode_row(bytes(encoded))


def test_another_version_is_named() -> None:
    """A row of a later format says so."""
    encoded = bytearray(encode_row({"x": torch.ones(1)}))
    encoded[4] = 2
    with pytest.raises(RowCorruptError, match="its format is version 2, this is version 1"):
        decode_layout(bytes(encoded))


def test_a_big_endian_machine_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Raw elements are only portable between machines of one byte order."""
    monkeypatch.setattr(sys, "byteorder", "big")
    with pytest.raises(RowFormatError, match="big-endian"):
        rows.check_byte_order()


def test_numpy_alone_is_enough() -> None:
    """Who uses numpy arrays needs no torch; importing the data plane imports neither."""
    script = (
        "import sys; from quiesce.dataplane import MemoryDataPlane; from quiesce import RowKey\n"
        "assert not {'torch', 'numpy'} & sys.modules.keys()\n"
        "import numpy\n"
        "plane = MemoryDataPlane(1, tensors='numpy'); key = RowKey(1, 'g', 0, 0)\n"
        "plane.put({key: {'x': numpy.arange(3)}}); print(plane.get([key])[0]['x'].tolist())\n"
        "assert 'torch' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr, done.returncode) == ("[0, 1, 2]\n", "", 0)


def test_a_put_is_not_disturbed_by_another_thread_that_is_importing_torch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """While torch is being imported elsewhere it is in sys.modules without its types; numpy rows still encode."""
    monkeypatch.setitem(sys.modules, "torch", types.ModuleType("torch"))

    encoded = encode_row({"tokens": np.arange(3)})

    assert list(decode_row(encoded, "numpy")["tokens"]) == [0, 1, 2]
