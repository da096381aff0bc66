"""A remedy is switched on all ranks before the same round, or on none, on one host and across several."""

import os
from itertools import accumulate, count, cycle
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sftriage.errors import RingError
from sftriage.mitigate import switching
from sftriage.mitigate.switching import MOST_ROUNDS_APART, VOTES_APART_NS, Request, Setting, SwitchFile, make_switch


class Group:
    """Ranks that begin rounds one by one, as an exchange lets them: none before all have begun the round before."""

    def __init__(self, path, n):
        self.switches = {place: switching.Switch(path, place) for place in range(n)}
        self.values = [[] for _ in range(n)]

    def begin_one(self, number):
        """One of those that may begin does, whichever a number says."""
        least = min(map(len, self.values))
        may_begin = [rank for rank, values in enumerate(self.values) if len(values) <= least]
        self.begin(rank := may_begin[number % len(may_begin)])
        return rank

    def begin(self, rank):
        self.values[rank].append(self.switches[rank].begin(step=100 + len(self.values[rank])))

    def round(self):
        for rank in self.switches:
            self.begin(rank)


@pytest.fixture
def path(tmp_path):
    return make_switch(tmp_path, (0, 1, 2))


def test_a_request_takes_effect_on_all_ranks_in_the_same_round(path):
    # GIVEN a group after a few rounds WHEN another value is requested
    group, file = Group(path, 3), SwitchFile(path)
    for _ in range(4):
        group.round()
    with SwitchFile(path) as gone:
        gone.write_request(gone.status().next_request(2))
    # (the requester may be gone: another one that wants the same need not request it)
    assert file.status().next_request(2) is None
    for _ in range(5):
        group.round()
    # THEN it is in force from one round on, on all, and it is on record from which of the job's steps
    assert group.values == [[0] * 6 + [2] * 3] * 3
    status = file.status()
    assert (status.value, status.since_step, status.round, status.all_begun) == (2, 106, 9, 9)
    # AND no request is due, until another value is wanted
    assert status.next_request(2) is None
    assert status.next_request(0) == Request(2, 9 + switching.ROUNDS_AHEAD, 0)


def test_a_request_that_one_rank_sees_too_late_fails_on_all_and_is_repeated(path):
    # GIVEN a request for a round before which two ranks are already
    group, file = Group(path, 3), SwitchFile(path)
    for _ in range(3):
        group.round()
    request = file.status().next_request(1)
    group.round()
    group.begin(0)
    group.begin(1)
    # WHEN the request is written late (only the third rank sees it at the start of the round before)
    assert request.round == 6
    file.write_request(request)
    group.begin(2)
    group.round()
    # THEN no rank has switched, and the request is due again
    assert [values[-1] for values in group.values] == [0, 0, 0]
    again = file.status().next_request(1)
    assert again == Request(2, 6 + switching.ROUNDS_AHEAD, 1)
    file.write_request(again)
    for _ in range(3):
        group.round()
    assert [values[-1] for values in group.values] == [1, 1, 1]


# A turn is a rank that begins a round, two or three times of four, or a request.
TURNS = st.lists(st.tuples(st.integers(0, 11), st.integers(-1, 3), st.integers(0, 59)), min_size=10, max_size=80)


@given(st.integers(1, 4), TURNS)
@settings(max_examples=150)
def test_no_two_ranks_are_ever_in_one_round_with_different_values(n, turns):
    # GIVEN ranks that begin rounds in any order that exchanges allow, and requests for any round at any moment, one
    # over the other, as from several requesters, or from one that was stopped for long in between
    with TemporaryDirectory() as directory, SwitchFile(make_switch(Path(directory), tuple(range(n)))) as file:
        group = Group(file.path, n)
        for number, (what, ahead, which) in enumerate(turns):
            if what % 4 == 0:
                at = max(0, max(map(len, group.values)) + ahead)
                file.write_request(Request(1 + number % 3, at, which % (n + 2)))
            else:
                group.begin_one(which)
    # THEN in each round, all that have begun it have the same in force, and that is a place of one of them, or none
    for of_round in zip(*group.values, strict=False):
        assert len(set(of_round)) == 1
        assert 0 <= of_round[0] <= n


AHEAD_S = (7, 5, 1)


