"""`sftriage run --check`: what stops or degrades a run, on one host and between several."""

import json
import os
import socket
from pathlib import Path

import pytest

from sftriage.model.checks import CheckResult, HostReport
from sftriage.policy.in_force import PolicyFiles, find
from sftriage.runtime import doctor, preflight
from sftriage.runtime.preflight import JobPlan, by_check, compared, is_ready, listener_on, plan_of
from tests.disks import small_disk

DEFAULT = PolicyFiles([find("default")]).current


def host(number, *, named=True, **changed):
    about = {"checks": (CheckResult("rings", "ok", "in /dev/shm"),), "versions": {"sftriage": "1.0", "torch": "2.5"}}
    name = f"node-{number}"
    return HostReport(f"{name}-{number}" if named else name, name, number if named else None, **(about | changed))


FULL = CheckResult("rings", "missing", "0 MiB free", "enlarge it")
TWO = [host(0), host(1)]
JOBS = {
    # the hosts that came, how many are expected, names of the missing; and the rows that are not ok
    "all came": (TWO, 2, (), {}),
    "more came": (TWO, 1, (), {}),
    "an unknown number": (TWO, None, (), {}),
    "one is missing": (TWO, 3, (), {"hosts": "2 of 3 hosts came; missing: number 2"}),
    "one is missing, and SLURM names it": (TWO, 3, ("node-9",), {"hosts": "2 of 3 hosts came; missing: node-9"}),
    "one is missing, and none has a number": (
        [host(0, named=False)],
        2,
        (),
        {"hosts": "1 of 2 hosts came"},
    ),
    "many are missing": (
        [host(0)],
        20,
        (),
        {"hosts": f"1 of 20 hosts came; missing: {', '.join(f'number {n}' for n in range(1, 9))} and 11 more"},
    ),
    "two have one number": (
        [host(0), host(0, checks=())],
        2,
        (),
        {"hosts": "node-0-0, node-0-0 all have the number 0"},
    ),
    "another sftriage": (
        [host(0), host(1, versions={"sftriage": "2.0", "torch": "2.5"})],
        2,
        (),
        {"versions": "node-1-1: sftriage 2.0, where node-0-0 has 1.0"},
    ),
    "another torch on two hosts": (
        [host(0), *(host(number, versions={"sftriage": "1.0", "torch": "2.4"}) for number in (1, 2))],
        3,
        (),
        {"versions": "node-1-1, node-2-2: torch 2.4, where node-0-0 has 2.5"},
    ),
    "a clock that is ahead": (
        [host(0), host(1, ahead_s=90.0)],
        2,
        (),
        {"clock": "node-1-1: 90.0 s ahead of the clock of node-0-0"},
    ),
    "a clock that is behind": (
        [host(0), host(1, ahead_s=-2.5)],
        2,
        (),
        {"clock": "node-1-1: 2.5 s behind the clock of node-0-0"},
    ),
    "a clock within the margin": ([host(0), host(1, ahead_s=1.5, margin_s=0.6)], 2, (), {}),
    "a full memory": ([host(0), host(1, checks=(FULL,))], 2, (), {"rings": "node-1-1: 0 MiB free"}),
    "other messages": (
        [host(0), host(1, checks=(CheckResult("versions", "wrong", "messages of version 2"),), versions={})],
        2,
        (),
        {"versions": "node-1-1: messages of version 2"},
    ),
}


@pytest.mark.parametrize(("reports", "expected", "missing", "wrong"), JOBS.values(), ids=JOBS)
def test_a_row_for_each_check_names_the_hosts_that_fail_it(reports, expected, missing, wrong):
    found = compared(reports, expected, missing)
    rows = {what: (state, detail, do) for what, state, detail, do in by_check(found)}
    assert {what: detail for what, (state, detail, _) in rows.items() if state != "ok"} == wrong
    assert is_ready(found) == (not wrong)
    # AND each row that is not ok has advice, if its check has
    assert all(rows[what][2] or "messages" in wrong[what] for what in wrong)


def test_rows_are_in_order_and_count_the_hosts_that_are_alike():
    rows = by_check(compared([host(number) for number in range(3)], 3))
    assert [row[0] for row in rows] == ["hosts", "versions", "clock", "rings"]
    assert rows[-1][2] == "in /dev/shm (and alike on 2 other hosts)"


