"""The bytes of one row: a small header, then each field's raw little-endian elements.

Rule: nothing is guessed. Encoding copies exactly the elements of a tensor (a view of a larger one is
compacted); decoding checks every length before it touches the bytes it describes, so that whatever comes in,
what comes out is the row or :class:`~quiesce.errors.RowCorruptError`. Nothing here suspends.

Layout, all integers little-endian and unsigned: ``QROW``, version (1 byte), 0 (1 byte), number of fields (2),
header size (4); per field dtype code (1), number of dimensions (1), length of the name (2), each dimension
(8), the name in UTF-8; then the elements of every field, in the same order, back to back to the last byte. It
costs a fifth of a safetensors document per row, which is why rows are stored like this and become safetensors
only when they are written to a folder.

torch and numpy are imported only when tensors of theirs are asked for; an array that is put brings its
library along.
"""

from __future__ import annotations

import ctypes
import math
import struct
import sys
from collections.abc import Collection, Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias

from quiesce.errors import MissingFieldError, RowCorruptError, RowExistsError, RowFormatError

if TYPE_CHECKING:
    from quiesce.dataplane.interface import Row, Tensor, TensorLibrary

__all__ = [
    "DTYPES",
    "Buffer",
    "DType",
    "Field",
    "check_byte_order",
    "decode_layout",
    "decode_row",
    "encode_row",
    "merge_rows",
    "span",
    "to_tensor",
]

_MAGIC: Final = b"QROW"
_VERSION: Final = 1
_MAX_FIELDS: Final = 4096
_MAX_NAME_BYTES: Final = 255
_MAX_DIMENSIONS: Final = 32
_MAX_SPAN: Final = (
    1 << 62
)  # elements times size, zero dimensions counted as one: what both libraries can address

_PREFIX: Final = struct.Struct("<4sBBHI")
_FIELD: Final = struct.Struct("<BBH")

Buffer = bytes | bytearray | memoryview


_Lazy: TypeAlias = Any  # a module that is not imported here, or a value of it


class DType(NamedTuple):
    """A dense element type.

    Attributes:
        code: Its number in the row header; never reused.
        name: Its name in torch and, where numpy has it, in numpy.
        size: Bytes per element (two packed elements for ``float4_e2m1fn_x2``).
        safetensors: Its name in a safetensors header; "" if the format has none that means the same.
        in_numpy: Whether numpy has it.
    """

    code: int
    name: str
    size: int
    safetensors: str
    in_numpy: bool


_TABLE: Final = (
    DType(1, "bool", 1, "BOOL", in_numpy=True),
    DType(2, "uint8", 1, "U8", in_numpy=True),
    DType(3, "int8", 1, "I8", in_numpy=True),
    DType(4, "uint16", 2, "U16", in_numpy=True),
    DType(5, "int16", 2, "I16", in_numpy=True),
    DType(6, "uint32", 4, "U32", in_numpy=True),
    DType(7, "int32", 4, "I32", in_numpy=True),
    DType(8, "uint64", 8, "U64", in_numpy=True),
    DType(9, "int64", 8, "I64", in_numpy=True),
    DType(10, "float16", 2, "F16", in_numpy=True),
    DType(11, "bfloat16", 2, "BF16", in_numpy=False),
    DType(12, "float32", 4, "F32", in_numpy=True),
    DType(13, "float64", 8, "F64", in_numpy=True),
    DType(14, "complex32", 4, "", in_numpy=False),
    DType(15, "complex64", 8, "C64", in_numpy=True),
    DType(16, "complex128", 16, "", in_numpy=True),
    DType(17, "float8_e4m3fn", 1, "F8_E4M3", in_numpy=False),
    DType(18, "float8_e5m2", 1, "F8_E5M2", in_numpy=False),
    DType(19, "float8_e4m3fnuz", 1, "", in_numpy=False),
    DType(20, "float8_e5m2fnuz", 1, "", in_numpy=False),
    DType(21, "float8_e8m0fnu", 1, "", in_numpy=False),
    DType(22, "float4_e2m1fn_x2", 1, "", in_numpy=False),
)
DTYPES: Final[Mapping[str, DType]] = {dtype.name: dtype for dtype in _TABLE}
"""Every element type that a row can hold, by name."""
_BY_CODE: Final = {dtype.code: dtype for dtype in _TABLE}


