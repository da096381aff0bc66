"""`sftriage run --check` on two hosts: they meet, the first one names each host with a problem, and nothing is left."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.integration.hubs import START
from tests.integration.namespaces import BOTH, two_hosts
from tests.integration.processes import DEADLINE_S, ROOT, wait_until
from tests.integration.shared_nats import SharedNats

pytest.importorskip("torch")
pytest.importorskip("nats", reason="many hosts want the extra `nats`")
PORT, PATIENCE_S = 7433, 60
LISTEN = f"import socket, time; s = socket.create_server(('', {PORT})); print('up', flush=True); time.sleep(600)"
OLDER = "import sftriage; sftriage.__version__ = '0.0.1'"


@pytest.fixture
def hosts():
    with two_hosts() as found:
        yield found


@pytest.fixture
def begin(hosts, tmp_path, environment):
    """Begin the check on a host of a job of two; returns its process and the file of its output."""

    def begin(number, *, creds="secret", patch="", patience_s=PATIENCE_S, **more):
        place = tmp_path / f"host-{number}"
        place.mkdir(exist_ok=True)
        run = [sys.executable, "-c", START.format(patch=patch), "run", "--check", "--json", "--seconds", patience_s]
        run += ["--job-id", f"check/{os.getpid()}", "--hub", f"{BOTH[0]}:{PORT}", "--creds", tmp_path / creds]
        launcher = [sys.executable, "-m", "torch.distributed.run", "--nnodes", 2, "--nproc-per-node", 2, "train.py"]
        own = {**environment, "PYTHONPATH": str(ROOT), **more}
        output = tmp_path / f"output-{number}"
        return hosts.start(number, ["env", "-C", place, *run, "--", *launcher], own, output), output

    yield begin
    # THEN nothing is left, whatever was found
    assert not [file for number in range(2) for file in (tmp_path / f"host-{number}").glob("**/*")]
    assert not [file for number in range(2) for file in hosts.memory(number).iterdir()]
    assert not hosts.pids(0, "nats-server")


def ended(begun):
    """The exit status of a check, and its results, by check and host."""
    process, output = begun
    status, text = process.wait(DEADLINE_S), output.read_text()
    (line,) = [line for line in text.splitlines() if line.startswith("[")] or [pytest.fail(text)]
    return status, {(row["what"], row["host"].rpartition("-")[0]): row for row in json.loads(line)}


def wrong(found):
    return {key: row["detail"] for key, row in found.items() if row["state"] != "ok"}


def test_two_hosts_that_are_ready(begin):
    # GIVEN two hosts without a problem, the first of which makes the credentials
    first, second = begin(0), begin(1)
    # WHEN they have met THEN both exit with 0
    (status, found), (other_status, other) = ended(first), ended(second)
    assert wrong(found) == wrong(other) == {}
    assert (status, other_status) == (0, 0)
    # AND the first one has the results of both, with a comparison, and the second one its own
    assert found["hosts", "node-a"]["detail"] == "2 hosts came"
    assert {host for what, host in found if what == "rings"} == {"node-a", "node-b"}
    assert ("clock", "node-b") in found
    assert {host for _, host in other} == {"node-b"}


@pytest.fixture
def clock(tmp_path):
    """The environment of a process whose clock is 100 s ahead."""
    library = tmp_path / "wall_clock.so"
    source = ROOT / "tests" / "chaos" / "wall_clock.c"
    subprocess.run(["cc", "-shared", "-fPIC", "-O1", "-o", library, source], check=True, capture_output=True)
    return {"LD_PRELOAD": str(library), "WALL_APART_S": "100"}


def test_each_problem_of_another_host_is_in_the_table_of_the_first(hosts, begin, clock):
    # GIVEN a second host of another version, with a clock that is ahead, and shared memory for one ring of two
    remount = hosts.inside(1, ["mount", "-o", "remount,size=900k", "/dev/shm"])
    subprocess.run(remount, check=True)
    first, second = begin(0), begin(1, patch=OLDER, **clock)
    (status, found), (other_status, other) = ended(first), ended(second)
    # THEN the first one names all three, and what to do
    problems = wrong(found)
    assert set(problems) == {("versions", "node-b"), ("clock", "node-b"), ("rings", "node-b")}
    assert problems["versions", "node-b"].startswith("sftriage 0.0.1, where node-a-0 has ")
    assert problems["clock", "node-b"] == "100.0 s ahead of the clock of node-a-0"
    assert "2 ranks of this host need 2 MiB" in problems["rings", "node-b"]
    assert all(found[key]["do"] for key in problems)
    # AND the second one has the one that it can see itself, and the same status
    assert set(wrong(other)) == {("rings", "node-b")}
    assert (status, other_status) == (1, 1)


def test_a_host_that_never_comes_is_named_after_the_patience(begin):
    status, found = ended(begin(0, patience_s=3))
    assert (status, wrong(found)) == (1, {("hosts", "node-a"): "1 of 2 hosts came; missing: number 1"})


def test_a_host_with_other_credentials_is_refused_and_both_name_that(begin, tmp_path):
    for name in ("secret", "other"):
        (tmp_path / name).write_text(f"sftriage:{name}\n")
    first, second = begin(0, patience_s=20), begin(1, creds="other")
    (status, found), (other_status, other) = ended(first), ended(second)
    assert (status, other_status) == (1, 1)
    assert found["credentials", "node-a"]["state"] == "wrong", found
    assert BOTH[1] in found["credentials", "node-a"]["detail"]
    assert "refuses the credentials in" in wrong(other)["credentials", "node-b"]
    # AND the files are still there
    assert (tmp_path / "secret").read_text() == "sftriage:secret\n"


def test_a_first_host_that_is_ended_leaves_nothing(begin, tmp_path):
    process, _ = begin(0)
    wait_until((tmp_path / "secret").exists)
    process.terminate()
    assert process.wait(DEADLINE_S) == 128 + signal.SIGTERM
    assert not (tmp_path / "secret").exists()


def test_a_taken_port_is_reported_with_the_process_that_has_it(hosts, begin, tmp_path):
    listener = hosts.start(0, [sys.executable, "-c", LISTEN], dict(os.environ), Path(tmp_path / "listener"))
    wait_until(lambda: "up" in (tmp_path / "listener").read_text())
    first, second = begin(0, patience_s=3), begin(1, patience_s=3)
    (status, found), (other_status, other) = ended(first), ended(second)
    assert (status, other_status) == (1, 1)
    assert f"process {listener.pid} (python" in wrong(found)["port", "node-a"]
    # AND the second one cannot meet the first
    assert set(wrong(other)) & {("hub", "node-b"), ("credentials", "node-b")}


def test_on_a_shared_server_the_permissions_of_a_job_suffice_and_keys_of_another_do_not(tmp_path, environment, start):
    pytest.importorskip("nkeys", reason="keys want the extra `nats`")
    # GIVEN a server with accounts for two jobs, and two hosts, the first of which has number 0
    names = [f"{socket.gethostname()}-{number}" for number in range(2)]
    with contextlib.closing(SharedNats(tmp_path / "nats", {"a": names, "b": names})) as server:

        def begin(number, keys="a", patience_s=PATIENCE_S):
            (place := tmp_path / f"host-{number}").mkdir(exist_ok=True)
            where = ("--job-id", "a", "--nats", server.url, "--creds", server.creds(keys), "--seconds", patience_s)
            own = {**environment, "NODE_RANK": str(number), "PYTHONPATH": str(ROOT)}
            command = ("run", "--check", "--json", *where, "--", sys.executable, "--nnodes=2", "train.py")
            return start(*command, cwd=place, env=own)

        # WHEN they check the job THEN they meet there
        both = [begin(number) for number in range(2)]
        outputs = [process.communicate(timeout=DEADLINE_S) for process in both]
        assert [process.returncode for process in both] == [0, 0], outputs
        assert {row["host"] for row in json.loads(outputs[0][0])} == set(names)
        assert (server.violations, list((server.directory / "jetstream").glob("**/streams/*"))) == ([], [])
        # AND a host with the keys of another job does not: each job has its own account
        apart = [begin(0, patience_s=1), begin(1, keys="b", patience_s=1)]
        details = [process.communicate(timeout=DEADLINE_S)[0] for process in apart]
        assert [process.returncode for process in apart] == [1, 1]
        assert "missing: number 1" in details[0]
        assert "the first host did not answer" in details[1]
    assert not [file for number in range(2) for file in (tmp_path / f"host-{number}").iterdir()]
