"""What holds for the verdict on any window at all."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sftriage.model.verdicts import Settings
from sftriage.verdict.accounting import complete_steps
from sftriage.verdict.evidence import Past
from sftriage.verdict.judging import judge
from sftriage.verdict.whatif import Baseline, Samples, profile, replayed, roles_of
from sftriage.words.verdicts import explain
from tests.scenario import classify
from tests.unit.verdict.strategies import ANY, distinct_windows, windows

REASONS = {
    "low_coverage",
    "self_inflicted",
    "co_critical",
    "intermittent",
    "roaming",
    "sync_ambiguous",
    "no_baseline",
    "mixed_roles",
    "no_sync",
}


def past_of(window, factor):
    """As if the job's healthy step were this window's, times a factor."""
    roles = roles_of(window)
    replays, valid_N = replayed(window, roles)
    typical = profile(replays, roles).of(valid_N).typical
    parts = {name: getattr(typical, name) * factor for name in ("level_CS", "common_CS", "sync_S", "lateness_s")}
    return Past(Baseline({("", None): Samples((replace(typical, **parts),), 10)}))


def assert_coherent(verdict, window):
    n_ranks = window.durations_NRS.shape[1]
    assert (verdict.label == "suspect") == (verdict.label != "healthy" and not verdict.reasons)
    assert verdict.label != "suspect" or verdict.suspects
    assert verdict.label != "healthy" or (not verdict.reasons and not verdict.suspects)
    assert set(verdict.reasons) <= REASONS
    assert len(set(verdict.reasons)) == len(verdict.reasons)
    assert (verdict.first_step, verdict.last_step) == (window.first_step, window.last_step)
    # (a mean of denormals is rounded to the next of them)
    assert sum(verdict.advances_s.values()) == pytest.approx(verdict.exposed_s, rel=1e-12, abs=1e-320)
    assert all(np.isfinite(value) for value in verdict.numbers.values())
    for suspect in verdict.suspects:
        assert 0.0 <= suspect.share <= 1.0 + 1e-9
        assert 0.0 <= suspect.persistence <= 1.0
        assert suspect.stage is None or suspect.stage in window.schema.stages
        assert set(suspect.ranks) <= set(range(n_ranks))
        assert (suspect.rank is not None) == (suspect.scope == "rank")
        assert (suspect.host is not None) == (suspect.scope == "host")
        assert suspect.period_steps is None or suspect.pattern == "recurring"
        assert suspect.onset_step is None or suspect.onset_step <= window.last_step


@given(window=windows(elements=ANY), factor=st.sampled_from([None, 0.0, 0.5, 0.9, 1.0, 2.0]))
@settings(max_examples=250)
def test_any_window_gets_a_coherent_verdict(window, factor):
    # GIVEN any window: one rank or more, one step or more, zeros, denormals, huge values, missing vectors
    known = factor is not None and complete_steps(window).any()
    # WHEN classified, with and without a baseline (which fits it or not), THEN the verdict says one thing
    with np.errstate(over="raise", invalid="raise", divide="raise"):
        assert_coherent(classify(window, past_of(window, factor) if known else None), window)


@given(
    window=windows(max_ranks=6) | distinct_windows(),
    factor=st.sampled_from([None, 0.5, 0.9, 1.0]),
    hosts=st.booleans(),
    seed=st.integers(0, 100),
)
@settings(max_examples=250)
def test_nothing_over_its_threshold_is_healthy(window, factor, hosts, seed):
    # GIVEN any window, of a job that is known or not, on one host or several
    names = np.random.default_rng(seed).choice(("a", "b"), window.durations_NRS.shape[1])
    window = replace(window, hosts=tuple(names.tolist()) if hosts else None)
    known = factor is not None and complete_steps(window).any()
    verdict = classify(window, past_of(window, factor) if known else None)
    # WHEN it is healthy, THEN no part of its excess reaches the threshold that is documented for it
    over = [
        check.name for check in explain(verdict).checks if check.met and check.name.endswith(("gain_s", "excess_s"))
    ]
    assert verdict.label != "healthy" or not over
    # AND if no rank is named, some part does
    held = set(verdict.reasons) - {"low_coverage", "self_inflicted", "mixed_roles", "no_sync"}
    assert not held or over


@given(window=windows(missing=False, max_ranks=3), settings_=st.builds(Settings, min_coverage_fraction=st.just(0.0)))
def test_judging_is_learning_from_at_most_one_window(window, settings_):
    # GIVEN any window and no past, WHEN judged
    verdict, past = judge(window, None, settings_)
    # THEN there is a baseline of one window or none
    teaches = verdict.exposed_s > 0.0 and (verdict.label == "healthy" or verdict.reasons == ("roaming",))
    assert past.baseline.n_windows == int(teaches)
    # AND who was named is remembered
    assert (past.named is not None) == (verdict.label == "suspect")


@given(window=distinct_windows(), exponent=st.integers(-30, 30), factor=st.sampled_from([None, 0.5, 0.9]))
def test_the_unit_of_time_does_not_matter(window, exponent, factor):
    # GIVEN a window and the same in another unit (a power of two, so that no digit is lost)
    unit = 2.0**exponent
    scaled = replace(window, durations_NRS=window.durations_NRS * unit)
    known = (None, None) if factor is None else (past_of(window, factor), past_of(scaled, factor))
    # WHEN both are classified
    there, here = classify(window, known[0]), classify(scaled, known[1])
    # THEN label, reasons and suspects are the same, and gains are in the unit
    assert (here.label, here.reasons, here.leaders) == (there.label, there.reasons, there.leaders)
    assert here.exposed_s == there.exposed_s * unit
    assert here.suspects == tuple(replace(suspect, gain_s=suspect.gain_s * unit) for suspect in there.suspects)


@given(window=distinct_windows(), factor=st.sampled_from([None, 0.5, 0.9]))
def test_ranks_may_be_numbered_in_any_order(window, factor):
    # GIVEN a window and the same with its ranks the other way round
    last = window.durations_NRS.shape[1] - 1
    turned = replace(window, durations_NRS=window.durations_NRS[:, ::-1])
    baseline = None if factor is None else past_of(window, factor)
    # WHEN both are classified
    there, back = classify(window, baseline), classify(turned, baseline)
    # THEN the label is the same, and who is suspected and who leads moves along
    assert (back.label, back.reasons) == (there.label, there.reasons)
    assert back.exposed_s == pytest.approx(there.exposed_s, rel=1e-12)
    assert back.advances_s == pytest.approx(there.advances_s, rel=1e-9)
    assert {stage: last - rank for stage, rank in back.leaders.items()} == dict(there.leaders)

    def named(verdict, renumber):
        return {
            (s.scope, s.stage, tuple(sorted(map(renumber, s.ranks)))): pytest.approx(s.gain_s, rel=1e-9)
            for s in verdict.suspects
        }

    # (the last ones listed may tie at the cut, so as many as there are room for are not compared)
    if len(there.suspects) < 8:
        assert named(back, lambda rank: last - rank) == named(there, lambda rank: rank)
