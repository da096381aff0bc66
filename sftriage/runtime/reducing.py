"""Heavy traces brought down to stages: their accounting, agreement with a run, causes, and operations to replay."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sftriage.errors import InputError, UsageError
from sftriage.model.verdicts import Settings, Verdict
from sftriage.model.windows import Window
from sftriage.reduce.events import Trace
from sftriage.reduce.inside import find
from sftriage.reduce.reading import read_traces
from sftriage.reduce.samples import read_samples
from sftriage.reduce.stages import Names, Reduction, reduce_trace
from sftriage.reduce.together import Agreement, Agrees, compare, overall, together
from sftriage.runs.directory import RunDirectory, read_info
from sftriage.runs.recordings import RecordedRun, load_recording
from sftriage.runs.whatif import operations_in, operations_of
from sftriage.runtime.annotating import explained, known_faulty, stage_in_question
from sftriage.runtime.catalogues import run_store
from sftriage.traces.manifest import MANIFEST_NAME, Findings, Manifest
from sftriage.traces.store import LocalStore
from sftriage.trainer.sampler import NAME as SAMPLES_NAME
from sftriage.verdict.judging import judge
from sftriage.whatif.graph import Operations
from sftriage.whatif.pipeline import COLUMNS, RANK, TraceRows, arranged
from sftriage.windows.gather import Shape

FALSE_NAMES_PER_MILLION_STEPS = 10_000.0
"""A trace is a few steps, and looked at once: of a hundred, one may name somebody by chance."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """A trace that was not reduced, and why."""

    source: str
    reason: str


@dataclass(frozen=True, slots=True)
class Reduced:
    """The traces that could be reduced, each with the file it came from, and those that could not."""

    reductions: tuple[Reduction, ...]
    files: tuple[Path, ...]
    refused: tuple[Refusal, ...]

    def whole(self, rank: int, names: Names, ranks: Mapping[str, int]) -> Reduction:
        """The reduction of one rank with its events, which are read again where they were let go."""
        at = next(index for index, one in enumerate(self.reductions) if one.trace.rank == rank)
        wanted = self.reductions[at]
        if wanted.trace.blocks:
            return wanted
        for trace in read_traces(self.files[at]):
            if trace.source == wanted.trace.source and (again := _described(trace, self.files[at], ranks)).rank == rank:
                return reduce_trace(again, names)
        raise InputError(f"{wanted.trace.source}: the file has changed while it was read")


def read_all(paths: Sequence[Path], names: Names, ranks: Mapping[str, int]) -> Reduced:
    """Read and reduce traces, one after the other; of several, only the stages stay in memory."""
    reductions: list[Reduction] = []
    files: list[Path] = []
    refused: list[Refusal] = []
    for path in paths:
        try:
            for trace in read_traces(path):
                if reductions:
                    reductions[-1] = reductions[-1].without_events()
                try:
                    reductions.append(reduce_trace(_described(trace, path, ranks), names))
                    files.append(path)
                except InputError as error:
                    refused.append(Refusal(trace.source, str(error)))
                del trace
        except InputError as error:
            refused.append(Refusal(str(path), str(error)))
    if len(reductions) > 1:
        reductions[-1] = reductions[-1].without_events()
    return Reduced(tuple(reductions), tuple(files), tuple(refused))


def _described(trace: Trace, path: Path, ranks: Mapping[str, int]) -> Trace:
    """The trace with the rank that a person gave it, and with what the manifest beside it knows and it does not."""
    manifest = _manifest_beside(path, trace)
    if manifest is not None:
        capture = manifest.capture
        trace = replace(
            trace,
            rank=capture.rank if trace.rank is None else trace.rank,
            world_size=trace.world_size or capture.world_size,
            job=trace.job or manifest.job,
            capture_id=manifest.capture_id,
        )
    member = trace.source.rpartition("!")[2]
    for name in (trace.source, member, Path(member).name, str(path), path.name):
        if name in ranks:
            return replace(trace, rank=ranks[name])
    return trace


def _manifest_beside(path: Path, trace: Trace) -> Manifest | None:
    """The manifest of the capture in whose directory a trace lies, if it is of no other capture."""
    beside = path.parent / MANIFEST_NAME
    try:
        manifest = Manifest.from_json(beside.read_bytes(), str(beside))
    except (OSError, InputError):
        return None
    ours = any(artefact.name == path.name for artefact in manifest.artefacts)
    return manifest if ours and trace.capture_id in (None, manifest.capture_id) else None


@dataclass(frozen=True, slots=True)
class Accounted:
    """The accounting on all ranks' traces; in words why there is none, or why it names nobody."""

    verdict: Verdict | None
    why_not: str


