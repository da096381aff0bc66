"""What filled a stage, from sampled stacks alone: no trace says it, the recorded steps say how long it was. Pure."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import PurePath

from sftriage.errors import InputError
from sftriage.model.captures import LeftOpen
from sftriage.reduce.samples import StackSamples
from sftriage.reduce.spots import RUNS_FRACTION, Spot, spots
from sftriage.traces.documents import CONTROL
from sftriage.traces.findings import MAX_SHARES, CauseCode, Findings, Share, StageProfile

_IN_TORCH = re.compile(r"/torch/")
_CALLS_TORCH = re.compile(r"\b(torch|nn|F)\.\w")
"""A file of torch's, and a line that calls it: what has no Python of its own leaves no frame."""

_NO_CAUSE: frozenset[CauseCode] = frozenset({"unknown", "blocked"})
"""Codes of a cause that is none."""


@dataclass(frozen=True, slots=True)
class SampledRank:
    """One rank's captured steps: what its stages took, in seconds, by step, and its stacks, of the file ``source``."""

    source: str
    rank: int
    steps: Mapping[int, Mapping[str, float]]
    samples: StackSamples

    def mean_s(self, stage: str | None = None, steps: Collection[int] = ()) -> float:
        """What a stage took in the mean of some steps, or of all; without a stage the step itself."""
        chosen = [self.steps[one] for one in steps or self.steps]
        return sum(sum(one.values()) if stage is None else one.get(stage, 0.0) for one in chosen) / len(chosen)

    @property
    def stages(self) -> tuple[str, ...]:
        """The stages of a step, in order."""
        return tuple(next(iter(self.steps.values())))


def slowest(suspect: SampledRank, control: SampledRank | None) -> str:
    """The longest stage; beside a control the one that is longest against it."""
    return max(suspect.stages, key=lambda one: suspect.mean_s(one) - (control.mean_s(one) if control else 0.0))


def find_sampled(
    suspect: SampledRank, stage: str, control: SampledRank | None = None, fault_steps: Collection[int] = ()
) -> Findings:
    """What filled a stage of one rank, as `inside.find` does for a trace.

    ``working_s`` is what the training thread ran, or could have with a core; ``waiting_s`` what it did not. Raises
    InputError where the steps have no such stage, or there are none.
    """
    if not suspect.steps or (control is not None and not control.steps):
        raise InputError(f"{suspect.source}: nothing was recorded of its steps")
    if stage not in suspect.stages:
        raise InputError(f"{suspect.source}: no stage {stage!r} in it; there are: {', '.join(suspect.stages)}")
    wanted = sorted(set(suspect.steps) & set(fault_steps)) or sorted(suspect.steps)
    others = sorted(set(suspect.steps) - set(wanted))
    beside, its_steps = (suspect, others) if others else (None, others)
    if control is not None:
        shared = sorted(set(wanted) & set(control.steps))
        beside, wanted, its_steps = control, shared or wanted, shared or sorted(control.steps)
    profile, named = _profile_of(suspect, stage, wanted)
    against, its = (None, {}) if beside is None else _profile_of(beside, stage, its_steps)
    if against is not None and beside is suspect and against.stage_s >= profile.stage_s:
        # What makes these steps the faulty ones is not that the stage is longer in them: its peers were quicker.
        against, its = None, {}
    shares = tuple(
        one if against is None else one.model_copy(update={"control_self_s": its[key].self_s if key in its else 0.0})
        for key, one in named.items()
    )
    whose = "" if against is None else "its other steps" if beside is suspect else f"rank {against.rank}"
    return Findings(
        stage=stage,
        suspect=profile,
        control=against,
        shares=shares,
        summary=_summary(stage, profile, against, whose, shares),
        of_steps=len(suspect.steps) if others else None,
        beside="steps" if beside is suspect else "rank",
    )


def _profile_of(one: SampledRank, stage: str, steps: list[int]) -> tuple[StageProfile, dict[tuple[str, str], Share]]:
    found = spots(one.samples, stage, steps)
    stage_s, weight_ns = one.mean_s(stage, steps), sum(spot.weight_ns for spot in found)
    per_ns = stage_s / weight_ns if weight_ns else 0.0
    known = [spot for spot in found if spot.run_fraction is not None]
    known_s = sum(spot.weight_ns for spot in known) * per_ns
    working_s = sum(spot.weight_ns * _ran(spot) for spot in known) * per_ns
    profile = StageProfile(
        source=CONTROL.sub("?", one.source)[-2000:],
        rank=one.rank,
        first_step=steps[0],
        last_step=steps[-1],
        steps=len(steps),
        step_s=one.mean_s(None, steps),
        stage_s=stage_s,
        working_s=working_s,
        waiting_s=known_s - working_s,
        unseen_s=stage_s - known_s,
        **dict.fromkeys(("device_s", "collective_s", "kernels", "launches", "launch_s"), 0.0),
    )
    return profile, {
        (spot.frame.function, spot.frame.file): Share(
            name=f"{spot.frame.function} ({PurePath(spot.frame.file).name}:{spot.frame.line})"[-100:],
            kind="python",
            waits=spot.run_fraction is not None and _ran(spot) < RUNS_FRACTION,
            self_s=spot.weight_ns * per_ns,
            calls=0.0,
        )
        for spot in found[:MAX_SHARES]
    }


def _ran(spot: Spot) -> float:
    return min(1.0, (spot.run_fraction or 0.0) + (spot.waited_fraction or 0.0))


def _summary(
    stage: str, profile: StageProfile, control: StageProfile | None, whose: str, shares: tuple[Share, ...]
) -> str:
    took = f"{profile.stage_s * 1e3:.1f} of the {profile.step_s * 1e3:.1f} ms of a step"
    parts = {
        "running": profile.working_s,
        "waiting": profile.waiting_s,
        "of which the system says nothing": profile.unseen_s,
    }
    said = ", ".join(f"{seconds * 1e3:.1f} ms {what}" for what, seconds in parts.items() if seconds > 0.0)
    sentence = f"{stage} took {took}, by its stacks: {said or 'no sample'}"
    if control is not None:
        longer_s = profile.stage_s - control.stage_s
        sentence += f"; {abs(longer_s) * 1e3:.1f} ms {'more' if longer_s >= 0 else 'less'} than {whose}"
    return f"{sentence}. What stands out is {shares[0].name}." if shares else f"{sentence}."


def in_torch(samples: StackSamples, stage: str | None) -> bool:
    """Whether the place that took most of a stage is a call of torch, of which operators would say more."""
    first = next(iter(spots(samples, stage)), None)
    if first is None:
        return False
    return bool(_CALLS_TORCH.search(first.frame.source)) or any(_IN_TORCH.search(one.file) for one in first.within)


def left_open(code: CauseCode, *, operators: bool, stacks: bool, torch_call: bool = False) -> LeftOpen:
    """What a capture leaves open of why its rank was slow, and another means would show.

    ``operators`` and ``stacks`` were recorded, or not; most of the stage is one ``torch_call``.
    """
    if code == "python" and torch_call and not operators:
        return "operators"
    if code not in _NO_CAUSE:
        return ""
    return "operators" if not operators else "system" if stacks else "stacks"
