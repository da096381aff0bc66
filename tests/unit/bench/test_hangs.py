"""How `bench.hangs` judges a sentence about a hang."""

from dataclasses import replace

import pytest

from bench.hangs import HANG_PY, OWN, Truth, judged, lines_of, own, own_kinds, policy_text, ranks_in
from sftriage.model.events import CauseFound, WindowJudged
from sftriage.policy.parsing import parse
from tests.scenario import decision, verdict

STALL = verdict(100, "stalled", reasons=("not_arrived",))
STALLED = WindowJudged(verdict=STALL, decision=decision(STALL))
START = replace(STALL, first_step=1)
STARTING = WindowJudged(verdict=START, decision=decision(START))
(LINE,) = lines_of(OWN, ["# line: evaluation"])
AT = LINE.replace("\\b", "").replace("\\", "")


def cause(code: str, sentence: str) -> CauseFound:
    time_s = STALLED.decision.time_s + 2.0
    return CauseFound(time_s=time_s, capture_id="c-1", rank=0, code=code, sure=True, sentence=sentence)


RIGHT = cause(
    "different_collective", f"Rank 2 called all_gather in evaluate ({AT}) where the other 3 called all_reduce."
)
KNOWN = Truth(("different_collective",), (2,), ("all_gather",), ("# line: evaluation",))

ABOUT = {"began_s": 0.0, "ranks": 4, "finished": True}

ROWS = {
    # (what is reported) -> the result, and which of kind, ranks, collective and line are right
    "all of it": ([STALLED, RIGHT], "right", "1111"),
    "another kind": ([cause("skipped", RIGHT.sentence)], "wrong", "0111"),
    "another rank": ([cause(RIGHT.code, RIGHT.sentence.replace("Rank 2", "Ranks 1 to 2"))], "wrong", "1011"),
    "another collective": (
        [cause(RIGHT.code, RIGHT.sentence.replace("all_gather", "all_gather_object"))],
        "wrong",
        "1101",
    ),
    "another line": ([cause(RIGHT.code, RIGHT.sentence.replace(AT, f"{AT}0"))], "wrong", "1110"),
    "unknown": ([STALLED, cause("unknown", "Why the job hangs is not known.")], "unknown", "0000"),
    "the first counts": ([cause("unknown", ""), RIGHT], "unknown", "0000"),
    "an earlier stall as it starts": ([STARTING, cause("absent", "Rank 1 imports."), STALLED, RIGHT], "right", "1111"),
    "a cause of slowness": ([STALLED, cause("sleep", RIGHT.sentence)], "nothing", "0000"),
    "nothing": ([STALLED], "nothing", "0000"),
}


@pytest.mark.parametrize(("events", "result", "parts"), ROWS.values(), ids=ROWS)
def test_a_row_is_right_if_kind_ranks_collective_and_line_are(events, result, parts):
    row = judged("evaluation", (KNOWN,), events, OWN, **ABOUT)
    right = (row.kind_right, row.rank_right, row.collective_right, row.line_right)
    assert (row.result, "".join(str(int(part)) for part in right)) == (result, parts)
    # AND times are from the stall on
    if STALLED in events:
        assert (row.stalled_s, row.sentence_s) == (STALL.exposed_s, None if result == "nothing" else 2.0)


def test_of_a_healthy_job_nothing_is_right_and_so_is_its_pause():
    # GIVEN a healthy job THEN no sentence is right if it has finished, and a sentence about what it does
    assert judged("healthy", (), [STALLED], OWN, **ABOUT).result == "right"
    assert judged("healthy", (), [STALLED], OWN, **{**ABOUT, "finished": False}).result == "nothing"
    assert judged("healthy", (), [RIGHT], OWN, **ABOUT).result == "wrong"
    assert judged("healthy_pause", (KNOWN,), [RIGHT], OWN, **ABOUT).result == "right"


@pytest.mark.parametrize(
    ("sentence", "ranks"),
    [
        ("Rank 2 called all_gather where the other 3 ranks called all_reduce.", (2,)),
        ("Ranks 0 to 3 wait for the lock on a file.", (0, 1, 2, 3)),
        ("Ranks 1, 2 and 5 to 7 on node-1 have not arrived.", (1, 2, 5, 6, 7)),
        ("All 4 ranks of the default group are in the same all_reduce.", (0, 1, 2, 3)),
        ("Why the job hangs is not known.", ()),
    ],
)
def test_the_ranks_of_a_sentence_are_those_that_it_names_first(sentence, ranks):
    assert ranks_in(sentence, 4) == ranks


@pytest.mark.parametrize("kind", own_kinds())
def test_each_kind_has_a_truth_whose_lines_are_in_its_script(kind):
    for truth in own(kind):
        assert bool(lines_of(OWN, truth.lines)) == bool(truth.lines)
        assert truth.ranks
    assert own(kind) or kind.startswith("healthy")


def test_jobs_of_other_scripts_have_truths_of_known_kinds():
    assert all(truth.kinds and truth.ranks for truths in HANG_PY.values() for truth in truths)


def test_the_policy_of_the_jobs_is_the_default_one_with_another_time_of_a_stall():
    spec = parse(policy_text(3.0).encode(), "policy.yaml").policy.spec
    assert (spec.detection.stalled_after_s, spec.rules[0].name) == (3.0, "slow-rank")
