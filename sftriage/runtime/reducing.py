"""Analysis of captures: during their run, noted in their manifests, and later on demand."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np

from sftriage.errors import InputError, SftriageError, UsageError
from sftriage.model.captures import LeftOpen, Reproduced
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
from sftriage.runs.lateness import HeatSource, captured_steps, control_of, counted_beside, steps_beside
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
"""Up to this size, a packed trace is analysed at once, in a second or two; a larger one only on demand."""


class Annotations:
    """Keeps the manifests of a run's captures up to date. ``do`` runs the writes."""

    def __init__(self, directory: RunDirectory, do: Do = at_once) -> None:
        self._do = do
        self.store = LocalStore(directory.path)
        # Remains of a crash must not stop the start if the disk cannot remove them now.
        with suppress(SftriageError):
            self.store.sweep()
        # Either may be known first, depending on how long writing a trace takes.
        self._uncosted: dict[str, tuple[int, int, int]] = {}
        self._costs: deque[tuple[CostMeasured, list[str]]] = deque(maxlen=KEPT_COSTS)
        self._steps = HeatSource(StepLogs(directory.steps))
        self._causes: deque[tuple[Manifest, CauseInfo, LeftOpen]] = deque()
        self._told: dict[str, tuple[str, str]] = {}
        self._gpu_slowed: dict[str, float] = {}

    def stored(
        self,
        capture_id: str,
        found: Reproduced | None,
        remarks: tuple[str, ...] = (),
        attempt: int = 0,
        gpu_slowed: float | None = None,
    ) -> None:
        """Update the manifest of a stored capture, and analyse it. The capture stays even if this fails.

        ``found`` says whether its fault is in it, ``remarks`` are of its rank's GPU, whose clock is ``gpu_slowed`` (a
        fraction) below the others', where it is slow.
        """
        if gpu_slowed is not None:
            self._gpu_slowed[capture_id] = gpu_slowed
        try:
            manifest = self.store.manifest(capture_id)
        except SftriageError as error:
            log.warning("could not update the manifest of capture %s: %s", capture_id, error)
            return
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

    def causes(self, now_s: float) -> Iterator[CauseFound]:
        """Causes found since the last call, of captured ranks; ``now_s`` is of the epoch."""
        while self._causes:
            manifest, cause, missing = self._causes.popleft()
            at = cause.place
            place = None if at is None else Place(at.function, at.file, at.line)
            about = manifest.capture_id, manifest.capture.rank, cause.code, cause.sure, cause.sentence
            yield CauseFound(now_s, *about, place, cause.compared_with, cause.next_step, missing)

    def _note(self, manifest: Manifest, noted: Noted) -> Manifest:
        """The manifest with a note, which the store has too once the disk takes it."""
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
        """Note what filled the suspect stage beside the control's, for small traces; the later of the two starts it."""
        if not quick(manifest):
            return
        try:
            beside = [one for one in self._beside(manifest) if quick(one)]
            if manifest.capture.role == "suspect":
                self._find(manifest, next(iter(beside), None), attempt)
                return
            for suspect in beside:
                self._find(suspect, manifest, attempt)
        except Exception as error:
            log.info("capture %s is stored but could not be analysed: %s", manifest.capture_id, error)

    def _find(self, manifest: Manifest, control: Manifest | None, attempt: int) -> None:
        samples, its = self._samples(manifest), None if control is None else self._samples(control)
        if manifest.sampled:
            mine = self._sampled(manifest, samples, attempt)
            theirs = None if control is None or its is None else self._sampled(control, its, attempt)
            named = manifest.trigger.stage
            stage = named if named is not None and named in mine.stages else slowest(mine, theirs)
            findings = find_sampled(mine, stage, theirs, known_faulty(manifest))
        else:
            one, other = self._reduced(manifest), None
            if control is not None and not control.sampled:
                other = self._reduced(control)
            stage = stage_in_question(None, manifest, None, one, other)
            if other is not None and stage not in other.schema.stages:
                other = None
            findings = find(one, stage, other, known_faulty(manifest))
        findings = findings.model_copy(update={"counted": self._counted(manifest, findings, attempt)})
        beside = its if findings.control is not None and findings.beside == "rank" else None
        cause = explained(findings, manifest, samples, beside)
        self._note(manifest, findings.model_copy(update={"cause": cause}))
        torch_call = samples is not None and in_torch(samples, findings.stage)
        sources = {"operators": not manifest.sampled, "stacks": samples is not None}
        missing = left_open(cause.code, **sources, torch_call=torch_call)
        # (the control's trace may add a cause, or repeat it)
        if self._told.get(manifest.capture_id) != (cause.code, missing):
            self._told[manifest.capture_id] = (cause.code, missing)
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
        """Counters of the captured rank above its peers', and what it lost to a lower clock of its GPU."""
        counted, slowed = counted_beside(self._steps, manifest, attempt), self._gpu_slowed.get(manifest.capture_id)
        if slowed is None:
            return counted
        whole = manifest.trigger.stage is None
        return {**(counted or {}), "gpu_s": slowed * (findings.suspect.step_s if whole else findings.suspect.device_s)}

    def _samples(self, manifest: Manifest) -> StackSamples | None:
        if not any(one.name == SAMPLES_NAME for one in manifest.artefacts):
            return None
        try:
            return read_samples(self.store.path(manifest.capture_id, SAMPLES_NAME))
        except InputError as error:
            log.info("cannot use the stacks of capture %s: %s", manifest.capture_id, error)
            return None

    def _reduced(self, manifest: Manifest) -> Reduction:
        path = self.store.path(manifest.capture_id, manifest.artefacts[0].name)
        (one,) = (reduce_trace(trace) for trace in read_traces(path))
        return one

    def _beside(self, manifest: Manifest) -> list[Manifest]:
        return [one for _, one in beside(self.store, manifest.capture_id, manifest)]

    def costed(self, cost: CostMeasured) -> None:
        """Note what captures have cost the job in the manifests of those that touched its steps."""
        self._costs.append((cost, []))
        self._note_cost(*self._costs[-1])

    def _note_cost(self, cost: CostMeasured, sharing: list[str]) -> None:
        """Note a cost in the captures that share it, now with those that have touched its steps as well."""
        touched = [
            capture_id
            for capture_id, (attempt, first_step, last_step) in self._uncosted.items()
            if attempt == cost.attempt and first_step <= cost.last_step and last_step >= cost.first_step
        ]
        if not touched:
            return
        for capture_id in touched:
            # By now its last step is logged, and the other captures with it are stored.
            attempt, *_ = self._uncosted.pop(capture_id)
            self._note_steps(capture_id, attempt)
            try:
                manifest = self.store.manifest(capture_id)
            except (SftriageError, OSError) as error:
                log.info("capture %s is not analysed again: %s", capture_id, error)
                continue
            if manifest.findings is not None and manifest.findings.counted is None:
                self._analyse(manifest, attempt)
        # Earlier captures get the new number of captures.
        sharing += touched
        about = {name: getattr(cost, name) for name in ("first_step", "last_step", "cost_s", "before_s")}
        info = CostInfo(**about, captures=len(sharing))
        for capture_id in sharing:
            self._have_noted(capture_id, info)

    def _note_steps(self, capture_id: str, attempt: int) -> None:
        """Note the captured steps as they were recorded: a store has the manifest, but not the run."""
        try:
            manifest = self.store.manifest(capture_id)
            controls = [one.capture.rank for one in self._beside(manifest) if one.capture.role == "control"]
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
        """Remove captures that retention no longer keeps. Retries a failing store the next time."""
        try:
            gone, problem = remove(self.store, outlook(self.store, retention, now_s).captures)
        except (SftriageError, OSError) as error:
            gone, problem = (), str(error)
        for one in gone:
            log.info("removed capture %s: beyond the policy's retention", one.capture_id)
        if problem is not None:
            log.warning("could not remove old captures: %s", problem)