class Field(NamedTuple):
    """Where one field lies in an encoded row.

    Attributes:
        name: The field's name.
        dtype: Its element type.
        shape: Its dimensions.
        start: Offset of its first byte.
        stop: Offset past its last byte.
    """

    name: str
    dtype: DType
    shape: tuple[int, ...]
    start: int
    stop: int


def check_byte_order() -> None:
    """Refuse a machine whose integers are not little-endian: raw elements are stored as they lie in memory.

    Raises:
        RowFormatError: On a big-endian machine.
    """
    if sys.byteorder != "little":
        raise RowFormatError(
            "every row", "this machine is big-endian, and rows are little-endian as they lie"
        )


def encode_row(row: Row, where: str = "row") -> bytes:
    """Return the row's bytes.

    Args:
        row: At least one field; tensors or arrays of any shape, contiguous or not, on any device, with or
            without gradient.
        where: Names the row in an error.

    Raises:
        RowFormatError: If it has no field, or a field cannot be stored: a name that is not text of 1 to 255
            bytes, a value that is neither a torch tensor nor a numpy array, a sparse, quantized or meta
            tensor, big-endian elements, or an element type of neither library's dense ones.
    """
    if not row:
        raise RowFormatError(where, "it has no field")
    if len(row) > _MAX_FIELDS:
        raise RowFormatError(where, f"it has {len(row)} fields, more than {_MAX_FIELDS}")
    kinds = []
    data = [b""]
    for name, value in row.items():
        dtype, shape, raw = _raw(value, name, where)
        kinds.append((name, dtype, shape))
        data.append(raw)
    try:
        data[0] = _build_header(tuple(kinds))
    except _MalformedError as error:
        raise RowFormatError(where, str(error)) from None
    return b"".join(data)


@lru_cache(maxsize=4096)
def _build_header(kinds: tuple[tuple[str, DType, tuple[int, ...]], ...]) -> bytes:
    parts = [b""]
    for name, dtype, shape in kinds:
        try:
            label = name.encode()
        except UnicodeEncodeError:
            raise _MalformedError(f"the name of field {name!r} cannot be encoded as UTF-8") from None
        if not 0 < len(label) <= _MAX_NAME_BYTES:
            raise _MalformedError(
                f"the name of field {name!r} has {len(label)} bytes, not 1 to {_MAX_NAME_BYTES}"
            )
        if len(shape) > _MAX_DIMENSIONS:
            raise _MalformedError(f"field {name!r} has {len(shape)} dimensions, more than {_MAX_DIMENSIONS}")
        parts += (
            _FIELD.pack(dtype.code, len(shape), len(label)),
            struct.pack(f"<{len(shape)}Q", *shape),
            label,
        )
    parts[0] = _PREFIX.pack(_MAGIC, _VERSION, 0, len(kinds), _PREFIX.size + sum(map(len, parts)))
    return b"".join(parts)


def decode_layout(data: Buffer, where: str = "row") -> tuple[Field, ...]:
    """Return where each field lies, having checked that the header describes exactly these bytes.

    Args:
        data: An encoded row.
        where: Names the row in an error.

    Raises:
        RowCorruptError: If it does not.
    """
    total = len(data)
    if total < _PREFIX.size:
        raise RowCorruptError(where, f"{total} bytes are too few for a header")
    magic, version, zero, count, header_size = _PREFIX.unpack_from(data)
    if magic != _MAGIC or zero:
        raise RowCorruptError(where, "it does not begin like a row")
    if version != _VERSION:
        raise RowCorruptError(where, f"its format is version {version}, this is version {_VERSION}")
    if not 0 < count <= _MAX_FIELDS or header_size > total:
        raise RowCorruptError(
            where, f"it claims {count} fields in a header of {header_size} of {total} bytes"
        )
    try:
        fields = _parse_header(bytes(data[:header_size]), count)
    except _MalformedError as error:
        raise RowCorruptError(where, str(error)) from None
    if fields[-1].stop != total:
        raise RowCorruptError(where, f"it has {total} bytes, its header describes {fields[-1].stop}")
    return fields


