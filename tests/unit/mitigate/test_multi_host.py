"""Ranks on several hosts vote across these: what is in force is the same on all of them in every round."""

from itertools import accumulate, count, cycle
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sftriage.errors import RingError
from sftriage.mitigate.switching import (
    MOST_ROUNDS_APART,
    NO_VOTE,
    UNLIKE,
    VOTES_APART_NS,
    MultiHostSwitch,
    Request,
    Setting,
    SwitchFile,
    find_switches,
    make_switch,
    whole_groups,
)

NAME = "ranks-0.abcd"


class Votes:
    """An exchange among ranks, as a collective of each round in which all take part; nobody waits to take part."""

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


class Group:
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
                self.switches[place] = MultiHostSwitch(path, place)
                self.switches[place].cast = votes.cast_of(place)
                # (rounds are as long as votes are to be apart)
                self.switches[place].clock = count(1, VOTES_APART_NS).__next__

    def may_begin(self, place):
        return len(self.values[place]) <= min(map(len, self.values))

    def begin_one(self, number):
        """One of those that may begin does, whichever a number says."""
        may_begin = [place for place in range(len(self.values)) if self.may_begin(place)]
        self.begin(may_begin[number % len(may_begin)])

    def begin(self, place):
        self.values[place].append(self.switches[place].begin(step=100 + len(self.values[place])))

    def rounds(self, number=1):
        for _ in range(number):
            for place in self.switches:
                self.begin(place)

    def ask(self, *values):
        for file, value in zip(self.files, values, strict=True):
            if value is not None:
                file.ask(Request(0, 0, value))

    def status(self):
        (whole,) = whole_groups(file.status() for file in self.files)
        return whole


@pytest.fixture
def group(tmp_path):
    made = Group(tmp_path, (0, 2), (1,))
    yield made
    for file in made.files:
        file.close()


@pytest.mark.parametrize(
    ("before", "asked", "after"),
    [
        # what is in force; what the first host is asked for, and the second; what is in force then
        (0, (2, 2), 2),
        (0, (2, 0), 0),
        (0, (0, 2), 0),
        (0, (2, 1), 0),
        (2, (2, 2), 2),
        (2, (0, 0), 0),
        (2, (0, 2), 2),
        (2, (2, 0), 2),
        (2, (1, 1), 1),
        # more than there are ranks, and a pipeline's plan: no rank can do that
        (0, (4, 4), 0),
        (2, (4, 4), 2),
        (2, (Setting.of_plan((3, 2, 1)).value,) * 2, 2),
        (0, (4, 2), 0),
    ],
)
def test_what_all_hosts_are_asked_for_is_in_force_and_else_what_was(group, before, asked, after):
    # GIVEN something in force WHEN hosts are asked for something THEN it is in force once all ranks have seen it
    group.ask(before, before)
    group.rounds(3)
    group.ask(*asked)
    # (in the round that begins, all vote)
    group.rounds(3)
    assert group.values == [[0, before, before, before, after, after]] * 3
    assert {file.status().value for file in group.files} == {after}


def test_it_comes_into_force_a_round_after_the_last_host_has_seen_it(group):
    # GIVEN a group on two hosts, of which one hears late of what is wanted
    group.ask(3, None)
    group.rounds(4)
    assert (group.status().value, group.status().request) == (0, UNLIKE)
    # THEN it is to be asked for still, and what is wanted no more is not
    assert group.status().next_request(3) == Request(0, 0, 3)
    assert group.status().next_request(0) == Request(0, 0, 0)
    # WHEN the other one hears of it too
    group.ask(None, 3)
    group.rounds(1)
    assert [values[-1] for values in group.values] == [0, 0, 0]
    group.rounds(1)
    # THEN all switch in one round, of a step that is on record
    assert [values[-1] for values in group.values] == [3, 3, 3]
    status = group.status()
    assert (status.value, status.since_step, status.round, status.all_begun) == (3, 105, 6, 6)
    assert status.next_request(3) is None
    assert status.next_request(0) == Request(0, 0, 0)


def test_what_is_withdrawn_before_all_have_seen_it_never_comes(group):
    group.ask(3, None)
    group.rounds(2)
    group.ask(0, 3)
    group.rounds(2)
    group.ask(None, 0)
    group.rounds(2)
    assert group.values == [[0] * 6] * 3
    assert group.status().next_request(0) is None


@pytest.mark.parametrize(
    ("round_s", "apart"),
    [
        # what a round takes the ranks; in every so-manieth round they vote
        ((1.0, 1.0, 1.0), 1),
        ((5.0, 5.0, 5.0), 1),
        ((0.25, 0.25, 0.25), 4),
        # one who was away for long, by its own clock, is waited for by all
        ((0.1, 0.3, 0.1), 3),
        ((1e-3, 1e-3, 1e-3), MOST_ROUNDS_APART),
    ],
)
def test_ranks_vote_about_every_second_in_the_same_rounds(group, round_s, apart):
    # GIVEN ranks whose rounds take them so long, by clocks that began at different times
    cast = {place: [] for place in group.switches}
    for place, one in group.switches.items():
        one.clock = lambda place=place: 7 + place + round(len(group.values[place]) * round_s[place] * 1e9)

        def then(words, place=place, before=one.cast):
            cast[place].append(len(group.values[place]))
            return before(words)

        one.cast = then
    # WHEN rounds go on THEN all vote in the same: the first two, and from there on so far apart
    group.rounds(4 * MOST_ROUNDS_APART)
    assert cast[0] == cast[1] == cast[2] == [0, *range(1, 4 * MOST_ROUNDS_APART, apart)]
    # AND what is asked for is in force a round after the next vote
    group.ask(2, 2)
    rounds = 0
    while group.values[0][-1] == 0:
        group.rounds()
        rounds += 1
    assert rounds <= apart + 1
    assert group.values[0] == group.values[1] == group.values[2]


