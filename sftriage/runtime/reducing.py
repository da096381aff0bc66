"""Analysis of captures: by triage during a run (`Annotations`, noted in their manifests), or later by `reduce`."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np

from sftriage.controller.hang_capture import HangFound
from sftriage.errors import InputError, SftriageError, UsageError
from sftriage.model.captures import LeftOpen, Report, Reproduced, Trigger
from sftriage.model.events import CauseFound, CostMeasured, Place
from sftriage.model.verdicts import Settings, Verdict
from sftriage.model.windows import Window
from sftriage.reduce.causes import cause_of, cause_of_rank, in_torch, left_open
from sftriage.reduce.inside import SampledRank, find, find_sampled, slowest
from sftriage.reduce.reading import read_traces
from sftriage.reduce.samples import StackSamples, read_samples
from sftriage.reduce.stages import Names, Reduction, reduce_trace
from sftriage.reduce.together import Agreement, Agrees, Reduced, compare, manifest_beside, overall, read_all, together
from sftriage.runs.directory import RunDirectory, read_info
from sftriage.runs.lateness import HeatSource, captured_steps, control_of, counted_beside, counted_in, steps_beside
from sftriage.runs.recordings import RecordedRun, load_recording
from sftriage.runtime.copies import push
from sftriage.traces.disk import Counted, Do, at_once, refusal
from sftriage.traces.manifest import (
    MANIFEST_NAME,
    CauseInfo,
    CostInfo,
    Findings,
    FollowedInfo,
    Manifest,
    Noted,
    Remarks,
    ReproducedInfo,
)
from sftriage.traces.retention import RetentionLimits, outlook, remove
from sftriage.traces.store import LocalStore, beside
from sftriage.trainer.sampler import NAME as SAMPLES_NAME
from sftriage.verdict.judging import judge
from sftriage.windows.gather import Shape
from sftriage.windows.logs import StepLogs

log = logging.getLogger("sftriage")

KEPT_COSTS = 64
"""How many costs to keep for captures that are not stored yet."""

QUICK_BYTES = 4 * 2**20
"""A packed trace up to this size is analysed at once, in a second or two; a larger one only on demand."""


class Annotations:
    """Writes findings into the manifests of a run's captures. ``do`` runs the writes."""

    def __init__(self, directory: RunDirectory, do: Do = at_once) -> None:
        self._do = do
        self.store, self._spool = LocalStore(directory.path), directory.spool
        # (a disk that cannot remove the remains of a crash must not stop the start)
        with suppress(SftriageError):
            self.store.sweep()
        # A cost may be known before its capture is stored, or after.
        self._uncosted: dict[str, tuple[int, int, int]] = {}
        self._costs: deque[tuple[CostMeasured, list[str]]] = deque(maxlen=KEPT_COSTS)
        self._steps = HeatSource(StepLogs(directory.steps))
        self._causes: deque[tuple[Manifest, CauseInfo, LeftOpen]] = deque()
        self._published: dict[str, tuple[str, str]] = {}
        self._gpu_slowed: dict[str, float] = {}
        self._counted_by_hosts: dict[str, dict[str, float] | None] = {}

    def stored(
        self,
        capture_id: str,
        found: Reproduced | None,
        remarks: tuple[str, ...] = (),
        attempt: int = 0,
        gpu_slowed: float | None = None,
        steps: Window | None = None,
    ) -> None:
        """Update the manifest of a stored capture, and analyse it. The capture stays even if this fails.

        ``found`` says whether the capture shows the fault; ``remarks`` are on its rank; ``gpu_slowed`` is how far
        the GPU's clock is below the others', as a fraction, if it is slow; ``steps`` are those up to the captured ones.
        """
        if gpu_slowed is not None:
            self._gpu_slowed[capture_id] = gpu_slowed
        try:
            manifest = self.store.manifest(capture_id)
        except SftriageError as error:
            log.warning("could not update the manifest of capture %s: %s", capture_id, error)
            return
        self._counted_by_hosts[capture_id] = counted_in(steps, manifest)
        if found is not None:
            manifest = self._note(manifest, ReproducedInfo.of(found))
        if remarks:
            manifest = self._note(manifest, Remarks(lines=remarks))
        if manifest.trigger.follows and manifest.capture.role == "suspect":
            self._have_noted(manifest.trigger.follows, FollowedInfo(capture_id=capture_id))
        self._uncosted[capture_id] = (attempt, manifest.capture.first_step, manifest.capture.last_step)
        for cost, sharing in self._costs:
            self._note_cost(cost, sharing)
        self._analyse(manifest, attempt)
        # (after the notes of the analysis)
        self._do(partial(self._note_steps, capture_id, attempt), "notes")

    def remark(self, capture_id: str, remarks: tuple[str, ...]) -> None:
        """Update the remarks on the rank of a stored capture."""
        self._have_noted(capture_id, Remarks(lines=remarks))

    def keep(self, hang: HangFound, trigger: Trigger, job: str, run: str, report: Callable[[Report], None]) -> None:
        """Store the evidence of a hang, and ``report`` how that ended; raises the error of a disk that refuses it."""
        try:
            report(hang.put(self.store, self._spool, trigger, job, run))
        except Exception as error:
            if refusal(error) is not None:
                raise
            report(Report(replace(hang.result, state="failed", detail=str(error))))

    def causes(self, now_s: float) -> Iterator[CauseFound]:
        """Causes found since the last call, of captured ranks; ``now_s`` is of the epoch."""
        while self._causes:
            manifest, cause, missing = self._causes.popleft()
            at = cause.place
            place = None if at is None else Place(at.function, at.file, at.line)
            about = manifest.capture_id, manifest.capture.rank, cause.code, cause.sure, cause.sentence
            yield CauseFound(now_s, *about, place, cause.compared_with, cause.next_step, missing)

    def _note(self, manifest: Manifest, noted: Noted) -> Manifest:
        """Write a note to the store, and return the manifest with it."""
        self._have_noted(manifest.capture_id, noted)
        return manifest.noting(noted)

    def _have_noted(self, capture_id: str, noted: Noted) -> None:
        def note() -> None:
            try:
                self.store.note(capture_id, noted)
            except SftriageError as error:
                if refusal(error) is not None:
                    raise
                log.warning("could not update the manifest of capture %s: %s", capture_id, error)

        self._do(note, "notes", Counted("notes on captures"))

    def _analyse(self, manifest: Manifest, attempt: int) -> None:
        """Note what filled the suspect stage; runs once for each small capture of a suspect and its control."""
        if not quick(manifest):
            return
        try:
            beside = [found for found in self._beside(manifest) if quick(found)]
            if manifest.capture.role == "suspect":
                self._find(manifest, next(iter(beside), None), attempt)
                return
            for suspect in beside:
                self._find(suspect, manifest, attempt)
        except Exception as error:
            log.info("capture %s is stored but could not be analysed: %s", manifest.capture_id, error)

    def _find(self, manifest: Manifest, control: Manifest | None, attempt: int) -> None:
        samples, control_samples = self._samples(manifest), None if control is None else self._samples(control)
        if manifest.sampled:
            mine = self._sampled(manifest, samples, attempt)
            theirs = None
            if control is not None and control_samples is not None:
                theirs = self._sampled(control, control_samples, attempt)
            named = manifest.trigger.stage
            stage = named if named is not None and named in mine.stages else slowest(mine, theirs)
            findings = find_sampled(mine, stage, theirs, known_faulty(manifest))
        else:
            reduction, other = self._reduced(manifest), None
            if control is not None and not control.sampled:
                other = self._reduced(control)
            stage = stage_in_question(None, manifest, None, reduction, other)
            if other is not None and stage not in other.schema.stages:
                other = None
            findings = find(reduction, stage, other, known_faulty(manifest))
        findings = findings.model_copy(update={"counted": self._counted(manifest, findings, attempt)})
        beside = control_samples if findings.control is not None and findings.beside == "rank" else None
        cause = explained(findings, manifest, samples, beside)
        self._note(manifest, findings.model_copy(update={"cause": cause}))
        torch_call = samples is not None and in_torch(samples, findings.stage)
        sources = {"operators": not manifest.sampled, "stacks": samples is not None}
        missing = left_open(cause.code, **sources, torch_call=torch_call)
        # (the control's trace may add a cause, or repeat it)
        if self._published.get(manifest.capture_id) != (cause.code, missing):
            self._published[manifest.capture_id] = (cause.code, missing)
            self._causes.append((manifest, cause, missing))

    def _sampled(self, manifest: Manifest, samples: StackSamples | None, attempt: int) -> SampledRank:
        if samples is None:
            raise InputError("cannot read its stacks")
        source = str(self.store.path(manifest.capture_id, SAMPLES_NAME))
        steps = captured_steps(self._steps.logs, manifest, attempt)
        if not steps:
            raise InputError("its steps were not recorded")
        return SampledRank(source, manifest.capture.rank, steps, samples)

    def _counted(self, manifest: Manifest, findings: Findings, attempt: int) -> dict[str, float] | None:
        """The captured rank's counters above its peers', and the time lost to a lower clock of its GPU."""
        counted = counted_beside(self._steps, manifest, attempt) or self._counted_by_hosts.get(manifest.capture_id)
        slowed = self._gpu_slowed.get(manifest.capture_id)
        if slowed is None:
            return counted
        whole = manifest.trigger.stage is None
        return {**(counted or {}), "gpu_s": slowed * (findings.suspect.step_s if whole else findings.suspect.device_s)}

    def _samples(self, manifest: Manifest) -> StackSamples | None:
        if not any(artefact.name == SAMPLES_NAME for artefact in manifest.artefacts):
            return None
        try:
            return read_samples(self.store.path(manifest.capture_id, SAMPLES_NAME))
        except InputError as error:
            log.info("cannot use the stacks of capture %s: %s", manifest.capture_id, error)
            return None

    def _reduced(self, manifest: Manifest) -> Reduction:
        path = self.store.path(manifest.capture_id, manifest.artefacts[0].name)
        (reduction,) = (reduce_trace(trace) for trace in read_traces(path))
        return reduction

    def _beside(self, manifest: Manifest) -> list[Manifest]:
        return [found for _, found in beside(self.store, manifest.capture_id, manifest)]

    def costed(self, cost: CostMeasured) -> None:
        """Note a cost to the job in the manifests of the captures that ran during its steps."""
        self._costs.append((cost, []))
        self._note_cost(*self._costs[-1])

    def _note_cost(self, cost: CostMeasured, sharing: list[str]) -> None:
        """Note a cost in the captures that share it, and in those stored since that ran during its steps."""
        touched = [
            capture_id
            for capture_id, (attempt, first_step, last_step) in self._uncosted.items()
            if attempt == cost.attempt and first_step <= cost.last_step and last_step >= cost.first_step
        ]
        if not touched:
            return
        for capture_id in touched:
            # (by now its last step is logged, and the other captures of its steps are stored)
            attempt, *_ = self._uncosted.pop(capture_id)
            self._note_steps(capture_id, attempt)
            try:
                manifest = self.store.manifest(capture_id)
            except (SftriageError, OSError) as error:
                log.info("capture %s is not analysed again: %s", capture_id, error)
                continue
            if manifest.findings is not None and manifest.findings.counted is None:
                self._analyse(manifest, attempt)
        # (earlier captures get the new number of captures, too)
        sharing += touched
        about = {name: getattr(cost, name) for name in ("first_step", "last_step", "cost_s", "before_s")}
        info = CostInfo(**about, captures=len(sharing))
        for capture_id in sharing:
            self._have_noted(capture_id, info)

    def _note_steps(self, capture_id: str, attempt: int) -> None:
        """Note the captured steps as they were recorded: a remote store has the manifest, but not the run."""
        try:
            manifest = self.store.manifest(capture_id)
            controls = [found.capture.rank for found in self._beside(manifest) if found.capture.role == "control"]
            control = control_of(manifest)
            if control is None:
                control = next(iter(controls), None)
            recorded = steps_beside(self._steps, manifest, attempt, control)
            if recorded is not None and recorded != manifest.recorded:
                self.store.note(capture_id, recorded)
        except (SftriageError, OSError) as error:
            if refusal(error) is not None:
                raise
            log.warning("could not save the steps of capture %s in its manifest: %s", capture_id, error)

    def tidy(self, retention: RetentionLimits, now_s: float) -> None:
        """Remove captures that retention no longer keeps; retries failures the next time."""
        try:
            gone, problem = remove(self.store, outlook(self.store, retention, now_s).captures)
        except (SftriageError, OSError) as error:
            gone, problem = (), str(error)
        for removed in gone:
            log.info("removed capture %s: beyond the policy's retention", removed.capture_id)
        if problem is not None:
            log.warning("could not remove old captures: %s", problem)