def quick(manifest: Manifest) -> bool:
    """Whether a capture is analysed at once."""
    supported = manifest.capture.profiler == "torch" or manifest.sampled
    return supported and manifest.artefacts[0].size_bytes <= QUICK_BYTES


def stage_in_question(
    asked: str | None, manifest: Manifest | None, verdict: Verdict | None, one: Reduction, control: Reduction | None
) -> str:
    """The stage to analyse: the requested stage, the suspect's, or the longest.

    The longest compared with the control if there is one, or else in the faulty steps compared with the others, if
    these are known.
    """
    if asked is not None:
        return asked
    triggered = manifest.trigger.stage if manifest is not None else None
    suspected = verdict.suspects[0].stage if verdict is not None and verdict.suspects else None
    for stage in (triggered, suspected):
        if stage is not None and stage in one.schema.stages:
            return stage
    mean_s = one.mean_s
    if control is not None:
        its_s = control.mean_s
        mean_s = {stage: seconds - its_s.get(stage, 0.0) for stage, seconds in mean_s.items() if stage in its_s}
    else:
        faulty_N = np.isin(one.steps.number_N, known_faulty(manifest))
        if faulty_N.any() and not faulty_N.all():
            more_S = one.durations_ns_NS[faulty_N].mean(axis=0) - one.durations_ns_NS[~faulty_N].mean(axis=0)
            mean_s = dict(zip(one.schema.stages, more_S.tolist(), strict=True))
    return max(mean_s, key=lambda stage: mean_s[stage])


