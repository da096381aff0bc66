"""Every reason has its words, whatever it is said with; and no program acts on words."""

import re
from dataclasses import replace
from pathlib import Path
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

import sftriage
from sftriage.model.captures import CaptureState, Decision, ReasonCode
from sftriage.words.decisions import RESOLUTIONS, SENTENCES, reason_kind, reason_sentence, resolution
from sftriage.words.run import afterwards, look_at
from sftriage.words.verdicts import RESOLVES, hours_of_ranks, lasted, system_sentence, verdict_sentence
from tests.scenario import verdict

CODES = get_args(ReasonCode)
WAITS = "rule a waits for it to last"
ON_WORDS = re.compile(
    r"\.(?:reason|detail|words|resolves|sentence)\b\)?"
    r"\.(?:startswith|endswith|find|index|split|partition|rpartition|removeprefix|removesuffix|replace)\("
    r"|\.(?:match|search|fullmatch|split)\([^()]*\.(?:reason|detail|words|resolves|sentence)\b"
    r"|[\"'] (?:not )?in \w+(?:\.\w+)*\.(?:reason|detail|words|resolves|sentence)\b"
)


def decided(reason: ReasonCode, label="suspect", **parameters) -> Decision:
    return Decision(1.0, 0, 19, label, "hold", reason, parameters=parameters)


def test_every_code_and_every_state_is_in_the_docs():
    docs = Path(__file__).parents[2] / "docs"
    for page, codes in (("policies-in-ci.md", get_args(ReasonCode)), ("policies.md", get_args(CaptureState))):
        text = (docs / page).read_text(encoding="utf-8")
        assert [code for code in codes if f"`{code}`" not in text] == []


@pytest.mark.parametrize(
    ("decision", "sentence", "kind"),
    [
        (decided("healthy"), "healthy", "healthy"),
        (decided("undecided", reasons=("roaming", "low_coverage")), "roaming, low_coverage", "roaming, low_coverage"),
        (decided("undecided", reasons=()), "no reason given", "no reason given"),
        (decided("standstill", reasons=("died",), rank=3, stage="data"), "died: rank 3 in data", "died"),
        (decided("active"), "active: captures are never allowed again", "active"),
        (decided("no_rule_matched"), "no rule is about the label suspect", "no rule is about the label suspect"),
        (
            decided("cooldown", rule="a", until_s=1.8e9),
            "cooldown of rule a until 2027-01-15T08:00:00Z",
            "cooldown of rule a",
        ),
        (decided("pending", rule="a", lasted_steps=60, for_steps=100), f"{WAITS}: 60 of 100 steps", WAITS),
        # In a month, seconds become many
        (decided("pending", rule="a", lasted_s=1234.5, for_s=86400.0), f"{WAITS}: 1234 s of 86400 s", WAITS),
        (
            decided("place_kept", place_of="captures_per_hour", gain_s=0.01, largest_gain_s=0.02, until_s=1.8e9),
            "the last place of captures_per_hour is kept for a suspect larger than any before: "
            "this one costs 10 ms a step, and one of 20 ms was captured; until 2027-01-15T08:00:00Z",
            "the last place of captures_per_hour is kept for a suspect larger than any before",
        ),
        # Journals of before have it
        (
            decided("no_rule_matched", rule="a", share=0.0351, min_share=0.05),
            "rule a does not match: its gain of 3.51% is under 5%",
            "rule a does not match: its gain of N is under N",
        ),
    ],
)
def test_a_reason_is_said_with_its_particulars_and_without(decision, sentence, kind):
    assert (reason_sentence(decision), reason_kind(decision)) == (sentence, kind)


VALUES = st.one_of(
    st.text(max_size=9),
    st.integers(),
    st.sampled_from([0, 10**400, -1]),
    st.floats(),
    st.booleans(),
    st.lists(st.one_of(st.text(max_size=5), st.integers()), max_size=3).map(tuple),
)
NAMES = sorted({*re.findall(r"{(\w+)}", str(SENTENCES)), "reasons", "stage", "share", "controls", "failures", "gain_s"})