@pytest.fixture
def pipeline(tmp_path):
    """The file of a pipeline of three stages, each with room for ten microbatches, and its ranks."""
    path = make_switch(tmp_path, (4, 5, 6), microbatches=8)
    group = Group(path, 3)
    for one in group.switches.values():
        one.most = 10
    return path, group


def test_a_plan_takes_effect_on_all_stages_in_the_same_step(pipeline):
    # GIVEN a pipeline WHEN a request lets it run further ahead, and then as before
    path, group = pipeline
    with SwitchFile(path) as file:
        for setting in (Setting.of_plan(AHEAD_S), Setting()):
            file.write_request(file.status().next_request(setting.value), setting.ahead_S)
            for _ in range(4):
                group.round()
            # THEN all its stages do, and it is known that they do
            assert [one.ahead_S for one in group.switches.values()] == [setting.ahead_S] * 3
            assert file.status().value == setting.value
            assert file.status().next_request(setting.value) is None


@pytest.mark.parametrize(
    "ahead_S",
    [
        (11, 5, 1),  # there is no room on the first
        (5, 7, 1),  # they would wait for each other
        (7, 5),
        (7, 5, 1, 1),
    ],
)
def test_a_plan_that_one_stage_cannot_follow_never_takes_effect(pipeline, ahead_S):
    path, group = pipeline
    with SwitchFile(path) as file:
        setting = Setting.of_plan(ahead_S)
        file.write_request(file.status().next_request(setting.value), setting.ahead_S)
    for _ in range(6):
        group.round()
    assert [one.ahead_S for one in group.switches.values()] == [()] * 3
    assert group.values == [[0] * 6] * 3


@given(TURNS)
@settings(max_examples=100)
def test_no_two_stages_ever_run_by_different_plans(turns):
    # GIVEN stages that begin steps in any order, and plans of which each may be written half before the next begins
    plans: list[list[tuple[int, ...]]] = [[], []]
    with TemporaryDirectory() as directory:
        path = make_switch(Path(directory), (0, 1), microbatches=4)
        group, file = Group(path, 2), SwitchFile(path)
        for one in group.switches.values():
            one.most = 9
        for number, (what, ahead, which) in enumerate(turns):
            if what % 3 == 0:
                ahead_S = ((3, 1), (4, 1), (4, 2), (9, 3))[which % 4]
                request = Request(1 + number % 3, max(map(len, plans)) + max(0, ahead), 0)
                if which % 8 < 4:
                    # (a controller that is killed here has requested nothing, and the value in force stays)
                    os.pwrite(file._descriptor, bytes(ahead_S).ljust(8, b"\0"), switching.REQUEST_AT + 8)
                else:
                    file.write_request(request._replace(value=Setting.of_plan(ahead_S).value), ahead_S)
            else:
                rank = group.begin_one(which)
                plans[rank].append(group.switches[rank].ahead_S)
    # THEN in each step, both stages run by the same, and by that of the value in force
    for (one, other), (value, _) in zip(zip(*plans, strict=False), zip(*group.values, strict=False), strict=True):
        assert one == other
        assert not value or Setting.of_plan(one).value == value
    file.close()


def test_stage_times_are_reported(pipeline):
    path, group = pipeline
    first, middle, last = group.switches.values()
    middle.took(switching.FORWARD_NS, 5_000_000)
    middle.took(switching.THERE_NS, 2_000_000)
    with SwitchFile(path) as file:
        assert file.status().stages[1] == switching.StageTimes(0.005, 0.0, 0.002, 0.0, 10)
        assert (file.status().ranks, file.status().microbatches) == ((4, 5, 6), 8)
    # AND each knows when its neighbours have sent it something, of each microbatch
    first.send(0, 3, 111)
    middle.send(0, 3, 222)
    last.send(1, 3, 333)
    assert (middle.sent_ns(0, 3), last.sent_ns(0, 3), middle.sent_ns(1, 3)) == (111, 222, 333)


