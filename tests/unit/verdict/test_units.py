"""What mending a host would have saved, and how much of a suspect's lateness the system caused."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sftriage.model.verdicts import Settings
from sftriage.model.windows import COUNTERS
from sftriage.verdict.sequential import arrivals_of_hosts
from sftriage.verdict.units import host_units, last_elsewhere, places_of, system_counts, with_system
from sftriage.verdict.whatif import SAMPLE_RANKS, grouped, replayed, roles_of
from sftriage.windows.npz import counted_of
from sftriage.words.verdicts import verdict_sentence
from tests.scenario import Fault, Job, always, at, classify, every, from_step, judged
from tests.unit.verdict.strategies import windows

SETTINGS = Settings()


def replayed_hosts(window):
    roles = roles_of(window)
    replays, _ = replayed(window, roles)
    before = [one.arrival_MR.copy() for one in replays]
    places = places_of(window.hosts)
    elsewhere = [] if places is None else [last_elsewhere(one, places) for one in replays]
    units = []
    if places is not None:
        units = host_units(replays, places, elsewhere, range(len(places.names)), roles, SETTINGS.larger_part_fraction)
    for one, arrival_MR in zip(replays, before, strict=True):
        assert (one.arrival_MR == arrival_MR).all()
    return replays, {unit.name: unit for unit in units}


def peers_N(one, k, column, role, mine, roles):
    """What ranks of a host are held against: their role on other hosts; all of it where the host is little of it."""
    cohort = roles.members[role]
    if len(cohort) > SAMPLE_RANKS and len(mine) <= len(cohort) // 10:
        return one.reference_KMC[k][column.offset : column.offset + column.n_steps, role]
    return np.median(column.values_NR[:, np.setdiff1d(cohort, mine)], axis=1)


def the_long_way(replays, window, name):
    """Gains of a host by row, stage and segment (the whole last), and its median rank's time over its peers."""
    roles, mine = roles_of(window), [rank for rank, host in enumerate(window.hosts) if host == name]
    theirs = [rank for rank, host in enumerate(window.hosts) if host != name]
    n_steps, _, n_stages = window.durations_NRS.shape
    over_NXS, gains = np.zeros((n_steps, len(mine), n_stages)), []
    for one in replays:
        n_rows = one.segment.n_rows
        excess_MXS = np.zeros((n_rows, len(mine), n_stages))
        for k, column in enumerate(one.segment.local):
            peers = {role: peers_N(one, k, column, role, mine, roles) for role in {roles.role_R[rank] for rank in mine}}
            for x, rank in enumerate(mine):
                excess_N = column.values_NR[:, rank] - peers[roles.role_R[rank]]
                excess_MXS[column.offset : column.offset + n_steps, x, column.stage] += excess_N
                over_NXS[:, x, column.stage] += excess_N
        gain_MS = np.zeros((n_rows, n_stages + 1))
        for s in range(n_stages + 1):
            excess_MX = excess_MXS[:, :, s] if s < n_stages else excess_MXS.sum(axis=2)
            mended_MX = one.arrival_MR[:, mine] - np.maximum(excess_MX, 0.0)
            left_M = np.maximum(mended_MX.max(axis=1), one.arrival_MR[:, theirs].max(axis=1))
            gain_MS[:, s] = np.maximum(one.arrival_MR.max(axis=1) - left_M, 0.0)
        gains.append(gain_MS)
    over_X = over_NXS.sum(axis=2).mean(axis=0)
    alike = over_X.max() > 0.0 and (over_X >= over_X.max() / 2).mean() >= SETTINGS.larger_part_fraction
    return gains, np.median(over_NXS, axis=1), alike


def check(window):
    replays, units = replayed_hosts(window)
    for name in set(window.hosts):
        gains, over_NS, alike = the_long_way(replays, window, name)
        total_s = sum(float(gain_MS[:, -1].sum()) for gain_MS in gains)
        scale = float(np.nansum(window.durations_NRS)) + 1e-300
        # By step or by row, the total is the same: a row's gain is put down to one of its steps.
        if name in units:
            assert alike
            whole_s = units[name].gain_NS.sum(axis=0)
            assert whole_s == pytest.approx(sum(gain_MS.sum(axis=0) for gain_MS in gains), abs=1e-9 * scale)
            assert units[name].over_NS == pytest.approx(over_NS, abs=1e-9 * scale)
        elif alike and window.hosts.count(name) > 1:
            # No late rank is left out.
            late_s = [np.minimum(gain_MS[:, -1], one.lateness_M) for gain_MS, one in zip(gains, replays, strict=True)]
            assert sum(np.maximum(late_M, 0.0).sum() for late_M in late_s) <= 1e-9 * scale, (name, total_s)
    return units


