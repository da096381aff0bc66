"""Recordings as ``.npz`` files: reads those of other programs, with messages for mistakes, and writes them."""

from __future__ import annotations

import math
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from sftriage.errors import InputError, SchemaError
from sftriage.model.windows import COUNTERS, OTHER, PLACE, StageSchema, Window
from sftriage.trainer.layout import MAX_COUNT
from sftriage.windows.decoding import BoolArray, FloatArray


def counted_of(known: Mapping[str, FloatArray | None]) -> FloatArray | None:
    """The counters of a window (N x R x C) from the known ones (N x R each); None if there are none."""
    there = {name: values_NR for name, values_NR in known.items() if values_NR is not None}
    if not there:
        return None
    counted_NRC = np.full((*next(iter(there.values())).shape, len(COUNTERS)), np.nan)
    for name, values_NR in there.items():
        counted_NRC[:, :, PLACE[name]] = values_NR
    return counted_NRC


_FIELDS = {
    "durations_s": "durations_NRS",
    "outside_s": "outside_NRG",
    "between_s": "between_NR",
    "ready_s": "ready_NR",
    "device_s": "device_NRS",
    "device_outside_s": "device_outside_NRG",
    "device_between_s": "device_between_NR",
    "device_ready_s": "device_ready_NR",
    "work": "work_NR",
    **{name: name for name in ("first_step", "hosts", "cohorts", "kinds", "on_device")},
}
"""The arrays of a file, and the fields of a window that they are."""


def save_npz(window: Window, path: Path) -> Path:
    """Write a window for `load_npz`, without its attempt, captures, and kinds that only some ranks note."""
    there = {name: values for name, of in _FIELDS.items() if (values := getattr(window, of)) is not None}
    if window.counted_NRC is not None:
        there |= {name: window.counted_NRC[:, :, place] for name, place in PLACE.items()}
    stages, sync = np.array(window.schema.stages, dtype=np.str_), np.array(window.schema.sync, dtype=np.str_)
    with path.open("wb") as file:  # (numpy would add a suffix to a path)
        np.savez_compressed(file, stages=stages, sync=sync, **there)
    return path


MAX_UNPACKED_BYTES = 512 << 20
"""Maximum memory for the arrays of a recording; as windows they take several times as much."""

_NPY_MAGIC = b"\x93NUMPY"
_NOT_FINITE = "not a finite number"