def for_one_look(settings: Settings) -> Settings:
    """The thresholds for a few steps that are looked at once."""
    return replace(settings, false_names_per_million_steps=FALSE_NAMES_PER_MILLION_STEPS)


def account(reductions: Sequence[Reduction], settings: Settings) -> Accounted:
    """Run the frontier on the traces of all ranks, where all are there and belong together."""
    try:
        if len(reductions) < 2:
            raise InputError("one rank's trace: the accounting takes those of all ranks")
        window = together(reductions)
    except InputError as error:
        return Accounted(None, str(error))
    verdict, _ = judge(window, None, for_one_look(settings))
    if window.schema.sync:
        return Accounted(verdict, "")
    none = not any(one.has_collectives for one in reductions)
    why = "no collective in these traces" if none else "no stage of these traces ends with a collective in most steps"
    verdict = replace(verdict, label="needs_evidence", reasons=("no_sync",), suspects=())
    return Accounted(verdict, f"{why}; a --map can name the stages in which the ranks wait (sync)")


LONG_STEPS = 512
"""Steps that are read of a run at once, where that many are wanted or not."""


@dataclass(frozen=True, slots=True)
class Signal:
    """What was recorded of a run: where, by which job, and the manifest of the capture in question."""

    recording: RecordedRun
    job: str
    manifest: Manifest | None
    store: LocalStore

    def steps(self, first: int, last: int) -> dict[int, Window]:
        """The recorded steps of a range, each a window of one step; of several attempts the last that has it."""
        found: dict[int, Window] = {}
        for shape in (*self._shapes(first, last), Shape(window_steps=1, stride_steps=1, warmup_steps=0)):
            for window in self.recording.windows(shape):
                for number in range(max(first, window.first_step), min(last, window.last_step) + 1):
                    one = window.steps(number, number)
                    if np.isfinite(one.durations_NRS).any() and window.attempt >= found.get(number, one).attempt:
                        found[number] = one
            # Windows step by step take long, and are for a run whose end no whole window reaches.
            if len(found) > last - first:
                break
        return found

    def _shapes(self, first: int, last: int) -> list[Shape]:
        """Of each attempt the long windows of which one ends with the last step that is wanted."""
        begins: dict[int, int] = {}
        for window in self.recording.windows(Shape(LONG_STEPS, LONG_STEPS, 0)):
            begins.setdefault(window.attempt, window.first_step)
        shapes = []
        for begin in sorted(set(begins.values())):
            long = max(last - first + 1, min(LONG_STEPS, last - begin + 1))
            shapes.append(Shape(long, long, (last - long + 1 - begin) % long))
        return shapes


def load_signal(path: Path) -> Signal:
    """A run directory, or the manifest of one of its captures; InputError where it is neither."""
    capture_id = None
    run = path
    if path.name == MANIFEST_NAME and path.is_file():
        # RUN/captures/ID/manifest.json
        capture_id, run = path.absolute().parent.name, path.absolute().parents[2]
        if not RunDirectory(run).info_file.is_file():
            raise InputError(f"{path}: a manifest outside its run, and the signal is in the run")
    elif not path.is_dir():
        raise InputError(f"{path}: neither a run directory nor the {MANIFEST_NAME} of a capture in one")
    store = run_store(RunDirectory(run))
    manifest = store.manifest(capture_id) if capture_id else None
    return Signal(load_recording(run), read_info(RunDirectory(run)).job, manifest, store)


@dataclass(frozen=True, slots=True)
class Confirmation:
    """Whether the heavy trace agrees with the coarse signal, rank by rank, and where all ranks are there as a whole."""

    agrees: Agrees
    ranks: tuple[Agreement, ...]
    verdict: Verdict | None
    verdicts_agree: bool | None


