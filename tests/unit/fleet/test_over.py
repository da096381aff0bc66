"""When a job on many hosts has ended: what each host has said, for how long it is quiet, and what waits to be read."""

import pytest

from sftriage.fleet.generations import Generations
from sftriage.fleet.hosts import Host
from sftriage.fleet.over_nats import GONE_S, all_over, of_all
from sftriage.model.windows import GpuFindings

NOW_S = 1000.0


def host(*, over=False, quiet_s=0.0):
    return Host(seen_s=NOW_S - quiet_s, over=over)


@pytest.mark.parametrize(
    ("hosts", "waiting", "expected"),
    [
        # what is known of each host, of whom something waits to be read, and whether the job is over
        ({}, set(), False),
        ({"a": host()}, set(), False),
        ({"a": host(over=True)}, set(), True),
        ({"a": host(over=True), "b": host()}, set(), False),
        ({"a": host(over=True), "b": host(over=True)}, set(), True),
        ({"a": host(over=True), "b": host(quiet_s=GONE_S - 1)}, set(), False),
        ({"a": host(over=True), "b": host(quiet_s=GONE_S + 1)}, set(), True),
        # one that waits for the others says every second that it is over
        ({"a": host(over=True), "b": host(over=True)}, {"a"}, True),
        ({"a": host(over=True), "b": host(quiet_s=GONE_S + 1)}, {"a"}, True),
        # who was quiet may have said something else, and so may somebody who was never heard of
        ({"a": host(over=True), "b": host(quiet_s=GONE_S + 1)}, {"b"}, False),
        ({"a": host(over=True)}, {"c"}, False),
    ],
)
def test_a_job_is_over_once_it_is_on_all_hosts(hosts, waiting, expected):
    assert all_over(hosts, waiting, Generations(), NOW_S, 0.0) is expected


def test_what_the_drivers_of_two_hosts_say_is_put_together():
    slow = GpuFindings(8.0, ("GPU 0 is too hot",), {1: {"uuid": "GPU-a"}})
    none = GpuFindings(9.0, problem="this host has no NVIDIA driver")
    assert of_all([slow, none]) == GpuFindings(8.0, slow.remarks, slow.gpus, none.problem)
