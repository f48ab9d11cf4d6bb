"""JSON for state that is not quite JSON: what a dataloader's ``state_dict`` holds.

Tensors (torch, numpy), bytes, tuples, dicts with keys that are not strings, and floats that JSON lacks each
become an object with the one key ``$`` naming the kind, so a state survives a round trip exactly, types
included, and nothing ever needs pickle. What is not in the table is refused, with the path to it, when the
state is saved, never when it is needed.

==============  =======================================================================
kind            form
==============  =======================================================================
``float``       ``{"$": "float", "value": "nan" | "inf" | "-inf"}``
``int``         ``{"$": "int", "hex": "-1f…"}``, for integers of more than 64 bits
``bytes``       ``{"$": "bytes", "base64": …}``; ``bytearray`` likewise
``tuple``       ``{"$": "tuple", "items": […]}``
``dict``        ``{"$": "dict", "items": [[key, value], …]}``, unless every key is a string other than ``$``
``ordered``     the same for an ``OrderedDict``
``numpy``       ``{"$": "numpy", "dtype": "<f4", "shape": […], "base64": …}``; ``scalar`` for a numpy scalar
``torch``       ``{"$": "torch", "dtype": "bfloat16", "shape": […], "base64": …}``: dense tensors on the CPU
==============  =======================================================================

Rule: decoding trusts nothing. Every length is checked before it is used, unknown kinds and fields are
refused, and whatever comes in, what comes out is a value or :class:`~quiesce.errors.DocumentError`. torch and
numpy are imported only when a value of theirs is met. Nothing here suspends; encoding a large state takes
time, so it is done outside the window.
"""

from __future__ import annotations

import base64
import binascii
import json
import math
import re
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Final, NoReturn

from quiesce.errors import DocumentError, UnencodableStateError

__all__ = ["MAX_DEPTH", "MAX_DOCUMENT_BYTES", "decode", "dumps", "encode", "loads", "parse_json", "to_bytes"]

MAX_DOCUMENT_BYTES: Final = 1 << 30
"""Larger documents are refused unread: control state is kilobytes, a loader's state megabytes."""

MAX_DEPTH: Final = 64
"""Levels of nesting that are encoded and decoded; below what Python's own JSON parser can take."""

_INT64: Final = (-(1 << 63), 1 << 63)
_MAX_INT_BITS: Final = 1 << 16
_MAX_DIMENSIONS: Final = 32
_NUMPY_DTYPE: Final = re.compile(r"[<|][biufc]\d{1,2}", re.ASCII)
_TORCH_DTYPES: Final = frozenset(
    {
        "bool",
        "uint8",
        "int8",
        "uint16",
        "int16",
        "uint32",
        "int32",
        "uint64",
        "int64",
        "float16",
        "bfloat16",
        "float32",
        "float64",
        "complex64",
        "complex128",
        "float8_e4m3fn",
        "float8_e5m2",
        "float8_e4m3fnuz",
        "float8_e5m2fnuz",
    }
)
_JSON: Final = json.JSONEncoder(ensure_ascii=True, allow_nan=False, separators=(",", ":"))
_ITEMS_AT_ONCE: Final = 256
_HEX: Final = re.compile(r"-?[0-9a-f]{1,16384}", re.ASCII)


def to_bytes(value: object) -> bytes:
    """Return the canonical bytes of a JSON value: ASCII, no spaces, fields in the order given.

    The library encodes a value in one call that holds the interpreter's lock, so the long lists that an object may have
    are handed to it a few items at a time: the event loop must not wait for a whole document.
    """
    if not isinstance(value, dict):
        return _JSON.encode(value).encode("ascii") + b"\n"
    fields = (f"{_JSON.encode(name)}:{_value(item)}" for name, item in value.items())
    return f"{{{','.join(fields)}}}\n".encode("ascii")


