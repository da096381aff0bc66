"""Whatever becomes of triage, the job starts, gets its signals, and ends as it would alone, as does `sftriage run`."""

import contextlib
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from sftriage.base.process import LET_GO
from sftriage.runtime.launcher import FORWARDED
from tests.disks import served_disk, small_disk
from tests.integration.hubs import BesideHub
from tests.integration.killing import POLICY
from tests.integration.processes import DEADLINE_S, LOOP, ended, sftriage_process, wait_until

STATUS = 3
BLOCK = "def block(*_, **__):\n    import time\n    while True:\n        time.sleep(60)\n"
REFUSE = 'def refuse(*_, **__):\n    raise RuntimeError("can\'t start new thread")\n'
BREAK = "def broken(*_, **__):\n    raise {}\n"
LOCAL, TRIAGE, AGENT = "sftriage.runtime.local", "sftriage.runtime.triage", "sftriage.agent.agent"
# what is done to a part of triage once its module is there, by name of the part
FAULTS = {
    "threads": ("threading", REFUSE + "threading.Thread.start = refuse"),
    "imports": (LOCAL, "raise ImportError('damaged')"),
    "preparing": (LOCAL, BLOCK + "LocalRun.__init__ = block"),
    "run directory": (LOCAL, BLOCK + "create = block"),
    "memory": (LOCAL, "def make_rings_directory(*_): raise MemoryError"),
    "beginning": (TRIAGE, BREAK.format("OSError(5, 'broken')") + "Triage.start = broken"),
    "turns": (TRIAGE, BLOCK + "Triage.turn = block"),
    "failing turns": (TRIAGE, BREAK.format("ValueError('broken')") + "Triage._judge = broken"),
    "agent": (AGENT, BLOCK + "Agent.rows = block"),
    "end of the agent": (AGENT, BLOCK + "Agent.close = block"),
    "judging": ("sftriage.controller.controller", BLOCK + "Controller.take = block"),
    "journal": ("sftriage.runs.journal", BLOCK + "Journal._write = block"),
    "files": ("sftriage.base.files", BLOCK + "replacing = block"),
    "store": ("sftriage.traces.store", BLOCK + "LocalStore.ids = LocalStore.manifests = block"),
    "sink": ("sftriage.sinks.terminal", BLOCK + "Reporter.take = block"),
    "terminal": ("sftriage.commands.output", BLOCK + "JobOutput.say_summary = block"),
    "rings": (LOCAL, BLOCK + "remove_rings_directory = block"),
    "first step": ("sftriage.runtime.first_step", BLOCK + "FirstStep.end = block"),
    "exit": (LOCAL, BLOCK + "import atexit\natexit.register(block)"),
    "a thread of others": (LOCAL, BLOCK + "import threading\nthreading.Thread(target=block).start()"),
}
INJECTED = """
import os, sys
class Injecting:
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        if name == {module!r}:
            sys.meta_path.remove(cls)
            import importlib.util
            spec = importlib.util.find_spec(name)
            loaded = spec.loader.exec_module
            def exec_module(module):
                loaded(module)
                exec(compile({code!r}, "injected", "exec"), module.__dict__)
            spec.loader.exec_module = exec_module
            return spec
if os.environ.pop("INJECTED", ""):
    if {module!r} == "threading":
        import threading
        exec(compile({code!r}, "injected", "exec"))
    else:
        sys.meta_path.insert(0, Injecting)
"""


def injected(folder: Path, environment: dict[str, str], module: str, code: str) -> dict[str, str]:
    """An environment in which something is done to a module of the first Python that is started, and of no other."""
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(INJECTED.format(module=module, code=code), encoding="utf-8")
    return {**environment, "PYTHONPATH": str(folder), "INJECTED": "1"}


@pytest.mark.parametrize("part", FAULTS)
def test_a_part_of_triage_that_fails_or_hangs_leaves_the_job_alone(start, tmp_path, environment, part):
    broken = injected(tmp_path / "site", environment, *FAULTS[part])
    # WHEN a job is run THEN it runs, and ends with its own status
    run = start("run", "--out", tmp_path / "run", "--", sys.executable, LOOP, 2, 40, STATUS, env=broken)
    out, err = run.communicate(timeout=60)
    assert (run.returncode, out) == (STATUS, "started\n"), err
    # AND what has gone wrong is a matter of a line or two
    assert len(err.splitlines()) < 8, err


