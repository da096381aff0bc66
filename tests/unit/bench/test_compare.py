"""The pure parts of the comparison: what is drawn, what the outputs of tools name, and what counts as right."""

import argparse
import random

import pytest

from bench.compare import CONTROLS, FAULTS, QUICK, Outcome, arguments, drawn, outcome, show, summary
from bench.estimates import plain
from bench.jobs.compared import Plan
from bench.peers import Gpuprof, Name, TraceML
from bench.rows import Deck

PLAN = Plan("bare", "", steps=200, seed=1, onset=90, rank=2, stage="data", more_s=0.02)


def plans(seed):
    parser = argparse.ArgumentParser()
    arguments(parser)
    options, rng = parser.parse_args([]), random.Random(seed)
    ranks = Deck(range(options.ranks), rng)
    return {fault: drawn(fault, options, rng, ranks) for fault in (*FAULTS, *CONTROLS)}


def test_faults_are_those_of_the_seed_and_in_steps_there_are():
    assert plans(1) == plans(1) != plans(2)
    for fault, plan in plans(3).items():
        assert (plan.rank is None) == (fault in CONTROLS)
        assert plan.stage == FAULTS.get(fault)
        assert (plan.more_s > 0) == (fault in FAULTS)
        # (also in the quick job, with a whole window after it)
        assert plan.onset < QUICK["steps"] - 50


@pytest.mark.parametrize(
    ("status", "action", "named"),
    [
        ("INPUT STRAGGLER", "Inspect input wait on r2.", [(5.0, 2, "data")]),
        ("COMPUTE STRAGGLER", "Inspect forward compute on r0.", [(5.0, 0, "forward")]),
        (
            "STRAGGLER",
            "Inspect synchronization, collectives, and unattributed work around r13.",
            [(5.0, 13, None)],
        ),
        ("INPUT-BOUND", "Increase workers, prefetch, or storage throughput.", []),
        ("BALANCED", "Inspect input wait on r2.", []),
    ],
)
def test_a_name_in_the_live_view_of_traceml_is_read_with_its_time(tmp_path, status, action, named):
    # GIVEN the lines of its panel, which stand beside those of another panel
    tool = TraceML(PLAN, 4, tmp_path, tmp_path)
    for line in (
        f"Issue: {status}",
        "Why: r2 waited 16.4 ms for input, compared with 7.0 ms on r3.",
        f"Next: {action}",
    ):
        tool.line(5.0, f"│ {line:<100}│      │ No GPU")
    assert tool.found == named


@pytest.mark.parametrize(
    ("of_group", "of_rank", "named"),
    [
        (["No rank skew detected"], {0: [], 1: []}, []),
        (["Rank skew: rank 3 median 87 ms vs rank 0 62 ms (40% slower)"], {0: [], 1: []}, [(3, None)]),
        (["Bucket 12: rank 1 is late on 84% of steps (p95 delta 24.7 ms)"], {0: [], 1: []}, [(1, "backward")]),
        ([], {0: ["34% of step time waiting on the loader (inter-step gap)"], 1: ["MFU 12.4%"]}, [(0, "data")]),
        # It singles out no rank if most have it.
        ([], {0: ["Prefetch queue starved on 30% of steps"], 1: ["Prefetch queue starved on 25% of steps"]}, []),
    ],
)
def test_the_insights_of_gpuprof_name_ranks(of_group, of_rank, named):
    assert list(Gpuprof.named(of_group, of_rank)) == named


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        ([], Outcome("tool", "nothing")),
        ([Name(2, "data", 120, 15.0)], Outcome("tool", "right", (2, "data"), 31, 5.0)),
        ([Name(2, "forward", 100, 11.0)], Outcome("tool", "part", (2, "forward"), 11, 1.0)),
        ([Name(1, "data", 100, 11.0)], Outcome("tool", "wrong", false_names=(1,))),
        # The best name counts, and the others are false, as is a name before the fault.
        (
            [Name(2, "data", 80, 9.0), Name(0, None, 100, 11.0), Name(2, None, 110, 12.0), Name(2, "data", 120, 15.0)],
            Outcome("tool", "right", (2, "data"), 31, 5.0, False, (0, 2)),
        ),
        ([Name(2, "data", 200, 30.0)], Outcome("tool", "right", (2, "data"), 111, 20.0, at_end=True)),
        ([Name(2, "data", 109)], Outcome("tool", "right", (2, "data"), 20)),
    ],
)
def test_the_first_of_the_best_names_counts(names, expected):
    assert outcome("tool", names, PLAN, onset_s=10.0) == expected


def test_any_stage_of_a_slow_host_is_right_and_any_name_without_a_fault_is_false():
    host = Plan("bare", "", 200, 1, 90, rank=2, stage=None, more_s=0.02)
    assert outcome("tool", [Name(2, "forward", 100)], host).did == "right"
    healthy = Plan("bare", "", 200, 1, 90)
    assert outcome("tool", [Name(2, "forward", 100)], healthy) == Outcome("tool", "wrong", false_names=(2,))


def test_the_tables_have_each_row_and_the_cost_beside_the_bare_job():
    # GIVEN a job with a fault, and a healthy one, with a tool that takes a tenth more
    costs = {
        name: {"step_s": step_s, "cpu_s": 1.5, "peak_bytes": 3 << 20, "written_bytes": 2048}
        for name, step_s in (("bare", 0.10), ("sftriage", 0.11))
    }
    outcomes = {
        "batch": {"sftriage": Outcome("sftriage", "right", (2, "data"), 31, 5.0, False, (0,))},
        "healthy": {"sftriage": Outcome("sftriage", "wrong", false_names=(1,))},
    }
    for by_tool in outcomes.values():
        by_tool["median deviation"] = Outcome("median deviation", "nothing")
    rows = [
        {
            "fault": fault,
            "plan": plain(fields(PLAN) if fault == "batch" else fields(Plan("bare", "", 200, 1, 90))),
            "outcomes": {tool: fields(one) for tool, one in by_tool.items()},
            "costs": costs,
        }
        for fault, by_tool in outcomes.items()
    ]
    # WHEN they are shown
    tools = {name: summary(name, rows) for name in ("sftriage", "median deviation")}
    lines = list(show({"tools": tools, "rows": rows, "refused": "ImportError: libcupti.so.12"}))
    # THEN
    assert "batch          rank 2, data, 20 ms from step 90 on" in lines
    assert any(line.split() == ["sftriage", "right", "+31", "(1", "false)", "wrong"] for line in lines)
    figures = next(line.split() for line in lines[6:] if line.startswith("sftriage"))
    assert figures[1:10] == ["1", "0", "0", "0", "0", "1", "1", "of", "1"]
    assert figures[10:] == ["31", "1.100", "[1.100,", "1.100]", "1.5", "3", "2"]
    assert lines[-2].endswith("rule only")
    assert lines[-1].endswith("ImportError: libcupti.so.12")


def fields(one):
    return {name: getattr(one, name) for name in one.__dataclass_fields__}