def load_npz(path: Path) -> Window:
    """A whole recording as one window.

    Raises InputError if it is not a readable ``.npz``, or has invalid arrays; the message names them.
    """
    try:
        if not zipfile.is_zipfile(path):
            raise InputError("not a readable .npz: not a zip archive")
        _check_sizes(path)
        with np.load(path, allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
        return _window(arrays)
    except InputError as error:
        raise InputError(f"{path}: {error}") from error
    except SchemaError as error:
        raise InputError(f"{path}: stages or sync: {error}") from error
    except Exception as error:  # numpy, zipfile and zlib raise many exceptions for damaged files
        raise InputError(f"{path}: not a readable .npz: {error}") from error


def _check_sizes(path: Path) -> None:
    with zipfile.ZipFile(path) as archive:
        members = archive.infolist()
        # A member unpacks to no more than its directory entry says: the reader stops there.
        total_bytes = sum(member.file_size for member in members)
        if total_bytes > MAX_UNPACKED_BYTES:
            raise InputError(f"its arrays have {total_bytes:,} bytes; at most {MAX_UNPACKED_BYTES:,} are allowed")
        for member in members:
            with archive.open(member) as file:
                if file.read(len(_NPY_MAGIC)) != _NPY_MAGIC:
                    continue
                file.seek(0)
                version = np.lib.format.read_magic(file)
                read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
                shape, _, dtype = read(file)
                declared_bytes, found_bytes = math.prod(shape) * dtype.itemsize, member.file_size - file.tell()
            if dtype.hasobject:
                raise InputError(f"not a readable .npz: {member.filename} contains Python objects")
            if declared_bytes != found_bytes:
                raise InputError(f"{member.filename} declares {declared_bytes:,} bytes but has {found_bytes:,}")


def _window(arrays: dict[str, Any]) -> Window:
    absent = [name for name in ("durations_s", "stages", "sync") if name not in arrays]
    if absent:
        there = ", ".join(sorted(arrays)) or "none"
        raise InputError(f"array {' and '.join(absent)} missing (found: {there})")
    schema = StageSchema(_texts(arrays, "stages"), _texts(arrays, "sync"))
    durations_NRS, missing_NR = _durations(arrays, len(schema.stages))
    n_steps, n_ranks = missing_NR.shape
    for name in ("ready_s", "device_ready_s"):
        if name in arrays and not schema.sync:
            raise InputError(f"{name} is set, but sync names no stage for it to split")
    for name in ("outside_s", "between_s", "device_outside_s", "device_between_s"):
        if name in arrays and schema.stages[-1] != OTHER:
            raise InputError(f"{name} requires {OTHER!r} as the last stage, which is {schema.stages[-1]!r}")
    outside_NRG = _refinement(arrays, "outside_s", missing_NR, n_sync=len(schema.sync))
    work_NR = _refinement(arrays, "work", missing_NR)
    device = _device(arrays, durations_NRS, schema.sync)
    return Window(
        schema=schema,
        first_step=_scalar(arrays, "first_step", "iu", "an integer"),
        durations_NRS=durations_NRS,
        outside_NRG=outside_NRG if schema.sync else None,
        between_NR=_refinement(arrays, "between_s", missing_NR),
        ready_NR=_refinement(arrays, "ready_s", missing_NR, unknown=True),
        hosts=_counted(arrays, "hosts", n_ranks, "rank"),
        cohorts=_counted(arrays, "cohorts", n_ranks, "rank"),
        kinds=_counted(arrays, "kinds", n_steps, "step"),
        work_NR=None if work_NR is None else np.nan_to_num(work_NR, copy=False, nan=0.0),
        counted_NRC=counted_of(
            {name: _refinement(arrays, name, missing_NR, unknown=True) for name in COUNTERS if name in arrays}
        ),
        on_device=bool(device) or bool(_scalar(arrays, "on_device", "biu", "true or false")),
        **device,
    )


def _durations(arrays: dict[str, Any], n_named: int) -> tuple[FloatArray, BoolArray]:
    values_NRS = _numbers(arrays, "durations_s", ("step", "rank", "stage"))
    n_steps, n_ranks, n_stages = values_NRS.shape
    if n_stages != n_named:
        raise InputError(f"durations_s has {n_stages} stages on its last axis, but stages names {n_named}")
    if 0 in values_NRS.shape:
        raise InputError(f"durations_s is empty: {n_steps} steps x {n_ranks} ranks x {n_stages} stages")
    missing_NR = _checked("durations_s", values_NRS)
    if missing_NR.all():
        raise InputError("durations_s is NaN everywhere")
    return values_NRS, missing_NR


def _checked(name: str, values_NRS: FloatArray) -> BoolArray:
    """Refuse invalid times; returns which vectors (N, R) are missing."""
    missing_NR: BoolArray = np.asarray(np.isnan(values_NRS).all(axis=2))
    bad_NRS = ~np.isfinite(values_NRS) & ~missing_NR[:, :, None]
    _refuse(name, values_NRS, bad_NRS, _NOT_FINITE, "; a missing step is NaN in all its stages")
    _refuse(name, values_NRS, values_NRS < 0, "negative")
    return missing_NR


def _device(arrays: dict[str, Any], durations_NRS: FloatArray, sync: tuple[str, ...]) -> dict[str, Any]:
    if "device_s" not in arrays:
        for name in ("device_outside_s", "device_between_s", "device_ready_s"):
            if name in arrays:
                raise InputError(f"{name} is set, but device_s is missing")
        return {}
    values_NRS = _numbers(arrays, "device_s", ("step", "rank", "stage"))
    if values_NRS.shape != durations_NRS.shape:
        raise InputError(f"device_s has shape {values_NRS.shape}; durations_s requires {durations_NRS.shape}")
    missing_NR = _checked("device_s", values_NRS)
    outside_NRG = _refinement(arrays, "device_outside_s", missing_NR, n_sync=len(sync))
    return {
        "device_NRS": values_NRS,
        "device_outside_NRG": outside_NRG if sync else None,
        "device_between_NR": _refinement(arrays, "device_between_s", missing_NR),
        "device_ready_NR": _refinement(arrays, "device_ready_s", missing_NR, unknown=True),
    }


def _refinement(
    arrays: dict[str, Any], name: str, missing_NR: BoolArray, *, n_sync: int | None = None, unknown: bool = False
) -> FloatArray | None:
    """An optional array by step and rank (and sync stage): NaN where the vector is missing."""
    if name not in arrays:
        return None
    shape = missing_NR.shape if n_sync is None else (*missing_NR.shape, n_sync)
    values = _numbers(arrays, name, ("step", "rank", "sync stage")[: len(shape)])
    if values.shape != shape:
        required = "durations_s requires" if n_sync is None else "durations_s and sync require"
        raise InputError(f"{name} has shape {values.shape}; {required} {shape}")
    missing = missing_NR if n_sync is None else np.broadcast_to(missing_NR[:, :, None], shape)
    bad = np.isinf(values) if unknown else ~np.isfinite(values) & ~missing
    _refuse(name, values, bad, _NOT_FINITE)
    _refuse(name, values, values < 0, "negative")
    values[missing_NR] = np.nan
    return values


def _numbers(arrays: dict[str, Any], name: str, axes: tuple[str, ...]) -> FloatArray:
    """A copy in float64 (N, R, ...), with the third axis first in memory: the ranks of one stage lie side by side."""
    values = arrays[name]
    if values.ndim != len(axes):
        raise InputError(f"{name} has {values.ndim} axes, shape {values.shape}; expected {' x '.join(axes)}")
    if not (np.issubdtype(values.dtype, np.floating) or np.issubdtype(values.dtype, np.integer)):
        raise InputError(f"{name} is {values.dtype}; expected float64{' seconds' if name.endswith('_s') else ''}")
    if values.ndim == 2:
        return np.array(values, dtype=np.float64, order="C")
    return np.array(values.transpose(2, 0, 1), dtype=np.float64, order="C").transpose(1, 2, 0)


def _refuse(name: str, values: FloatArray, bad: BoolArray, problem: str, remark: str = "") -> None:
    """Refuse an array with bad values, naming the first place. ``remark`` is added if that is NaN."""
    n_bad = int(np.count_nonzero(bad))
    if not n_bad:
        return
    at = tuple(int(i) for i in np.unravel_index(int(bad.argmax()), bad.shape))
    axes = ("step", "rank", "stage" if name in ("durations_s", "device_s") else "sync stage")
    place = ", ".join(f"{axis} {i}" for axis, i in zip(axes, at, strict=False))
    more = f" and {n_bad - 1} more" if n_bad > 1 else ""
    raise InputError(f"{name} is {problem} at {place} ({values[at]}){more}{remark if np.isnan(values[at]) else ''}")


def _scalar(arrays: dict[str, Any], name: str, dtype_kinds: str, expected: str) -> int:
    value = arrays.get(name, np.array(0))
    if value.ndim or value.dtype.kind not in dtype_kinds or not -MAX_COUNT < int(value) < MAX_COUNT:
        raise InputError(f"{name} is {value.dtype} of shape {value.shape}; expected {expected}")
    return int(value)


def _texts(arrays: dict[str, Any], name: str) -> tuple[str, ...]:
    values = arrays[name]
    # An empty list of names is saved as an empty float array: a job may have no sync stage.
    if values.ndim != 1 or not (values.dtype.kind == "U" or values.size == 0):
        raise InputError(f"{name} has {values.ndim} axes of {values.dtype}; expected one axis of strings")
    return tuple(str(value) for value in values)


def _counted(arrays: dict[str, Any], name: str, count: int, axis: str) -> tuple[str, ...] | None:
    if name not in arrays:
        return None
    values = _texts(arrays, name)
    if len(values) != count:
        raise InputError(f"{name} has {len(values)} entries, but durations_s has {count} on its {axis} axis")
    return values