def known_faulty(manifest: Manifest | None) -> tuple[int, ...]:
    """The captured steps that are known to have the fault; none if unknown."""
    return () if manifest is None or manifest.reproduced is None else manifest.reproduced.fault_steps


def explained(
    findings: Findings, manifest: Manifest | None, sampled: StackSamples | None, control: StackSamples | None
) -> CauseInfo:
    """The cause behind some findings, with the steps in the manifest of the capture."""
    faulty = known_faulty(manifest)
    if manifest is None or manifest.trigger.label != "suspect":
        return cause_of(findings, sampled, control, faulty)
    trigger = manifest.trigger
    # If the captured steps do not show the excess, the trigger does.
    over_s = trigger.gain_s if manifest.reproduced is None else manifest.reproduced.over_s
    if trigger.stage is None:
        first = next((one.name for one in findings.shares[:1] if one.kind == "operator"), "")
        return cause_of_rank(manifest.capture.rank, sampled, over_s, first, findings.counted)
    over = over_s if trigger.stage == findings.stage else None
    return cause_of(findings, sampled, control, faulty, over, on_device=trigger.clock == "device")


FALSE_NAMES_PER_MILLION_STEPS = 10_000.0
"""A trace is a few steps, judged once: one of a hundred may name a rank by chance."""


@dataclass(frozen=True, slots=True)
class Accounted:
    """The verdict on all ranks' traces; why there is none, or why it names no rank."""

    verdict: Verdict | None
    why_not: str


def for_one_look(settings: Settings) -> Settings:
    """The thresholds for a few steps that are judged once."""
    return replace(settings, false_names_per_million_steps=FALSE_NAMES_PER_MILLION_STEPS)


def account(reductions: Sequence[Reduction], settings: Settings) -> Accounted:
    """Judge the traces of all ranks, if none is missing and they belong together."""
    try:
        if len(reductions) < 2:
            raise InputError("only one rank's trace: a verdict needs those of all ranks")
        window = together(reductions)
    except InputError as error:
        return Accounted(None, str(error))
    verdict, _ = judge(window, None, for_one_look(settings))
    if window.schema.sync:
        return Accounted(verdict, "")
    none = not any(one.has_collectives for one in reductions)
    why = "no collective in these traces" if none else "no stage of these traces ends with a collective in most steps"
    verdict = replace(verdict, label="needs_evidence", reasons=("no_sync",), suspects=())
    return Accounted(verdict, f"{why}; name the stages in which ranks wait with --map (sync)")


LONG_STEPS = 512
"""Steps of a run to read at once, needed or not."""