def _value(value: object) -> str:
    if not isinstance(value, list) or len(value) <= _ITEMS_AT_ONCE:
        return _JSON.encode(value)
    batches = (value[start : start + _ITEMS_AT_ONCE] for start in range(0, len(value), _ITEMS_AT_ONCE))
    return f"[{','.join(_JSON.encode(batch)[1:-1] for batch in batches)}]"


def dumps(value: object) -> bytes:
    """Encode a state to canonical bytes.

    Raises:
        UnencodableStateError: If it holds something that is not stored, with the path to it.
    """
    return to_bytes(encode(value))


def loads(data: bytes, *, file: str) -> Any:  # noqa: ANN401 - any value
    """Decode what :func:`dumps` made.

    Args:
        data: The bytes.
        file: Named in errors.

    Raises:
        DocumentError: If they are anything else.
    """
    return decode(parse_json(data, file=file), file=file)


def parse_json(data: bytes, *, file: str) -> Any:  # noqa: ANN401 - any value
    """Parse JSON strictly: UTF-8, no key twice, no NaN, no integer beyond 64 bits, bounded nesting.

    Raises:
        DocumentError: If the bytes are anything else.
    """
    if len(data) > MAX_DOCUMENT_BYTES:
        raise DocumentError(
            file, "$", f"{len(data)} bytes are more than the {MAX_DOCUMENT_BYTES} of a document"
        )

    def refuse(problem: str) -> NoReturn:
        raise DocumentError(file, "$", problem)

    def pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(items)
        if len(found) != len(items):
            keys = [key for key, _ in items]
            refuse(f"key {next(key for key in keys if keys.count(key) > 1)!r} stands twice in one object")
        return found

    def integer(text: str) -> int:
        if len(text) > 20 or not _INT64[0] <= int(text) < _INT64[1]:  # noqa: PLR2004 - digits of 2**63
            refuse(f"the integer {text[:24]} does not fit 64 bits")
        return int(text)

    def number(text: str) -> float:
        value = float(text)
        if not math.isfinite(value):
            refuse(f"the number {text[:24]} does not fit a float")
        return value

    try:
        return json.loads(
            data.decode("utf-8"),
            object_pairs_hook=pairs,
            parse_int=integer,
            parse_float=number,
            parse_constant=lambda text: refuse(f"{text} is not JSON"),
        )
    except UnicodeDecodeError as error:
        raise DocumentError(file, "$", f"not UTF-8 at byte {error.start}") from None
    except json.JSONDecodeError as error:
        raise DocumentError(
            file, "$", f"not JSON: {error.msg} at line {error.lineno} column {error.colno}"
        ) from None
    except RecursionError:
        raise DocumentError(file, "$", "nested too deeply") from None


# --------------------------------------------------------------------------------------------------- encoding


def encode(value: object, *, path: str = "$") -> Any:  # noqa: ANN401 - any value
    """Turn a state into JSON values.

    Args:
        value: The state.
        path: Where it stands, for errors.

    Raises:
        UnencodableStateError: If it holds something that is not stored, with the path to it.
    """
    return _encode(value, path, 0)


def _encode(value: object, path: str, depth: int) -> Any:  # noqa: ANN401 - any value
    if depth > MAX_DEPTH:
        raise UnencodableStateError(path, f"nested more than {MAX_DEPTH} levels deep (or it contains itself)")
    simple = _ENCODERS.get(type(value))
    if simple is not None:
        return simple(value, path, depth)
    # Only a library that is loaded already can have made a value of its own.
    for name, encoder in (("torch", _encode_torch), ("numpy", _encode_numpy)):
        library = sys.modules.get(name)
        if library is not None:
            found = encoder(library, value, path)
            if found is not None:
                return found
    raise UnencodableStateError(
        path,
        f"a {type(value).__module__}.{type(value).__qualname__} cannot be stored; what can: None, bool, int, "
        "float, str, bytes, bytearray, list, tuple, dict, OrderedDict, tensors, numpy arrays and scalars",
    )