def test_an_exchange_takes_as_long_as_on_the_last_rank(path):
    # GIVEN ranks of which the last does not wait THEN an exchange takes as long as on that one, smoothed
    group, file = Group(path, 3), SwitchFile(path)
    group.switches[0].exchanged(50_000_000, 4096)
    group.switches[2].exchanged(20_000_000, 4096)
    assert (file.status().exchange_s, file.status().exchanged_bytes) == (0.0, 4096)  # one has not reported yet
    group.switches[1].exchanged(30_000_000, 4096)
    assert file.status().exchange_s == pytest.approx(0.02)
    group.switches[2].exchanged(36_000_000, 4096)
    assert file.status().exchange_s == pytest.approx(0.022)


def test_files_of_dead_groups_are_removed_and_a_new_file_has_the_highest_number(tmp_path):
    # GIVEN groups of two first ranks, the last of which was made by a process that is there no more
    first, other = make_switch(tmp_path, (0, 1)), make_switch(tmp_path, (2, 5, 9))
    child = os.fork()
    if child == 0:
        make_switch(tmp_path, (0, 4))
        os._exit(0)
    os.waitpid(child, 0)
    assert [path.name for path in switching.find_switches(tmp_path, 0)] == ["rank-0.0.switch", "rank-0.1.switch"]
    # WHEN ranks join again, beside a file that is none
    (tmp_path / "rank-0.x.switch").touch()
    again = make_switch(tmp_path, (0, 1))
    # THEN files without a writer are removed, and the newest is the last
    assert switching.find_switches(tmp_path, 0) == [first, again]
    with SwitchFile(again) as new, SwitchFile(first) as old, SwitchFile(other) as beside:
        assert switching.newest_of_each([new, old, beside]) == [new, beside]
        assert new.maker_alive


@pytest.mark.parametrize(
    "damage",
    [
        lambda content: b"",
        lambda content: b"SOMEBODY" + content[8:],
        lambda content: content[:20] + b"?" + content[21:],
        lambda content: content[:-8],
        lambda content: content[: switching.REQUEST_AT],
    ],
)
def test_a_damaged_file_is_refused(path, damage):
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(RingError):
        SwitchFile(path)


NAME = "ranks-0.abcd"


class Votes:
    """An exchange among ranks, as a collective of each round in which all take part; no rank waits to take part."""

    def __init__(self, n):
        self.n, self.of_round = n, {}

    def cast_of(self, rank):
        rounds = count()

        def cast(words):
            votes = self.of_round.setdefault(next(rounds), {})
            votes[rank] = words

            def counted():
                assert len(votes) == self.n, "a round has ended before all have begun it"
                return [max(of_one) for of_one in zip(*votes.values(), strict=True)]

            return counted

        return cast


class MultiHostGroup(Group):
    """Ranks on hosts, that begin rounds as an exchange of gradients lets them, and the file of each host."""

    def __init__(self, directory, *here):
        n = sum(map(len, here))
        votes = Votes(n)
        self.values = [[] for _ in range(n)]
        self.switches, self.files = {}, []
        for number, places in enumerate(here):
            rings = directory / f"host-{number}"
            rings.mkdir()
            path = make_switch(rings, tuple(range(n)), group=NAME, here=places)
            self.files.append(SwitchFile(path))
            for place in places:
                self.switches[place] = switching.MultiHostSwitch(path, place)
                self.switches[place].cast = votes.cast_of(place)
                # (rounds are as long as votes are to be apart)
                self.switches[place].clock = count(1, VOTES_APART_NS).__next__

    def rounds(self, number=1):
        for _ in range(number):
            self.round()

    def write_request(self, *values):
        for file, value in zip(self.files, values, strict=True):
            if value is not None:
                file.write_request(Request(0, 0, value))

    def status(self):
        (whole,) = switching.whole_groups(file.status() for file in self.files)
        return whole


@pytest.fixture
def hosts(tmp_path):
    made = MultiHostGroup(tmp_path, (0, 2), (1,))
    yield made
    for file in made.files:
        file.close()