def quick(manifest: Manifest) -> bool:
    """Whether a capture is analysed at once."""
    supported = manifest.capture.profiler == "torch" or manifest.sampled
    return supported and manifest.artefacts[0].size_bytes <= QUICK_BYTES


def stage_in_question(
    stage: str | None, manifest: Manifest | None, verdict: Verdict | None, reduced: Reduction, control: Reduction | None
) -> str:
    """The requested ``stage``, the suspect's, or the longest beyond the control, or in faulty steps beyond others."""
    if stage is not None:
        return stage
    triggered = manifest.trigger.stage if manifest is not None else None
    suspected = verdict.suspects[0].stage if verdict is not None and verdict.suspects else None
    for stage in (triggered, suspected):
        if stage is not None and stage in reduced.schema.stages:
            return stage
    mean_s = reduced.mean_s
    if control is not None:
        control_s = control.mean_s
        mean_s = {stage: seconds - control_s[stage] for stage, seconds in mean_s.items() if stage in control_s}
    else:
        faulty_N = np.isin(reduced.steps.number_N, known_faulty(manifest))
        if faulty_N.any() and not faulty_N.all():
            durations_NS = reduced.durations_ns_NS
            more_S = durations_NS[faulty_N].mean(axis=0) - durations_NS[~faulty_N].mean(axis=0)
            mean_s = dict(zip(reduced.schema.stages, more_S.tolist(), strict=True))
    return max(mean_s, key=lambda stage: mean_s[stage])


