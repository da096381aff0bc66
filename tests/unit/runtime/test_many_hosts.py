"""A host of a job on many: its names, its wait for the hub, and the steps of all hosts where the controller is."""

import errno
import logging
import os
import socket
import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from sftriage.errors import UsageError
from sftriage.runtime import hub_server
from sftriage.runtime.controlling import LOGS_PER_SECOND, KeptRows
from sftriage.runtime.hosting import file_name, host_directory, host_name
from sftriage.runtime.hub_server import HubOptions, slurm_hosts
from sftriage.traces import disk
from sftriage.traces.disk import Disk
from sftriage.windows.decoding import CAPTURING, FLAGS
from sftriage.windows.log_files import find_logs
from sftriage.windows.logs import LOG_KIND, LogReader
from tests.unit.fleet.shipments import rows, steps


def test_a_host_keeps_what_is_its_own_apart_from_other_runs_under_the_same_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    # GIVEN a job that ran on a host before, and one that never ran
    first = host_directory("job", "node-a-0", {}, new=True)
    first.mkdir(parents=True)
    # THEN who runs the first one again does not mistake its captures for those
    second = host_directory("job", "node-a-0", {}, new=True)
    assert second != first
    assert host_directory("other", "node-a-0", {}, new=True).name == first.name
    # AND taking a run over continues the newest one
    assert host_directory("job", "node-a-0", {}) == first
    second.mkdir()
    assert host_directory("job", "node-a-0", {}) == second


