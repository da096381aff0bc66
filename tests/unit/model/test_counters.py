"""Which of what the kernel counted accounts for a rank's lateness: a truth table."""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from sftriage.model.counters import COUNTERS, accounting, accounts

TABLE = {
    # What was counted over the peers' in steps that were late by 30 ms -> the code, whether it was counted, and
    # whether it needs no line of the program.
    "nothing": ({}, None),
    "its cgroup keeps it from running, where it stands in the queue": (
        {"throttled_s": 0.025, "queued_s": 0.027},
        ("cgroup_throttled", True, True),
    ),
    "its cgroup keeps it from running a little, and others do the rest": (
        {"throttled_s": 0.005, "queued_s": 0.027},
        ("descheduled", True, True),
    ),
    "somebody stops it": ({"stopped_s": 0.04, "queued_s": 0.002}, ("stopped", True, True)),
    "its pages are read from disk": ({"major_faults": 7.0, "disk_s": 0.028}, ("page_faults", True, True)),
    "it reads files": ({"major_faults": 0.2, "disk_s": 0.028, "read_bytes": 9e6}, ("disk", True, False)),
    "it reads files, and the kernel counts no waits for disks": ({"io_s": 0.028}, ("disk", False, False)),
    "its memory is reclaimed": ({"memory_s": 0.02}, ("memory_pressure", False, True)),
    "it touches fresh memory": ({"minor_faults": 16384.0, "system_s": 0.024}, ("page_faults", False, False)),
    "it is in the kernel, for something else": ({"minor_faults": 12.0, "system_s": 0.024}, None),
    "its segments are sent again": ({"retransmitted": 0.1}, ("network", False, False)),
    "its GPU runs at a lower clock": ({"gpu_s": 0.02}, ("gpu_throttled", False, False)),
    "some of everything, and not half of it": ({"queued_s": 0.014, "stopped_s": 0.014, "disk_s": 0.014}, None),
    "what was counted is said before what is inferred": (
        {"queued_s": 0.016, "memory_s": 0.030},
        ("descheduled", True, True),
    ),
    "less than its peers": (dict.fromkeys(COUNTERS, -1.0), None),
}


@pytest.mark.parametrize(("over", "found"), TABLE.values(), ids=TABLE)
def test_what_accounts_for_a_lateness(over, found):
    account = accounting(over, 0.030)
    assert (account and (account.code, account.counted, account.alone is not None)) == found
    # AND who is not late has nothing to account for
    assert accounting(over, 0.0) is None


AMOUNTS = st.dictionaries(st.sampled_from(COUNTERS), st.floats(-10.0, 10.0))


@example(over={}, late_s=5e-324, of="throttled_s")
@given(over=AMOUNTS, late_s=st.floats(0.0, 5.0), of=st.sampled_from(("throttled_s", "stopped_s")))
def test_what_is_said_is_at_least_half_of_it_and_more_of_it_is_never_said_less(over, late_s, of):
    found = accounting(over, late_s)
    assert found is None or (found in list(accounts(over)) and found.took_s >= 0.5 * late_s)
    assert found is None or (found.took_s > 0.0 and late_s > 0.0)
    more = accounting({**over, of: max(0.0, over.get(of, 0.0)) + late_s}, late_s)
    assert (more is None) == (late_s == 0.0)
    assert more is None or more.counted
