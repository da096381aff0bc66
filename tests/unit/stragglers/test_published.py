"""The published traces of arXiv 2505.05713: every figure of theirs, from their operations.

Their analyser computes in a mixture of single and double precision; so near to its figures come only the same
dependencies, ideal durations and steps.
"""

import json
import os
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import get_args

import numpy as np
import pytest

from sftriage.errors import InputError
from sftriage.runs.operations import load_operations
from sftriage.runs.whatif import MAX_OFF, MAX_STEPS_OFF, REMEDIES, whatif_of
from sftriage.stragglers import factors
from sftriage.stragglers import kinds as kinds_module
from sftriage.stragglers.kinds import attributed
from sftriage.stragglers.pipeline import CLOCK_ERROR_S, COLUMNS, TYPES, arranged, read_rows
from sftriage.stragglers.slowdown import MIN_SLOWDOWN, WORST_PERCENT, slowdown_of
from tests.needs import NO_REAL_TRACES

pytest.importorskip("pyarrow", reason="no reader of Parquet here: pip install 'sftriage[whatif]'")

REPOSITORY = Path(__file__).parents[3]
DATA = Path(os.environ.get("SFTRIAGE_TEST_DATA") or REPOSITORY.parent / "shared" / "data") / "straggler-analysis"
PUBLISHED = sorted(path.stem.removeprefix("trace-") for path in DATA.glob("trace-*.parquet"))
NEAR = {"rel": 1e-6, "abs": 1e-9}

traces = pytest.mark.parametrize("name", PUBLISHED or [pytest.param("", marks=pytest.mark.skip(NO_REAL_TRACES))])


@cache
def analysed(name):
    operations = load_operations([DATA / f"trace-{name}.parquet"])
    return operations, slowdown_of(operations)


def published(kind, name):
    return json.loads((DATA / f"{kind}-{name}.json").read_text(encoding="utf-8"))


@traces
def test_the_slowdown_and_the_time_of_every_step(name):
    # GIVEN a published trace, analysed
    _, found = analysed(name)
    theirs = published("result", name)
    # THEN all of its steps are there, and each takes what they say: as measured, replayed, and without stragglers
    for ours_N, key in ((found.measured_N, "step_t_base"), (found.replayed_N, "step_t_nodelay")):
        assert dict(zip(map(str, found.steps), ours_N, strict=True)) == pytest.approx(theirs[key], **NEAR)
    assert list(theirs["step_t_noblk"].values()) == pytest.approx([found.ideal_s] * len(found.steps), **NEAR)
    # AND so is the slowdown, of all and of each
    assert found.s == pytest.approx(theirs["blocking_slowdown"], **NEAR)
    assert 1.0 + found.unexplained == pytest.approx(theirs["launch_slowdown"], **NEAR)
    by_step = dict(zip(map(str, found.steps), found.replayed_N / found.ideal_s, strict=True))
    assert by_step == pytest.approx(theirs["blocking_step_slowdown"], **NEAR)


@traces
def test_the_slowdown_by_worker_and_operation(name):
    # GIVEN a published trace, analysed
    _, found = analysed(name)
    theirs = published("result", name)
    # THEN what each data-parallel rank, stage and type of operation costs is theirs, over all steps and in each
    for ours, key in ((found.by_dp, "dp_rank"), (found.by_pp, "stage"), (found.by_part, "optype")):
        assert {str(one): slowdown for one, slowdown in ours.items()} == pytest.approx(
            theirs[f"blocking_decompose_by_{key}"], **NEAR
        )
    for ours_N, key in ((found.by_dp_N, "dp_rank"), (found.by_pp_N, "stage"), (found.by_part_N, "optype")):
        for at, step in enumerate(found.steps):
            of_step = {str(one): float(slowdown_N[at]) for one, slowdown_N in ours_N.items()}
            assert of_step == pytest.approx(theirs[f"blocking_decompose_by_{key}_per_step"][str(step)], **NEAR)


@traces
def test_what_fixing_the_worst_workers_or_the_last_stage_would_recover(name):
    # GIVEN a published trace, analysed
    _, found = analysed(name)
    for fix, kind, key in ((found.m_w, "mw", "Mw"), (found.m_s, "ms", "Ms")):
        theirs = published(kind, name)
        # THEN the mended step is theirs, and so is its share
        assert fix.step_s == pytest.approx(theirs["trem"], **NEAR)
        assert fix.share == pytest.approx(theirs[key], **NEAR)
        assert (found.replayed_N.mean(), found.ideal_s) == pytest.approx((theirs["tori"], theirs["tideal"]), **NEAR)