@given(window=windows(min_ranks=2, max_ranks=8), data=st.data())
def test_the_gains_of_hosts_are_what_the_naive_replay_saves(window, data):
    # GIVEN any window, and any ranks on any hosts, in a row or not; some with cohorts
    n_ranks = window.durations_NRS.shape[1]
    hosts = data.draw(st.lists(st.sampled_from("abc"), min_size=n_ranks, max_size=n_ranks))
    cohorts = data.draw(st.lists(st.sampled_from("xy"), min_size=n_ranks, max_size=n_ranks) | st.none())
    if cohorts is not None and len(set(zip(hosts, cohorts, strict=True))) < len(set(hosts)) * len(set(cohorts)):
        cohorts = None  # (a cohort that is not on every host has no peers)
    window = replace(window, hosts=tuple(hosts), cohorts=None if cohorts is None else tuple(cohorts))
    if len(set(hosts)) < 2:
        # (one host has no peers)
        assert replayed_hosts(window)[1] == {}
        return
    # WHEN its hosts are replayed the long way, THEN what they would have saved is that
    check(window)


@pytest.mark.parametrize("n_ranks", [16, 320])
@pytest.mark.parametrize("shuffled", [False, True], ids=["in a row", "shuffled"])
@pytest.mark.parametrize("per_host", [4, 8])
@pytest.mark.parametrize("stage", ["data", "other"])
def test_a_slow_host_of_many_is_found_wherever_its_ranks_are(n_ranks, shuffled, per_host, stage):
    # GIVEN a job of several hosts, one of them slow, and another a little
    order = np.random.default_rng(1).permutation(n_ranks) if shuffled else np.arange(n_ranks)
    host_R = order // per_host
    slow, slower = (tuple(int(rank) for rank in np.flatnonzero(host_R == h)) for h in (0, 1))
    job = Job(n_ranks=n_ranks, n_steps=20, hosts=tuple(f"node-{h}" for h in host_R))
    window = job.run(Fault(stage, slow, 0.004), Fault(stage, slower, 0.020))
    # WHEN its hosts are replayed the long way, THEN what they would have saved is that
    units = check(window)
    # AND the slow one would have saved most
    assert max(units.values(), key=lambda unit: unit.gain_NS[:, -1].sum()).ranks == slower


def test_a_cohort_that_is_on_no_other_host_has_no_peers():
    # GIVEN a pipeline with a host for each of its stages, one of them slow
    window = Job(n_ranks=8, hosts=("a",) * 4 + ("b",) * 4, cohorts=("pp0",) * 4 + ("pp1",) * 4).run(
        Fault("data", (4, 5, 6, 7), 0.020)
    )
    # WHEN its hosts are compared, THEN neither can be distinguished from its work
    assert replayed_hosts(window)[1] == {}
    # BUT if no cohorts say that they do different work, it is the slow one
    assert set(replayed_hosts(replace(window, cohorts=None))[1]) == {"b"}


def test_ranks_are_grouped_by_name_in_the_order_in_which_the_names_appear():
    # GIVEN names in no order, WHEN grouped
    groups = grouped(("b", "a", "b", "c", "a"))
    # THEN each has its ranks, in their order
    assert groups.names == ("b", "a", "c")
    assert groups.role_R.tolist() == [0, 1, 0, 2, 1]
    assert [ranks.tolist() for ranks in groups.members] == [[0, 2], [1, 4], [3]]
    # AND no caller can change it for the next one
    with pytest.raises(ValueError, match="read-only"):
        groups.role_R[0] = 1
    assert grouped(()).members == ()


@pytest.mark.parametrize(("late", "blamed"), [((0, 1), True), ((0,), False)])
def test_delay_by_one_rank_alone_is_not_its_hosts(late, blamed):
    # GIVEN two ranks on each of two hosts, of which both ranks of one are late, or one alone
    window = Job(hosts=("a", "a", "b", "b")).run(Fault("data", late, 0.020))
    replays, _ = replayed_hosts(window)
    places = places_of(window.hosts)
    # WHEN the hosts' delays are computed
    last = arrivals_of_hosts(replays, [last_elsewhere(one, places) for one in replays], places, SETTINGS).last
    held_s = sum(held_M[host_M == 0].sum() for host_M, held_M in last)
    # THEN it is nothing where mending the one rank would have saved most of it
    assert held_s == pytest.approx(50 * 0.020 if blamed else 0.0, rel=0.2)


