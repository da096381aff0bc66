"""Why a rank is slow in all its local stages alike: no line of its own can be why, what is done to it can. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from sftriage.counters import accounting
from sftriage.reduce.causes import (
    BY_SYSTEM,
    MAIN_FRACTION,
    SURE_FRACTION,
    SURE_STEPS,
    TOLD_BY_COUNTS,
    busiest,
    by_account,
    unsure,
)
from sftriage.reduce.samples import StackSamples
from sftriage.reduce.spots import Spot, spots
from sftriage.traces.findings import CauseCode, CauseInfo
from sftriage.words.amounts import milliseconds
from sftriage.words.causes import DOES, HOST_STEP, NEXT_STEP


def cause_of_rank(
    rank: int,
    sampled: StackSamples | None,
    over_s: float,
    operator: str = "",
    counted: Mapping[str, float] | None = None,
) -> CauseInfo:
    """Why a rank is slow in all its local stages alike: no line of its own can be why, what is done to it can.

    Args:
        rank: the rank.
        operator: what took the most of its longest stage, "" where that is no operator.
        sampled: the stacks that were sampled on it; None where none were.
        over_s: by how much it is over its peers, in seconds a step.
        counted: what the kernel counted of it over its peers', a step, of what is known.
    """
    if over_s <= 0.0:
        return unsure(f"Rank {rank} was no slower than its peers while it was captured.")
    found = [] if sampled is None else spots(sampled, None)
    # (a step may have no sample, where the sampler was kept from it)
    n_steps = 0 if sampled is None or not found else max(sampled.step_N) - min(sampled.step_N) + 1

    def seconds(fraction_of: Callable[[Spot], float | None]) -> float:
        return sum(one.weight_ns * (fraction_of(one) or 0.0) for one in found) * 1e-9 / max(1, n_steps)

    subject = f"Rank {rank} is slow in all its local stages, {milliseconds(over_s)} a step over its peers"
    account = accounting(counted or {}, over_s)
    if account is not None and account.of_rank:
        return by_account(f"{subject}: for {milliseconds(account.took_s)}", account, over_s)
    done = _done_to_rank(seconds, over_s, on_record=counted is not None and "queued_s" in counted) if found else None
    if done is not None:
        code, took_s, certain_s = done
        does = "it collected garbage" if code == "garbage_collection" else DOES[code]
        if code == "gil" and sampled is not None:
            does = f"it waited for the interpreter (the GIL), held by thread {busiest(sampled)}"
        return CauseInfo(
            code=code,
            # What the system has counted stands on no number of samples.
            sure=sum(one.samples for one in found) >= SURE_STEPS
            and certain_s >= SURE_FRACTION * over_s
            and not (counted is None and code in TOLD_BY_COUNTS),
            sentence=f"{subject}: for {milliseconds(took_s)} {does}.",
            next_step=NEXT_STEP[code],
            took_s=took_s,
        )
    ran_s = seconds(lambda one: one.run_fraction)
    if operator and found and ran_s >= SURE_FRACTION * over_s:
        more = "it has more work than they have, or a slower processor"
        said = f"{subject}: it computes for {milliseconds(ran_s)}, first of all {operator}; {more}."
        return unsure(said, "operator", took_s=ran_s)
    if account is not None:
        return by_account(f"{subject}: for {milliseconds(account.took_s)}", account, over_s)
    return unsure(f"{subject}, and it is not known why.", next_step=HOST_STEP)


def _done_to_rank(
    seconds: Callable[[Callable[[Spot], float | None]], float], over_s: float, *, on_record: bool
) -> tuple[CauseCode, float, float] | None:
    """What kept a whole rank from running, for how long a step, and for how long of that for certain.

    Args:
        seconds: what a fraction of each place's time comes to, a step.
        over_s: by how much the rank is over its peers, in seconds a step.
        on_record: how long it waited for a core is known beside its peers': on a busy host everybody waits.
    """
    gil_s = seconds(lambda one: one.gil_fraction)
    by = {code: (seconds(fraction_of),) * 2 for code, fraction_of in BY_SYSTEM.items()}
    # (that another thread was busy meanwhile is no proof that it held the interpreter)
    by["garbage_collection"] = (seconds(lambda one: one.collected_fraction),) * 2
    by["gil"] = (max(gil_s, seconds(lambda one: one.beside_fraction)), gil_s)
    for code, (took_s, certain_s) in by.items():
        if took_s >= MAIN_FRACTION * over_s and not (code == "descheduled" and on_record):
            return code, took_s, certain_s
    return None
