"""Real ranks under the real nsys: captures, exit statuses, signals, and what must not be in a report."""

import contextlib
import json
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

from sftriage.agent import nsys, nsys_rank
from sftriage.agent.agent import Agent
from sftriage.agent.nsys import processes
from sftriage.model.captures import ENDED, CaptureRequest, Trigger, WantedCapture
from sftriage.traces.store import LocalStore
from tests import needs
from tests.disks import small_disk
from tests.integration.killing import POLICY as ASKED_ONLY
from tests.integration.policies import policy
from tests.integration.processes import DEADLINE_S, wait_until
from tests.integration.runs import captures

pytestmark = needs.nsys

JOB = Path(__file__).parent / "jobs" / "slow_data.py"
SECRET = "hunter2-hunter2"
RULE = """name: any, match: {gain: ">= 20%"}, cooldown: 1h,
  capture: {profiler: nsys, steps: 4, max_seconds: 60, nsys: {trace: [nvtx, osrt], sqlite: true}}"""
POLICY = policy(RULE, steps=(40, 40, 20), limits="")
WHY = Trigger(0, 49, "suspect", "rank", (0,), "data", 0.02, 0.3, 0.9, "default", "ab" * 32, "slow")
SLEEPS = "import sys, time; print('up', flush=True); time.sleep(float(sys.argv[1]))"


@pytest.fixture
def environment(environment):
    return {**environment, "A_TOKEN": SECRET}


@pytest.fixture
def run(start, tmp_path):
    """Start the job under `sftriage run --nsys`; rank 1 is slow in data until it is let go."""

    def run(*launcher, policy=POLICY):
        (tmp_path / "policy.yaml").write_text(policy, encoding="utf-8")
        options = ["--nsys", "--nsys-trace", "nvtx,osrt", "--policy", tmp_path / "policy.yaml"]
        return start("run", *options, "--out", tmp_path / "run", "--", *launcher, JOB, tmp_path / "release")

    yield run
    (tmp_path / "release").touch()


def test_the_slow_rank_is_captured_by_nsys_with_exactly_the_steps_that_were_marked(run, tmp_path):
    # GIVEN two ranks by torchrun, each under nsys
    job = run(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2)
    # WHEN the policy orders a capture
    (captured,) = wait_until(lambda: captures(tmp_path / "run"))
    path = tmp_path / "run" / "captures" / captured.capture_id / "manifest.json"
    (tmp_path / "release").touch()
    out, err = job.communicate(timeout=DEADLINE_S)
    assert (job.returncode, out) == (0, "trained\n"), err
    manifest = json.loads(path.read_text(encoding="utf-8"))
    capture = manifest["capture"]
    assert (capture["profiler"], capture["rank"], capture["steps"]) == ("nsys", 1, 4)
    assert set(capture["timings_s"]) == {"start", "run", "stop", "export"}
    assert "environment" in manifest["may_contain"]
    # AND so has the report, with the slow stage in each of them
    names = [one["name"] for one in manifest["artefacts"]]
    assert names == ["trace.nsys-rep", "trace.sqlite"]
    with contextlib.closing(sqlite3.connect(path.parent / "trace.sqlite")) as database:
        ranges = database.execute(
            "SELECT coalesce(e.text, s.value), e.end - e.start FROM NVTX_EVENTS e "
            "LEFT JOIN StringIds s ON s.id = e.textId WHERE e.end IS NOT NULL ORDER BY e.start"
        ).fetchall()
    steps = [name for name, _ in ranges if name.startswith("ProfilerStep#")]
    assert steps == [f"ProfilerStep#{step}" for step in range(capture["first_step"], capture["last_step"] + 1)]
    slow = [ns for name, ns in ranges if name == "sftriage:data"]
    assert (len(slow), min(slow) >= 20_000_000) == (4, True)
    for artefact in path.parent.iterdir():
        assert SECRET.encode() not in artefact.read_bytes(), artefact
    # AND what was temporary is gone
    assert not list((tmp_path / "run").glob("nsys-*"))
    assert list((tmp_path / "run" / "spool").iterdir()) == []
    again = ["nsys", "export", "--type=sqlite", f"--output={tmp_path / 'again.sqlite'}"]
    subprocess.run([*again, path.parent / "trace.nsys-rep"], capture_output=True, timeout=120, check=True)


def test_a_job_of_one_process_is_captured_too(run, start, tmp_path):
    # GIVEN a rank that is not torchrun's: the script itself starts it
    job = run(sys.executable, policy=ASKED_ONLY)
    wait_until(lambda: list((tmp_path / "run" / "steps").glob("*.steps")))
    # WHEN a user requests a capture of it THEN there is one
    command = start("capture", "--run", tmp_path / "run", "--rank", 0, "--profiler", "nsys", "--reason", "a look")
    _, err = command.communicate(timeout=DEADLINE_S)
    assert command.returncode == 0, err
    assert len(captures(tmp_path / "run")) == 1
    (tmp_path / "release").touch()
    out, err = job.communicate(timeout=DEADLINE_S)
    assert (job.returncode, out) == (0, "trained\n"), err


