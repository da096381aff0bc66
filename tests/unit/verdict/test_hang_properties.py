"""What holds for any job that hangs: other numbers of ranks, a longer past, more ranks that agree."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from sftriage.verdict.hangs import hang_of

from .hang_cases import GATHER, GRADIENTS, LOSS, call, group, job, queue_get, rank, silent

MISMATCHES = {"different_collective", "different_types", "different_sizes", "skipped", "extra"}
OPS = st.sampled_from([GRADIENTS, LOSS, GATHER, call("barrier"), call(dtype="Half"), call("all_to_all", (5,))])
HISTORIES = st.lists(OPS, max_size=12)


@st.composite
def jobs(draw):
    """A job whose ranks agree up to a call, which some are in, some have not come to, and some take for another."""
    world, past, last = draw(st.integers(3, 7)), draw(HISTORIES), draw(OPS)
    made = []
    for number in range(world):
        what = draw(st.sampled_from(["in", "in", "in", "absent", "other", "silent", "dead"]))
        if what == "silent":
            made.append(silent(number, state=draw(st.sampled_from(["", "S", "T"]))))
        elif what == "dead":
            made.append(silent(number, alive=False))
        else:
            calls = {"in": [*past, last], "absent": past, "other": [*past, draw(OPS)]}[what]
            made.append(rank(number, calls, int(what != "absent"), threads=[queue_get()]))
    return job(*made)


def relabelled(evidence, to):
    ranks = [replace(each, rank=to[each.rank], pid=100 + to[each.rank]) for each in evidence.ranks]
    return replace(evidence, ranks=tuple(sorted(ranks, key=lambda each: each.rank)))


@given(evidence=jobs(), data=st.data())
def test_relabelling_ranks_relabels_the_result(evidence, data):
    # GIVEN any job, and other numbers for its ranks
    to = data.draw(st.permutations(range(len(evidence.ranks))))
    before, after = hang_of(evidence), hang_of(relabelled(evidence, to))
    # THEN kind and number are the same, and the ranks are those, if not as many are on each side
    assert (before.kind, before.number) == (after.kind, after.number)
    if "tie" not in before.numbers:
        assert sorted(to[each] for each in before.ranks) == list(after.ranks)
        assert sorted(to[each] for each in before.others) == list(after.others)


@given(evidence=jobs(), prefix=HISTORIES, wrapped=st.booleans())
def test_what_ranks_agreed_on_before_changes_nothing(evidence, prefix, wrapped):
    # GIVEN any job, and calls that all its ranks had made before; or have lost
    def later(each):
        (own,) = each.groups or (group([], [], 0),)
        if not each.answered:
            return each
        table = [*each.calls, *prefix]
        calls = tuple(range(len(each.calls), len(table))) + own.calls
        moved = replace(own, calls=calls, pending=tuple(n + len(prefix) for n in own.pending))
        if wrapped:
            moved = replace(moved, calls=own.calls, first=1 + len(prefix))
        return replace(each, calls=tuple(table), groups=(moved,))

    before = hang_of(evidence)
    after = hang_of(replace(evidence, ranks=tuple(map(later, evidence.ranks))))
    # THEN the result is the same, that many calls later
    assert (before.kind, before.ranks, before.others) == (after.kind, after.ranks, after.others)
    assert before.number is None or after.number == before.number + len(prefix)


@given(evidence=jobs(), more=st.integers(1, 5))
def test_ranks_that_agree_with_the_majority_change_no_culprit(evidence, more):
    # GIVEN a job with a fault that is no tie
    before = hang_of(evidence)
    if before.kind in ("unknown", "all_inside") or "tie" in before.numbers or not before.others:
        return
    usual = next(each for each in evidence.ranks if each.rank == before.others[0])
    added = [replace(usual, rank=len(evidence.ranks) + n) for n in range(more)]
    after = hang_of(job(*evidence.ranks, *added))
    # WHEN more ranks call what most call, THEN the same are at fault
    assert (before.kind, before.ranks, before.number) == (after.kind, after.ranks, after.number)


@given(
    past=st.lists(OPS, max_size=30),
    last=OPS,
    firsts=st.lists(st.integers(0, 8), min_size=2, max_size=6),
    missing=st.sets(st.integers(0, 5)),
)
def test_ranks_that_agree_are_never_accused_of_a_disagreement(past, last, firsts, missing):
    # GIVEN ranks with the same calls, as far as each has come and remembers
    ranks = []
    for number, first in enumerate(firsts):
        calls = [*past, last] if number not in missing else past
        kept = min(first, len(calls))
        ranks.append(rank(number, calls[kept:], int(number not in missing and kept < len(calls)), first=1 + kept))
    # THEN no kind of disagreement is found
    assert hang_of(job(*ranks)).kind not in MISMATCHES