class _MalformedError(Exception):
    """What is wrong with a header; inside this module only."""


# Rows of one run have few different headers, and parsing one costs more than comparing it.
@lru_cache(maxsize=4096)
def _parse_header(header: bytes, count: int) -> tuple[Field, ...]:
    fields = []
    offset, start = _PREFIX.size, len(header)
    names = set()
    for _ in range(count):
        if offset + _FIELD.size > len(header):
            raise _MalformedError("its header ends within a field")
        code, rank, name_size = _FIELD.unpack_from(header, offset)
        offset += _FIELD.size
        dtype = _BY_CODE.get(code)
        if dtype is None or rank > _MAX_DIMENSIONS or not 0 < name_size <= _MAX_NAME_BYTES:
            raise _MalformedError(
                f"a field has dtype code {code}, {rank} dimensions, {name_size} bytes of name"
            )
        if offset + 8 * rank + name_size > len(header):
            raise _MalformedError("its header ends within a field")
        shape = struct.unpack_from(f"<{rank}Q", header, offset)
        offset += 8 * rank
        try:
            name = header[offset : offset + name_size].decode()
        except UnicodeDecodeError:
            raise _MalformedError("a field's name is not UTF-8") from None
        offset += name_size
        if name in names:
            raise _MalformedError(f"field {name!r} is there twice")
        names.add(name)
        size = span(dtype, shape)
        if size is None:
            raise _MalformedError(f"field {name!r} has the impossible shape {shape}")
        fields.append(Field(name, dtype, shape, start, start + size))
        start += size
    if offset != len(header):
        raise _MalformedError(f"{len(header) - offset} bytes of its header belong to no field")
    return tuple(fields)


def span(dtype: DType, shape: Sequence[int]) -> int | None:
    """Return how many bytes the elements of a shape take.

    None stands for a shape that no library could hold, also where a zero dimension leaves it empty.
    """
    if len(shape) > _MAX_DIMENSIONS or math.prod(size or 1 for size in shape) * dtype.size > _MAX_SPAN:
        return None
    return math.prod(shape) * dtype.size


def decode_row(
    data: Buffer, tensors: TensorLibrary = "torch", fields: Collection[str] | None = None, where: str = "row"
) -> Row:
    """Return the row's fields as tensors with memory of their own.

    Args:
        data: An encoded row.
        tensors: Which library's.
        fields: Names of the fields to return, in that order; None returns all.
        where: Names the row in an error.

    Raises:
        MissingFieldError: If it has no such field.
        RowCorruptError: If the bytes are not a row.
        RowFormatError: If numpy arrays are asked for and the field's element type is torch's alone.
    """
    layout = decode_layout(data, where)
    if fields is not None:
        there = {field.name: field for field in layout}
        for name in fields:
            if name not in there:
                raise MissingFieldError(where, name, tuple(there))
        layout = tuple(there[name] for name in fields)
    view = memoryview(data)
    return {
        field.name: to_tensor(
            bytearray(view[field.start : field.stop]),
            field.dtype,
            field.shape,
            tensors,
            f"{where}, field {field.name!r}",
        )
        for field in layout
    }


def merge_rows(old: Buffer, new: Buffer, where: str = "row") -> bytes:
    """Return the row that has the fields of both, the old ones first.

    Raises:
        RowExistsError: If a field is in both, whatever the values.
        RowCorruptError: If one of them is not a row.
        RowFormatError: If it would have too many fields.
    """
    layouts = (decode_layout(old, where), decode_layout(new, where))
    names = {field.name for field in layouts[0]}
    for field in layouts[1]:
        if field.name in names:
            raise RowExistsError(where, field.name)
    count = len(layouts[0]) + len(layouts[1])
    if count > _MAX_FIELDS:
        raise RowFormatError(where, f"it has {count} fields, more than {_MAX_FIELDS}")
    views = (memoryview(old), memoryview(new))
    data_at = tuple(layout[0].start for layout in layouts)
    headers = [view[_PREFIX.size : at] for view, at in zip(views, data_at, strict=True)]
    prefix = _PREFIX.pack(_MAGIC, _VERSION, 0, count, _PREFIX.size + len(headers[0]) + len(headers[1]))
    return b"".join((prefix, *headers, *(view[at:] for view, at in zip(views, data_at, strict=True))))