def known_faulty(manifest: Manifest | None) -> tuple[int, ...]:
    """The captured steps that are known to have the fault; empty if unknown."""
    return () if manifest is None or manifest.reproduced is None else manifest.reproduced.fault_steps


def explained(
    findings: Findings, manifest: Manifest | None, sampled: StackSamples | None, control: StackSamples | None
) -> CauseInfo:
    """The cause behind findings; the manifest of the capture has the faulty steps and the excess."""
    faulty = known_faulty(manifest)
    if manifest is None or manifest.trigger.label != "suspect":
        return cause_of(findings, sampled, control, faulty)
    trigger = manifest.trigger
    # (by the captured steps, or else by the trigger)
    over_s = trigger.gain_s if manifest.reproduced is None else manifest.reproduced.over_s
    if trigger.stage is None:
        first = next((share.name for share in findings.shares[:1] if share.kind == "operator"), "")
        return cause_of_rank(manifest.capture.rank, sampled, over_s, first, findings.counted)
    over = over_s if trigger.stage == findings.stage else None
    return cause_of(findings, sampled, control, faulty, over, on_device=trigger.clock == "device")


FALSE_NAMES_PER_MILLION_STEPS = 10_000.0
"""A trace has few steps and is judged once: one in a hundred traces may name a rank by chance."""


