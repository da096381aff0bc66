"""What nsys says, and what it is told: truth tables."""

import pytest

from sftriage.capture.nsys import (
    ListedSession,
    check_traces,
    parse_sessions,
    parse_version,
    report_of,
    session_of,
    start_flags,
)
from sftriage.errors import CaptureError

LISTED = """
              ID         TIME                       STATE LAUNCH NAME
         1025708        00:02                    Launched      1 sft-20260101-0.0
         1125709        00:12             RangeCollection      1 somebody's own session
"""


@pytest.mark.parametrize(
    ("said", "version"),
    [
        ("NVIDIA Nsight Systems version 2022.4.2.1-df9881f\n", (2022, 4, 2)),
        ("NVIDIA Nsight Systems version 2025.3.2.474-253236389321v0", (2025, 3, 2)),
        ("NVIDIA Nsight Systems version 2021.4.1.73-08591f7", (2021, 4, 1)),
        ("warning: something\nNVIDIA Nsight Systems version 2026.5", (2026, 5, 0)),
    ],
)
def test_a_version_is_read(said, version):
    assert parse_version(said) == version


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        ("", "no version"),
        ("nsys: not found", "no version"),
        ("NVIDIA Nsight Systems version 2021.3.2", "nsys 2021.3 is too old: 2021.4 is needed"),
    ],
)
def test_a_version_that_will_not_do_is_a_reason(said, reason):
    with pytest.raises(CaptureError, match=reason):
        parse_version(said)


@pytest.mark.parametrize(
    ("options", "flags"),
    [
        ({}, ("--sample=none", "--cpuctxsw=none")),
        ({"sample": "none", "sqlite": True, "trace": ["nvtx"]}, ("--sample=none", "--cpuctxsw=none")),
        ({"sample": "cpu"}, ("--sample=process-tree", "--cpuctxsw=process-tree")),
    ],
)
def test_nothing_is_sampled_unless_asked_for(options, flags):
    assert start_flags(options) == flags


@pytest.mark.parametrize("options", [{}, {"trace": ["nvtx"]}, {"trace": ("nvtx", "cuda")}])
def test_what_the_rank_was_launched_with_may_be_traced(options):
    check_traces(options, ("cuda", "nvtx"))


def test_sessions_are_read_and_other_lines_passed_over():
    found = parse_sessions(LISTED)
    assert found == (
        ListedSession("Launched", "sft-20260101-0.0"),
        ListedSession("RangeCollection", "somebody's own session"),
    )
    assert parse_sessions("") == parse_sessions("Connection refused\n") == ()


@pytest.mark.parametrize(
    ("names", "rank", "chosen"),
    [
        (["sft-a-0.0", "sft-a-1.0"], 1, "sft-a-1.0"),
        (["sft-a-1.0", "sft-a-11.0"], 1, "sft-a-1.0"),
        (["sft-a-1.2", "sft-a-1.10", "sft-a-1.9"], 1, "sft-a-1.10"),
        (["sft-ab-1.0", "sft-a-1.0"], 1, "sft-a-1.0"),
        (["sft-b-1.0", "xsft-a-1.0", "sft-a-1"], 1, None),
        ([], 0, None),
    ],
)
def test_the_session_of_a_rank_is_that_of_its_newest_attempt(names, rank, chosen):
    sessions = [ListedSession("Launched", name) for name in names]
    if chosen is not None:
        assert session_of(sessions, "sft-a", rank).name == chosen
        return
    with pytest.raises(CaptureError, match=rf"rank {rank} has no nsys session"):
        session_of(sessions, "sft-a", rank)


@pytest.mark.parametrize(("state", "free"), [("Launched", True), ("Collection", False), ("RangeGeneration", False)])
def test_a_session_in_which_something_is_collected_is_not_free(state, free):
    assert ListedSession(state, "sft-a-0.0").free == free


@pytest.mark.parametrize(
    ("said", "report"),
    [
        ("Generating '/tmp/nsys-report-1.qdstrm'\nGenerated:\n    /run/x.qdstrm\n", "/run/x.qdstrm"),
        ("Generated:\n    /run/x.nsys-rep\n", "/run/x.nsys-rep"),
        ("Generated:\n    /run/with space/x.qdstrm\n    /run/with space/x.nsys-rep\n", "/run/with space/x.nsys-rep"),
        ("Generating '/tmp/nsys-report-1.qdstrm'\n", None),
        ("", None),
    ],
)
def test_where_the_report_went_is_read(said, report):
    assert report_of(said) == report
