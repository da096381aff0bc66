"""From a trace in the spool to a capture in the store: checked, compressed, linked to its trigger, catalogued."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from datetime import datetime, timezone

from sftriage.capture import TorchCapture, verify_trace
from sftriage.controller import Controller
from sftriage.errors import SftriageError
from sftriage.recorder import RingInfo
from sftriage.records import CaptureResult
from sftriage.traces import Artefact, CaptureInfo, Catalogue, LocalStore, Manifest, TriggerInfo, may_contain
from sftriage.traces.rundir import RunDirectory, RunInfo

log = logging.getLogger("sftriage")


class Collector:
    """Puts a run's captures into its store and catalogue."""

    def __init__(self, directory: RunDirectory, run: RunInfo) -> None:
        self._run = run
        self._store = LocalStore(directory.path)
        self._catalogue = Catalogue(directory.catalogue, self._store)
        self._store.sweep()

    def collect(
        self, capture: TorchCapture, result: CaptureResult, controller: Controller, ranks: Mapping[int, RingInfo]
    ) -> tuple[CaptureResult, Manifest | None]:
        """Store a finished capture. One that cannot be stored, or is not what was promised, is a failed capture.

        Returns:
            The result as it goes on record, and the manifest of what is in the store.
        """
        try:
            if result.state != "done":
                return result, None
            verify_trace(capture.trace, capture.request, result)
            manifest = self._store.put(
                capture.request.capture_id,
                capture.trace,
                lambda artefact: self._manifest(capture, result, controller, ranks, artefact),
            )
            self._index(manifest)
        except SftriageError as error:
            return replace(result, state="failed", detail=str(error)), None
        finally:
            capture.close()
        return result, manifest

    def _index(self, manifest: Manifest) -> None:
        """The store has the capture; a catalogue that cannot take it now is rebuilt from the store when it can."""
        try:
            self._catalogue.add(manifest)
        except SftriageError as error:
            log.warning("capture %s is stored but not catalogued: %s", manifest.capture_id, error)

    def _manifest(
        self,
        capture: TorchCapture,
        result: CaptureResult,
        controller: Controller,
        ranks: Mapping[int, RingInfo],
        artefact: Artefact,
    ) -> Manifest:
        ring = ranks[capture.request.rank]
        return Manifest(
            capture_id=capture.request.capture_id,
            job=self._run.job,
            run=self._run.run_id,
            created_at=datetime.now(timezone.utc),
            trigger=TriggerInfo.of(controller.trigger_of(capture.request.capture_id)),
            capture=CaptureInfo.of(capture.request, result, world_size=ring.world_size, host=ring.host),
            artefacts=(artefact,),
            may_contain=may_contain(capture.request.options),
        )