def test_a_disk_that_hangs_to_the_end_keeps_nothing(start, tmp_path):
    with served_disk(tmp_path) as disk:
        over = tmp_path / "over"
        job = f"{sys.executable} {LOOP} 2 100 0; echo up; read word; touch {over}; exit {STATUS}"
        run = start("run", "--out", disk.path / "run", "--", "sh", "-c", job, stdin=subprocess.PIPE)
        wait_until(lambda: any((disk.path / "run" / "steps").glob("*.steps")))
        disk.stop()
        # WHEN it ends THEN so do we, with its status
        run.stdin.write("go\n")
        run.stdin.close()
        wait_until(over.exists)
        assert run.wait(timeout=30) == STATUS


@pytest.fixture
def taken():
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield listening.getsockname()[1]


# where the hub is said to be, and what is said of that
HUBS = {
    "a name that is none": (["--hub", "no-such-host.invalid"], "--hub no-such-host.invalid: cannot resolve"),
    "a port that is taken": (["--hub", "127.0.0.1:TAKEN"], "cannot start the hub on 127.0.0.1:TAKEN"),
    "a server that is away": (["--nats", "nats://127.0.0.1:1"], "--nats nats://127.0.0.1:1: no server answers"),
    "a server without a name": (["--nats", "tls://no-such-host.invalid"], "cannot resolve no-such-host.invalid"),
    "credentials that are not there": (
        ["--nats", "nats://127.0.0.1:TAKEN", "--creds", "mistyped"],
        "--creds mistyped: no such file",
    ),
}


@pytest.mark.parametrize("hub", HUBS)
def test_a_hub_that_is_not_there_keeps_no_job_from_starting(start, tmp_path, environment, taken, hub):
    pytest.importorskip("nats", reason="many hosts want the extra `nats`")
    # GIVEN where the hub is said to be, which is wrong
    words, said = ([word.replace("TAKEN", str(taken)) for word in one] for one in (HUBS[hub][0], [HUBS[hub][1]]))
    # WHEN a job is run THEN it starts, and what is wrong is one line, while it runs
    command = ["run", "--job-id", "job", *words, "--"]
    environment = {**environment, "NODE_RANK": "0"}
    with (tmp_path / "said").open("wb") as output:
        job = ["sh", "-c", f"touch ran; read word; exit {STATUS}"]
        run = start(*command, *job, env=environment, cwd=tmp_path, stdin=subprocess.PIPE, stderr=output)
    wait_until((tmp_path / "ran").exists)
    wait_until(lambda: said[0] in (tmp_path / "said").read_text())
    run.stdin.close()
    assert run.wait(timeout=60) == STATUS
    lines = (tmp_path / "said").read_text().splitlines()
    assert sum("unwatched" in line for line in lines) == 1, lines
    assert "Traceback" not in "".join(lines)
    # AND where it is required, there is no job
    refused = start("run", "--required", *command[1:], "touch", "never", env=environment, cwd=tmp_path)
    _, why = refused.communicate(timeout=60)
    assert (refused.returncode, len(why.splitlines()), (tmp_path / "never").exists()) == (2, 1, False), why
    assert said[0] in why


@pytest.mark.parametrize("url", ["foo://bar", "nats://", "bar", "nats://host:99999", "nats://a:1,foo://b"])
def test_what_is_no_address_of_a_server_is_refused_at_once(start, tmp_path, url):
    run = start("run", "--job-id", "job", "--nats", url, "--", "touch", tmp_path / "never")
    _, err = run.communicate(timeout=60)
    assert (run.returncode, "give it as nats://HOST:PORT" in err, (tmp_path / "never").exists()) == (2, True, False)


def test_a_directory_that_takes_nothing_keeps_no_job_from_starting(start, tmp_path):
    # GIVEN a working directory on a disk that is read-only
    with small_disk(tmp_path / "disk") as disk:
        disk.remount("ro")
        run = start("run", "--", "sh", "-c", f"echo ran; exit {STATUS}", cwd=disk.path)
        out, err = run.communicate(timeout=60)
        # THEN the job runs, and one line says why it is not watched
        assert (run.returncode, out, len(err.splitlines())) == (STATUS, "ran\n", 1), err
        assert "Read-only file system" in err


def test_the_job_is_not_started_where_that_is_required_and_cannot_be_watched(start, tmp_path, environment):
    broken = injected(tmp_path / "site", environment, *FAULTS["memory"])
    run = start("run", "--required", "--out", tmp_path / "run", "--", "echo", "ran", env=broken)
    out, _ = run.communicate(timeout=60)
    assert (run.returncode != 0, out) == (True, "")