FOUR = Job(n_ranks=4)
"""A step is 100 ms, 60 of them before the sync and after the last one: of what is spread evenly, 60 % count."""

ALL = np.ones(50, dtype=bool)
SLEEPS = (Fault("data", 1, 0.05),)
EVERYWHERE = (Fault("data", 1, factor=2.0), Fault("forward", 1, factor=2.0), Fault("backward", 1, factor=2.0))
"""A rank that has its core half of the time, as it is with another busy process on it."""


def queued(window, *waits_s, unknown=()):
    """The window with seconds in the run queue a step, (rank, steps, seconds) each."""
    queued_NR = per_step(window, waits_s, unknown)
    return counting(window, queued_s=queued_NR, preempted=np.round(queued_NR * 200.0))


def per_step(window, amounts, unknown=()):
    values_NR = np.zeros(window.durations_NRS.shape[:2])
    for rank, steps, amount in amounts:
        values_NR[steps(len(values_NR)), rank] = amount
    for rank in unknown:
        values_NR[:, rank] = np.nan
    return values_NR


def counting(window, **known):
    return replace(window, counted_NRC=counted_of(known))


half = from_step(25)
THEN_ALL_EXCHANGE = (Fault("data", 1, 0.01), Fault("backward", None, 0.3))


@pytest.mark.parametrize(
    ("situation", "faults", "waits_s", "least", "most"),
    [
        ("it has its core half of the time", EVERYWHERE, ((1, always, 0.085),), 0.8, 1.0),
        ("it sleeps", SLEEPS, (), 0.0, 0.0),
        ("it sleeps, and all wait a little", SLEEPS, tuple((r, always, 0.01) for r in range(4)), 0.0, 0.0),
        ("it sleeps, and waits a little", SLEEPS, ((1, always, 0.01),), 0.15, 0.25),
        ("it sleeps, and a peer waits", SLEEPS, ((2, always, 0.04),), 0.0, 0.0),
        ("it waited more than it was late", (Fault("data", 1, 0.02),), ((1, always, 0.09),), 1.0, 1.0),
        ("in half of the steps", (Fault("data", 1, 0.06, half),), ((1, half, 0.06),), 0.9, 1.0),
        # In a step that is mostly an exchange, all of its waiting is before that.
        ("it waits, and then all exchange", THEN_ALL_EXCHANGE, ((1, always, 0.01),), 0.9, 1.0),
        ("now and then", (Fault("data", 1, 0.2, every(7, 3)),), ((1, every(7, 3), 0.2),), 0.6, 1.0),
        # What was waited now and then is spread over the steps between two readings.
        ("now and then, spread", (Fault("data", 1, 0.2, every(7, 3)),), ((1, always, 0.2 / 7),), 0.6, 1.0),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_the_part_of_the_lateness_that_was_waiting(situation, faults, waits_s, least, most):
    found = system_counts(queued(FOUR.run(*faults), *waits_s), [1], ALL)
    assert least <= found.descheduled_fraction <= most, situation


@pytest.mark.parametrize(
    ("situation", "collected_s", "queued_s", "found"),
    [
        ("it collects garbage", 0.045, 0.0, {"garbage_collection": 0.9}),
        ("for less than half of its lateness", 0.02, 0.0, {}),
        ("and waits for a CPU longer", 0.03, 0.2, {}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_the_part_of_the_lateness_that_the_interpreter_took(situation, collected_s, queued_s, found):
    window = FOUR.run(Fault("data", 1, 0.05))
    of = {"collected_s": collected_s, "queued_s": queued_s}
    counts = system_counts(
        counting(window, **{name: per_step(window, [(1, always, value)]) for name, value in of.items()}), [1], ALL
    )
    assert counts.system is None
    assert dict([counts.interpreter] if counts.interpreter else []) == pytest.approx(found, abs=0.1)


def test_the_numbers_are_means_over_the_chosen_steps():
    window = queued(FOUR.run(Fault("data", 1, 0.05, half)), (1, half, 0.03))
    later, all_of_them = system_counts(window, [1], half(50)), system_counts(window, [1], ALL)
    assert (later.own["queued_s"], later.own["preempted"]) == (pytest.approx(0.03), pytest.approx(6.0))
    assert (all_of_them.own["queued_s"], all_of_them.own["preempted"]) == (pytest.approx(0.015), pytest.approx(3.0))
    assert later.late_s == pytest.approx(0.05, rel=0.1)
    assert all_of_them.late_s == pytest.approx(0.025, rel=0.1)


def test_the_ranks_of_a_host_wait_together():
    hosts = ("a", "a", "b", "b", "b")
    window = Job(n_ranks=5, hosts=hosts).run(Fault("data", (0, 1), 0.05))
    window = queued(window, (0, always, 0.06), (1, always, 0.06))
    assert system_counts(window, [0, 1], ALL).descheduled_fraction > 0.6
    # AND ranks of another cohort are no measure: a host with one rank of each is held against the others of each
    window = replace(window, cohorts=("x", "y", "x", "y", "y"))
    assert system_counts(window, [0, 1], ALL).descheduled_fraction > 0.6


def test_in_a_large_job_a_sample_of_ranks_represents_the_others():
    # GIVEN a host of 128 ranks that wait for a CPU for most of what they are late, among 1,024 that wait a little
    host = tuple(range(256, 384))
    window = Job(n_ranks=1024).run(Fault("data", host, 0.05))
    waits_s = [(rank, always, 0.07 if rank in host else 0.01) for rank in range(1024)]
    found = system_counts(queued(window, *waits_s), host, ALL)
    # THEN it is as if all had been compared
    assert found.late_s == pytest.approx(0.05, rel=0.1)
    assert found.own["queued_s"] == pytest.approx(0.07)
    assert found.waited_s == pytest.approx(0.06)


@pytest.mark.parametrize(
    ("situation", "window", "ranks"),
    [
        ("no counters", FOUR.run(Fault("data", 1, 0.05)), [1]),
        ("not the suspect's", queued(FOUR.run(Fault("data", 1, 0.05)), unknown=(1,)), [1]),
        ("of no peer", queued(FOUR.run(Fault("data", 1, 0.05)), (1, always, 0.05), unknown=(0, 2, 3)), [1]),
        ("it has no peers", queued(FOUR.run(Fault("data", None, 0.05))), [0, 1, 2, 3]),
        ("of one of its cohort", queued(replace(FOUR.run(), cohorts=("a", "b", "b", "b"))), [0]),
        ("no ranks chosen", queued(FOUR.run()), []),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_unknown_counters_give_no_counts(situation, window, ranks):
    assert system_counts(window, ranks, ALL) is None, situation


def test_enough_of_the_steps_must_be_known():
    window = queued(FOUR.run(Fault("data", 1, 0.05)), (1, always, 0.05))
    window.counted_NRC[26:, 1] = np.nan
    assert system_counts(window, [1], ALL).own["queued_s"] == pytest.approx(0.05)
    window.counted_NRC[24:, 1] = np.nan
    assert system_counts(window, [1], ALL) is None
    # AND a peer that is not known is none
    window = queued(FOUR.run(Fault("data", 1, 0.05)), (1, always, 0.05), unknown=(2,))
    without = system_counts(window.of_ranks([0, 1, 3]), [1], ALL)
    assert system_counts(window, [1], ALL).descheduled_fraction == pytest.approx(without.descheduled_fraction, rel=0.01)


@given(
    waits_s=st.lists(st.floats(0.0, 10.0), min_size=4, max_size=4),
    late_s=st.floats(0.0, 1.0),
    missing=st.sets(st.integers(0, 49)),
)
def test_a_fraction_is_one_and_more_waiting_never_explains_less(waits_s, late_s, missing):
    window = queued(FOUR.run(Fault("data", 1, late_s)), *((rank, always, one) for rank, one in enumerate(waits_s)))
    window.durations_NRS[list(missing), 3] = np.nan
    found = system_counts(window, [1], ALL)
    if found is None or found.descheduled_fraction is None:
        assert found is not None or len(missing) > 25
        return
    assert 0.0 <= found.descheduled_fraction <= 1.0
    longer = counting(window, queued_s=window.counted("queued_s") + np.array([0.0, 1.0, 0.0, 0.0]))
    assert system_counts(longer, [1], ALL).descheduled_fraction >= found.descheduled_fraction


def test_a_suspect_that_waited_for_a_cpu_stays_one_and_the_verdict_has_the_wait():
    # GIVEN a rank that has its core half of the time, and one that sleeps
    waited = classify(queued(FOUR.run(*EVERYWHERE), (1, always, 0.085)))
    slept = classify(queued(FOUR.run(Fault("data", 1, 0.05))))
    # THEN both are named
    assert [(one.label, one.suspects[0].ranks) for one in (waited, slept)] == [("suspect", (1,))] * 2
    # AND of each it is known
    assert waited.suspects[0].descheduled_fraction > 0.8
    assert slept.suspects[0].descheduled_fraction == 0.0
    assert waited.numbers["queued_s"] == pytest.approx(0.085)
    assert waited.numbers["preempted"] == pytest.approx(17.0)
    # AND all else is as without counters
    unknown = classify(FOUR.run(*EVERYWHERE))
    assert unknown.suspects[0].descheduled_fraction is None
    assert replace(waited.suspects[0], descheduled_fraction=None, contended_fraction=None) == unknown.suspects[0]
    assert {**waited.numbers, "queued_s": 0, "preempted": 0} == {**unknown.numbers, "queued_s": 0, "preempted": 0}


def test_steps_of_another_kind_and_those_before_it_began_are_not_counted():
    # GIVEN a rank that waits from step 30 on, and an evaluation for which it waits by itself in every tenth step
    kinds = tuple("evaluation" if n % 10 == 0 else "" for n in range(50))
    job = replace(FOUR, kinds=kinds)
    faults = [Fault(stage, 1, factor=2.0, steps=from_step(30)) for stage in ("data", "forward", "backward")]
    window = job.run(*faults, Fault("other", None, 0.3, every(10)))
    window = queued(window, (1, from_step(30), 0.085), (1, at(0, 10, 20), 5.0), (0, every(10), 9.0))
    verdict = classify(window)
    assert verdict.suspects[0].ranks == (1,)
    assert verdict.suspects[0].descheduled_fraction > 0.8
    # (its onset is not known to the step)
    assert 0.06 <= verdict.numbers["queued_s"] <= 0.086


@pytest.mark.parametrize(
    ("situation", "stage", "waits_s", "runs_s", "usual_s", "fraction"),
    [
        ("it sleeps", 0, (0.0,) * 4, (0.02,) * 4, 0.0, 0.0),
        ("its peers wait as long, in the sync stage", 0, (0.04,) * 4, (0.02,) * 4, 0.0, 0.8),
        ("its peers wait as long, and what is usual is not known", 0, (0.04,) * 4, (0.02,) * 4, None, 0.0),
        ("it alone waits, and what is usual is not known", 0, (0.0, 0.04, 0.0, 0.0), (0.02,) * 4, None, 0.8),
        ("they do so in usual steps", 0, (0.04,) * 4, (0.02,) * 4, 0.04, 0.0),
        ("it waits for longer than in usual steps", 0, (0.04,) * 4, (0.02,) * 4, 0.015, 0.5),
        ("a peer waits", 0, (0.0, 0.0, 0.04, 0.0), (0.02,) * 4, 0.0, 0.0),
        ("it runs for longer, in one stage", 0, (0.0,) * 4, (0.02, 0.07, 0.02, 0.02), 0.0, 0.0),
        ("it runs for longer in all it does", None, (0.0,) * 4, (0.02, 0.07, 0.02, 0.02), 0.0, 1.0),
        ("it does both", None, (0.0, 0.01, 0.0, 0.0), (0.02, 0.05, 0.02, 0.02), 0.0, 0.8),
        ("a peer runs for longer", None, (0.0,) * 4, (0.02, 0.02, 0.02, 0.07), 0.0, 0.0),
    ],
)
def test_the_part_of_the_lateness_that_contention_may_explain(situation, stage, waits_s, runs_s, usual_s, fraction):
    # GIVEN a rank that is 50 ms late, and how long each rank waited for a CPU and ran
    window = FOUR.run(Fault("data", 1, 0.05))
    each = {"queued_s": waits_s, "run_s": runs_s}
    of = {name: per_step(window, [(r, always, s) for r, s in enumerate(some)]) for name, some in each.items()}
    found = system_counts(counting(window, **of), [1], ALL)
    assert found.contended_fraction(usual_s, stage) == pytest.approx(fraction, abs=0.05), situation


def test_running_longer_counts_as_contention_if_everything_is_slower_and_at_most_twice_as_long():
    # GIVEN a rank that runs longer than its peers, by so much in each stage; they take 20, 30 and 10 ms in these
    def contended(runs_more_s=0.0, **late_s):
        window = FOUR.run(*(Fault(stage, 1, seconds) for stage, seconds in late_s.items()))
        runs_s = [(r, always, 0.09 + (sum(late_s.values()) + runs_more_s) * (r == 1)) for r in range(4)]
        known = {"queued_s": per_step(window, ()), "run_s": per_step(window, runs_s)}
        found = system_counts(counting(window, **known), [1], ALL)
        return found.contended_fraction(0.0, window.schema.stages.index("forward"))

    # THEN in one of several stages it has more to do there
    assert contended(forward=0.03) == contended(forward=0.03, data=0.006) == pytest.approx(0.0)
    # AND where it is at least half as slow in the others, that may be its core
    assert contended(forward=0.012, data=0.005, optimizer=0.002) == pytest.approx(1.0, abs=0.1)
    # AND inside the sync stage, which takes as long on all ranks, it shows in what it runs
    assert contended(forward=0.012, runs_more_s=0.02) == pytest.approx(1.0, abs=0.1)
    # AND no core is slower by more than half because another one is busy
    assert contended(forward=0.12, data=0.08, optimizer=0.04) == pytest.approx(0.25, abs=0.05)


def test_waiting_for_the_cgroups_limit_is_no_contention_and_uncounted_waiting_is_unknown():
    window = FOUR.run(Fault("data", 1, 0.05))
    one = per_step(window, ((1, always, 0.05),))
    found = system_counts(counting(window, queued_s=one, throttled_s=one), [1], ALL)
    assert found.contended_fraction(0.0, 0) == pytest.approx(0.0)
    assert system_counts(counting(window, run_s=one), [1], ALL).contended_fraction(0.0, None) is None


def test_contention_may_explain_a_named_rank_that_is_not_late_in_the_window():
    # GIVEN a rank beside which all others have become late, and that waits for a CPU, or does not
    window = FOUR.run(Fault("data", (0, 2, 3), 0.05))
    for waits_s, fraction in ((0.03, 1.0), (0.0, 0.0)):
        found = system_counts(queued(window, (1, always, waits_s)), [1], ALL)
        assert found.late_s < 0.0
        assert (found.contended_fraction(0.0, 0), found.descheduled_fraction) == (fraction, None)


def test_contention_is_waiting_beyond_that_at_the_jobs_best():
    # GIVEN a job whose ranks wait 30 ms a step for a CPU, and of which one is late from step 200 on
    def contended(*more_waits_s):
        run = Job(n_ranks=4, n_steps=300).run(Fault("data", 1, 0.05, from_step(200)))
        window = queued(run, *((rank, always, 0.03) for rank in range(4)), *more_waits_s)
        *_, (verdict, _) = judged(window)
        (suspect, *_) = verdict.suspects
        assert (verdict.label, suspect.ranks) == ("suspect", (1,))
        return suspect.contended_fraction

    # THEN what it has always waited is no reason for its being late
    assert contended() == pytest.approx(0.0, abs=0.02)
    # AND what all wait more from then on may be, for it is the one that does so outside the sync stage
    assert contended(*((rank, from_step(200), 0.06) for rank in range(4))) == pytest.approx(0.6, abs=0.05)


HOSTS = ("a", "a", "b", "b")
STAGES = ("data", "forward", "backward", "optimizer")


def kept_from_running(window, began, *, ranks=(2, 3), **fractions):
    """The window of ranks that run for 94 ms a step, of which some are kept from it for so much of the step."""
    step_s = window.durations_NRS.sum(axis=2).mean(axis=1)[:, None] * np.isin(range(4), ranks) * began[:, None]
    counts = {name: fraction * step_s for name, fraction in fractions.items()}
    return counting(
        window,
        **{name: np.zeros_like(step_s) for name in ("queued_s", "throttled_s", "stopped_s")}
        | counts
        | {"run_s": np.full_like(step_s, 0.094)},
    )


@pytest.mark.parametrize(
    ("situation", "known", "began"),
    [
        ("its cgroup's limit", {"queued_s": 0.75, "throttled_s": 1.5}, 200),
        ("its cgroup's limit, from the first step on", {"queued_s": 0.75, "throttled_s": 1.5}, 0),
        ("other processes", {"queued_s": 0.75}, 200),
        ("stops", {"stopped_s": 0.75}, 200),
        ("stops, from the first step on", {"stopped_s": 0.75}, 0),
    ],
)
@pytest.mark.parametrize("split", [False, True])
def test_a_host_held_back_costs_what_the_job_gains_without_that(situation, known, began, split):
    # GIVEN a host whose ranks have their CPUs a quarter of the time, inside the sync stage too
    job = Job(n_ranks=4, n_steps=300, hosts=HOSTS)
    held = replace(job, exchange_s=0.005).run(
        *(Fault(one, (2, 3), factor=4.0, steps=from_step(began)) for one in STAGES), split=split
    )
    slow_s, healthy_s = (one.durations_NRS[250:].sum(axis=2).max(axis=1).mean() for one in (held, job.run(split=split)))
    held = kept_from_running(held, from_step(began)(300), **known)
    # WHEN its windows are judged
    *_, (verdict, _) = judged(held)
    # THEN the host is named, and its gain is what the step is longer by
    (suspect, *_) = verdict.suspects
    assert (verdict.label, suspect.host, suspect.stage) == ("suspect", "b", None), situation
    assert suspect.gain_s == pytest.approx(slow_s - healthy_s, rel=0.2)
    assert verdict.numbers["without_s"] == pytest.approx(healthy_s, rel=0.4)
    # AND the job, where it has been quicker, is slower for some ranks and not for all alike
    assert verdict.regression is None or verdict.regression.scope == "some"
    assert (verdict.regression is None) == (began == 0)


def test_a_rank_that_is_alone_on_its_host_is_that_host():
    # GIVEN four ranks on as many hosts, or on two, one of which is late
    def suspect(hosts):
        return classify(replace(FOUR, hosts=hosts).run(Fault("data", 2, 0.05))).suspects[0]

    of = [suspect(hosts) for hosts in (("a", "b", "c", "d"), HOSTS, None)]
    assert [(one.scope, one.ranks, one.host) for one in of] == [("rank", (2,), host) for host in ("c", None, None)]


def test_each_stage_of_a_suspect_is_compared_on_its_own():
    # GIVEN a rank that has more to do in `forward` from step 35 on, a little in `optimizer`, and runs so much longer
    late = Fault("forward", 1, 0.03, from_step(35)), Fault("optimizer", 1, 0.003, from_step(35))
    window = FOUR.run(*late)
    runs_s = [(rank, always, 0.09) for rank in (0, 2, 3)] + [(1, always, 0.09), (1, from_step(35), 0.123)]
    verdict = classify(counting(window, queued_s=per_step(window, ()), run_s=per_step(window, runs_s)))
    # THEN `forward` is named by half the evidence that contention would want: what it does elsewhere is no slower,
    # though by `optimizer` alone it is
    (suspect, *_) = verdict.suspects
    assert (verdict.label, suspect.ranks, suspect.stage) == ("suspect", (1,), "forward")
    assert suspect.contended_fraction == pytest.approx(0.0, abs=0.05)
    assert verdict.numbers["first_log_odds"] < 2 * Settings().naming_log_odds


def test_waiting_that_all_ranks_share_counts_for_no_rank():
    window = FOUR.run(Fault("data", 1, 0.05))
    verdict = classify(window)
    everybody = replace(verdict.suspects[0], scope="all", ranks=(0, 1, 2, 3), rank=None)
    waited = queued(window, *((rank, always, 0.05) for rank in range(4)))
    found = with_system(replace(verdict, suspects=(everybody,)), waited, {}, 0.0)
    assert found.suspects[0].descheduled_fraction is None
    assert "queued_s" not in found.numbers


def test_shared_counters_read_at_other_times_count_for_no_rank():
    # GIVEN segments that a host sends again, which were counted for one rank a little later than for the others
    window = FOUR.run(Fault("data", 1, 0.03))
    again_NR = per_step(window, ((r, always, 6.2 if r == 1 else 6.0) for r in range(4)))
    assert system_counts(counting(window, retransmitted=again_NR), [1], ALL).over["retransmitted"] == 0.0
    # AND another host's, which sends many more
    again_NR = per_step(window, ((r, always, 6.0 if r == 1 else 0.5) for r in range(4)))
    assert system_counts(counting(window, retransmitted=again_NR), [1], ALL).over["retransmitted"] > 3.0


def test_on_a_busy_host_more_work_waits_longer_and_that_is_no_cause():
    # GIVEN ranks that have a core half of the time, of which one has three times as much to do
    window = FOUR.run(*(Fault(stage, 1, factor=3.0) for stage in ("data", "forward", "backward")))
    run_NR = per_step(window, ((r, always, 0.06 if r == 1 else 0.02) for r in range(4)))
    found = system_counts(counting(window, run_s=run_NR, queued_s=run_NR), [1], ALL)
    # THEN its waits are those of what it has to do
    assert found.descheduled_fraction == pytest.approx(0.0)
    # AND so are those of one that is woken as much more often
    woken_NR = per_step(window, ((r, always, 30.0 if r == 1 else 10.0) for r in range(4)))
    found = system_counts(counting(window, woken=woken_NR, queued_s=run_NR), [1], ALL)
    assert found.descheduled_fraction == pytest.approx(0.0)
    # AND it is another one whose neighbour takes its core
    waits_NR = per_step(window, ((r, always, 0.10 if r == 1 else 0.02) for r in range(4)))
    alone = system_counts(counting(window, run_s=np.full_like(run_NR, 0.02), queued_s=waits_NR), [1], ALL)
    assert alone.descheduled_fraction > 0.3


@pytest.mark.parametrize(
    ("known", "code"),
    [
        ({"throttled_s": 0.09, "queued_s": 0.09}, "cgroup_throttled"),
        ({"stopped_s": 0.09}, "stopped"),
        ({"major_faults": 40.0, "disk_s": 0.09}, "page_faults"),
        ({"memory_s": 0.09}, "memory_pressure"),
        # A trace shows the line that these are of.
        ({"disk_s": 0.09}, None),
        ({"minor_faults": 1e5, "system_s": 0.09}, None),
        ({"queued_s": 0.09}, None),
        ({"stopped_s": 0.01}, None),
    ],
)
def test_a_suspects_system_cause_is_its_own_alone(known, code):
    window = FOUR.run(*EVERYWHERE)
    of_rank = {name: per_step(window, ((1, always, amount),)) for name, amount in known.items()}
    verdict = classify(counting(window, **of_rank))
    suspect = verdict.suspects[0]
    assert (verdict.label, suspect.ranks, suspect.system and suspect.system[0]) == ("suspect", (1,), code)
    # AND what decided is in its numbers
    assert code is None or {name for name in known if name in verdict.numbers} == set(known)
    # AND if all ranks have the same, it is no rank's
    of_all = {name: per_step(window, ((r, always, amount) for r in range(4))) for name, amount in known.items()}
    assert classify(counting(window, **of_all)).suspects[0].by_system is None


def test_limits_of_all_ranks_are_said_though_no_rank_is_named():
    window = FOUR.run()
    throttled = {share: per_step(window, ((r, always, share) for r in range(4))) for share in (0.001, 0.09)}
    little, much = (classify(counting(window, throttled_s=of_all)) for of_all in throttled.values())
    assert (little.label, much.label) == ("healthy", "healthy")
    assert "all_throttled_s" not in little.numbers
    assert "; CPU limits throttle every rank for 90.0 ms of a step or more: raise its" in verdict_sentence(much)


def test_the_more_a_rank_waited_for_a_cpu_the_later_it_is_named():
    # GIVEN a rank that is late in one stage of every step, for it sleeps, or for another process has its core
    window = FOUR.run(Fault("data", 1, 0.05))

    def named_after(queued_s):
        of = queued(window, (1, always, queued_s))
        verdicts = [classify(of.steps(0, n_steps - 1)) for n_steps in range(10, 40)]
        first = next(one for one in verdicts if one.label == "suspect")
        return round(first.suspects[0].descheduled_fraction, 1), first.last_step + 1

    # THEN a dozen steps are enough to name a rank that sleeps, twice as many for one whose lateness is half or more a
    # wait for a CPU, and in proportion for one that waited less
    assert [named_after(queued_s) for queued_s in (0.0, 0.010, 0.025, 0.09)] == [
        (0.0, 13),
        (0.2, 18),
        (0.5, 26),
        (1.0, 26),
    ]


@given(
    st.lists(st.tuples(st.integers(0, 3), st.sampled_from(COUNTERS), st.floats(1e-6, 1e3)), max_size=12),
    st.floats(0.0, 0.09),
)
def test_counters_to_seven_digits_make_the_same_verdict(counted, waited_s):
    # GIVEN a slow rank, and what the kernel counted of all ranks
    window = Job(n_ranks=4, n_steps=25).run(*EVERYWHERE)
    amounts = {name: [] for name in ("queued_s", "preempted", *(name for _, name, _ in counted))}
    for rank, name, amount in [(1, "queued_s", waited_s), *counted]:
        amounts[name].append((rank, always, amount))
    whole = counting(window, **{name: per_step(window, some) for name, some in amounts.items()})
    # WHEN it is sent and gathered, it has seven digits
    sent = replace(whole, counted_NRC=whole.counted_NRC.astype(np.float32))
    # THEN the suspect, the reasons and the effect of the system are the same
    one, other = (with_system(classify(some), some, {}, 0.0) for some in (whole, sent))
    assert replace(other, suspects=(), numbers={}) == replace(one, suspects=(), numbers={})
    assert other.numbers == pytest.approx(one.numbers, rel=1e-5, abs=1e-9)
    for mine, its in zip(one.suspects, other.suspects, strict=True):
        fractions = ("descheduled_fraction", "contended_fraction")
        unknown = dict.fromkeys((*fractions, "system"))
        assert replace(its, **unknown) == replace(mine, **unknown)
        for name in fractions:
            assert getattr(its, name) == pytest.approx(getattr(mine, name), rel=1e-5, abs=1e-6)
        assert (its.system is None) == (mine.system is None)
        if mine.system is not None:
            assert its.system[0] == mine.system[0]
            assert its.system[1] == pytest.approx(mine.system[1], rel=1e-5)