@dataclass(frozen=True, slots=True)
class Accounted:
    """The verdict on the traces of all ranks, and why there is none, or why it names no rank."""

    verdict: Verdict | None
    why_not: str


def for_few_steps(settings: Settings) -> Settings:
    """The thresholds for a few steps that are judged once."""
    return replace(settings, false_names_per_million_steps=FALSE_NAMES_PER_MILLION_STEPS)


def account(reductions: Sequence[Reduction], settings: Settings) -> Accounted:
    """Judge the traces of all ranks, if they are complete and of one job."""
    try:
        if len(reductions) < 2:
            raise InputError("only one rank's trace: a verdict needs those of all ranks")
        window = together(reductions)
    except InputError as error:
        return Accounted(None, str(error))
    verdict, _ = judge(window, None, for_few_steps(settings))
    if window.schema.sync:
        return Accounted(verdict, "")
    none = not any(reduction.has_collectives for reduction in reductions)
    why = "no collective in these traces" if none else "no stage of these traces ends with a collective in most steps"
    verdict = replace(verdict, label="needs_evidence", reasons=("no_sync",), suspects=())
    return Accounted(verdict, f"{why}; name the stages in which ranks wait with --map (sync)")


LONG_STEPS = 512
"""How many steps of a run to read at once."""


