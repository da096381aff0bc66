"""What stragglers cost a job, and of which kinds they are, in words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from sftriage.words.amounts import milliseconds

SHOWN_WORKERS = 4


def step(seconds: float) -> str:
    """What a step takes: large models' take seconds."""
    return f"{seconds:.2f} s" if seconds >= 1.0 else milliseconds(seconds)


def share(fraction: float) -> str:
    """A share of what stragglers cost; mending a place may win more than they cost, as it may be better than ideal."""
    return "all" if fraction >= 0.995 else f"{fraction:.0%}"


def worker(dp: int, pp: int, rank: int | None) -> str:
    """Who a worker is."""
    place = f"data-parallel rank {dp}, stage {pp}"
    return f"worker of {place}" if rank is None else f"rank {rank} ({place})"


def cost_sentence(slowdown: float, step_s: float, ideal_s: float, *, shared_out: bool, named: bool = False) -> str:
    """What the job would run at; where somebody is ``named``, more than that one's slowness is gone."""
    if not shared_out:
        return f"Stragglers cost next to nothing: {step(step_s)} a step, {step(ideal_s)} without (S = {slowdown:.3f})."
    if named:
        every = "If every rank took what its peers mostly take, a step would take"
        return f"{every} {step(ideal_s)}, and not {step(step_s)} (S = {slowdown:.3f})."
    lost = 1.0 - 1.0 / slowdown
    return (
        f"Without stragglers a step would take {step(ideal_s)}, and not {step(step_s)}: they cost {lost:.0%} of the "
        f"time (S = {slowdown:.3f})."
    )


def named_sentence(who: str, part: str, saves_s: float, step_s: float) -> str:
    """What mending whom the verdict names would save, in its own figures."""
    saved, without = f"{step(saves_s)} of the {step(step_s)} of a slow step", step(max(0.0, step_s - saves_s))
    where = part or "all its local stages"
    return (
        f"The verdict on these steps: mending {who} in {where} would save {saved}, which would take {without} without."
    )


def kind_sentence(
    code: str, share_of_cost: float, saves_s: float, numbers: Mapping[str, float], who: Sequence[str], part: str
) -> str:
    """Which kind of stragglers it is, and by what one sees that."""
    more = len(who) - SHOWN_WORKERS
    named = ", ".join(who[:SHOWN_WORKERS]) + (f" and {more} more" if more > 0 else "")
    of_it = share(share_of_cost)
    if code == "slow_worker":
        who_it_is, them = ("One slow worker", "it") if len(who) == 1 else ("Few slow workers", "them")
        most = f"most of all in {part}" if part else "in all they do"
        saved = f"{step(saves_s)} a step, {of_it} of that"
        return f"{who_it_is}: {named}, {most}. Mending {them} would save {saved}."
    if code == "in_sync":
        return (
            f"Inside the sync stage, {part}: at its median it would win back {of_it} of that. What ranks compute, or "
            "wait for a CPU for, and what they exchange cannot be told apart there."
        )
    if code == "last_stage":
        return f"Last stage: all its workers take longer than the others'. Mending it would win back {of_it} of that."
    if code == "sequence_lengths":
        return (
            f"Sequence lengths: microbatches of one worker differ, forward and backward alike (correlation "
            f"{numbers['forward_backward_correlation']:.2f}). Evening them out would win back {of_it} of that."
        )
    if code == "garbage_collection":
        return (
            f"Stalls in forward alone, now on one worker, now on another ({numbers['of_workers']:.0%} of the workers, "
            f"in {numbers['of_steps']:.0%} of the steps), as garbage collection makes them. Without them {of_it} of "
            "that would be won back."
        )
    return f"Communication, most of all {part}: at its median it would win back {of_it} of that."


REMEDIES: Mapping[str, str] = {
    "slow_worker": "Capture it, to see why it is slow there: sftriage capture --rank. Where all that it computes is "
    "slow alike, look at its host and GPU (clocks, temperature, errors): sftriage evidence; replace it if it stays so.",
    "last_stage": "Give the last stage fewer layers, or the loss and the output layer a stage of their own: it "
    "computes these on top of its layers.",
    "sequence_lengths": "Pack microbatches by the cost of their sequences (the sum of squared lengths where attention "
    "dominates), and share them out among the data-parallel ranks by it.",
    "garbage_collection": "Turn automatic collection off (gc.disable()) and collect on all ranks in the same step, "
    "every so many steps; gc.freeze() after the first one.",
    "communication": "Look at the network of the workers whose transfers are slow (links, congestion, other jobs): "
    "sftriage capture on both ends.",
    "in_sync": "Look at who waited for a CPU (sftriage explain). Where the last gradient of each step is not known, "
    "monitor.watch(model) records it, with DDP. Else capture some ranks (sftriage capture), and compare.",
}
"""What to do about each kind."""

BEHIND = "Once that is mended:"
"""Before a kind that others hide."""

OF_PLACES = frozenset({"slow_worker", "last_stage"})
ONE_RANK = "With one data-parallel rank, a slow worker and a stage with more to compute look alike."

NO_KIND = "No single kind accounts for it: look at the workers and operations below."


def fidelity_sentence(unexplained: float) -> str:
    """How far the replay is off."""
    way = "longer" if unexplained >= 0 else "shorter"
    return (
        f"As recorded, steps are {abs(unexplained):.1%} {way} than replayed: launches, data and what no operation has."
    )