def confirm(
    reductions: Sequence[Reduction], accounted: Accounted, signal: Signal, stage: str | None, settings: Settings
) -> Confirmation:
    """Compare traces with what was recorded of the same steps; InputError where that is nothing."""
    for one in reductions:
        trace = one.trace
        if one.origin != "sftriage" and trace.capture_id is None:
            foreign = "sftriage did not capture it, so its step numbers are the profiler's own and not the run's"
            raise InputError(f"{trace.source}: {foreign}")
        if trace.job is not None and trace.job != signal.job:
            raise InputError(f"{trace.source}: of job {trace.job!r}; the run is of {signal.job!r}")
        if trace.rank is None:
            raise InputError(f"{trace.source}: it does not say its rank; give it with --rank FILE=RANK")
    first = min(int(one.steps.number_N.min()) for one in reductions)
    last = max(int(one.steps.number_N.max()) for one in reductions)
    recorded = signal.steps(first, last)
    if not recorded:
        raise InputError(f"{signal.recording.source}: nothing was recorded of steps {first} to {last}")
    agreements = tuple(_agreement(one, recorded, stage) for one in reductions)
    verdict, verdicts_agree = None, None
    judged = accounted.verdict is not None and not accounted.why_not
    if judged and all(number in recorded for number in range(first, last + 1)):
        whole = Window.joined([recorded[number] for number in range(first, last + 1)])
        # A profiler ran in all of these steps: that is what is compared here, and no reason to say nothing.
        verdict, _ = judge(replace(whole, capturing_N=None), None, for_one_look(settings))
        verdicts_agree = _named(verdict) == _named(accounted.verdict)  # type: ignore[arg-type]  # there is one
    return Confirmation(overall(agreements, verdicts_agree=verdicts_agree), agreements, verdict, verdicts_agree)


def _agreement(one: Reduction, recorded: Mapping[int, Window], stage: str | None) -> Agreement:
    rank = one.trace.rank or 0
    rows, signal = [], []
    for row, number in enumerate(one.steps.number_N.tolist()):
        window = recorded.get(number)
        if window is None or rank >= window.durations_NRS.shape[1]:
            continue
        durations_S = window.durations_NRS[0, rank]
        if np.isfinite(durations_S).all():
            rows.append(row)
            signal.append(durations_S)
    if not rows:
        raise InputError(f"{one.trace.source}: nothing was recorded of its steps on rank {rank}")
    heavy_S = (one.durations_ns_NS[rows].mean(axis=0) * 1e-9).tolist()
    coarse_S = np.mean(signal, axis=0).tolist()
    return compare(
        dict(zip(one.schema.stages, heavy_S, strict=True)),
        dict(zip(next(iter(recorded.values())).schema.stages, coarse_S, strict=True)),
        stage=stage,
        rank=rank,
        numbers=tuple(one.steps.number_N[rows].tolist()),
    )


def _named(verdict: Verdict) -> tuple[str, tuple[int, ...], str | None]:
    if verdict.label != "suspect" or not verdict.suspects:
        return verdict.label, (), None
    return verdict.label, verdict.suspects[0].ranks, verdict.suspects[0].stage