@dataclass(frozen=True, slots=True)
class Signal:
    """The recording of a run, its job, and the manifest of the capture in question."""

    recording: RecordedRun
    job: str
    manifest: Manifest | None
    store: LocalStore

    def steps(self, first: int, last: int) -> dict[int, Window]:
        """The recorded steps of a range, each as a window of one step, from the last attempt that has it."""
        found: dict[int, Window] = {}
        for shape in (*self._shapes(first, last), Shape(window_steps=1, stride_steps=1, warmup_steps=0)):
            for window in self.recording.windows(shape):
                for number in range(max(first, window.first_step), min(last, window.last_step) + 1):
                    step = window.steps(number, number)
                    if np.isfinite(step.durations_NRS).any() and window.attempt >= found.get(number, step).attempt:
                        found[number] = step
            # (windows of one step are slow, and needed only at the end of a run)
            if len(found) > last - first:
                break
        return found

    def _shapes(self, first: int, last: int) -> list[Shape]:
        """For each attempt, the shape of long windows, one of which ends with the last requested step."""
        begins: dict[int, int] = {}
        for window in self.recording.windows(Shape(LONG_STEPS, LONG_STEPS, 0)):
            begins.setdefault(window.attempt, window.first_step)
        shapes = []
        for begin in sorted(set(begins.values())):
            long = max(last - first + 1, min(LONG_STEPS, last - begin + 1))
            shapes.append(Shape(long, long, (last - long + 1 - begin) % long))
        return shapes


def load_signal(path: Path) -> Signal:
    """Load a run directory, or the manifest of a capture in one; raises InputError for another path."""
    capture_id = None
    run = path
    if path.name == MANIFEST_NAME and path.is_file():
        # RUN/captures/ID/manifest.json
        capture_id, run = path.absolute().parent.name, path.absolute().parents[2]
        if not RunDirectory(run).info_file.is_file():
            raise InputError(f"{path}: not in a run directory, where the recording is")
    elif not path.is_dir():
        raise InputError(f"{path}: neither a run directory nor the {MANIFEST_NAME} of a capture in one")
    store = LocalStore(run, changed=partial(push, run))
    manifest = store.manifest(capture_id) if capture_id else None
    return Signal(load_recording(run), read_info(RunDirectory(run)).job, manifest, store)


@dataclass(frozen=True, slots=True)
class Confirmation:
    """Whether traces agree with the recording, by rank, and by their verdict if all ranks have a trace."""

    agrees: Agrees
    ranks: tuple[Agreement, ...]
    verdict: Verdict | None
    verdicts_agree: bool | None


def confirm(
    reductions: Sequence[Reduction], accounted: Accounted, signal: Signal, stage: str | None, settings: Settings
) -> Confirmation:
    """Compare traces with the recording of the same steps; raises InputError if there is none."""
    for reduction in reductions:
        trace = reduction.trace
        if reduction.origin != "sftriage" and trace.capture_id is None:
            foreign = "not captured by sftriage: its step numbers are the profiler's, not the run's"
            raise InputError(f"{trace.source}: {foreign}")
        if trace.job is not None and trace.job != signal.job:
            raise InputError(f"{trace.source}: of job {trace.job!r}, but the run is of {signal.job!r}")
        trace.check_rank()
    first = min(int(reduction.steps.number_N.min()) for reduction in reductions)
    last = max(int(reduction.steps.number_N.max()) for reduction in reductions)
    recorded = signal.steps(first, last)
    if not recorded:
        raise InputError(f"{signal.recording.source}: no recording of steps {first} to {last}")
    agreements = tuple(_agreement(reduction, recorded, stage) for reduction in reductions)
    verdict, verdicts_agree = None, None
    judged = accounted.verdict is not None and not accounted.why_not
    if judged and all(number in recorded for number in range(first, last + 1)):
        whole = Window.joined([recorded[number] for number in range(first, last + 1)])
        # A profiler ran in all of these steps, so that must not hold this verdict.
        verdict, _ = judge(replace(whole, capturing_N=None), None, for_few_steps(settings))
        verdicts_agree = _named(verdict) == _named(accounted.verdict)  # type: ignore[arg-type]  # there is one
    return Confirmation(overall(agreements, verdicts_agree=verdicts_agree), agreements, verdict, verdicts_agree)


