"""What would help against a straggler, in words: each remedy, from where on it pays, and what it takes for granted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from sftriage.model.events import RemedyChanged, RemedyReason
from sftriage.words.amounts import milliseconds

TITLES = {
    "take_out": "Take it out",
    "rebalance": "Give it less to do",
    "stragglar": "All-reduce around it (StragglAR)",
    "pipeline": "Run stages further ahead (Adaptra)",
    "host_transfers": "Send activations from the host",
}
ASSUMPTIONS = {
    "take_out": "the others share its work evenly, all of a step grows with the work, and no spare takes its place",
    "rebalance": "all of a step grows with the work, and work can be shared out unevenly",
    "stragglar": "every rank is in one all-reduce of that size a step, as a ring, after the straggler's last gradient; "
    "any two ranks have the same link to themselves",
    "pipeline": "every microbatch takes its stage's median, links delay and do not limit, and activations fit",
    "host_transfers": "transfers hold up what the device computes next, which the recording does not show",
}
SHOWN_S = 5e-5
"""Less than this is written as 0.0 ms."""
NOTHING = "Nothing that is known here is worth the trouble."
NOBODY = "Nobody has been slow for long enough to be lived with."


def straggler_sentence(who: str, where: str, late_s: float, step_s: float, n_ranks: int) -> str:
    """Whom it is about."""
    late, step = milliseconds(late_s), milliseconds(step_s)
    return f"{who[:1].upper()}{who[1:]} holds up {n_ranks} ranks in {where}, by {late} of the {step} of a step."


def link_name(link: int) -> str:
    """A link of a pipeline, by the number of the stage before it."""
    return f"the link between stages {link} and {link + 1}"


def link_sentence(link: int, delay_s: float) -> str:
    """Which link it is about."""
    return f"The {link_name(link)[4:]} delays a microbatch by {milliseconds(delay_s)}."


def remedy_sentence(
    code: str, saves_s: float | None, pays_from_s: float | None, numbers: Mapping[str, float], ahead: Sequence[int]
) -> str:
    """What a remedy saves, and from where on."""
    if code == "take_out":
        spare = f"with a spare in its place {milliseconds(numbers['with_a_spare_s'])}"
        return f"{_saves(saves_s)}, {spare}; pays where it is late by more than {_ms(pays_from_s)}."
    if code == "rebalance":
        its = f" with {numbers['its_share']:.0%} of its work for it, and more for the others" if numbers else ""
        return f"{_saves(saves_s)}{its}; pays wherever it can be done."
    if code == "stragglar" and saves_s is None:
        return (
            f"Saves up to {numbers['most_of_ring']:.0%} of an all-reduce, and pays where the straggler is late by more "
            f"than {numbers['break_even_of_ring']:.0%} of one. Name --gradients and --bandwidth to have it in seconds."
        )
    if code == "stragglar":
        ring, after = milliseconds(numbers["ring_s"]), milliseconds(numbers["after_s"])
        pays = "never pays here" if pays_from_s is None else f"pays where it is late by more than {_ms(pays_from_s)}"
        return f"{_saves(saves_s)}: {after} once it is there, and not {ring}; {pays}."
    if code == "pipeline":
        adapted, ideal = milliseconds(numbers["adapted_s"]), milliseconds(numbers["ideal_s"])
        far = ", ".join(map(str, ahead))
        return f"{_saves(saves_s)} with stages {far} microbatches ahead: {adapted}, and {ideal} without delays."
    held, free = milliseconds(numbers["held_up_s"]), milliseconds(numbers["not_held_up_s"])
    return f"Where transfers hold up what is computed next, a step is {held} even so; sent from the host, {free}."


def _saves(saves_s: float | None) -> str:
    if saves_s is None:
        return "Saves what cannot be said from here"
    if abs(saves_s) < SHOWN_S:
        return "Saves nothing"
    return f"Saves {milliseconds(saves_s)} a step" if saves_s > 0 else f"Costs {milliseconds(-saves_s)} a step more"


def _ms(seconds: float | None) -> str:
    return "any time" if seconds is None else milliseconds(seconds)


REMEDY_REASONS: Mapping[RemedyReason, str] = {
    "worthwhile": "it is worth the trouble by its model",
    "helps": "it helps",
    "no_help": "it does not help",
    "moved": "another one is the straggler now",
    "gone": "there is no straggler any more",
    "not_allowed": "the policy does not allow it",
    "no_room": "stages have no room for more activations",
    "not_switched": "not all ranks switched",
    "restarted": "the ranks began anew",
    "interrupted": "its trial was cut off",
}


def remedy_told(seen: RemedyChanged) -> str:
    """What is done about a straggler that stays, and what has come of it."""
    numbers = {name: milliseconds(number) for name, number in seen.numbers.items() if name.endswith("_s")}
    late = f", late by {numbers['delay_s']} a microbatch" if "delay_s" in numbers else ""
    what, why = f"{TITLES[seen.remedy]}, {seen.who} in {seen.where}{late}", REMEDY_REASONS[seen.reason]
    if seen.state == "advised" and seen.reason != "not_allowed":
        return f"{what}: not tried, for {why}."
    if seen.state in ("advised", "trying"):
        done = "is tried" if seen.state == "trying" else f"not tried, for {why}"
        return f"{what}: {done}; it would save {numbers.get('expected_s', 'something')} a step by its model."
    measured = ""
    if "on_s" in numbers:
        measured = "; a step is {on_s} with it, and {off_s} without, give or take {error_s}".format_map(numbers)
    return f"{what}: {seen.state}, for {why}{measured}."