TRAPS = """
import signal, sys, time
got = []
for number in map(int, sys.argv[2:]):
    signal.signal(number, lambda number, _: got.append(number))
print("up", flush=True)
with open(sys.argv[1], "w", buffering=1) as told:
    while signal.SIGTERM not in got:
        time.sleep(0.01)
        while got and got[0] != signal.SIGTERM:
            told.write(f"{got.pop(0)}\\n")
sys.exit(7)
"""


def test_every_signal_of_the_jobs_reaches_it_and_ends_nothing_else(start, tmp_path):
    (tmp_path / "traps.py").write_text(TRAPS, encoding="utf-8")
    told = tmp_path / "told"
    numbers = [*map(int, FORWARDED)]
    run = start("run", "--out", tmp_path / "run", "--", sys.executable, tmp_path / "traps.py", told, *numbers)
    assert run.stdout.readline() == "up\n"
    wait_until(told.exists)
    # WHEN each is sent to us THEN the job has got it
    for number in numbers:
        if number != signal.SIGTERM:
            run.send_signal(number)
            wait_until(lambda number=number: str(number) in told.read_text().split())
    # AND by the last of them it ends, with its own status
    run.send_signal(signal.SIGTERM)
    assert run.wait(timeout=60) == 7


AT_FORK = "import os\nos.register_at_fork({when}=lambda: os.kill(os.getpid(), {signum}))"
AT_START = {
    "before it is started": (LOCAL, AT_FORK.format(when="before", signum=15)),
    "once it is started": (LOCAL, AT_FORK.format(when="after_in_parent", signum=15)),
    "by Ctrl-C": (LOCAL, AT_FORK.format(when="after_in_parent", signum=2)),
    "by a scheduler": (LOCAL, AT_FORK.format(when="after_in_parent", signum=10)),
    "while triage is imported": (LOCAL, "import os\nos.kill(os.getpid(), 15)"),
    "while it gets ready": ("sftriage.runtime.rings", "import os\nos.kill(os.getpid(), 15)"),
}


@pytest.mark.parametrize("moment", AT_START)
def test_a_signal_at_any_moment_of_the_start_is_obeyed(start, tmp_path, environment, moment):
    broken = injected(tmp_path / "site", environment, *AT_START[moment])
    went_on = tmp_path / "went-on"
    # THEN the job is not started, or ends by it
    job = f"sleep 5; touch {went_on}"
    run = start("run", "--out", tmp_path / "run", "--", "sh", "-c", job, env=broken)
    _, err = run.communicate(timeout=60)
    expected = {"by Ctrl-C": signal.SIGINT, "by a scheduler": signal.SIGUSR1}.get(moment, signal.SIGTERM)
    assert run.returncode == 128 + expected, err
    assert (went_on.exists(), "Traceback" in err, "Exception ignored" in err) == (False, False, False)


def test_a_run_directory_that_is_removed_is_one_line(tmp_path, environment):
    out, release = tmp_path / "run", tmp_path / "release"
    said = tmp_path / "said"
    job = f"{sys.executable} {LOOP} 2 3000 0; exit {STATUS}"
    with said.open("wb") as file:
        run = sftriage_process("run", "--out", out, "--", "sh", "-c", job, env=environment, stdout=file, stderr=file)
    with ended(run):
        wait_until(lambda: (out / "decisions.jsonl").exists() and (out / "decisions.jsonl").stat().st_size > 0)
        # WHEN its directory is removed THEN that is said, once, and nothing else of it
        subprocess.run(["mv", out, release], check=True)
        wait_until(lambda: "The run directory cannot be written (it has been removed)" in said.read_text())
        assert run.wait(DEADLINE_S) == STATUS
    lines = [line for line in said.read_text().splitlines() if "Error" in line or "run directory c" in line]
    # (and in the end what is lost of it)
    assert len(lines) == 2, said.read_text()
    assert not out.exists()


def test_agent_and_controller_do_not_die_of_what_is_sent_to_the_job(tmp_path, environment):
    pytest.importorskip("nats", reason="many hosts want the extra `nats`")
    # GIVEN an agent and a controller beside a job, as its scheduler sees them: processes of it like all others
    with contextlib.closing(BesideHub(tmp_path, environment, POLICY)) as job:
        wait_until((job.run / "run.json").exists)
        for process in (job.agent, job.controller):
            # WHEN they are sent what is meant for the job THEN they go on, to be ended by what is meant for them
            for number in set(FORWARDED) - {signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGTSTP, LET_GO}:
                process.send_signal(number)
            process.send_signal(signal.SIGINT)
            assert process.wait(timeout=60) in (0, 128 + signal.SIGINT), job.said
        assert "Traceback" not in job.said