def _agreement(reduction: Reduction, recorded: Mapping[int, Window], stage: str | None) -> Agreement:
    rank = reduction.trace.rank or 0
    rows, signal = [], []
    for row, number in enumerate(reduction.steps.number_N.tolist()):
        window = recorded.get(number)
        if window is None or rank >= window.durations_NRS.shape[1]:
            continue
        durations_S = window.durations_NRS[0, rank]
        if np.isfinite(durations_S).all():
            rows.append(row)
            signal.append(durations_S)
    if not rows:
        raise InputError(f"{reduction.trace.source}: no recording of its steps on rank {rank}")
    heavy_S = (reduction.durations_ns_NS[rows].mean(axis=0) * 1e-9).tolist()
    coarse_S = np.mean(signal, axis=0).tolist()
    return compare(
        dict(zip(reduction.schema.stages, heavy_S, strict=True)),
        dict(zip(next(iter(recorded.values())).schema.stages, coarse_S, strict=True)),
        stage=stage,
        rank=rank,
        numbers=tuple(reduction.steps.number_N[rows].tolist()),
    )


def _named(verdict: Verdict) -> tuple[str, tuple[int, ...], str | None]:
    if verdict.label != "suspect" or not verdict.suspects:
        return verdict.label, (), None
    return verdict.label, verdict.suspects[0].ranks, verdict.suspects[0].stage


def _ranks_to_compare(reductions: Sequence[Reduction], verdict: Verdict, stage: str | None) -> tuple[int, int] | None:
    """The suspect, or else the slowest rank in the requested stage, and the median rank to compare with; or None."""
    suspect = verdict.suspects[0] if verdict.suspects else None
    chosen = stage or (suspect.stage if suspect else None)
    took_s = {
        reduction.trace.rank: sum(reduction.mean_s.values()) if chosen is None else reduction.mean_s.get(chosen, 0.0)
        for reduction in reductions
        if reduction.trace.rank is not None
    }
    order = sorted(took_s, key=lambda rank: took_s[rank])
    if len(order) < 2 or (stage is None and (suspect is None or suspect.rank not in took_s)):
        return None
    first = suspect.rank if suspect is not None and suspect.rank in took_s else order[-1]
    others = [rank for rank in order if rank != first]
    return int(first or 0), others[(len(others) - 1) // 2]


def with_manifest(signal: Signal | None, reduced: Reduced) -> Signal | None:
    """The signal with the manifest of a single trace's capture."""
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
    requested: str | None,
) -> Findings | None:
    """What filled the stage in question, of a single rank, or of the suspect among several."""
    beside: Reduction | None = None
    if len(reduced.reductions) > 1:
        if control is not None:
            raise UsageError("--control needs a single trace; among several, the median rank is the control")
        verdict = accounted.verdict
        chosen = None if verdict is None else _ranks_to_compare(reduced.reductions, verdict, requested)
        if chosen is None:
            return None
        reduction, beside = (reduced.whole(rank, *how) for rank in chosen)
    else:
        (reduction,) = reduced.reductions
        if control is not None:
            read = read_all([control], *how)
            if len(read.reductions) != 1:
                raise InputError(f"{control}: expected one trace: {'; '.join(each.reason for each in read.refused)}")
            (beside,) = read.reductions
    manifest = signal.manifest if signal else None
    if manifest is None and len(reduced.reductions) == 1:
        manifest = manifest_beside(reduced.files[0], reduction.trace)
    stage = stage_in_question(requested, manifest, accounted.verdict, reduction, beside)
    findings = find(reduction, stage, beside, known_faulty(manifest))
    known = None if manifest is None else manifest.findings
    findings = findings.model_copy(update={"counted": None if known is None else known.counted})
    files = reduced.files[0] if len(reduced.reductions) == 1 else None, control
    beside_files = (None if file is None else file.with_name(SAMPLES_NAME) for file in files)
    samples = [read_samples(file) if file is not None and file.is_file() else None for file in beside_files]
    return findings.model_copy(update={"cause": explained(findings, manifest, *samples)})
