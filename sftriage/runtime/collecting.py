"""From a trace in the spool to a capture in the store: checked, compressed, linked to its trigger, catalogued."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime, timezone

from sftriage.capture import Executor
from sftriage.controller.controller import Controller
from sftriage.controller.costs import Cost
from sftriage.errors import SftriageError
from sftriage.recorder import RingInfo
from sftriage.records import CaptureResult, Reproduced, Window, plain
from sftriage.reduce.inside import find
from sftriage.reduce.reading import read_traces
from sftriage.reduce.stages import Reduction, reduce_trace
from sftriage.runs.directory import RunDirectory, RunInfo
from sftriage.runtime.reducing import known_faulty, stage_in_question
from sftriage.traces.catalogue import Catalogue
from sftriage.traces.manifest import Artefact, CaptureInfo, CostInfo, Manifest, ReproducedInfo, TriggerInfo, contents_of
from sftriage.traces.retention import Retention, due, remove
from sftriage.traces.store import FileToStore, LocalStore

log = logging.getLogger("sftriage")

KEPT_COSTS = 64
"""Costs that a capture may still turn out to be of, once it is stored."""

QUICK_BYTES = 4 * 2**20
"""Up to this size a packed trace is looked into at once, in a second or two; a larger one when somebody asks."""


@dataclass(frozen=True, slots=True)
class Known:
    """What is known of a capture beside its trace: its steps, of all ranks, and what the rank's GPU says of itself."""

    steps: Window | None = None
    remarks: tuple[str, ...] = ()


@dataclass(slots=True)
class _Costed:
    """A cost, and the captures that share it."""

    cost: Cost
    attempt: int
    captures: list[str] = field(default_factory=list)