def test_slurm_says_how_often_a_job_was_queued_again(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    places = [
        host_directory("7", "node-a-0", {"SLURM_RESTART_COUNT": count}) for count in ("", "0", "1", "2", "nonsense")
    ]
    names = ("7", "7", "7-2", "7-3", "7")
    assert [str(place.parent) for place in places] == [f"sftriage-runs/{name}.hosts" for name in names]


def test_a_number_distinguishes_hosts_of_one_name():
    assert host_name({}) == socket.gethostname()
    assert host_name({"SLURM_NODEID": "3"}) == f"{socket.gethostname()}-3"


@pytest.fixture
def quick(monkeypatch):
    """A port without a listener, polled often."""
    monkeypatch.setattr(hub_server, "POLL_S", 0.01)
    monkeypatch.setattr(hub_server, "HINT_S", 0.0)
    with socket.create_server(("127.0.0.1", 0)) as closed:
        return closed.getsockname()[1]


def test_the_hubs_host_may_be_the_last_one_to_start(tmp_path, quick, caplog):
    # GIVEN a host that waits for that of the hub, which is not up
    secret = tmp_path / "job.hub"
    later = threading.Timer(0.2, secret.touch)
    later.start()
    # WHEN that starts after all THEN it has waited, with one message
    with caplog.at_level(logging.WARNING, "sftriage"):
        HubOptions("job", f"127.0.0.1:{quick}", credentials=secret).wait_for_secret(60.0)
    assert [record.getMessage() for record in caplog.records] == [
        f"{socket.gethostname()} is waiting for 127.0.0.1 to start the hub"
    ]


def test_a_hub_without_a_password_is_reported_once_it_is_up(tmp_path, quick, monkeypatch):
    monkeypatch.setattr(hub_server, "UP_S", 0.0)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        threading.Thread(target=lambda: listening.accept()[0].sendall(b"INFO {}\r\n"), daemon=True).start()
        options = HubOptions("job", f"127.0.0.1:{listening.getsockname()[1]}", credentials=tmp_path / "job.hub")
        with pytest.raises(UsageError, match=r"job.hub is missing: 127.0.0.1 creates it .* give it with --creds"):
            options.wait_for_secret(60.0)


def test_the_hub_must_be_on_a_host_of_the_job(tmp_path, quick, monkeypatch):
    # GIVEN a job whose hosts SLURM knows
    monkeypatch.setattr(hub_server, "slurm_hosts", lambda: ["n1", "n2", "n3", "n4"])
    refusal = r"--hub localhost is not a host of this job \(n1, n2, n3, \.\.\.\); "
    with pytest.raises(UsageError, match=refusal):
        HubOptions("job", f"localhost:{quick}", credentials=tmp_path / "job.hub").wait_for_secret(60.0)
    # THEN each of them is accepted by any of its names; and so is an address
    for host in ("n2.invalid", "127.0.0.1"):
        with pytest.raises(UsageError, match="is missing"):
            HubOptions("job", f"{host}:{quick}", credentials=tmp_path / "job.hub").wait_for_secret(0.1)


def test_outside_of_a_job_of_slurm_its_hosts_are_not_known(monkeypatch):
    for name in ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST"):
        monkeypatch.delenv(name, raising=False)
    assert slurm_hosts() == []


def test_a_job_is_called_in_files_as_people_call_it():
    names = ["7", "llama-3.1-70b", "v1.2_final", "A" * 64]
    assert list(map(file_name, names)) == names


@pytest.mark.parametrize(
    ("name", "begins"),
    [
        ("my job/7", "my-job-7-"),
        ("B" * 65, "B" * 40 + "-"),
        ("..", ""),
        (".hidden", "hidden-"),
        ("../../etc/passwd", "etc-passwd-"),
        ("job.hosts", "job.hosts-"),
        ("\u6f22", ""),
    ],
)
def test_what_is_no_name_of_a_file_keeps_what_can_be_read_and_stays_apart(name, begins):
    made = file_name(name)
    assert made.startswith(begins)
    assert len(made) <= 49
    assert "/" not in made
    assert made.strip(".")
    assert made != file_name(name + "2")
    assert file_name(made) == made


RANKS = (0, 1)


class Kept:
    """A run directory's steps, of a controller that can be restarted, at a set time."""

    def __init__(self, directory: Path) -> None:
        self.directory, self.now_s = directory, 0.0
        self.start()

    def start(self) -> None:
        self.disk = Disk()
        self.rows = KeptRows(self.directory, None, self.disk, clock=lambda: self.now_s)

    def take(self, agent, position, ranks, first, count, *, generation=0, device=None, capturing=False):
        about = {"generation": generation, "world_size": 10_000, "agent": agent, "position": position}
        some = rows(ranks, first, count, device_steps=device, **about)
        some.steps.slots_BW[:, FLAGS] = CAPTURING * capturing
        self.rows.take(some)

    def take_of_hosts(self, n_hosts):
        for number in range(n_hosts):
            self.take(f"host-{number}", number + 1, (2 * number, 2 * number + 1), 0, 2)

    def turn(self, passed_s=1.0):
        self.now_s += passed_s
        self.rows.turn()
        self.disk.drain(20.0) if self.rows.position is None else self.written()

    def written(self):
        """Run the queued writes of the disk; rows held back stay so."""
        self.disk.do(lambda: None, "test", last=True)

    def steps_of(self, rank, kind="steps"):
        (log,) = (one for one in find_logs(self.directory, kind) if one.rank == rank)
        return LogReader(log, kind).read().step_B.tolist()


@pytest.fixture
def kept(tmp_path):
    made = Kept(tmp_path)
    yield made
    made.disk.close()


def files_open(directory):
    links = Path("/proc/self/fd").iterdir()
    return sum(os.path.realpath(link).startswith(str(directory)) for link in links)


def test_steps_of_a_small_job_are_written_at_once(kept):
    kept.take("a", 1, RANKS, 0, 3)
    kept.take("b", 2, (2, 3), 0, 2, device=steps((2,), 0, 1))
    kept.turn(0.25)
    assert [kept.steps_of(rank) for rank in range(4)] == [[0, 1, 2]] * 2 + [[0, 1]] * 2
    # AND device times beside them, empty where a rank has shown none, though others of its host have
    assert (kept.steps_of(2, LOG_KIND), kept.steps_of(3, LOG_KIND)) == ([0], [])
    assert kept.rows.position is None
    assert files_open(kept.directory) == 0


def test_a_large_job_writes_a_limited_number_of_logs_and_acknowledges_no_waiting_rows(kept):
    n_hosts = LOGS_PER_SECOND
    kept.take_of_hosts(n_hosts)
    # WHEN a second has gone by
    kept.turn()
    # THEN half of the hosts' logs are there, and the others wait, in the order in which they came
    assert len(find_logs(kept.directory)) == LOGS_PER_SECOND
    assert kept.rows.position == n_hosts // 2 + 1
    # AND what comes meanwhile waits with them
    kept.take("host-0", n_hosts + 1, (0, 1), 2, 1)
    kept.turn()
    assert kept.rows.position == n_hosts + 1
    kept.turn()
    assert kept.steps_of(0) == [0, 1, 2]
    assert (kept.rows.position, files_open(kept.directory)) == (None, 0)


def test_waiting_rows_are_written_before_logs_are_read(kept):
    kept.take_of_hosts(LOGS_PER_SECOND)
    kept.disk.settle()
    assert len(find_logs(kept.directory)) == 2 * LOGS_PER_SECOND
    assert kept.rows.position is None


def test_steps_that_a_profiler_touched_wait_for_nothing(kept):
    kept.take_of_hosts(LOGS_PER_SECOND)
    last = 2 * LOGS_PER_SECOND - 1
    kept.take(f"host-{LOGS_PER_SECOND - 1}", 10**6, (last - 1, last), 2, 1, capturing=True)
    kept.written()
    assert kept.steps_of(last) == [0, 1, 2]


def test_another_controller_goes_on_where_the_logs_end(kept):
    kept.take("a", 1, RANKS, 0, 3)
    kept.turn()
    kept.disk.close()
    kept.start()
    # WHEN what the first one had not acknowledged comes again, and more
    kept.take("a", 2, RANKS, 1, 5)
    kept.turn()
    assert kept.steps_of(0) == kept.steps_of(1) == [0, 1, 2, 3, 4, 5]


def test_another_process_of_a_rank_has_a_log_of_its_own(kept):
    kept.take("a", 1, RANKS, 0, 3)
    kept.take("a", 2, RANKS, 0, 2, generation=1)
    kept.turn()
    assert {(log.attempt, log.rank) for log in find_logs(kept.directory)} == {(0, 0), (0, 1), (1, 0), (1, 1)}


def test_what_the_disk_refuses_is_there_once_later(kept, monkeypatch):
    refused = []
    write = os.pwrite

    def once(descriptor, data, at):
        if len(refused) < 3:
            refused.append(at)
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(descriptor, data, at)

    monkeypatch.setattr(os, "pwrite", once)
    monkeypatch.setattr(disk, "RETRY_S", 0.01)
    kept.take("a", 1, RANKS, 0, 4)
    kept.rows.turn()
    kept.disk.drain(20.0)
    assert len(refused) == 3
    assert kept.steps_of(0) == kept.steps_of(1) == [0, 1, 2, 3]


def test_steps_of_ranks_that_lie_mixed_are_kept_by_rank(kept):
    some = rows(RANKS, 0, 4)
    mixed = some.steps[np.argsort(some.steps.step_B, kind="stable")]
    kept.rows.take(replace(some, steps=mixed))
    kept.turn()
    assert kept.steps_of(0) == kept.steps_of(1) == [0, 1, 2, 3]