@given(st.sampled_from(CODES), st.dictionaries(st.sampled_from(NAMES), VALUES))
def test_what_was_read_back_has_words_whatever_its_parameters_are(code, parameters):
    decision = decided(code, **parameters)
    for said in (reason_sentence(decision), reason_kind(decision), resolution(decision)):
        assert isinstance(said, str)


WAITED = " of its lateness was waiting for a CPU; in each step it waited 25.0 ms for a CPU"


@pytest.mark.parametrize(
    ("fraction", "mostly", "by_itself"),
    [(0.83, True, f"83%{WAITED}; see what"), (0.2, False, f"20%{WAITED}"), (None, False, "")],
)
@pytest.mark.parametrize("pattern", ["chronic", "recurring", "one-off"])
def test_a_suspect_that_mostly_waited_for_a_cpu_is_said_to_have(pattern, fraction, mostly, by_itself):
    of = verdict(label="suspect")
    suspect = replace(of.suspects[0], pattern=pattern, period_steps=7, onset_step=3, descheduled_fraction=fraction)
    of = replace(of, suspects=(suspect,), numbers={"queued_s": 0.025})
    sentence = verdict_sentence(of)
    assert sentence.count("CPU") == mostly
    assert sentence.endswith("; 83% of its lateness was waiting for a CPU." if mostly else ".")
    assert by_itself in system_sentence(of)
    assert ("see what" in system_sentence(of)) == ("see what" in by_itself)


def test_nothing_is_decided_by_what_words_say():
    root = Path(sftriage.__file__).parent
    lines = ((path, line) for path in root.rglob("*.py") for line in path.read_text(encoding="utf-8").splitlines())
    assert [f"{path}: {line.strip()}" for path, line in lines if ON_WORDS.search(line)] == []


@pytest.mark.parametrize(
    "line",
    [
        'if decision.reason.startswith("the last "):',
        "if not answer.detail.startswith(NO_NVTX):",
        'rule = re.match(r"rule", decision.reason)',
        'if "captures left" in decision.reason:',
    ],
)
def test_a_decision_by_words_would_be_found(line):
    assert ON_WORDS.search(line)


@pytest.mark.parametrize("code", sorted({*RESOLUTIONS, *RESOLVES}))
def test_once_a_run_has_ended_nothing_is_waited_for(code):
    reason, reasons = (code, ()) if code in RESOLUTIONS else ("undecided", (code,))
    said = afterwards(reason, reasons, {"place_of": "captures_per_day"})
    assert not re.search(r"(^|[.:;,] (or |and |then )*)[Ww]ait\b|sftriage capture\b|restart|py-spy", said)
    assert "{" not in said


@pytest.mark.parametrize(
    ("seconds", "said"), [(0.0, "0 ms"), (0.4291, "429 ms"), (1.463, "1.5 s"), (119, "119.0 s"), (120, "2.0 min")]
)
def test_a_length_of_time(seconds, said):
    assert lasted(seconds) == said


@pytest.mark.parametrize(
    ("rank_s", "on_devices", "said"), [(144.0, False, "0.04 rank-hours"), (3600.0 * 1024, True, "1,024 GPU-hours")]
)
def test_what_all_ranks_have_lost(rank_s, on_devices, said):
    assert hours_of_ranks(rank_s, on_devices=on_devices) == said


@pytest.mark.parametrize(
    ("who", "stage", "hosts", "said"),
    [
        ("rank 2", "data", ["vm"], "Look at the data loader of rank 2 on host vm: the storage"),
        ("rank 2", "data", [""], "Look at the data loader of rank 2: the storage"),
        ("host vm (8 ranks)", None, ["vm"], "Look at everything of host vm (8 ranks): its device's clocks"),
        ("every rank", "tokenize", ["a", "b"], "Look at tokenize of every rank on hosts a, b: what only it does"),
    ],
)
def test_where_to_look(who, stage, hosts, said):
    assert look_at(who, stage, hosts).startswith(said)