@pytest.mark.parametrize(
    ("before", "requests", "after"),
    [
        # the value in force; the requests on the first host and the second; the value in force then
        *((0, [pair], after) for pair, after in (((2, 2), 2), ((2, 0), 0), ((0, 2), 0), ((2, 1), 0))),
        *((2, [pair], after) for pair, after in (((2, 2), 2), ((0, 0), 0), ((0, 2), 2), ((2, 0), 2), ((1, 1), 1))),
        # more than there are ranks, and a pipeline's plan: no rank can do that
        *((before, [pair], before) for before, pair in ((0, (4, 4)), (2, (4, 4)), (0, (4, 2)))),
        (2, [(Setting.of_plan((3, 2, 1)).value,) * 2], 2),
        # withdrawn before all have seen it
        (0, [(3, None), (0, 3), (None, 0)], 0),
    ],
)
def test_a_value_takes_effect_once_all_hosts_request_it(hosts, before, requests, after):
    # GIVEN a value in force WHEN hosts get requests THEN a new value is in force once all ranks have seen it
    hosts.write_request(before, before)
    hosts.rounds(3)
    for words in requests:
        hosts.write_request(*words)
        # (in the round that begins, all vote)
        hosts.rounds(3)
    assert hosts.values == [[0, before, before, before, *[after] * (3 * len(requests) - 1)]] * 3
    assert {file.status().value for file in hosts.files} == {after}


def test_a_value_takes_effect_one_round_after_the_last_host_sees_it(hosts):
    # GIVEN a hosts on two hosts, of which one hears late of what is wanted
    hosts.write_request(3, None)
    hosts.rounds(4)
    assert (hosts.status().value, hosts.status().request) == (0, switching.UNLIKE)
    # THEN its request is still due, and one for a value no longer wanted is not
    assert hosts.status().next_request(3) == Request(0, 0, 3)
    assert hosts.status().next_request(0) == Request(0, 0, 0)
    # WHEN the other one hears of it too
    hosts.write_request(None, 3)
    hosts.rounds(1)
    assert [values[-1] for values in hosts.values] == [0, 0, 0]
    hosts.rounds(1)
    # THEN all switch in one round, of a step that is on record
    assert [values[-1] for values in hosts.values] == [3, 3, 3]
    status = hosts.status()
    assert (status.value, status.since_step, status.round, status.all_begun) == (3, 105, 6, 6)
    assert status.next_request(3) is None
    assert status.next_request(0) == Request(0, 0, 0)


@pytest.mark.parametrize(
    ("round_s", "apart"),
    [
        # what a round takes the ranks; in every so-manieth round they vote
        ((1.0, 1.0, 1.0), 1),
        ((5.0, 5.0, 5.0), 1),
        ((0.25, 0.25, 0.25), 4),
        # all wait for one that was away for long by its own clock
        ((0.1, 0.3, 0.1), 3),
        ((1e-3, 1e-3, 1e-3), MOST_ROUNDS_APART),
    ],
)
def test_ranks_vote_about_every_second_in_the_same_rounds(hosts, round_s, apart):
    # GIVEN ranks whose rounds take this long, by clocks that began at different times
    cast = {place: [] for place in hosts.switches}
    for place, one in hosts.switches.items():
        one.clock = lambda place=place: 7 + place + round(len(hosts.values[place]) * round_s[place] * 1e9)

        def then(words, place=place, before=one.cast):
            cast[place].append(len(hosts.values[place]))
            return before(words)

        one.cast = then
    # WHEN rounds go on THEN all vote in the same: the first two, and from there on so far apart
    hosts.rounds(4 * MOST_ROUNDS_APART)
    assert cast[0] == cast[1] == cast[2] == [0, *range(1, 4 * MOST_ROUNDS_APART, apart)]
    # AND a request is in force a round after the next vote
    hosts.write_request(2, 2)
    rounds = 0
    while hosts.values[0][-1] == 0:
        hosts.rounds()
        rounds += 1
    assert rounds <= apart + 1
    assert hosts.values[0] == hosts.values[1] == hosts.values[2]