DAMAGE = {
    "seconds since 1970 in float32": lambda rows: {"start_E": (rows.start_E + 1.7e9).astype(np.float32)},
    "clocks of neighbouring stages 1 s apart": lambda rows: {"start_E": rows.start_E + rows.pp_E % 2},
    "durations in another unit": lambda rows: {"duration_E": rows.duration_E / 1000},
    "every tenth start with a flipped bit of its exponent": lambda rows: {
        "start_E": np.where(np.arange(len(rows.start_E)) % 10 == 0, rows.start_E * 16, rows.start_E)
    },
}


@traces
@pytest.mark.parametrize("damage", DAMAGE)
def test_no_figure_of_a_damaged_trace_is_given(name, damage):
    # GIVEN a published trace, and some damage to its times
    rows = read_rows(DATA / f"trace-{name}.parquet")
    try:
        shown = whatif_of(arranged(replace(rows, **DAMAGE[damage](rows))))
    except InputError:
        return
    # WHEN it is replayed, THEN the only line says why there are no figures
    (line,) = shown.lines()
    assert line.startswith("No figure of this recording can be trusted: ")
    values = shown.values()
    assert (values["trusted"], values["S"], values["kinds"], shown.heat()) == (False, None, [], None)


@traces
def test_a_published_trace_is_replayed_as_it_ran(name):
    # GIVEN a published trace, WHEN it is replayed, THEN every step is far from the limit
    operations, _ = analysed(name)
    assert operations.off_N.max() < MAX_OFF / 2
    assert whatif_of(operations).values()["trusted"]


@pytest.mark.parametrize(
    ("name", "figures", "kinds"),
    [
        ("AR", (1.973, 1.002, -0.001), [("slow_worker", ((0, 0),))]),
        ("ST", (1.179, 0.031, 1.219), [("last_stage", ((0, 3), (1, 3)))]),
    ],
)
def test_the_figures_of_the_paper_and_the_kinds_it_names(name, figures, kinds):
    # GIVEN a job whose stragglers the paper explains: one worker made slow, a last stage with more to do
    if name not in PUBLISHED:
        pytest.skip(NO_REAL_TRACES)
    operations, found = analysed(name)
    # THEN S, M_W and M_S are its, and it has that kind of stragglers, and no other
    assert tuple(round(one, 3) for one in (found.s, found.m_w.share, found.m_s.share)) == figures
    assert [(kind.code, kind.workers) for kind in attributed(operations, found).kinds] == kinds


PAGE = " ".join((Path(__file__).parents[3] / "docs" / "whatif.md").read_text(encoding="utf-8").split())


def test_every_kind_is_documented_with_a_remedy():
    codes = set(get_args(kinds_module.Code))
    assert set(REMEDIES) == codes
    for code in codes:
        assert f"| `{code}` | " in PAGE


@pytest.mark.parametrize("name", [*TYPES, *COLUMNS])
def test_every_type_of_operation_and_column_is_documented(name):
    assert f"`{name}`" in PAGE


@pytest.mark.parametrize(
    "sentence",
    [
        f"Under S = {MIN_SLOWDOWN} nothing is shared out",
        f"the worst {WORST_PERCENT} % of the workers (at least one",
        f"more than {MAX_OFF:.0%} of the step away".replace("%", " %"),
        f"If more than {MAX_STEPS_OFF:.0%} of the steps are off".replace("%", " %"),
        f"from {kinds_module.MIN_SHARE} of the slowdown on, communication from {kinds_module.MIN_LINK_SHARE}",
        f"longer than their peers by {factors.MIN_OVER:.0%} at least".replace("%", " %"),
        f"longer by {kinds_module.MIN_STAGE_OVER:.0%} than the median of the others".replace("%", " %"),
        f"(correlation ≥ {factors.MIN_CORRELATION})",
        f"by {factors.STALL_RATIO:.0%} and six deviations".replace("%", " %"),
        f"Clocks of workers may be apart by {CLOCK_ERROR_S * 1e3:.0f} ms",
    ],
)
def test_the_numbers_that_decide_are_documented(sentence):
    assert sentence in PAGE