def _ranks_to_look_at(reductions: Sequence[Reduction], verdict: Verdict, stage: str | None) -> tuple[int, int] | None:
    """Of several ranks the suspect, or whoever takes longest in the stage asked for; and the median rank beside it.

    None where nobody is suspected, and no stage was asked for.
    """
    suspect = verdict.suspects[0] if verdict.suspects else None
    asked = stage or (suspect.stage if suspect else None)
    took_s = {
        one.trace.rank: sum(one.mean_s.values()) if asked is None else one.mean_s.get(asked, 0.0)
        for one in reductions
        if one.trace.rank is not None
    }
    order = sorted(took_s, key=lambda rank: took_s[rank])
    if len(order) < 2 or (stage is None and (suspect is None or suspect.rank not in took_s)):
        return None
    first = suspect.rank if suspect is not None and suspect.rank in took_s else order[-1]
    others = [rank for rank in order if rank != first]
    return int(first or 0), others[(len(others) - 1) // 2]


def with_manifest(signal: Signal | None, reduced: Reduced) -> Signal | None:
    """The signal with the manifest of the capture that the one trace is."""
    capture_id = reduced.reductions[0].trace.capture_id
    if signal is None or signal.manifest is not None or len(reduced.reductions) > 1 or capture_id is None:
        return signal
    try:
        return replace(signal, manifest=signal.store.manifest(capture_id))
    except (UsageError, InputError):
        return signal


def findings_of(
    reduced: Reduced,
    accounted: Accounted,
    signal: Signal | None,
    control: Path | None,
    how: tuple[Names, dict[str, int]],
    asked: str | None,
) -> Findings | None:
    """What filled the stage in question on the one rank, or on the suspect among several."""
    beside: Reduction | None = None
    if len(reduced.reductions) > 1:
        if control is not None:
            raise UsageError("--control goes with a single trace; of several, the median rank is the control")
        verdict = accounted.verdict
        chosen = None if verdict is None else _ranks_to_look_at(reduced.reductions, verdict, asked)
        if chosen is None:
            return None
        one, beside = (reduced.whole(rank, *how) for rank in chosen)
    else:
        (one,) = reduced.reductions
        if control is not None:
            read = read_all([control], *how)
            if len(read.reductions) != 1:
                raise InputError(f"{control}: one trace is wanted: {'; '.join(each.reason for each in read.refused)}")
            (beside,) = read.reductions
    manifest = signal.manifest if signal else None
    if manifest is None and len(reduced.reductions) == 1:
        manifest = _manifest_beside(reduced.files[0], one.trace)
    stage = stage_in_question(asked, manifest, accounted.verdict, one, beside)
    findings = find(one, stage, beside, known_faulty(manifest))
    known = None if manifest is None else manifest.findings
    findings = findings.model_copy(update={"counted": None if known is None else known.counted})
    files = reduced.files[0] if len(reduced.reductions) == 1 else None, control
    beside_files = (None if file is None else file.with_name(SAMPLES_NAME) for file in files)
    its, others = (read_samples(file) if file is not None and file.is_file() else None for file in beside_files)
    return findings.model_copy(update={"cause": explained(findings, manifest, its, others)})


SUFFIX = ".parquet"
MAX_OPERATIONS, MAX_UNPACKED_BYTES = 30_000_000, 2 << 30
"""What a trace in Parquet may hold: all of its operations are in memory at once."""
ALONE = (SUFFIX, ".npz")
"""Files that are of all ranks; any other file is one rank's trace, or an archive of several."""
MAGIC = b"PAR1"
ROWS_AT_A_TIME = 1 << 20


def load_operations(paths: Sequence[Path]) -> Operations:
    """The operations of a recording, or of the heavy traces of all its ranks."""
    if absent := [path for path in paths if not path.exists()]:
        raise InputError(f"{absent[0]}: no such file or directory")
    recordings = [path for path in paths if path.is_dir() or path.suffix in ALONE]
    if not recordings:
        reduced = read_all(paths, Names(), {})
        if reduced.refused:
            raise InputError("; ".join(refusal.reason for refusal in reduced.refused))
        if len(reduced.reductions) < 2:
            raise InputError(f"{paths[0]}: one rank's trace: a replay takes those of all ranks")
        return operations_of(together(reduced.reductions))
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
                    if missing := batch.column(column).null_count:
                        raise InputError(f"{path}: {column}: {missing} values missing")
                    values_E = _values(batch.column(column), names if column == "optype" else None)
                    parts.setdefault(column, []).append(values_E)
    except (ArrowException, OSError) as error:
        raise InputError(f"{path}: not a readable Parquet file: {str(error).splitlines()[0]}") from error
    if not parts:
        raise InputError("no operations")
    columns = {column: np.concatenate(arrays) for column, arrays in parts.items()}
    for column, values_E in columns.items():
        seconds = column in ("start_ts", "duration")
        if values_E.dtype.kind not in ("f" if seconds else "iu"):
            meant = "seconds" if seconds else "whole numbers"
            raise InputError(f"{path}: {column}: {values_E.dtype}, and not {meant}")
    return TraceRows.of(columns, names)


def _values(column: Any, names: list[str] | None) -> NDArray[Any]:
    """A column's values; of texts, where they are in ``names``, to which those not yet there are added."""
    if names is None:
        return np.asarray(column.to_numpy(zero_copy_only=False))
    encoded = column.dictionary_encode()
    texts = [str(text) for text in encoded.dictionary.to_pylist()]
    names.extend(text for text in texts if text not in names)
    place = np.array([names.index(text) for text in texts], dtype=np.int16)
    return np.asarray(place[encoded.indices.to_numpy(zero_copy_only=False)])