# A turn is a rank's that begins, three times of four, or brings a word to a host, or to all.
TURNS = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 59), st.integers(0, 3)), min_size=10, max_size=80)
# Clocks go on by any of these, now and then not at all; of each of five ranks by some of its own, over and over.
TICKS = st.sampled_from([0, 1, VOTES_APART_NS // 100, VOTES_APART_NS // 3, 5 * VOTES_APART_NS])
CLOCKS = st.tuples(*[st.lists(TICKS, min_size=1, max_size=20)] * 5)


@given(st.lists(st.integers(0, 2), min_size=2, max_size=5).filter(lambda hosts: len(set(hosts)) > 1), TURNS, CLOCKS)
@settings(max_examples=150, deadline=None)
def test_no_two_ranks_are_ever_in_one_round_with_different_values(host_R, turns, clocks):
    # GIVEN ranks on up to three hosts that begin rounds in any order that exchanges allow, each by a clock of its own,
    # and words that come to each host at any moment, in any order, several times or never
    n = len(host_R)
    here = [tuple(at for at in range(n) if host_R[at] == host) for host in sorted(set(host_R))]
    with TemporaryDirectory() as directory:
        group = Group(Path(directory), *here)
    for place, one in group.switches.items():
        one.clock = accumulate(cycle(clocks[place])).__next__
    for what, which, whom in turns:
        if what == 0:
            host = whom % (len(here) + 1)
            group.ask(*(which % (n + 2) if host in (at, len(here)) else None for at in range(len(here))))
        else:
            group.begin_one(which)
    # THEN in each round, all that have begun it have the same in force, and that is a place of one of them, or none
    for of_round in zip(*group.values, strict=False):
        assert len(set(of_round)) == 1
        assert 0 <= of_round[0] <= n
    # AND once all hosts are asked for the same, it is in force after the next vote but one
    group.ask(*[n] * len(here))
    while min(map(len, group.values)) < max(map(len, group.values)):
        group.begin(min(range(n), key=lambda one: len(group.values[one])))
    group.rounds(2 * MOST_ROUNDS_APART)
    assert {values[-1] for values in group.values} == {n}
    for file in group.files:
        file.close()


def test_a_rank_that_cannot_vote_votes_against(group):
    votes = []
    group.switches[1].cast = lambda words: votes.append(words[0]) or (lambda: words)
    group.ask(None, 9)
    for _ in range(2):
        group.begin(1)
    # THEN nothing comes of it, though all that were counted are alike
    assert (votes, group.values[1]) == ([NO_VOTE, NO_VOTE], [0, 0])


def test_an_exchange_takes_what_it_takes_the_last_rank_of_any_host(group):
    for place, took_ms in enumerate((50, 20)):
        group.switches[place].exchanged(took_ms * 1_000_000, 4096)
    assert (group.status().exchange_s, group.status().exchanged_bytes) == (0.0, 4096)  # one has not said yet
    group.switches[2].exchanged(30_000_000, 4096)
    assert group.status().exchange_s == pytest.approx(0.02)


def test_a_group_is_whole_with_all_of_its_ranks_once(group, tmp_path):
    first, second = (file.status() for file in group.files)
    alone = SwitchFile(make_switch(tmp_path, (7, 8)))
    assert (first.name, first.ranks, second.ranks) == (NAME, (0, 1, 2), (0, 1, 2))
    assert [list(one.ranks_here) for one in (first, second, alone.status())] == [[0, 2], [1], [7, 8]]
    # THEN one that lacks a host is left out, as is one of which two tell the same; what is on one host is whole
    assert [one.name for one in whole_groups([first, alone.status()])] == [alone.path.name]
    assert whole_groups([first, second, second]) == []
    assert [one.here for one in whole_groups([first, second])] == [(0, 1, 2)]
    alone.close()


def test_the_file_of_a_host_is_found_by_its_first_rank_there(tmp_path):
    # GIVEN ranks of any order and numbers, on two hosts that share a directory by mistake
    made = [make_switch(tmp_path, (4, 9, 6, 1), group=NAME, here=here) for here in ((0, 3), (1, 2))]
    assert [path.name for path in made] == ["rank-4.0.switch", "rank-9.0.switch"]
    assert set(find_switches(tmp_path)) == set(made)
    with SwitchFile(made[1]) as file:
        assert (file.name, file.ranks, file.here) == (NAME, (4, 9, 6, 1), (1, 2))
        assert list(file.status().ranks_here) == [9, 6]


@pytest.mark.parametrize("here", [(1, 3), (0, 0), (-1,)])
def test_places_that_a_group_has_not_are_refused(tmp_path, here):
    with pytest.raises(RingError):
        SwitchFile(make_switch(tmp_path, (0, 1, 2), group=NAME, here=here))