# A turn is a rank's that begins, three times of four, or brings a word to a host, or to all.
TURNS_OF_HOSTS = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 59), st.integers(0, 3)), min_size=10, max_size=80)
# Clocks go on by any of these, now and then not at all; of each of five ranks by some of its own, over and over.
TICKS = st.sampled_from([0, 1, VOTES_APART_NS // 100, VOTES_APART_NS // 3, 5 * VOTES_APART_NS])
CLOCKS = st.tuples(*[st.lists(TICKS, min_size=1, max_size=20)] * 5)


HOSTS = st.lists(st.integers(0, 2), min_size=2, max_size=5).filter(lambda hosts: len(set(hosts)) > 1)


@given(HOSTS, TURNS_OF_HOSTS, CLOCKS)
@settings(max_examples=150)
def test_no_two_ranks_of_hosts_are_ever_in_one_round_with_different_values(host_R, turns, clocks):
    # GIVEN ranks on up to three hosts that begin rounds in any order that exchanges allow, each by a clock of its own,
    # and words that come to each host at any moment, in any order, several times or never
    n = len(host_R)
    here = [tuple(at for at in range(n) if host_R[at] == host) for host in sorted(set(host_R))]
    with TemporaryDirectory() as directory:
        group = MultiHostGroup(Path(directory), *here)
    for place, one in group.switches.items():
        one.clock = accumulate(cycle(clocks[place])).__next__
    for what, which, target in turns:
        if what == 0:
            host = target % (len(here) + 1)
            group.write_request(*(which % (n + 2) if host in (at, len(here)) else None for at in range(len(here))))
        else:
            group.begin_one(which)
    # THEN in each round, all that have begun it have the same in force, and that is a place of one of them, or none
    for of_round in zip(*group.values, strict=False):
        assert len(set(of_round)) == 1
        assert 0 <= of_round[0] <= n
    # AND once all hosts have the same request, it is in force after the next vote but one
    group.write_request(*[n] * len(here))
    while min(map(len, group.values)) < max(map(len, group.values)):
        group.begin(min(range(n), key=lambda one: len(group.values[one])))
    group.rounds(2 * MOST_ROUNDS_APART)
    assert {values[-1] for values in group.values} == {n}
    for file in group.files:
        file.close()


def test_a_rank_that_cannot_vote_votes_against(hosts):
    votes = []
    hosts.switches[1].cast = lambda words: votes.append(words[0]) or (lambda: words)
    hosts.write_request(None, 9)
    for _ in range(2):
        hosts.begin(1)
    # THEN nothing comes of it, though all that were counted are alike
    assert (votes, hosts.values[1]) == ([switching.NO_VOTE, switching.NO_VOTE], [0, 0])


def test_an_exchange_takes_as_long_as_on_the_last_rank_of_any_host(hosts):
    for place, took_ms in enumerate((50, 20)):
        hosts.switches[place].exchanged(took_ms * 1_000_000, 4096)
    assert (hosts.status().exchange_s, hosts.status().exchanged_bytes) == (0.0, 4096)  # one has not reported yet
    hosts.switches[2].exchanged(30_000_000, 4096)
    assert hosts.status().exchange_s == pytest.approx(0.02)


def test_a_group_is_whole_with_all_of_its_ranks_once(hosts, tmp_path):
    first, second = (file.status() for file in hosts.files)
    alone = SwitchFile(make_switch(tmp_path, (7, 8)))
    assert (first.name, first.ranks, second.ranks) == (NAME, (0, 1, 2), (0, 1, 2))
    assert [list(one.ranks_here) for one in (first, second, alone.status())] == [[0, 2], [1], [7, 8]]
    # THEN one that lacks a host is left out, as is one of which two tell the same; what is on one host is whole
    assert [one.name for one in switching.whole_groups([first, alone.status()])] == [alone.path.name]
    assert switching.whole_groups([first, second, second]) == []
    assert [one.here for one in switching.whole_groups([first, second])] == [(0, 1, 2)]
    alone.close()


def test_the_file_of_a_host_is_found_by_its_first_rank_there(tmp_path):
    # GIVEN ranks of any order and numbers, on two hosts that share a directory by mistake
    made = [make_switch(tmp_path, (4, 9, 6, 1), group=NAME, here=here) for here in ((0, 3), (1, 2))]
    assert [path.name for path in made] == ["rank-4.0.switch", "rank-9.0.switch"]
    assert set(switching.find_switches(tmp_path)) == set(made)
    with SwitchFile(made[1]) as file:
        assert (file.name, file.ranks, file.here) == (NAME, (4, 9, 6, 1), (1, 2))
        assert list(file.status().ranks_here) == [9, 6]


@pytest.mark.parametrize("here", [(1, 3), (0, 0), (-1,)])
def test_places_that_a_group_has_not_are_refused(tmp_path, here):
    with pytest.raises(RingError):
        SwitchFile(make_switch(tmp_path, (0, 1, 2), group=NAME, here=here))