@pytest.fixture
def place(tmp_path, environment, request):
    """The environment that `sftriage run --nsys` would give to a rank."""
    tmp = tmp_path / "tmp"
    tmp.mkdir()
    return {
        **environment,
        "SFTRIAGE_NSYS": shutil.which("nsys"),
        "SFTRIAGE_NSYS_SESSION": f"sft-test-{os.getpid()}-{abs(hash(request.node.nodeid)) % 10**6}",
        "SFTRIAGE_NSYS_TRACE": "nvtx",
        "SFTRIAGE_NSYS_TMP": str(tmp),
    }


@pytest.fixture
def rank(place):
    started = []

    def rank(*program, **changes):
        command = [sys.executable, "-I", "-S", nsys_rank.__file__, "--", *map(str, program)]
        streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        started.append(subprocess.Popen(command, env={**place, **changes}, **streams))
        return started[-1]

    yield rank
    for process in started:
        process.kill()
        process.wait(DEADLINE_S)
        # (an agent of nsys that has failed may hold their other ends for a while)
        process.stdout.close()
        process.stderr.close()


def test_a_full_disk_is_the_reason_and_the_next_capture_works(rank, place, tmp_path, monkeypatch):
    # GIVEN a rank whose nsys writes to a disk that fills up unnoticed
    monkeypatch.setattr(nsys, "FREE_BYTES", 0)
    with small_disk(tmp_path / "small", "64m", 2000) as disk:
        made = {name: tmp_path / name for name in ("rings", "steps", "spool")}
        for path in made.values():
            path.mkdir()
        there = {"SFTRIAGE_RINGS": str(made["rings"]), "SFTRIAGE_SPOOL": str(made["spool"])}
        process = rank(sys.executable, JOB, tmp_path / "release", **there, SFTRIAGE_NSYS_TMP=str(disk.path))
        own = nsys.NsysPlace(Path(place["SFTRIAGE_NSYS"]), place["SFTRIAGE_NSYS_SESSION"], ("nvtx",), disk.path)
        places = made["rings"], tmp_path, LocalStore(tmp_path)
        with contextlib.closing(Agent(*places, job="job", run="run-1", nsys=own)) as agent:

            def capture(number):
                wanted = CaptureRequest(
                    f"c-{number}", 0, "nsys", steps=3, warmup_steps=1, max_seconds=60, max_bytes=10**8
                )
                agent.want([WantedCapture(wanted, WHY)])
                reports = []
                wait_until(lambda: reports.extend(agent.reports()) or (reports and reports[-1].result.state in ENDED))
                return reports[-1].result

            wait_until(lambda: agent.rows())
            wait_until((made["rings"] / "rank-0.0.mailbox").exists)
            disk.fill()
            # WHEN a capture begins THEN that is the reason
            failed = capture(0)
            assert (failed.state, "No space left on device" in failed.detail) == ("failed", True), failed.detail
            # AND once there is room again the next capture works, and training goes on to its end
            disk.empty()
            stored = capture(1)
            assert stored.state == "stored", stored.detail
        (tmp_path / "release").touch()
        assert (process.stdout.readline(), process.wait(DEADLINE_S)) == ("trained\n", 0)


def session_agent(place):
    name = f"--session-name={place['SFTRIAGE_NSYS_SESSION']}-0.0".encode()
    return next(iter(processes(lambda words: b"--start-agent" in words and name in words)), None)


def ends_in(descriptor):
    with contextlib.suppress(OSError):  # (closed since)
        return str(Path(descriptor).readlink())


def trainers(word):
    """Processes with this argument, which no launcher is among."""
    return processes(lambda words: word.encode() in words and not {b"--", b"launch"} & set(words))


