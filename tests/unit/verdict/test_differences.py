"""What differs between a suspect and its peers, by their facts; and how that is said."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sftriage.model.events import Difference, DifferencesFound
from sftriage.model.verdicts import Suspect
from sftriage.verdict.differences import MAX_DIFFERENCES, MAX_VALUE, differences
from sftriage.words.differences import difference_lines


def suspect(stage="data", ranks=(1,), scope="rank", **about):
    return Suspect(scope, ranks, stage, 0.1, 0.1, 1.0, **about)


def compared(mine, theirs, name="num_workers", **about):
    """The value and the others' one, of a fact of the suspect's ranks and of its peers; None for one without it."""
    known = [[{} if value is None else {name: value} for value in of] for of in (mine, theirs)]
    its, peers = ([{"torch": "2.7", **facts} for facts in of] for of in known)
    found = differences(suspect(**about), its, peers)
    assert {each.name for each in found} <= {name}
    return [(each.value, each.others, each.alike) for each in found]


TABLE = [
    # (the fact of the suspect's ranks, of its peers, and what differs)
    ("another value than that of all peers", [1], [4, 4, 4], [(1, 4, 3)]),
    ("the value of all peers", [4], [4, 4, 4], []),
    ("one of two", [1], [4], [(1, 4, 1)]),
    ("nearly all peers are alike", [1], [4, 4, 4, 8], [(1, 4, 3)]),
    ("a peer has the suspect's value", [1], [4, 4, 4, 1], [(1, 4, 3)]),
    ("peers differ among themselves", [1], [4, 4, 8, 8], []),
    ("all ranks of a host", [1, 1, 1], [4, 4], [(1, 4, 2)]),
    ("nearly all ranks of a host", [1, 1, 1, 4], [4, 4], [(1, 4, 2)]),
    ("half of a host", [1, 4], [4, 4], []),
    ("unlike, and unlike each other", [1, 2, 2], [4, 4], [(2, 4, 2)]),
    ("of a suspect it is unknown", [None], [4, 4], []),
    ("of peers it is unknown", [1], [None, None], []),
    ("no rank has answered", [], [4, 4], []),
    ("no peer has answered", [1], [], []),
]


@pytest.mark.parametrize(("mine", "theirs", "expected"), [row[1:] for row in TABLE], ids=[row[0] for row in TABLE])
def test_a_fact_differs_if_nearly_all_peers_have_one_value_and_nearly_all_suspects_another(mine, theirs, expected):
    assert compared(mine, theirs) == expected


@pytest.mark.parametrize(
    ("name", "mine", "theirs", "expected"),
    [
        # A variable that is not set, and a limit that is not there, are values.
        ("OMP_NUM_THREADS", None, "4", [(None, "4", 2)]),
        ("cpu_limit", 0.5, None, [(0.5, None, 2)]),
        ("traced_by", "coverage", None, [("coverage", None, 2)]),
        # What is unknown is none.
        ("parameter_types", None, "float32", []),
        # A clock varies by itself.
        ("gpu_clock_mhz", 1905, 1980, []),
        ("gpu_clock_mhz", 1200, 1980, [(1200, 1980, 2)]),
        # A path of each rank's own differs in its numbers; other numbers count.
        ("TRITON_CACHE_DIR", "/tmp/cache-1", "/tmp/cache-12", []),
        ("TRITON_CACHE_DIR", "/mnt/cache-1", "/tmp/cache-12", [("/mnt/cache-1", "/tmp/cache-12", 2)]),
        ("NCCL_SOCKET_IFNAME", "eth1", "eth0", [("eth1", "eth0", 2)]),
        ("pin_memory", False, True, [(False, True, 2)]),
    ],
)
def test_what_counts_as_a_difference_of_a_fact(name, mine, theirs, expected):
    assert compared([mine], [theirs] * 2, name) == expected


ALL = {
    "num_workers": 1,
    "parameter_types": "float64",
    "cpu_limit": 0.5,
    "cores": 1,
    "gc": "off",
    "OMP_NUM_THREADS": "1",
    "kernel": "6.1",
    "ZZ": "1",
}


@pytest.mark.parametrize(
    ("about", "names"),
    [
        ({"stage": "data"}, ["num_workers", "cpu_limit", "cores", "OMP_NUM_THREADS"]),
        ({"stage": "forward"}, ["parameter_types", "OMP_NUM_THREADS", "cpu_limit", "cores"]),
        ({"descheduled_fraction": 0.9}, ["cpu_limit", "cores", "OMP_NUM_THREADS", "num_workers"]),
        ({"interpreter": ("garbage_collection", 0.9)}, ["gc", "num_workers", "cpu_limit", "cores"]),
        ({"scope": "cohort"}, ["cpu_limit", "cores", "OMP_NUM_THREADS", "gc"]),
    ],
)
def test_the_likeliest_reason_comes_first(about, names):
    others = dict.fromkeys(ALL, "other")
    found = differences(suspect(**about), [ALL], [others, others])
    assert [each.name for each in found][: len(names)] == names
    assert len(found) == MAX_DIFFERENCES


VALUES = st.one_of(st.integers(0, 3), st.sampled_from(["a", "b", "/x/1", "/x/2", "z" * 300]), st.booleans())
FACTS = st.dictionaries(st.sampled_from([*ALL, "gpu_clock_mhz"]), VALUES)


@given(st.lists(FACTS, max_size=4), st.lists(FACTS, max_size=6), st.randoms())
def test_differences_are_few_short_and_of_both_sides_whatever_the_facts(its, peers, random):
    found = differences(suspect(ranks=(1, 2)), its, peers)
    assert len(found) <= MAX_DIFFERENCES
    for each in found:
        assert each.value != each.others or len(str(each.value)) == MAX_VALUE
        assert all(len(str(value)) <= MAX_VALUE for value in (each.value, each.others))
        values = [facts.get(each.name) for facts in peers if facts]
        assert 0 < each.alike <= len(values)
    # AND ranks that are like their peers differ in nothing, and their order says nothing
    assert differences(suspect(), peers[:1] * len(its), peers[:1] * len(peers)) == ()
    assert {each.name for each in differences(suspect(), random.sample(its, len(its)), peers)} == {
        each.name for each in differences(suspect(), its, peers)
    }


@pytest.mark.parametrize(
    ("difference", "peers", "line"),
    [
        (Difference("num_workers", 1, 4, 3), 3, "1 loader worker, the other ranks have 4"),
        (Difference("num_workers", 0, "1 and 4", 1), 1, "0 loader workers, the other rank has 1 and 4"),
        (Difference("num_workers", "1 and 4", 4, 3), 3, "1 and 4 loader workers, the other ranks have 4"),
        (Difference("gc", "off", "at 700", 15), 16, "garbage collection off, 15 of 16 other ranks have at 700"),
        (Difference("parameter_types", "float64", "float32", 3), 3, "float64 parameters, the other ranks have float32"),
        (Difference("OMP_NUM_THREADS", "1", "8", 3), 3, "OMP_NUM_THREADS=1, the other ranks have 8"),
        (Difference("LD_PRELOAD", None, "/lib/a.so", 3), 3, "LD_PRELOAD not set, the other ranks have /lib/a.so"),
        (Difference("LD_PRELOAD", "/{}", None, 3), 3, "LD_PRELOAD=/{}, the other ranks have it not set"),
        (Difference("cpu_limit", 0.5, None, 3), 3, "CPU limit 0.5, the other ranks have none"),
        (Difference("memory_limit_bytes", None, 8 << 30, 3), 3, "memory limit none, the other ranks have 8.0 GiB"),
        (Difference("detect_anomaly", True, False, 3), 3, "detect anomaly on, the other ranks have it off"),
        (Difference("gpu_clock_mhz", 1200.0, 1980.0, 3), 3, "GPU clock 1,200 MHz, the other ranks have 1,980"),
        (Difference("kernel", "5.15", "6.1", 3), 3, "kernel 5.15, the other ranks have 6.1"),
    ],
)  # fmt: skip
def test_a_difference_is_a_line(difference, peers, line):
    about = {"time_s": 0.0, "attempt": 0, "who": "rank 1", "ranks": (1,)}
    assert difference_lines(DifferencesFound(**about, peers=tuple(range(peers)), differences=(difference,))) == [line]