TORCHRUN = ("torchrun", "--nnodes", "4", "--nproc-per-node", "8", "train.py")
PLANS = {
    "torchrun": (TORCHRUN, {}, False, (4, 8)),
    "on this host alone": (TORCHRUN, {}, True, (1, 8)),
    "with =, and as a range": (("torchrun", "--nnodes=2:4", "--nproc_per_node=3", "x"), {}, False, (2, 3)),
    "by torchrun's variables": (("torchrun", "x"), {"PET_NNODES": "3", "PET_NPROC_PER_NODE": "2"}, False, (3, 2)),
    "by SLURM": (("torchrun", "--nproc-per-node", "2", "x"), {"SLURM_NNODES": "5"}, False, (5, 2)),
    "accelerate": (("accelerate", "launch", "--num_machines", "2", "--num_processes", "16", "x"), {}, False, (2, 8)),
    "one process": (("python", "train.py"), {}, False, (None, 1)),
    "as many as there are devices": (("torchrun", "--nproc-per-node", "auto", "x"), {}, True, (1, 6)),
}


@pytest.mark.parametrize(("command", "environment", "here", "plan"), PLANS.values(), ids=PLANS)
def test_hosts_and_ranks_come_from_the_command_or_the_launcher(monkeypatch, command, environment, here, plan):
    monkeypatch.setattr(preflight, "_devices", lambda: 6)
    found = plan_of(command, environment, DEFAULT, nsys=False, here=here)
    assert (found.n_hosts, found.ranks) == plan
    assert (found.trace_bytes, found.by_nsys) == (512 << 20, False)


def test_open_files_must_suffice_for_the_agent_and_for_connections_to_all_ranks():
    at = {ranks: preflight.files_check(JobPlan(1, ranks), 1024).state for ranks in (1, 8, 87, 88)}
    assert at == {1: "ok", 8: "ok", 87: "ok", 88: "wrong"}
    assert preflight.files_check(JobPlan(1000, 8), 1024).state == "wrong"
    assert preflight.files_check(JobPlan(1000, 8), -1).state == "ok"


@pytest.mark.parametrize(("left", "state"), [(None, "ok"), (56, "ok"), (55, "wrong"), (-3, "wrong")])
def test_threads_must_suffice_for_the_ranks(left, state):
    assert preflight.threads_check(8, left).state == state


def test_the_threads_left_are_those_of_the_limits_of_the_cgroup(monkeypatch, tmp_path):
    (inner := tmp_path / "job").mkdir()
    for folder, most, now in ((tmp_path, "1000", "990"), (inner, "max", "3")):
        (folder / "pids.max").write_text(f"{most}\n")
        (folder / "pids.current").write_text(f"{now}\n")
    monkeypatch.setattr(preflight, "cgroups", lambda *_, **__: [inner])
    monkeypatch.setattr(preflight.resource, "getrlimit", lambda _: (preflight.resource.RLIM_INFINITY,) * 2)
    assert preflight.threads_left() == 10
    # AND of the user, who is not root
    monkeypatch.setattr(preflight.os, "geteuid", lambda: 1000)
    monkeypatch.setattr(preflight.resource, "getrlimit", lambda _: (5, 5))
    assert preflight.threads_left() < 5


def test_a_full_or_read_only_disk_stops_the_run(tmp_path):
    with small_disk(tmp_path / "disk") as disk:
        # GIVEN a disk with room, for no trace
        check = preflight.disk_check([disk.path / "sftriage-runs"], 512 << 20)
        assert (check.state, "a trace may take 512 MiB" in check.detail) == ("limited", True)
        # WHEN it is full, or read-only
        disk.fill()
        full = preflight.disk_check([Path.cwd(), disk.path / "sftriage-runs"], 0)
        disk.empty()
        disk.remount("ro")
        read_only = preflight.disk_check([disk.path / "sftriage-runs"], 0)
        # THEN the check names the directory and the error, and what to do
        assert [(each.state, str(disk.path) in each.detail) for each in (full, read_only)] == [("wrong", True)] * 2
        assert ("No space left" in full.detail, full.do.startswith("free space")) == (True, True)
        assert ("Read-only" in read_only.detail, read_only.do.startswith("start it in another")) == (True, True)
        assert not list(disk.path.glob("sftriage*"))