@pytest.mark.parametrize(
    ("ending", "status"),
    [
        ("sys.exit(0)", 0),
        ("sys.exit(3)", 3),
        ("os.kill(os.getpid(), signal.SIGSEGV)", -signal.SIGSEGV),
        ("os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL),
    ],
)
def test_a_rank_ends_as_its_trainer_does_and_its_output_goes_where_it_would(rank, ending, status):
    code = f"import os, signal, sys; print(os.environ['A_TOKEN'], os.environ.get('TMPDIR'), flush=True); {ending}"
    process = rank(sys.executable, "-c", code)
    # The trainer has its own environment back.
    assert process.stdout.readline() == f"{SECRET} {os.environ.get('TMPDIR')}\n"
    assert process.wait(DEADLINE_S) == status


def test_nothing_that_nsys_leaves_running_holds_the_output_of_the_job(rank, place):
    # GIVEN a rank whose output is read to its end
    process = rank(sys.executable, "-c", "import sys; print('up', flush=True); sys.stdin.readline()")
    assert process.stdout.readline() == "up\n"
    # THEN nsys's agent, which may stay on, has no end of it
    ends = {ends_in(f"/proc/self/fd/{stream.fileno()}") for stream in (process.stdout, process.stderr)}
    agent = wait_until(lambda: session_agent(place))
    assert not ends & {ends_in(one) for one in Path(f"/proc/{agent}/fd").iterdir()}


@pytest.mark.parametrize("fault", ["missing", "failing", "hanging"])
def test_without_a_working_nsys_the_rank_runs_all_the_same_and_once(tmp_path, fault):
    # GIVEN an nsys that is not there, fails at once, or hangs before it starts anything
    nsys = tmp_path / "nsys"
    if fault != "missing":
        nsys.write_text("#!/bin/sh\n" + ("exit 1\n" if fault == "failing" else "exec sleep 100\n"), encoding="utf-8")
        nsys.chmod(0o700)
    script = f"import sys; sys.path.insert(0, {str(Path(nsys_rank.__file__).parent)!r}); import nsys_rank; "
    script += f"nsys_rank.START_S = 0.5; sys.argv = ['rank', '--', 'sh', '-c', 'echo ran >> {tmp_path}/ran; exit 5']; "
    script += "sys.exit(nsys_rank.main())"
    place = {"SFTRIAGE_NSYS": str(nsys), "SFTRIAGE_NSYS_TMP": str(tmp_path), "SFTRIAGE_NSYS_SESSION": "s"}
    place = {**os.environ, **place, "SFTRIAGE_NSYS_TRACE": "nvtx"}
    process = subprocess.run([sys.executable, "-c", script], env=place, capture_output=True, timeout=60, check=False)
    assert (process.returncode, (tmp_path / "ran").read_text(encoding="utf-8")) == (5, "ran\n")
    assert b"runs without it" in process.stderr


def test_an_nsys_that_fails_at_first_is_started_again(rank, place, tmp_path):
    # GIVEN an nsys that ends before its rank is there, as the real one may on a busy machine, and not the next time
    nsys = tmp_path / "nsys"
    fails = f"[ $1 = launch ] && ! [ -e {tmp_path}/failed ] && touch {tmp_path}/failed && exit 1"
    nsys.write_text(f'#!/bin/sh\n{fails}\nexec {place["SFTRIAGE_NSYS"]} "$@"\n', encoding="utf-8")
    nsys.chmod(0o700)
    code = "import sys; print('up', flush=True); sys.stdin.readline()"
    process = rank(sys.executable, "-c", code, SFTRIAGE_NSYS=str(nsys))
    assert process.stdout.readline() == "up\n"
    assert (tmp_path / "failed").exists()
    assert session_agent(place) is not None


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_reaches_the_trainer(rank, signum):
    code = (
        "import signal, sys, time\n"
        "def end(signum, _): sys.exit(20 + signum)\n"
        "signal.signal(signal.SIGTERM, end); signal.signal(signal.SIGINT, end)\n"
        "print('up', flush=True)\n"
        "time.sleep(600)"
    )
    process = rank(sys.executable, "-c", code)
    assert process.stdout.readline() == "up\n"
    process.send_signal(signum)
    assert process.wait(DEADLINE_S) == 20 + signum


def test_a_trainer_ends_when_what_started_it_is_killed(rank):
    process = rank(sys.executable, "-c", SLEEPS, "171.5")
    assert process.stdout.readline() == "up\n"
    (pid,) = trainers("171.5")
    # WHEN the launcher kills the rank, which has no time to do anything
    process.kill()
    wait_until(lambda: not Path(f"/proc/{pid}").exists() or not trainers("171.5"))


def test_when_nsys_dies_the_trainer_goes_on_and_its_status_is_still_its_own(rank, place):
    # GIVEN a rank whose trainer will end with a status of its own
    code = "import sys, time; print('up', flush=True); sys.stdin.readline(); print('end', flush=True); sys.exit(9)"
    command = [sys.executable, "-I", "-S", nsys_rank.__file__, "--", sys.executable, "-c", code]
    streams = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    process = subprocess.Popen(command, env=place, **streams)
    assert process.stdout.readline() == "up\n"
    # WHEN nsys's agent is killed, on which `nsys launch` ends with status 0
    os.kill(wait_until(lambda: session_agent(place)), signal.SIGKILL)
    process.stdin.write("go on\n")
    process.stdin.flush()
    assert (process.stdout.readline(), process.wait(DEADLINE_S)) == ("end\n", 9)
