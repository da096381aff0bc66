"""Cheap evidence beside verdicts, while a job runs: what the GPUs of its ranks say of themselves."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from sftriage.agent.evidence import EvidenceSampler, GpuEvidence
from sftriage.events import EvidenceGathered
from sftriage.recorder import RingInfo
from sftriage.records import Verdict, plain


@dataclass(slots=True)
class Corroboration:
    """Has the GPUs asked about those that a verdict names, and never waits for them. It decides nothing.

    A suspect's GPU is always asked, and that of a window that cannot be decided where the policy says so
    (``on_needs_evidence.gather``). Where there is no driver nobody is asked again.

    Attributes:
        sampler: who asks.
        remarks: what was last said of each rank's GPU.
    """

    sampler: EvidenceSampler = field(default_factory=EvidenceSampler)
    remarks: dict[int, tuple[str, ...]] = field(default_factory=dict)
    _wanted: Verdict | None = None
    _nobody: bool = False

    def want(self, verdict: Verdict, *, of_undecided: bool) -> None:
        """A verdict has been taken. The latest is the one that evidence is for."""
        if verdict.suspects and (verdict.label == "suspect" or (of_undecided and verdict.label == "needs_evidence")):
            self._wanted = verdict

    def look(self, ranks: Mapping[int, RingInfo], now_s: float) -> EvidenceGathered | None:
        """What the GPUs have answered, to be put on record, once they have; None as long as nothing is to be said.

        Args:
            ranks: the job's ranks on this host.
            now_s: the time on a clock that only goes on, in seconds.
        """
        verdict = self._wanted
        if verdict is None or self._nobody or not ranks:
            return None
        about = sorted({rank for one in verdict.suspects[:1] for rank in one.ranks} & set(ranks))
        evidence = self.sampler.ask(list(ranks.values()), now_s, about)
        if evidence is None:
            return None
        self._wanted = None
        self._nobody = not evidence.gpus
        for rank in about:
            self.remarks[rank] = evidence.remarks
        return EvidenceGathered(
            evidence.time_s, verdict.first_step, verdict.last_step, tuple(evidence.remarks), _brief(evidence, about)
        )

    def close(self) -> None:
        """End a question that is under way."""
        self.sampler.close()


def _brief(evidence: GpuEvidence, about: list[int]) -> dict[str, Any]:
    """What goes on record: the suspects' GPUs, and what is out of the ordinary about them."""
    gpus = {str(rank): plain(gpu) for rank in about if (gpu := evidence.of(rank)) is not None}
    return {"problem": evidence.problem, "of": gpus}
