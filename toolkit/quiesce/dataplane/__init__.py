"""Where the rows of prompt groups live, and how a cut pins them.

``interface`` says what a data plane promises; ``lmdb`` (the default) and ``memory`` keep it; ``base`` is what
these two have in common; ``rows`` is the encoding of one row and ``shards`` the files that rows are written
to and restored from.
"""

from quiesce.dataplane.interface import (
    DataPlane,
    DataPlaneStatistics,
    FileDigest,
    RowsWritten,
    Snapshot,
    TensorLibrary,
)
from quiesce.dataplane.lmdb import DEFAULT_MAP_BYTES, LmdbDataPlane, default_map_bytes
from quiesce.dataplane.memory import MemoryDataPlane
from quiesce.dataplane.shards import SHARD_BYTES, read_inventory, read_metadata, read_rows

__all__ = [
    "DEFAULT_MAP_BYTES",
    "SHARD_BYTES",
    "DataPlane",
    "DataPlaneStatistics",
    "FileDigest",
    "LmdbDataPlane",
    "MemoryDataPlane",
    "RowsWritten",
    "Snapshot",
    "TensorLibrary",
    "default_map_bytes",
    "read_inventory",
    "read_metadata",
    "read_rows",
]
