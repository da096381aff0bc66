"""Where a what-if replay's operations come from: a trace in Parquet, a run, an ``.npz``, heavy traces of all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sftriage.errors import InputError, UsageError
from sftriage.model.windows import Window
from sftriage.reduce.stages import Names
from sftriage.reduce.together import together
from sftriage.runs.whatif import operations_in, operations_of
from sftriage.runtime.reducing import read_all
from sftriage.whatif.graph import Operations
from sftriage.whatif.pipeline import COLUMNS, RANK, TraceRows, arranged

SUFFIX = ".parquet"
MAX_OPERATIONS, MAX_UNPACKED_BYTES = 30_000_000, 2 << 30
"""What a trace in Parquet may hold: all of its operations are in memory at once."""
ALONE = (SUFFIX, ".npz")
"""Files that are of all ranks; any other file is one rank's trace, or an archive of several."""
MAGIC = b"PAR1"
ROWS_AT_A_TIME = 1 << 20


def load_operations(paths: Sequence[Path]) -> Operations:
    """The operations of a recording, or of the heavy traces of all its ranks.

    Raises:
        InputError: it is none, or cannot be used; the message names what and where.
        UsageError: what reads it is not installed, or of several files each is a recording by itself.
    """
    if absent := [path for path in paths if not path.exists()]:
        raise InputError(f"{absent[0]}: no such file or directory")
    recordings = [path for path in paths if path.is_dir() or path.suffix in ALONE]
    if not recordings:
        return operations_of(_reduced(paths))
    if len(paths) > 1:
        raise UsageError(f"{recordings[0]} is a recording of all ranks: it goes alone")
    (path,) = paths
    try:
        if path.suffix == SUFFIX:
            return arranged(_read_rows(path))
        return operations_in(path)
    except InputError as error:
        if str(error).startswith(str(path)):
            raise
        raise InputError(f"{path}: {error}") from error


def _reduced(paths: Sequence[Path]) -> Window:
    reduced = read_all(paths, Names(), {})
    if reduced.refused:
        raise InputError("; ".join(refusal.reason for refusal in reduced.refused))
    if len(reduced.reductions) < 2:
        raise InputError(f"{paths[0]}: one rank's trace: a replay takes those of all ranks")
    return together(reduced.reductions)


def _read_rows(path: Path) -> TraceRows:
    try:
        with path.open("rb") as file:
            magic = file.read(len(MAGIC))
    except OSError as error:
        raise InputError(f"{path}: {error.strerror}") from error
    if magic != MAGIC:
        raise InputError(f"{path}: not a Parquet file")
    try:
        from pyarrow import ArrowException
        from pyarrow.parquet import ParquetFile
    except ImportError:
        raise UsageError(f"{path}: a trace in Parquet needs pyarrow: pip install 'sftriage[whatif]'") from None
    names: list[str] = []
    parts: dict[str, list[NDArray[Any]]] = {}
    try:
        with ParquetFile(path) as file:
            there = file.schema_arrow.names
            if absent := [column for column in COLUMNS if column not in there]:
                raise InputError(f"{path}: column {', '.join(absent)} missing (columns there: {', '.join(there)})")
            about = file.metadata
            unpacked_bytes = sum(about.row_group(n).total_byte_size for n in range(about.num_row_groups))
            if about.num_rows > MAX_OPERATIONS or unpacked_bytes > MAX_UNPACKED_BYTES:
                raise InputError(
                    f"{path}: {about.num_rows:,} operations, {unpacked_bytes:,} bytes unpacked; at most "
                    f"{MAX_OPERATIONS:,} and {MAX_UNPACKED_BYTES:,} are read"
                )
            wanted = [column for column in COLUMNS | RANK if column in there]
            for batch in file.iter_batches(ROWS_AT_A_TIME, columns=wanted, use_threads=False):
                for column in wanted:
                    values_E = _values(batch.column(column), names if column == "optype" else None)
                    parts.setdefault(column, []).append(values_E)
    except (ArrowException, OSError) as error:
        raise InputError(f"{path}: not a readable Parquet file: {str(error).splitlines()[0]}") from error
    except _MissingError as error:
        raise InputError(f"{path}: {column}: {error}") from error
    if not parts:
        raise InputError("no operations")
    columns = {column: np.concatenate(arrays) for column, arrays in parts.items()}
    for column, values_E in columns.items():
        seconds = column in ("start_ts", "duration")
        if values_E.dtype.kind not in ("f" if seconds else "iu"):
            meant = "seconds" if seconds else "whole numbers"
            raise InputError(f"{path}: {column}: {values_E.dtype}, and not {meant}")
    return TraceRows.of(columns, names)


class _MissingError(Exception):
    """A column has rows without a value."""


def _values(column: Any, names: list[str] | None) -> NDArray[Any]:
    """A column's values; of texts, where they are in ``names``, to which those not yet there are added."""
    if column.null_count:
        raise _MissingError(f"{column.null_count} values missing")
    if names is None:
        return np.asarray(column.to_numpy(zero_copy_only=False))
    encoded = column.dictionary_encode()
    texts = [str(text) for text in encoded.dictionary.to_pylist()]
    names.extend(text for text in texts if text not in names)
    place = np.array([names.index(text) for text in texts], dtype=np.int16)
    return np.asarray(place[encoded.indices.to_numpy(zero_copy_only=False)])