@dataclass(frozen=True, slots=True)
class Signal:
    """The recording of a run, its job, and the manifest of the capture in question."""

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
            # Windows of one step are slow, and only for a run whose end no whole window reaches.
            if len(found) > last - first:
                break
        return found

    def _shapes(self, first: int, last: int) -> list[Shape]:
        """For each attempt, long windows of which one ends with the last requested step."""
        begins: dict[int, int] = {}
        for window in self.recording.windows(Shape(LONG_STEPS, LONG_STEPS, 0)):
            begins.setdefault(window.attempt, window.first_step)
        shapes = []
        for begin in sorted(set(begins.values())):
            long = max(last - first + 1, min(LONG_STEPS, last - begin + 1))
            shapes.append(Shape(long, long, (last - long + 1 - begin) % long))
        return shapes


def load_signal(path: Path) -> Signal:
    """A run directory, or the manifest of one of its captures; InputError if it is neither."""
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
    """Whether the heavy trace agrees with the recording, rank by rank, and as a whole if all ranks are there."""

    agrees: Agrees
    ranks: tuple[Agreement, ...]
    verdict: Verdict | None
    verdicts_agree: bool | None


def confirm(
    reductions: Sequence[Reduction], accounted: Accounted, signal: Signal, stage: str | None, settings: Settings
) -> Confirmation:
    """Compare traces with the recording of the same steps; InputError if there is none."""
    for one in reductions:
        trace = one.trace
        if one.origin != "sftriage" and trace.capture_id is None:
            foreign = "not captured by sftriage: its step numbers are the profiler's, not the run's"
            raise InputError(f"{trace.source}: {foreign}")
        if trace.job is not None and trace.job != signal.job:
            raise InputError(f"{trace.source}: of job {trace.job!r}, but the run is of {signal.job!r}")
        if trace.rank is None:
            raise InputError(f"{trace.source}: unknown rank; give it with --rank FILE=RANK")
    first = min(int(one.steps.number_N.min()) for one in reductions)
    last = max(int(one.steps.number_N.max()) for one in reductions)
    recorded = signal.steps(first, last)
    if not recorded:
        raise InputError(f"{signal.recording.source}: no recording of steps {first} to {last}")
    agreements = tuple(_agreement(one, recorded, stage) for one in reductions)
    verdict, verdicts_agree = None, None
    judged = accounted.verdict is not None and not accounted.why_not
    if judged and all(number in recorded for number in range(first, last + 1)):
        whole = Window.joined([recorded[number] for number in range(first, last + 1)])
        # A profiler ran in all of these steps, which is expected here and no reason to hold the verdict.
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
        raise InputError(f"{one.trace.source}: no recording of its steps on rank {rank}")
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


def _ranks_to_compare(reductions: Sequence[Reduction], verdict: Verdict, stage: str | None) -> tuple[int, int] | None:
    """Of several ranks, the suspect, or the slowest in the requested stage; and the median rank to compare with.

    None without a suspect and without a requested stage.
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
    asked: str | None,
) -> Findings | None:
    """What filled the stage in question, on a single rank or on the suspect among several."""
    beside: Reduction | None = None
    if len(reduced.reductions) > 1:
        if control is not None:
            raise UsageError("--control needs a single trace; among several, the median rank is the control")
        verdict = accounted.verdict
        chosen = None if verdict is None else _ranks_to_compare(reduced.reductions, verdict, asked)
        if chosen is None:
            return None
        one, beside = (reduced.whole(rank, *how) for rank in chosen)
    else:
        (one,) = reduced.reductions
        if control is not None:
            read = read_all([control], *how)
            if len(read.reductions) != 1:
                raise InputError(f"{control}: expected one trace: {'; '.join(each.reason for each in read.refused)}")
            (beside,) = read.reductions
    manifest = signal.manifest if signal else None
    if manifest is None and len(reduced.reductions) == 1:
        manifest = manifest_beside(reduced.files[0], one.trace)
    stage = stage_in_question(asked, manifest, accounted.verdict, one, beside)
    findings = find(one, stage, beside, known_faulty(manifest))
    known = None if manifest is None else manifest.findings
    findings = findings.model_copy(update={"counted": None if known is None else known.counted})
    files = reduced.files[0] if len(reduced.reductions) == 1 else None, control
    beside_files = (None if file is None else file.with_name(SAMPLES_NAME) for file in files)
    its, others = (read_samples(file) if file is not None and file.is_file() else None for file in beside_files)
    return findings.model_copy(update={"cause": explained(findings, manifest, its, others)})
