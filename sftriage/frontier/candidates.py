"""Who could be the suspect: every (rank, stage), every whole rank, every stage of all ranks, with its gain."""

from __future__ import annotations

import numpy as np

from sftriage.frontier.arrays import BoolArray, FloatArray
from sftriage.frontier.baseline import Profile, Typical
from sftriage.frontier.whatif import SegmentReplay
from sftriage.records import StageSchema, Suspect

STAGE_TELLS_FRACTION = 0.7
"""A stage with this much of its whole scope's excess is the better name for it: a smaller place to look."""


def ranked(candidates: list[Suspect], min_gain_s: float) -> tuple[Suspect, ...]:
    """Best gain first, without those under ``min_gain_s``; of equal gains a whole scope before one of its stages."""
    kept = [candidate for candidate in candidates if candidate.gain_s >= min_gain_s]
    return tuple(sorted(kept, key=lambda candidate: (-candidate.gain_s, candidate.stage is not None)))


def rank_candidates(
    replays: list[SegmentReplay],
    schema: StageSchema,
    n_ranks: int,
    n_steps: int,
    exposed_s: float,
    present_s: float,
) -> list[Suspect]:
    """Scope ``rank``: gains by stage, and with stage None what mending the whole rank would save.

    A rank has its whole as a candidate only where no stage of it tells. That is judged by its time over all rows: gains
    are cut off at the next rank's arrival, where two slow stages look the same, and jitter does not cancel out of the
    rows that a rank happened to lead.

    Args:
        replays: the window's segments, replayed.
        schema: names of the stages.
        n_ranks: ranks in the window.
        n_steps: complete steps in the window.
        exposed_s: mean exposed seconds a step.
        present_s: a suspect is present in a step where its gain is at least this many seconds.
    """
    n_stages = len(schema.stages)
    gain_RS, present_RS = _gains_by_rank(replays, n_ranks, present_s)
    total_RS = np.sum([segment.total_RS for segment in replays], axis=0)
    over_RS = total_RS - np.median(total_RS, axis=0)
    found = []
    for rank, stage in zip(*np.nonzero(present_RS), strict=True):
        if stage == n_stages and _one_stage_tells(over_RS[rank]):
            continue
        gain_s = float(gain_RS[rank, stage]) / n_steps
        found.append(
            Suspect(
                scope="rank",
                ranks=(int(rank),),
                rank=int(rank),
                stage=schema.stages[stage] if stage < n_stages else None,
                gain_s=gain_s,
                share=gain_s / exposed_s,
                # (a step that is left out may still hold what came after the sync of the one before it)
                persistence=min(1.0, float(present_RS[rank, stage]) / n_steps),
            )
        )
    return found


def _gains_by_rank(replays: list[SegmentReplay], n_ranks: int, present_s: float) -> tuple[FloatArray, FloatArray]:
    """Summed gains, and steps in which they were there, of each rank: R × (S stages and then the whole).

    A rank's gains in one step's segments add up before it is asked whether they were there: a step counts once.
    """
    n_steps = min(len(segment.leader_M) for segment in replays)
    keys, gains = [], []
    for segment in replays:
        # What came after the last step's last sync is that step's.
        step_M = np.minimum(np.arange(len(segment.leader_M)), n_steps - 1)
        keys.append(step_M * n_ranks + segment.leader_M)
        gains.append(np.column_stack([segment.gain_MS, segment.whole_gain_M]))
    led, place_M = np.unique(np.concatenate(keys), return_inverse=True)
    gain_KS = np.zeros((len(led), gains[0].shape[1]))
    np.add.at(gain_KS, place_M, np.concatenate(gains))
    gain_RS, present_RS = (np.zeros((n_ranks, gain_KS.shape[1])) for _ in range(2))
    np.add.at(gain_RS, led % n_ranks, gain_KS)
    np.add.at(present_RS, led % n_ranks, (gain_KS >= present_s) & (gain_KS > 0.0))
    return gain_RS, present_RS


def _one_stage_tells(excess_S: FloatArray) -> bool:
    return bool(excess_S.max() >= STAGE_TELLS_FRACTION * excess_S.sum())


def group_candidates(
    seen: Profile, normal: Typical, schema: StageSchema, ranks: tuple[int, ...], exposed_s: float
) -> list[Suspect]:
    """Scope ``all``: local stages slower on (nearly) every rank than the baseline, by stage and together.

    Levels are medians over the window's steps, so what is found here is in most of them; ``persistence`` is the
    fraction of steps whose own level is nearer to the window's than to the baseline's.

    Args:
        seen: the window's profile.
        normal: a typical healthy step of the job.
        schema: names of the stages.
        ranks: the ranks of the window.
        exposed_s: mean exposed seconds a step.
    """
    common_S = seen.typical.common_S
    # A median of few steps may be over their mean, and what is saved is no more than what was spent.
    mean_rise_S = np.clip(seen.common_NS - normal.common_S, 0.0, None).mean(axis=0)
    rise_S = np.minimum(np.clip(common_S - normal.common_S, 0.0, None), mean_rise_S)
    found = []
    for s in np.flatnonzero(rise_S):
        slow_N = seen.common_NS[:, s] > (common_S[s] + normal.common_S[s]) / 2
        found.append(_group(schema.stages[s], ranks, float(rise_S[s]), exposed_s, slow_N))
    if found and not _one_stage_tells(rise_S):
        slow_N = seen.common_NS.sum(axis=1) > (common_S.sum() + normal.common_S.sum()) / 2
        found.append(_group(None, ranks, float(rise_S.sum()), exposed_s, slow_N))
    return found


def _group(stage: str | None, ranks: tuple[int, ...], gain_s: float, exposed_s: float, slow_N: BoolArray) -> Suspect:
    return Suspect("all", ranks, stage, gain_s, gain_s / exposed_s, float(slow_N.mean()))
