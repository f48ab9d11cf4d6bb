"""The codec: whatever a loader's state holds comes back exactly, and nothing else comes in."""

from __future__ import annotations

import json
import math
import random
import struct
from collections import Counter, OrderedDict
from typing import Any

import numpy as np
import pytest
import torch

from quiesce.checkpoint import codec
from quiesce.errors import DocumentError, UnencodableStateError


def round_trip(value: object) -> Any:  # noqa: ANN401 - any value
    """Encode to bytes and back."""
    return codec.loads(codec.dumps(value), file="state.json")


def refused(body: object, *, file: str = "state.json") -> DocumentError:
    """Return the error that decoding a JSON value ends in."""
    with pytest.raises(DocumentError) as caught:
        codec.loads(json.dumps(body).encode(), file=file)
    return caught.value


@pytest.mark.parametrize(
    "value",
    [
        None,
        True,
        False,
        0,
        -(1 << 63),
        (1 << 63) - 1,
        1 << 63,
        -(1 << 300),
        0.1,
        -0.0,
        1.0,
        5e-324,
        math.inf,
        -math.inf,
        "",
        "é\ud800\x00$",
        b"",
        b"\x00\xff",
        bytearray(b"\x01"),
        [],
        (),
        {},
        {"$": "bytes", "base64": ""},
        {"a": {"$": 1}},
        {1: "a", "1": "b", (2, b"c"): None, None: [()]},
        OrderedDict([("b", 1), ("a", (2,))]),
        [[1, (2, [3, (4,)])]],
        random.Random(5).getstate(),
    ],
    ids=repr,
)
def test_a_value_comes_back_with_its_type(value: object) -> None:
    """Equal, and of exactly the same type, also where JSON has no form of its own."""
    found = round_trip(value)

    assert found == value
    assert type(found) is type(value)


def test_a_float_keeps_its_bits() -> None:
    """Sign of zero and last digit survive, and NaN stays NaN."""
    values = [-0.0, 0.1 + 0.2, 1e300, 2.0**-1074]

    found = round_trip([*values, math.nan])

    assert [struct.pack("d", value) for value in found[:-1]] == [struct.pack("d", value) for value in values]
    assert math.isnan(found[-1])


def test_a_dict_keeps_the_order_of_its_keys() -> None:
    """A loader may rely on it, so canonical bytes do not sort a state's keys."""
    assert list(round_trip({"b": 1, "a": 2})) == ["b", "a"]


@pytest.mark.parametrize("shape", [(), (3, 2), (0,), (2, 0, 3)])
@pytest.mark.parametrize("dtype", sorted(codec._TORCH_DTYPES))  # noqa: SLF001 - every dtype that is promised
def test_a_torch_tensor_comes_back_bit_for_bit(dtype: str, shape: tuple[int, ...]) -> None:
    """Dtype, shape and bytes are the same, for every dtype and for empty and zero-dimensional tensors."""
    size = math.prod(shape) * getattr(torch, dtype).itemsize
    data = torch.randint(0, 2, (size,), dtype=torch.uint8)
    tensor = (
        data.view(getattr(torch, dtype)).reshape(shape)
        if size
        else torch.empty(shape, dtype=getattr(torch, dtype))
    )

    found = round_trip({"t": tensor})["t"]

    assert (found.dtype, found.shape) == (tensor.dtype, tensor.shape)
    assert not size or torch.equal(found.reshape(-1).view(torch.uint8), data)


def test_a_view_of_a_larger_tensor_is_stored_compact() -> None:
    """Strides and conjugation are resolved; the values are the same."""
    view = torch.arange(1000.0).reshape(10, 100)[:, 3].t()
    conjugate = torch.randn(4, dtype=torch.complex64).conj()

    assert torch.equal(round_trip(view), view)
    assert torch.equal(round_trip(conjugate), conjugate)
    assert len(codec.dumps(view)) < 200


@pytest.mark.parametrize(
    "dtype", ["|b1", "|i1", "|u1", "<i2", "<u4", "<i8", "<f2", "<f4", "<f8", "<c8", "<c16"]
)
def test_a_numpy_array_comes_back_bit_for_bit(dtype: str) -> None:
    """Also a strided view, an empty array and a scalar, each as what it was."""
    array = np.arange(12).astype(dtype).reshape(3, 4)

    for value in (array, array[:, ::2], np.empty((0, 3), dtype), array[1, 1]):
        found = round_trip(value)

        assert type(found) is type(value)
        assert found.dtype == value.dtype
        assert np.array_equal(found, value)


def test_a_decoded_array_may_be_changed() -> None:
    """A loader goes on counting in the arrays that it gets back."""
    array, tensor = round_trip([np.zeros(2), torch.zeros(2)])

    array += 1
    tensor += 1

    assert (array.sum(), tensor.sum()) == (2, 2)