def _encode_int(value: Any, _path: str, _depth: int) -> Any:  # noqa: ANN401 - any value
    if _INT64[0] <= value < _INT64[1]:
        return value
    if value.bit_length() > _MAX_INT_BITS:
        raise UnencodableStateError(_path, f"an integer of {value.bit_length()} bits cannot be stored")
    return {"$": "int", "hex": f"{value:x}"}


def _encode_float(value: Any, _path: str, _depth: int) -> Any:  # noqa: ANN401 - any value
    return value if math.isfinite(value) else {"$": "float", "value": repr(value)}


def _encode_items(items: Iterable[object], path: str, depth: int) -> list[Any]:
    return [_encode(item, f"{path}[{number}]", depth + 1) for number, item in enumerate(items)]


def _encode_pairs(value: Mapping[Any, Any], path: str, depth: int) -> list[Any]:
    return [
        [_encode(key, f"{path}.keys()", depth + 1), _encode(item, f"{path}[{key!r}]", depth + 1)]
        for key, item in value.items()
    ]


def _encode_dict(value: Any, path: str, depth: int) -> Any:  # noqa: ANN401 - any value
    if all(type(key) is str for key in value) and "$" not in value:
        return {key: _encode(item, f"{path}.{key}", depth + 1) for key, item in value.items()}
    return {"$": "dict", "items": _encode_pairs(value, path, depth)}


def _encode_ordered(value: Any, path: str, depth: int) -> Any:  # noqa: ANN401 - any value
    if vars(value):
        raise UnencodableStateError(
            path, f"an OrderedDict with attributes {', '.join(vars(value))} cannot be stored"
        )
    return {"$": "ordered", "items": _encode_pairs(value, path, depth)}


def _base64(data: bytes | bytearray | memoryview) -> str:
    return base64.b64encode(data).decode("ascii")


_ENCODERS: Final[dict[type, Callable[[Any, str, int], Any]]] = {
    type(None): lambda value, _path, _depth: value,
    bool: lambda value, _path, _depth: value,
    str: lambda value, _path, _depth: value,
    int: _encode_int,
    float: _encode_float,
    bytes: lambda value, _path, _depth: {"$": "bytes", "base64": _base64(value)},
    bytearray: lambda value, _path, _depth: {"$": "bytearray", "base64": _base64(value)},
    list: _encode_items,
    tuple: lambda value, path, depth: {"$": "tuple", "items": _encode_items(value, path, depth)},
    dict: _encode_dict,
    OrderedDict: _encode_ordered,
}


def _encode_torch(torch: Any, value: Any, path: str) -> dict[str, Any] | None:  # noqa: ANN401 - lazily imported
    if not isinstance(value, torch.Tensor):
        return None
    dtype = str(value.dtype).removeprefix("torch.")
    problem = ""
    if type(value) is not torch.Tensor:
        problem = f"a {type(value).__qualname__} is not a plain tensor"
    elif value.device.type != "cpu":
        problem = f"a tensor on {value.device} has to be copied to the CPU first"
    elif value.layout is not torch.strided or dtype not in _TORCH_DTYPES:
        problem = f"a tensor of layout {value.layout} and dtype {value.dtype} cannot be stored"
    elif value.requires_grad:
        problem = "a tensor that requires a gradient has to be detached first"
    elif value.dim() > _MAX_DIMENSIONS:
        problem = f"a tensor of {value.dim()} dimensions cannot be stored"
    if problem:
        raise UnencodableStateError(path, problem)
    flat = value.resolve_conj().resolve_neg().contiguous().reshape(-1)
    data = flat.view(torch.uint8).numpy().data if flat.numel() else b""
    return {"$": "torch", "dtype": dtype, "shape": list(value.shape), "base64": _base64(data)}


