"""Which steps of a window are compared: complete ones of one kind, without special steps and disturbed ones."""

from __future__ import annotations

from collections import Counter

import numpy as np

from sftriage.frontier.arrays import BoolArray, FloatArray, medians
from sftriage.frontier.profile import Profile
from sftriage.model.windows import Window
from sftriage.verdicts.settings import Settings


def undisturbed_steps(window: Window, valid_N: BoolArray) -> BoolArray:
    """The complete steps in which no profiler ran, nor in the step before."""
    return valid_N if window.capturing_N is None else valid_N & ~_with_next(window.capturing_N)


def steps_of_a_kind(window: Window, valid_N: BoolArray) -> BoolArray:
    """The complete steps of the most frequent kind, without those right after a step of another kind.

    A checkpoint is not a slow training step, and the rank that wrote it arrives late in the next step.
    """
    if window.kinds is None or len(set(window.kinds)) == 1:
        return valid_N
    kinds_N = np.asarray(window.kinds)
    main = Counter(kinds_N[valid_N].tolist()).most_common(1)[0][0]
    same_N: BoolArray = np.asarray(kinds_N == main)
    used_N: BoolArray = valid_N & ~_with_next(~same_N)
    return used_N if used_N.any() else valid_N & same_N


def ordinary_steps(used_N: BoolArray, whole: Profile, exposed_N: FloatArray, settings: Settings) -> BoolArray:
    """The steps without *special* ones, which do other work though no kind was given, and those right after them.

    In a special step (nearly) all ranks spend time in a stage that the other steps do not have: an evaluation, a
    checkpoint, garbage collection. If many steps are like that, they are ordinary.
    """
    common_NS = whole.common_NCS.min(axis=1)
    usual_S = medians(common_NS[used_N], axis=0)
    over_NS = common_NS - usual_S
    # (of the step itself: in one that a late rank makes ten times as long, what all ranks spend more is a trifle)
    least_N1 = settings.min_gain_fraction * exposed_N[:, None]
    special_N = used_N & ((over_NS > usual_S) & (over_NS > least_N1)).any(axis=1)
    if not special_N.any() or special_N.sum() > settings.smaller_part_fraction * used_N.sum():
        return used_N
    ordinary_N: BoolArray = used_N & ~_with_next(special_N)
    return ordinary_N if ordinary_N.any() else used_N


def _with_next(steps_N: BoolArray) -> BoolArray:
    return np.asarray(steps_N | np.concatenate([[False], steps_N[:-1]]))