@pytest.mark.parametrize(
    "value, path",
    [
        ({"a": [1, {2}]}, "$.a[1]"),
        ({"a": {3: object()}}, "$.a[3]"),
        ((Counter("ab"),), "$[0]"),
        (torch.nn.Parameter(torch.zeros(1)), "$"),
        (torch.zeros(1, requires_grad=True), "$"),
        (torch.zeros(2, 2).to_sparse(), "$"),
        (torch.zeros(1, device="meta"), "$"),
        (np.array([object()]), "$"),
        (np.zeros(2, dtype=">f4"), "$"),
        (np.array(["a"]), "$"),
        (np.ma.masked_array([1]), "$"),
        (1 << (1 << 17), "$"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_is_not_stored_is_named_with_its_path(value: object, path: str) -> None:
    """A state that could not come back exactly is refused when it is saved."""
    with pytest.raises(UnencodableStateError) as caught:
        codec.dumps(value)

    assert caught.value.path == path


def test_a_state_that_contains_itself_is_refused() -> None:
    """Depth is bounded, so it ends in an error that says so and not in a crash."""
    state: list[object] = []
    state.append(state)

    with pytest.raises(UnencodableStateError, match="deep"):
        codec.dumps(state)


@pytest.mark.parametrize(
    "body, path",
    [
        ({"a": {"$": "pickle", "data": ""}}, "$.a.$"),
        ({"$": ["torch"]}, "$.$"),
        ({"$": "bytes"}, "$"),
        ({"$": "bytes", "base64": "AA==", "more": 1}, "$"),
        ({"$": "bytes", "base64": "A"}, "$.base64"),
        ({"$": "bytes", "base64": "AB=="}, "$.base64"),
        ({"$": "bytes", "base64": 3}, "$.base64"),
        ({"$": "float", "value": "1.5"}, "$.value"),
        ({"$": "float", "value": 1}, "$.value"),
        ({"$": "float", "value": []}, "$.value"),
        ({"$": "int", "hex": "ff"}, "$.hex"),
        ({"$": "int", "hex": "0x" + "f" * 20}, "$.hex"),
        ({"$": "int", "hex": "f" * 20000}, "$.hex"),
        ({"$": "tuple", "items": {}}, "$.items"),
        ({"$": "dict", "items": [[1]]}, "$.items[0]"),
        ({"$": "dict", "items": [[1, 2], [1, 3]]}, "$.items[1][0]"),
        ({"$": "dict", "items": [[[], 2]]}, "$.items[0][0]"),
        ({"$": "numpy", "dtype": "|O8", "shape": [1], "base64": "AAAAAAAAAAA="}, "$.dtype"),
        ({"$": "numpy", "dtype": "<f7", "shape": [1], "base64": "AAAA"}, "$"),
        ({"$": "numpy", "dtype": "<i1", "shape": [1], "base64": "AA=="}, "$"),
        ({"$": "numpy", "dtype": "<f4", "shape": [-1], "base64": "AAAAAA=="}, "$.shape"),
        ({"$": "numpy", "dtype": "<f4", "shape": [True], "base64": "AAAAAA=="}, "$.shape"),
        ({"$": "numpy", "dtype": "<f4", "shape": [1 << 62, 1 << 62], "base64": "AAAAAA=="}, "$"),
        ({"$": "numpy", "dtype": "<f4", "shape": [0, 1 << 62, 1 << 62], "base64": ""}, "$"),
        ({"$": "numpy", "dtype": "<f4", "shape": [1] * 40, "base64": "AAAAAA=="}, "$.shape"),
        ({"$": "scalar", "dtype": "<f4", "shape": [1], "base64": "AAAAAA=="}, "$.shape"),
        ({"$": "torch", "dtype": "load", "shape": [1], "base64": "AA=="}, "$.dtype"),
        ({"$": "torch", "dtype": "float32", "shape": [2], "base64": "AAAAAA=="}, "$"),
        ({"$": "torch", "dtype": "float32", "shape": [0, 1 << 62, 1 << 62], "base64": ""}, "$"),
    ],
)
def test_a_value_that_no_encoder_made_is_refused_by_path(body: object, path: str) -> None:
    """Unknown kinds, wrong fields, wrong lengths and forms that are not canonical name the place."""
    error = refused(body, file="position.json")

    assert (error.file, error.path) == ("position.json", path)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{",
        b"\xff",
        b'{"a":1,"a":2}',
        b"NaN",
        b"[Infinity]",
        b"1e999",
        b"9223372036854775808",
        b"-9223372036854775809",
        b"1" * 5000,
        b"[" * 100_000,
        b'{"a":' * 5000,
        b"1 2",
        b"[" * 70 + b"]" * 70,
    ],
    ids=lambda data: data[:12].decode("latin1"),
)
def test_bytes_that_are_not_strict_json_are_refused(data: bytes) -> None:
    """Whatever is wrong, it ends in the error that names the file."""
    with pytest.raises(DocumentError) as caught:
        codec.loads(data, file="ledger.json")

    assert caught.value.file == "ledger.json"


def test_a_document_beyond_the_size_limit_is_refused_unread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Control state is small, so a huge document is no control state."""
    monkeypatch.setattr(codec, "MAX_DOCUMENT_BYTES", 10)

    with pytest.raises(DocumentError, match="11 bytes"):
        codec.parse_json(b"[1,2,3,4,5]", file="ledger.json")


def test_equal_states_give_equal_bytes() -> None:
    """The bytes are ASCII without spaces, so digests can be compared."""
    data = codec.dumps({"a": (1, 2.5), "b": "é"})

    assert data == b'{"a":{"$":"tuple","items":[1,2.5]},"b":"\\u00e9"}\n'
