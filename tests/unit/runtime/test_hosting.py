"""What a host of a job on many is called, where it keeps what is its own, and how it waits for the host of the hub."""

import logging
import socket
import threading

import pytest

from sftriage.errors import UsageError
from sftriage.runtime import many_hosts
from sftriage.runtime.hosting import file_name, host_directory, host_name
from sftriage.runtime.many_hosts import slurm_hosts, wait_for_secret


def test_a_host_keeps_what_is_its_own_apart_from_other_runs_under_the_same_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    # GIVEN a job that ran on a host before, and one that nobody has run
    first = host_directory("job", "node-a-0", {}, new=True)
    first.mkdir(parents=True)
    # THEN who runs the first one again does not mistake its captures for those
    second = host_directory("job", "node-a-0", {}, new=True)
    assert second != first
    assert host_directory("other", "node-a-0", {}, new=True).name == first.name
    # AND who takes a run up goes on with the newest one
    assert host_directory("job", "node-a-0", {}) == first
    second.mkdir()
    assert host_directory("job", "node-a-0", {}) == second


def test_slurm_says_how_often_a_job_was_queued_again(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    places = [
        host_directory("7", "node-a-0", {"SLURM_RESTART_COUNT": count}) for count in ("", "0", "1", "2", "nonsense")
    ]
    assert [str(place.parent) for place in places] == [
        "sftriage-runs/7.hosts",
        "sftriage-runs/7.hosts",
        "sftriage-runs/7-2.hosts",
        "sftriage-runs/7-3.hosts",
        "sftriage-runs/7.hosts",
    ]


def test_a_host_is_told_from_others_of_its_name_by_its_number():
    assert host_name({}) == socket.gethostname()
    assert host_name({"SLURM_NODEID": "3"}) == f"{socket.gethostname()}-3"


@pytest.fixture
def quick(monkeypatch):
    """A port on which nobody listens, looked at often."""
    monkeypatch.setattr(many_hosts, "LOOK_S", 0.01)
    monkeypatch.setattr(many_hosts, "HINT_S", 0.0)
    with socket.create_server(("127.0.0.1", 0)) as closed:
        return closed.getsockname()[1]


def test_the_hubs_host_may_be_the_last_one_to_start(tmp_path, quick, caplog):
    # GIVEN a host that waits for that of the hub, which is not up
    secret = tmp_path / "job.hub"
    later = threading.Timer(0.2, secret.touch)
    later.start()
    # WHEN that starts after all THEN it has waited, and said so once
    with caplog.at_level(logging.WARNING, "sftriage"):
        wait_for_secret(secret, "127.0.0.1", quick, 60.0, {})
    assert [record.getMessage() for record in caplog.records] == [
        f"{socket.gethostname()} waits for 127.0.0.1, which is to start the hub"
    ]


def test_a_hub_without_a_password_is_said_once_it_is_up(tmp_path, quick, monkeypatch):
    monkeypatch.setattr(many_hosts, "UP_S", 0.0)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        threading.Thread(target=lambda: listening.accept()[0].sendall(b"INFO {}\r\n"), daemon=True).start()
        with pytest.raises(UsageError, match=r"job.hub is not there: 127.0.0.1 makes it, .* name that with --creds"):
            wait_for_secret(tmp_path / "job.hub", "127.0.0.1", listening.getsockname()[1], 60.0, {})


def test_a_host_that_is_none_of_the_jobs_is_not_waited_for(tmp_path, quick, monkeypatch):
    # GIVEN a job whose hosts SLURM knows
    monkeypatch.setattr(many_hosts, "slurm_hosts", lambda _: ["n1", "n2", "n3", "n4"])
    with pytest.raises(
        UsageError, match=r"--hub localhost is none of this job's hosts, which are n1, n2, n3, \.\.\.: "
    ):
        wait_for_secret(tmp_path / "job.hub", "localhost", quick, 60.0, {})
    # THEN one of them is waited for, by whichever of its names; and an address, which they do not tell
    for host in ("n2.invalid", "127.0.0.1"):
        with pytest.raises(UsageError, match="is not there"):
            wait_for_secret(tmp_path / "job.hub", host, quick, 0.1, {})


def test_nobody_asks_slurm_outside_of_a_job():
    assert slurm_hosts({}) == []


@pytest.mark.parametrize("name", ["7", "llama-3.1-70b", "v1.2_final", "A" * 64])
def test_a_job_is_called_in_files_as_people_call_it(name):
    assert file_name(name) == name


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
