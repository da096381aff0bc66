"""What mending a host would have saved, against a replay that does it the long way."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sftriage.verdict.accounting import Settings, segments, walk
from sftriage.verdict.sequential import arrivals_of_hosts
from sftriage.verdict.units import host_units, last_elsewhere, places_of
from sftriage.verdict.whatif import SAMPLE_RANKS, grouped, replay, roles_of
from tests.scenario import Fault, Job
from tests.unit.verdict.strategies import windows

SETTINGS = Settings()


def found(window):
    roles, n_steps = roles_of(window), len(window.durations_NRS)
    replays = replay([walk(segment, roles.some_X) for segment in segments(window)], roles, len(window.schema.stages))
    before = [one.walk.arrival_MR.copy() for one in replays]
    places = places_of(window.hosts)
    elsewhere = [] if places is None else [last_elsewhere(one, places) for one in replays]
    units = []
    if places is not None:
        units = host_units(
            replays, places, elsewhere, range(len(places.names)), roles, n_steps, SETTINGS.larger_part_fraction
        )
    for one, arrival_MR in zip(replays, before, strict=True):
        assert (one.walk.arrival_MR == arrival_MR).all()
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
        n_rows = one.walk.segment.n_rows
        excess_MXS = np.zeros((n_rows, len(mine), n_stages))
        for k, column in enumerate(one.walk.segment.local):
            peers = {role: peers_N(one, k, column, role, mine, roles) for role in {roles.role_R[rank] for rank in mine}}
            for x, rank in enumerate(mine):
                excess_N = column.values_NR[:, rank] - peers[roles.role_R[rank]]
                excess_MXS[column.offset : column.offset + n_steps, x, column.stage] += excess_N
                over_NXS[:, x, column.stage] += excess_N
        gain_MS = np.zeros((n_rows, n_stages + 1))
        for s in range(n_stages + 1):
            excess_MX = excess_MXS[:, :, s] if s < n_stages else excess_MXS.sum(axis=2)
            mended_MX = one.walk.arrival_MR[:, mine] - np.maximum(excess_MX, 0.0)
            left_M = np.maximum(mended_MX.max(axis=1), one.walk.arrival_MR[:, theirs].max(axis=1))
            gain_MS[:, s] = np.maximum(one.walk.arrival_MR.max(axis=1) - left_M, 0.0)
        gains.append(gain_MS)
    over_X = over_NXS.sum(axis=2).mean(axis=0)
    alike = over_X.max() > 0.0 and (over_X >= over_X.max() / 2).mean() >= SETTINGS.larger_part_fraction
    return gains, np.median(over_NXS, axis=1), alike


def check(window):
    replays, units = found(window)
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
            # Nobody who is late is left out.
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
        cohorts = None  # (a cohort that is not on every host has nobody to be compared with)
    window = replace(window, hosts=tuple(hosts), cohorts=None if cohorts is None else tuple(cohorts))
    if len(set(hosts)) < 2:
        # (one host has nobody to be compared with)
        assert found(window)[1] == {}
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
    # WHEN its hosts are looked at, THEN neither can be told from its work
    assert found(window)[1] == {}
    # BUT where nobody says that they do different work, it is the slow one
    assert set(found(replace(window, cohorts=None))[1]) == {"b"}


def test_ranks_are_grouped_by_name_in_the_order_in_which_the_names_appear():
    # GIVEN names in no order, WHEN grouped
    groups = grouped(("b", "a", "b", "c", "a"))
    # THEN each has its ranks, in their order
    assert groups.names == ("b", "a", "c")
    assert groups.role_R.tolist() == [0, 1, 0, 2, 1]
    assert [ranks.tolist() for ranks in groups.members] == [[0, 2], [1, 4], [3]]
    # AND nobody can spoil it for the next who asks
    with pytest.raises(ValueError, match="read-only"):
        groups.role_R[0] = 1
    assert grouped(()).members == ()


@pytest.mark.parametrize(("late", "blamed"), [((0, 1), True), ((0,), False)])
def test_what_one_rank_alone_held_up_is_not_its_hosts_doing(late, blamed):
    # GIVEN two ranks on each of two hosts, of which both ranks of one are late, or one alone
    window = Job(hosts=("a", "a", "b", "b")).run(Fault("data", late, 0.020))
    replays, _ = found(window)
    places = places_of(window.hosts)
    # WHEN it is asked what the hosts held up
    last = arrivals_of_hosts(replays, [last_elsewhere(one, places) for one in replays], places, SETTINGS).last
    held_s = sum(held_M[host_M == 0].sum() for host_M, held_M in last)
    # THEN it is nothing where mending the one rank would have saved most of it
    assert held_s == pytest.approx(50 * 0.020 if blamed else 0.0, rel=0.2)
