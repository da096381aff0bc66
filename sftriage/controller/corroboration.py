"""Cheap evidence beside verdicts, while a job runs: what the GPUs of its ranks say of themselves."""

from __future__ import annotations

from dataclasses import dataclass, field

from sftriage.controller.needs import Fleet
from sftriage.decisions import Verdict
from sftriage.events import EvidenceGathered


@dataclass(slots=True)
class Corroboration:
    """Has the GPUs asked about those that a verdict names, and never waits for them. It decides nothing.

    A suspect's GPU is always asked, and that of a window that cannot be decided where the policy says so
    (``on_needs_evidence.gather``).

    Attributes:
        remarks: what was last said of each rank's GPU.
        slowed: by how much lower its clock was than the others', of those that were slow.
    """

    remarks: dict[int, tuple[str, ...]] = field(default_factory=dict)
    slowed: dict[int, float | None] = field(default_factory=dict)
    _wanted: Verdict | None = None

    def want(self, verdict: Verdict, *, of_undecided: bool) -> None:
        """A verdict has been taken. The latest is the one that evidence is for."""
        if verdict.suspects and (verdict.label == "suspect" or (of_undecided and verdict.label == "needs_evidence")):
            self._wanted = verdict

    def look(self, fleet: Fleet) -> EvidenceGathered | None:
        """What the GPUs have answered, to be put on record, once they have; None where nothing is to be said."""
        verdict = self._wanted
        if verdict is None:
            return None
        found = fleet.gpus(verdict.suspects[0].ranks)
        if found is None:
            return None
        self._wanted = None
        for rank in verdict.suspects[0].ranks:
            self.remarks[rank] = found.remarks
            self.slowed[rank] = found.gpus.get(rank, {}).get("slowed_fraction")
        if not (found.remarks or found.gpus or found.problem):
            return None
        gpus = {"problem": found.problem, "of": {str(rank): dict(gpu) for rank, gpu in found.gpus.items()}}
        return EvidenceGathered(found.time_s, verdict.first_step, verdict.last_step, found.remarks, gpus)