def _encode_numpy(numpy: Any, value: Any, path: str) -> dict[str, Any] | None:  # noqa: ANN401 - lazily imported
    if not isinstance(value, numpy.ndarray | numpy.generic):
        return None
    little = value.dtype.newbyteorder("<")
    if not _NUMPY_DTYPE.fullmatch(little.str) or (type(value) is not numpy.ndarray and value.shape):
        raise UnencodableStateError(
            path, f"a {type(value).__qualname__} of dtype {value.dtype} cannot be stored"
        )
    if value.dtype != little:
        raise UnencodableStateError(
            path, f"an array of byte order {value.dtype.byteorder!r} cannot be stored"
        )
    if value.ndim > _MAX_DIMENSIONS:
        raise UnencodableStateError(path, f"an array of {value.ndim} dimensions cannot be stored")
    kind = "numpy" if type(value) is numpy.ndarray else "scalar"
    return {"$": kind, "dtype": little.str, "shape": list(value.shape), "base64": _base64(value.tobytes())}


# --------------------------------------------------------------------------------------------------- decoding


def decode(value: object, *, file: str, path: str = "$") -> Any:  # noqa: ANN401 - any value
    """Turn JSON values back into the state.

    Args:
        value: What :func:`parse_json` returned.
        file: Named in errors.
        path: Where the value stands, for errors.

    Raises:
        DocumentError: If it is not what :func:`encode` makes.
    """
    return _Decoder(file).decode(value, path, 0)


class _Decoder:
    """One document being decoded."""

    def __init__(self, file: str) -> None:
        self._file = file

    def refuse(self, path: str, problem: str) -> NoReturn:
        raise DocumentError(self._file, path, problem)

    def decode(self, value: Any, path: str, depth: int) -> Any:  # noqa: ANN401 - any value
        if depth > MAX_DEPTH:
            self.refuse(path, f"nested more than {MAX_DEPTH} levels deep")
        if isinstance(value, list):
            return list(self.items(value, path, depth))
        if not isinstance(value, dict):
            return value
        if "$" not in value:
            return {key: self.decode(item, f"{path}.{key}", depth + 1) for key, item in value.items()}
        kind = value["$"]
        if not isinstance(kind, str) or kind not in _FIELDS:
            self.refuse(f"{path}.$", f"unknown kind {kind!r}")
        if set(value) != _FIELDS[kind]:
            wrong = ", ".join(sorted(set(value) ^ _FIELDS[kind]))
            self.refuse(
                path, f"a {kind} has exactly the fields {', '.join(sorted(_FIELDS[kind]))}; wrong: {wrong}"
            )
        if "dtype" in value:
            return self.tensor(kind, value, path)
        if kind in {"tuple", "dict", "ordered"}:
            if not isinstance(value["items"], list):
                self.refuse(f"{path}.items", "expected a list")
            if kind == "tuple":
                return tuple(self.items(value["items"], f"{path}.items", depth))
            return self.mapping(kind, value["items"], f"{path}.items", depth)
        return self.scalar(kind, value, path)

    def scalar(self, kind: str, value: Mapping[str, Any], path: str) -> int | float | bytes | bytearray:
        if kind == "float":
            if value["value"] not in ("nan", "inf", "-inf"):
                self.refuse(f"{path}.value", "expected nan, inf or -inf")
            return float(value["value"])
        if kind == "int":
            text = value["hex"]
            if not isinstance(text, str) or not _HEX.fullmatch(text):
                self.refuse(f"{path}.hex", "expected a hexadecimal integer")
            number = int(text, 16)
            if _INT64[0] <= number < _INT64[1] or f"{number:x}" != text:
                self.refuse(f"{path}.hex", "not in canonical form")
            return number
        data = self.data(value, path)
        return bytearray(data) if kind == "bytearray" else data

    def items(self, values: list[Any], path: str, depth: int) -> Iterator[Any]:
        for number, item in enumerate(values):
            yield self.decode(item, f"{path}[{number}]", depth + 1)

    def mapping(self, kind: str, pairs: list[Any], path: str, depth: int) -> dict[Any, Any]:
        found: dict[Any, Any] = OrderedDict() if kind == "ordered" else {}
        for number, pair in enumerate(pairs):
            here = f"{path}[{number}]"
            if not isinstance(pair, list) or len(pair) != 2:  # noqa: PLR2004 - a key and its value
                self.refuse(here, "expected a key and a value")
            key = self.decode(pair[0], f"{here}[0]", depth + 1)
            try:
                known = key in found
            except TypeError:
                self.refuse(f"{here}[0]", f"a {type(key).__name__} cannot be a key")
            if known:
                self.refuse(f"{here}[0]", f"key {key!r} stands twice")
            found[key] = self.decode(pair[1], f"{here}[1]", depth + 1)
        return found

    def data(self, value: Mapping[str, Any], path: str) -> bytes:
        text = value["base64"]
        if not isinstance(text, str):
            self.refuse(f"{path}.base64", "expected a string")
        try:
            data = base64.b64decode(text, validate=True)
        except (binascii.Error, ValueError):
            self.refuse(f"{path}.base64", "not base64")
        if _base64(data) != text:
            self.refuse(f"{path}.base64", "not base64 in canonical form")
        return data

    def tensor(self, kind: str, value: Mapping[str, Any], path: str) -> Any:  # noqa: ANN401 - either library
        shape, dtype = value["shape"], value["dtype"]
        if (
            not isinstance(shape, list)
            or len(shape) > _MAX_DIMENSIONS
            or not all(type(size) is int and size >= 0 for size in shape)
        ):
            self.refuse(f"{path}.shape", f"expected at most {_MAX_DIMENSIONS} sizes of 0 or more")
        known = isinstance(dtype, str) and (
            dtype in _TORCH_DTYPES if kind == "torch" else _NUMPY_DTYPE.fullmatch(dtype) is not None
        )
        if not known:
            self.refuse(f"{path}.dtype", f"unknown dtype {dtype!r}")
        if kind == "scalar" and shape:
            self.refuse(f"{path}.shape", "a scalar has none")
        data = self.data(value, path)
        try:
            return _tensor_from(kind, dtype, shape, data)
        except ImportError as error:
            self.refuse(path, f"this value needs {error.name}, which is not installed")
        except (TypeError, ValueError, AttributeError, RuntimeError, OverflowError) as error:
            self.refuse(path, f"not a tensor: {error}")