def test_shared_memory_must_suffice_for_the_rings_of_all_ranks(tmp_path):
    with small_disk(tmp_path / "shm", "1500k") as disk:
        states = {}
        for ranks in (1, 2, 3):
            found = {check.what: check for check in doctor.recording_checks(disk.path, ranks)}
            states[ranks] = found["rings"].state
        assert states == {1: "ok", 2: "ok", 3: "missing"}
        assert ("3 ranks of this host need 2 MiB" in found["rings"].detail, "--shm-size" in found["rings"].do) == (1, 1)
        assert not list(disk.path.iterdir())


NSYS = {
    "not used": (JobPlan(), "", "ok"),
    "a policy needs it, but no rank starts under it": (JobPlan(by_nsys=True), "add --nsys", "limited"),
    "not installed": (JobPlan(nsys=True), "install it on this host", "missing"),
}


@pytest.mark.parametrize(("plan", "do", "state"), NSYS.values(), ids=NSYS)
def test_nsys_is_needed_only_where_ranks_start_under_it(monkeypatch, plan, do, state):
    monkeypatch.setenv("PATH", "/nowhere")
    found = preflight._nsys_check(plan)
    assert (found.state, found.do.startswith(do)) == (state, True)


def program(directory, name, text):
    path = directory / name
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


@pytest.mark.parametrize(("level", "user", "state"), [("4", 1000, "limited"), ("2", 1000, "ok"), ("4", 0, "ok")])
def test_the_kernel_may_forbid_nsys_to_sample(monkeypatch, tmp_path, level, user, state):
    program(tmp_path, "nsys", "echo NVIDIA Nsight Systems version 2024.6.1.90-1")
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(preflight, "content_of", lambda _: level.encode())
    monkeypatch.setattr(preflight.os, "geteuid", lambda: user)
    assert preflight._nsys_check(JobPlan(nsys=True, samples=True)).state == state
    assert preflight._nsys_check(JobPlan(nsys=True)).state == "ok"


PROBES = {
    "without Kineto": ("print('none')", "limited"),
    "that does not import": ("raise ImportError('libcudart.so')", "wrong"),
    "that is whole": ("print('a warning', 'kineto')", "ok"),
}


@pytest.mark.parametrize(("code", "state"), PROBES.values(), ids=PROBES)
def test_a_torch(monkeypatch, code, state):
    pytest.importorskip("torch")
    monkeypatch.setattr(preflight, "_PROBE", code)
    found = preflight._kineto_check()
    assert (found.state, bool(found.do)) == (state, state != "ok")


def test_py_spy_is_tried_on_a_process(monkeypatch, tmp_path):
    if doctor.py_spy_check().state == "missing":
        pytest.skip("needs py-spy")
    # GIVEN one that may not attach THEN the check has its reason
    program(tmp_path, "py-spy", "echo 'Error: Permission denied (os error 13)'; exit 1")
    monkeypatch.setattr(doctor, "search_path", lambda: str(tmp_path))
    found = doctor.py_spy_check()
    assert (found.state, "CAP_SYS_PTRACE" in found.detail) == ("limited", True)


def test_the_process_that_listens_on_a_port_is_found():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert f"process {os.getpid()} " in listener_on(port)
    assert listener_on(port) == ""


def test_on_one_host_it_prints_a_table_or_json_and_starts_nothing(sftriage, monkeypatch, tmp_path):
    pytest.importorskip("torch")
    monkeypatch.chdir(tmp_path)
    launched = ("--", "touch", str(tmp_path / "started"))
    # GIVEN a host with all that a run needs
    whole = sftriage("run", "--check", "--json", *launched)
    found = {row["what"]: row for row in json.loads(whole.out)}
    assert {row["host"] for row in found.values()} == {socket.gethostname()}
    assert found["rings"]["state"] == found["disk"]["state"] == "ok"
    assert whole.code == int(any(row["state"] != "ok" for row in found.values()))
    # WHEN a policy needs what is missing THEN it exits with 1, and the table says what to do
    (tmp_path / "mine.yaml").write_text(find("default").read_text().replace("profiler: auto", "profiler: nsys"))
    limited = sftriage("run", "--check", "--policy", "mine.yaml", *launched)
    assert (limited.code, "add --nsys" in limited.out) == (1, True)
    # AND wrong usage exits with 2
    assert sftriage("run", "--json", *launched).code == 2
    assert sftriage("run", "--check", "--hub", "node-1", *launched).code == 2
    assert [path.name for path in tmp_path.iterdir()] == ["mine.yaml"]