class Collector:
    """Puts a run's captures into its store and catalogue."""

    def __init__(self, directory: RunDirectory, run: RunInfo) -> None:
        self._run = run
        self._store = LocalStore(directory.path)
        self._catalogue = Catalogue(directory.catalogue, self._store)
        self._store.sweep()
        # Which of the two is known first depends on how long a trace takes to be written.
        self._uncosted: dict[str, tuple[int, int, int]] = {}
        self._costs: deque[_Costed] = deque(maxlen=KEPT_COSTS)

    def collect(
        self,
        capture: Executor,
        result: CaptureResult,
        controller: Controller,
        ranks: Mapping[int, RingInfo],
        known: Known | None = None,
    ) -> tuple[CaptureResult, Manifest | None]:
        """Store a finished capture. One that cannot be stored, or is not what was promised, is a failed capture.

        Args:
            capture: what has ended.
            result: how.
            controller: who knows why it was asked for.
            ranks: the job's ranks.
            known: what is known of it beside its trace.

        Returns:
            The result as it goes on record, and the manifest of what is in the store.
        """
        known = known or Known()
        try:
            if capture.request.capture_id in self._store.ids():
                # Whoever put it there ended before it could say so.
                manifest = self._store.manifest(capture.request.capture_id)
                self._index(manifest)
                return _result_of(manifest, result), manifest
            if result.state != "done":
                return result, None
            capture.verify(result)
            found = self._reproduced(capture.request.capture_id, known, controller)
            manifest = self._store.put_files(
                capture.request.capture_id,
                [FileToStore(one.path, one.name, one.media_type, one.compress) for one in capture.products()],
                lambda artefacts: self._manifest(capture, result, controller, ranks, artefacts, known, found),
            )
            self._index(manifest)
            steps = manifest.capture.first_step, manifest.capture.last_step
            self._uncosted[manifest.capture_id] = (ranks[manifest.capture.rank].attempt, *steps)
            for known_cost in self._costs:
                self._note_cost(known_cost)
            manifest = self._looked_into(manifest)
        except SftriageError as error:
            return replace(result, state="failed", detail=str(error)), None
        finally:
            capture.close()
        return result, manifest

    def _reproduced(self, capture_id: str, known: Known, controller: Controller) -> Reproduced | None:
        """Whether the fault was there. A capture is not lost because that could not be worked out."""
        try:
            return controller.reproduced(capture_id, known.steps)
        except Exception:
            log.exception("whether capture %s holds its fault could not be told", capture_id)
            return None

    def _looked_into(self, manifest: Manifest) -> Manifest:
        """The manifest with what filled the suspect stage in the trace, beside the control's, if that is quickly said.

        Whichever of the two is stored last has the suspect looked into. A trace that says nothing is as good as before:
        `sftriage reduce` tells what is the matter with it.
        """
        if not _quick(manifest):
            return manifest
        try:
            beside = self._beside(manifest)
            if manifest.capture.role == "suspect":
                return self._found(manifest, next(iter(beside), None))
            for suspect in beside:
                self._found(suspect, manifest)
        except Exception as error:
            log.info("capture %s is stored, and was not looked into: %s", manifest.capture_id, error)
        return manifest

    def _found(self, manifest: Manifest, control: Manifest | None) -> Manifest:
        one, other = self._reduced(manifest), None if control is None else self._reduced(control)
        stage = stage_in_question(None, manifest, None, one, other)
        if other is not None and stage not in other.schema.stages:
            other = None
        return self._store.note(manifest.capture_id, find(one, stage, other, known_faulty(manifest)))

    def _reduced(self, manifest: Manifest) -> Reduction:
        path = self._store.path(manifest.capture_id, manifest.artefacts[0].name)
        (one,) = (reduce_trace(trace) for trace in read_traces(path))
        return one

    def _beside(self, manifest: Manifest) -> list[Manifest]:
        """The captures of the other role that were asked for together with this one, and can be quickly looked into."""
        window = manifest.trigger.window
        begins = f"w{window.first_step}-{window.last_step}-r"
        others = (self._store.manifest(one) for one in self._store.ids() if one.startswith(begins))
        return [
            one
            for one in others
            if one.capture.role != manifest.capture.role
            and one.trigger.rule == manifest.trigger.rule
            and one.capture.first_step <= manifest.capture.last_step
            and one.capture.last_step >= manifest.capture.first_step
            and _quick(one)
        ]

    def costed(self, cost: Cost, attempt: int) -> None:
        """Note what captures have cost the job in the manifests of those that touched its steps."""
        self._costs.append(_Costed(cost, attempt))
        self._note_cost(self._costs[-1])

    def _note_cost(self, known: _Costed) -> None:
        cost = known.cost
        touched = [
            capture_id
            for capture_id, (attempt, first_step, last_step) in self._uncosted.items()
            if attempt == known.attempt and first_step <= cost.last_step and last_step >= cost.first_step
        ]
        if not touched:
            return
        for capture_id in touched:
            del self._uncosted[capture_id]
        # Those that were noted before learn that there is one more.
        known.captures += touched
        for capture_id in known.captures:
            try:
                self._store.note(capture_id, CostInfo(**plain(cost), captures=len(known.captures)))
            except SftriageError as error:
                log.warning("what capture %s has cost is not in its manifest: %s", capture_id, error)

    def tidy(self, retention: Retention, now_s: float) -> None:
        """Remove what is kept no longer. A store that cannot be read or written now is tried again the next time."""
        try:
            gone, problem = remove(self._store, self._catalogue, due(self._store, retention, now_s))
        except (SftriageError, OSError) as error:
            gone, problem = (), str(error)
        for one in gone:
            log.info("capture %s is kept no longer: the policy's retention", one.capture_id)
        if problem is not None:
            log.warning("old captures could not be removed: %s", problem)

    def _index(self, manifest: Manifest) -> None:
        """The store has the capture; a catalogue that cannot take it now is rebuilt from the store when it can."""
        try:
            self._catalogue.add(manifest)
        except SftriageError as error:
            log.warning("capture %s is stored but not catalogued: %s", manifest.capture_id, error)

    def _manifest(
        self,
        capture: Executor,
        result: CaptureResult,
        controller: Controller,
        ranks: Mapping[int, RingInfo],
        artefacts: tuple[Artefact, ...],
        known: Known,
        found: Reproduced | None,
    ) -> Manifest:
        ring = ranks[capture.request.rank]
        return Manifest(
            capture_id=capture.request.capture_id,
            job=self._run.job,
            run=self._run.run_id,
            created_at=datetime.now(timezone.utc),
            trigger=TriggerInfo.of(controller.trigger_of(capture.request.capture_id)),
            capture=CaptureInfo.of(capture.request, result, world_size=ring.world_size, host=ring.host),
            artefacts=artefacts,
            reproduced=None if found is None else ReproducedInfo.of(found),
            evidence=known.remarks,
            may_contain=contents_of(capture.request.profiler, capture.request.options),
        )


def _quick(manifest: Manifest) -> bool:
    return manifest.capture.profiler == "torch" and manifest.artefacts[0].size_bytes <= QUICK_BYTES


def _result_of(manifest: Manifest, result: CaptureResult) -> CaptureResult:
    """What became of a capture that is in the store, by its manifest, where nobody else can tell any more."""
    if result.state == "done":
        return result
    info = manifest.capture
    return replace(
        result,
        state="done",
        detail="",
        first_step=info.first_step,
        last_step=info.last_step,
        size_bytes=manifest.artefacts[0].size_bytes,
    )