def _tensor_from(kind: str, dtype: str, shape: list[int], data: bytes) -> Any:  # noqa: ANN401 - either library
    if kind == "torch":
        import torch

        wanted = getattr(torch, dtype)
        _check_length(shape, wanted.itemsize, data)
        if not data:
            return torch.empty(shape, dtype=wanted)
        return torch.frombuffer(bytearray(data), dtype=torch.uint8).view(wanted).reshape(shape)
    import numpy as np

    resolved = np.dtype(dtype)
    if resolved.str != dtype:
        message = f"dtype {dtype!r} is not in canonical form"
        raise ValueError(message)
    _check_length(shape, resolved.itemsize, data)
    array = np.frombuffer(data, dtype=resolved).reshape(shape)
    return array[()] if kind == "scalar" else array.copy()


def _check_length(shape: list[int], item_size: int, data: bytes) -> None:
    wanted = math.prod(shape) * item_size
    if wanted != len(data):
        message = f"{len(data)} bytes where shape {shape} needs {wanted}"
        raise ValueError(message)


_FIELDS: Final[dict[str, frozenset[str]]] = {
    "float": frozenset({"$", "value"}),
    "int": frozenset({"$", "hex"}),
    "bytes": frozenset({"$", "base64"}),
    "bytearray": frozenset({"$", "base64"}),
    "tuple": frozenset({"$", "items"}),
    "dict": frozenset({"$", "items"}),
    "ordered": frozenset({"$", "items"}),
    "numpy": frozenset({"$", "dtype", "shape", "base64"}),
    "scalar": frozenset({"$", "dtype", "shape", "base64"}),
    "torch": frozenset({"$", "dtype", "shape", "base64"}),
}