def to_tensor(
    data: bytearray, dtype: DType, shape: Sequence[int], tensors: TensorLibrary, where: str = "tensor"
) -> Tensor:
    """Return a tensor over ``data``, which it owns from now on.

    Raises:
        RowCorruptError: If truth values are other than 0 and 1.
        RowFormatError: If numpy has no such element type.
    """
    if dtype.name == "bool" and data.translate(None, b"\x00\x01"):
        raise RowCorruptError(where, "a truth value is neither 0 nor 1")
    if tensors == "torch":
        import torch

        wanted: torch.dtype = getattr(torch, dtype.name)
        if not data:
            return torch.empty(tuple(shape), dtype=wanted)
        flat = torch.frombuffer(data, dtype=wanted)
        return flat if len(shape) == 1 else flat.reshape(tuple(shape))
    import numpy as np

    if not dtype.in_numpy:
        raise RowFormatError(where, f"numpy has no {dtype.name}; ask for torch tensors")
    if not data:
        return np.empty(tuple(shape), dtype=np.dtype(dtype.name))
    return np.frombuffer(data, dtype=np.dtype(dtype.name)).reshape(tuple(shape))


def _raw(value: object, name: object, where: str) -> tuple[DType, tuple[int, ...], bytes]:
    """Return element type, shape and the elements in C order of a tensor or array."""
    if not isinstance(name, str):
        raise RowFormatError(where, f"a field's name is {name!r}, not text")
    # A library that nobody imported cannot have made the value; nor can one that another thread is importing right now,
    # which is in sys.modules already but does not have its types yet.
    torch: _Lazy = sys.modules.get("torch")
    tensor_type: _Lazy = getattr(torch, "Tensor", None)
    if tensor_type is not None and isinstance(value, tensor_type):
        return _raw_torch(torch, value, name, where)
    array_type: _Lazy = getattr(sys.modules.get("numpy"), "ndarray", None)
    if array_type is not None and isinstance(value, array_type):
        return _raw_numpy(value, name, where)
    raise RowFormatError(
        where, f"field {name!r} is a {type(value).__name__}, neither a torch tensor nor a numpy array"
    )


def _raw_torch(torch: _Lazy, value: _Lazy, name: str, where: str) -> tuple[DType, tuple[int, ...], bytes]:
    dtype = DTYPES.get(str(value.dtype).removeprefix("torch."))
    if (
        dtype is None
        or value.layout is not torch.strided
        or value.is_nested
        or value.is_meta
        or value.is_quantized
    ):
        kind = "meta" if value.is_meta else "nested" if value.is_nested else value.layout
        raise RowFormatError(
            where, f"field {name!r} is a {value.dtype} tensor ({kind}), which is not plain and dense"
        )
    if not (value.is_cpu and value.is_contiguous() and not value.is_conj() and not value.is_neg()):
        value = value.detach().resolve_conj().resolve_neg().cpu().contiguous()
    size = value.numel() * dtype.size
    # string_at copies from the address, with neither numpy (which has no bfloat16) nor a view per element
    # type.
    return dtype, tuple(value.shape), ctypes.string_at(value.data_ptr(), size) if size else b""


def _raw_numpy(value: _Lazy, name: str, where: str) -> tuple[DType, tuple[int, ...], bytes]:
    dtype = DTYPES.get(value.dtype.name)
    if dtype is None or value.dtype.itemsize != dtype.size or value.dtype.hasobject:
        raise RowFormatError(where, f"field {name!r} is an array of {value.dtype}, which rows do not hold")
    if value.dtype.byteorder == ">":
        raise RowFormatError(where, f"field {name!r} is big-endian ({value.dtype.str}); swap it first")
    return dtype, tuple(value.shape), value.tobytes()
