"""Every reason has its words, whatever it is said with; and no program acts on words."""

import re
from pathlib import Path
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

import sftriage
from sftriage.model.captures import CaptureState, Decision, ReasonCode
from sftriage.words.decisions import RESOLUTIONS, SENTENCES, afterwards, reason_kind, reason_sentence, resolution
from sftriage.words.verdicts import RESOLVES

CODES = get_args(ReasonCode)
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
