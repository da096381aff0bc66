"""What each rule says of a row, against its truth. Pure functions of recorded windows."""

from __future__ import annotations

from dataclasses import dataclass

from bench.hidden_rank_matrix.recorded import Recorded
from bench.hidden_rank_matrix.rivals import RULES, Named, says
from bench.hidden_rank_matrix.rows import BAR_FRACTION, Row, Truth
from sftriage.decisions import Suspect, Verdict
from sftriage.verdicts import Settings, judge

OURS = "ours"

RIGHT, PART, WRONG, HELD, QUIET = "right", "part", "wrong", "held", "quiet"
"""What a rule did with a window: named the truth; named some of it (a rank at fault, but no stage, or one rank of many
that are); named what is not at fault; said that it cannot know; or saw nothing."""


@dataclass(frozen=True, slots=True)
class Score:
    """One rule on one row.

    Attributes:
        did: one of the above, in the window that counts.
        top1: the truth is its first candidate; of ours, its suspect.
        top2: the truth is among its first two candidates.
        said: its first candidates in words.
    """

    did: str
    top1: bool
    top2: bool
    said: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Ours:
    """All of our verdicts on one row.

    Attributes:
        verdicts: one a window.
        did: what each of them did, against what could be known in its window.
        false_suspects: windows that named what is not at fault there.
        latency_steps: from the onset to the last step of the first window that named the truth; None if none did.
    """

    verdicts: tuple[Verdict, ...]
    did: tuple[str, ...]
    false_suspects: int
    latency_steps: int | None


@dataclass(frozen=True, slots=True, eq=False)
class Scored:
    """A row, and what every rule said of it."""

    recorded: Recorded
    scores: dict[str, Score]
    ours: Ours | None

    @property
    def row(self) -> Row:
        """The row."""
        return self.recorded.row

    @property
    def class_(self) -> str:
        """What is asked of a rule: ``named``, ``below`` (too little to have to be named), ``hold`` or ``healthy``."""
        return class_of(self.recorded)

    @property
    def as_expected(self) -> bool:
        """Whether ours did what is asked."""
        return self.ours is not None and expected(self.class_, self.scores[OURS].did)


def class_of(recorded: Recorded) -> str:
    """What is asked of a rule on a row.

    A delay's size is known, for it was made. What pressure from outside did to a rank is not, and is measured.
    """
    row = recorded.row
    if row.truth.label != "suspect":
        return "hold" if row.truth.label == "needs_evidence" else "healthy"
    if row.pressure is not None:
        return "named" if recorded.slowdown >= BAR_FRACTION else "below"
    return "named" if row.sort == "host" or row.fraction >= BAR_FRACTION else "below"


def expected(class_: str, did: str) -> bool:
    """Whether what a rule did is what was asked of it."""
    return (
        did
        in {
            "named": (RIGHT,),
            "below": (RIGHT, HELD, QUIET),
            "hold": (HELD,),
            "healthy": (QUIET,),
        }[class_]
    )


def score(recorded: Recorded, settings: Settings) -> Scored:
    """Every rule on one row. A row without windows has no scores."""
    if recorded.judged < 0:
        return Scored(recorded, {}, None)
    ours = judged_by_us(recorded, settings)
    truth, at = recorded.row.truth, recorded.judged
    verdict = ours.verdicts[at]
    first_two = [suspect_is(suspect, recorded.row) for suspect in verdict.suspects[:2]]
    scores = {
        OURS: Score(
            did=ours.did[at],
            top1=ours.did[at] == RIGHT,
            top2=RIGHT in first_two,
            said=tuple(suspect_words(suspect) for suspect in verdict.suspects[:2]),
        )
    }
    for name, rule in RULES.items():
        said = says(rule, recorded.windows[: at + 1])
        are = [named_is(named, truth) for named in said.ranked[:2]]
        scores[name] = Score(
            did=(are[0] if are else WRONG) if said.alarm else QUIET,
            top1=are[:1] == [RIGHT],
            top2=RIGHT in are,
            said=tuple(f"rank {named.rank} {named.stage}" for named in said.ranked[:2]),
        )
    return Scored(recorded, scores, ours)


def judged_by_us(recorded: Recorded, settings: Settings) -> Ours:
    """Our verdicts through the windows in order, as a job's controller has them."""
    verdicts: list[Verdict] = []
    past = None
    for window in recorded.windows:
        verdict, past = judge(window, past, settings)
        verdicts.append(verdict)
    did = tuple(
        verdict_did(verdict, recorded.row, recorded.filled(window))
        for verdict, window in zip(verdicts, recorded.windows, strict=True)
    )
    first = next((verdict.last_step for verdict, one in zip(verdicts, did, strict=True) if one == RIGHT), None)
    return Ours(
        verdicts=tuple(verdicts),
        did=did,
        false_suspects=did.count(WRONG),
        latency_steps=None if first is None else first - recorded.row.truth.onset,
    )


def verdict_did(verdict: Verdict, row: Row, filled: float) -> str:
    """What a verdict did with its window, of which ``filled`` is what was done to it: before its onset nothing is."""
    if verdict.label == "healthy":
        return QUIET
    if verdict.label != "suspect" or not verdict.suspects:
        return HELD
    return suspect_is(verdict.suspects[0], row) if filled > 0.0 else WRONG


def suspect_is(suspect: Suspect, row: Row) -> str:
    """Whether a suspect of ours is right, part of the truth, or wrong.

    A rank that is slow in everything may be named for the stage in which most of that shows.
    """
    truth = row.truth
    at_fault = bool(suspect.ranks) and set(suspect.ranks) <= set(truth.ranks)
    if truth.label != "suspect":
        return PART if at_fault and suspect.scope != "all" else WRONG
    if not at_fault:
        return WRONG
    whole = suspect.scope == truth.scope and set(suspect.ranks) == set(truth.ranks)
    if whole and (suspect.stage == truth.stage or row.pressure is not None):
        return RIGHT
    return PART if suspect.stage in (truth.stage, None) or truth.stage is None else WRONG


def named_is(named: Named, truth: Truth) -> str:
    """Whether a rival's candidate is right. Rivals know ranks only: any rank of a slow host is the host."""
    if named.rank not in truth.ranks:
        return WRONG
    if truth.label != "suspect":
        return PART
    return RIGHT if truth.stage in (named.stage, None) else WRONG


def suspect_words(suspect: Suspect) -> str:
    """A suspect in a few words."""
    who = f"rank {suspect.ranks[0]}" if suspect.scope == "rank" else f"{suspect.scope} {list(suspect.ranks)}"
    return (
        f"{who} {suspect.stage or 'all stages'} {suspect.share:.1%}/{suspect.persistence:.2f} "
        f"{suspect.pattern} since {suspect.onset_step}"
    )
