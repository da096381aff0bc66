"""Real captures with torch.profiler, asked for through the mailbox, in a trainer of its own."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from sftriage.agent.executor import MailboxClient
from sftriage.model.captures import CaptureRequest, CaptureResult
from sftriage.windows.rings import Ring
from tests.integration.processes import wait_until
from tests.scenario import new_records

pytest.importorskip("torch")

TRAINER = """
    import sys, torch
    from sftriage import Monitor
    rings, spool = sys.argv[1:3]
    monitor = Monitor(rings=rings, spool=spool, rank=2, world_size=4, job="a\\\\b\\"c", slots=65536)
    model = torch.nn.Linear(16, 16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    def train(number=None):
        with monitor.step(number):
            with monitor.stage("data"):
                x = torch.ones(4, 16)
            with monitor.stage("forward"):
                loss = model(x).sum()
            with monitor.stage("backward"):
                loss.backward()
            with monitor.stage("optimizer"):
                optimizer.step()
    train(1000)
    print("ready", flush=True)
    for line in sys.stdin:
        if line.startswith("steps"):
            for _ in range(int(line.split()[1])):
                train()
        else:
            exec(line)
        print("done", flush=True)
"""

REQUEST = CaptureRequest("cap-1", 2, "torch", 3, 2, 60.0, 50_000_000)
SECOND = replace(REQUEST, capture_id="cap-2", steps=1, warmup_steps=1)


class Job:
    """A trainer that takes steps when told, and the controller's ends of its ring and mailbox."""

    def __init__(self, train, rings: Path, spool: Path) -> None:
        self.trainer = train(TRAINER, rings, spool)
        assert self.trainer.says() == "ready"
        self.client = MailboxClient(rings / "rank-2.0.mailbox")
        self.reader = Ring(rings / "rank-2.0.ring")

    def does(self, what: str) -> None:
        self.trainer.hears(what)
        assert self.trainer.says() == "done"

    def captures(self, request: CaptureRequest) -> CaptureResult:
        self.client.post(request)
        self.does(f"steps {request.warmup_steps + request.steps + 2}")
        return self.result()

    def result(self):
        result = wait_until(self.client.poll)
        wait_until(lambda: self.client.progress().state == "idle")
        return result


@pytest.fixture
def spool(tmp_path):
    directory = tmp_path / "spool"
    directory.mkdir(mode=0o700)
    return directory


@pytest.fixture
def job(train, rings, spool):
    made = Job(train, rings, spool)
    yield made
    made.client.close()
    made.reader.close()


def names(path: Path) -> list[str]:
    return [event["name"] for event in json.loads(path.read_text())["traceEvents"] if "name" in event]


def steps_in(path: Path) -> list[int]:
    return sorted(int(name.partition("#")[2]) for name in names(path) if name.startswith("ProfilerStep#"))


def test_a_trace_holds_exactly_the_promised_steps_and_its_rank(job, spool):
    # GIVEN a job at step 1005 that is not torch.distributed WHEN three steps are asked for after two of warm-up
    job.does("steps 5")
    result = job.captures(REQUEST)
    job.does("steps 3")
    # THEN there is one trace, of valid JSON
    assert (result.state, result.detail, result.first_step, result.last_step) == ("stored", "", 1008, 1010)
    (path,) = spool.iterdir()
    assert (path.name, path.stat().st_size) == ("cap-1.json", result.size_bytes)
    assert path.stat().st_mode & 0o777 == 0o600
    trace = json.loads(path.read_text())
    # AND in it are these steps and no others, with their stages
    found = names(path)
    assert steps_in(path) == [1008, 1009, 1010]
    for stage in ("data", "forward", "backward", "optimizer"):
        assert found.count(f"sftriage:{stage}") == 3
    assert any(name.startswith("aten::") for name in found)
    # AND whose it is, though the job's name would have broken the JSON
    assert (trace["distributedInfo"]["rank"], trace["distributedInfo"]["world_size"]) == (2, 4)
    assert trace["sftriage.capture_id"] == "cap-1"
    assert (trace["sftriage.first_step"], trace["sftriage.last_step"]) == ("1008", "1010")
    assert trace["sftriage.job"] == "a_b_c"
    # AND what it cost, and when it was
    assert set(result.timings_s) == {"import", "prepare", "start", "run", "stop", "export"}
    assert all(seconds >= 0 for seconds in result.timings_s.values())
    # AND each step is where the ring has it, once the clocks of the result have moved it from wall time to the
    # monotonic clock, within the profiler's own slowness
    offset_ns = result.clock["mono_ns"] - result.clock["wall_ns"] + int(trace["baseTimeNanoseconds"])
    # AND the ring says which steps were touched, and that training went on
    records = {record.step: record for record in new_records(job.reader)}
    for event in trace["traceEvents"]:
        if event.get("name", "").startswith("ProfilerStep#"):
            record = records[int(event["name"].partition("#")[2])]
            assert abs(int(event["ts"] * 1000) + offset_ns - record.start_ns) < 20_000_000
    assert [step for step in range(1000, 1008) if records[step].capturing] == [1006, 1007]
    assert all(records[step].capturing for step in range(1008, 1012))
    assert sorted(records) == list(range(1000, 1016))
    assert not records[1015].capturing


def test_a_second_capture_works_after_the_first_and_options_reach_the_profiler(job, spool):
    assert job.captures(REQUEST).state == "stored"
    second = CaptureRequest("cap-2", 2, "torch", 1, 0, 60.0, 50_000_000, {"record_shapes": True})
    result = job.captures(second)
    assert (result.state, result.first_step) == ("stored", result.last_step)
    assert len(steps_in(spool / "cap-2.json")) == 1
    assert "Input Dims" in (spool / "cap-2.json").read_text()
    assert "Input Dims" not in (spool / "cap-1.json").read_text()


@pytest.mark.parametrize("phase", ["warmup", "recording"])
def test_the_jobs_own_profiler_is_respected(job, spool, tmp_path, phase):
    # GIVEN a job with a profiler of its own, in its warm-up or recording
    active = "wait=0, warmup=100, active=1" if phase == "warmup" else "wait=0, warmup=0, active=100"
    job.does(f"own = torch.profiler.profile(schedule=torch.profiler.schedule({active})); own.start()")
    # WHEN a capture is asked for THEN it is refused
    result = job.captures(REQUEST)
    assert (result.state, result.detail) == ("refused", "a profiler is already running in this process")
    # AND theirs goes on, and once it has stopped there can be captures again
    job.does("own.stop()")
    if phase == "recording":
        job.does(f"own.export_chrome_trace({str(tmp_path / 'own.json')!r})")
        assert "aten::linear" in names(tmp_path / "own.json")
    assert job.captures(SECOND).state == "stored"


@pytest.mark.parametrize("warmup", [0, 90])
def test_a_capture_makes_way_when_the_job_starts_its_own_profiler(job, spool, tmp_path, warmup):
    # GIVEN a capture that is recording, or still warming up
    job.client.post(CaptureRequest("cap-1", 2, "torch", 90, warmup, 60.0, 50_000_000))
    job.does("steps 3")
    assert job.client.progress().state == ("armed" if warmup else "recording")
    # WHEN the job starts its own THEN ours has failed, and theirs records what it should
    job.does("own = torch.profiler.profile(); own.start()")
    result = job.result()
    assert (result.state, result.detail) == ("failed", "the job started a profiler of its own")
    job.does("steps 2")
    job.does(f"own.stop(); own.export_chrome_trace({str(tmp_path / 'own.json')!r})")
    own = names(tmp_path / "own.json")
    assert own.count("aten::linear") == 2
    # AND nothing of ours is in it, or left in the spool
    assert not [name for name in own if name.startswith("sftriage:")]
    assert "sftriage." not in (tmp_path / "own.json").read_text()
    assert list(spool.iterdir()) == []


def test_a_profiler_that_was_only_prepared_is_stopped_without_an_error(job):
    # GIVEN a session that is called off in its warm-up, and one that is stopped twice THEN torch makes no complaint
    job.does("from sftriage.trainer.session import GUARD, TorchSession")
    for _ in range(2):
        job.does("s = TorchSession(monitor.info, {}, GUARD); s.prepare(); train(); s.stop(); s.stop()")
    assert job.captures(REQUEST).state == "stored"


def test_a_step_that_was_left_half_way_does_not_upset_the_marks_of_the_next(job, spool):
    # GIVEN a captured step that is never left, in the middle of a stage, as with callbacks
    job.client.post(CaptureRequest("cap-1", 2, "torch", 3, 0, 60.0, 50_000_000))
    job.does("monitor.step().__enter__(); monitor.stage('forward').__enter__()")
    job.does("steps 3")
    # THEN it is one of the captured steps, and the two after it have their own marks
    assert job.result().state == "stored"
    found = names(spool / "cap-1.json")
    assert len(steps_in(spool / "cap-1.json")) == 3
    assert (found.count("sftriage:forward"), found.count("sftriage:data")) == (3, 2)


def test_a_capture_of_many_steps_records_those_that_fit(job, spool):
    # GIVEN bytes for about a dozen steps of this job, and a capture of a hundred
    one = job.captures(CaptureRequest("cap-1", 2, "torch", 4, 1, 60.0, 50_000_000))
    room = 3 * one.size_bytes
    job.captures(CaptureRequest("cap-2", 2, "torch", 1, 1, 60.0, 50_000_000, {"record_shapes": True}))
    # WHEN it is captured, with the size of a step known from before
    result = job.captures(CaptureRequest("cap-3", 2, "torch", 100, 1, 60.0, room))
    # THEN the trace is whole, within its bytes, and says that it has fewer steps, and why
    assert (result.state, result.size_bytes <= room) == ("stored", True)
    steps = len(steps_in(spool / "cap-3.json"))
    assert result.detail == f"{steps} of 100 steps: more would not fit into {room} bytes"
    assert 6 <= steps <= 12


OPERATORS = """
def operators():
    x = torch.ones(4)
    for _ in range(400):
        x = x + 1
monitor_step = train
def train(number=None):
    operators()
    with monitor.step(number), monitor.stage("forward"):
        operators()
"""


@pytest.mark.parametrize(("steps", "options"), [(200, {}), (9, {"with_stack": True, "record_shapes": True})])
def test_a_capture_of_many_operators_is_cut_before_it_holds_up_the_rank(job, spool, steps, options):
    # GIVEN steps of 400 operators, and a bound that not even two of them keep
    job.does(f"exec({OPERATORS!r}, globals())")
    job.does("from sftriage.trainer import session; session.MAX_STALL_S = 1e-6")
    # WHEN more are asked for
    result = job.captures(CaptureRequest("cap-1", 2, "torch", steps, 1, 60.0, 500_000_000, options))
    # THEN the trace has one, and says why
    assert (result.state, result.first_step) == ("stored", result.last_step)
    assert result.detail == f"1 of {steps} steps: more would hold the rank up for over 1e-06 s"
    found = names(spool / "cap-1.json")
    assert (found.count("aten::add"), result.timings_s["probe"] > 0.0) == (400, True)
    # AND with a bound that they keep, all are recorded
    job.does("session.MAX_STALL_S = 1e6")
    result = job.captures(CaptureRequest("cap-2", 2, "torch", 9, 1, 60.0, 500_000_000, options))
    assert (result.detail, result.last_step - result.first_step) == ("", 8)


def test_a_capture_imports_nothing_beyond_torch_into_a_job(train, rings, spool):
    # GIVEN a job that has not imported dynamo or inductor, which torch's own profiler does when it is first prepared
    trainer = train(BARE, rings, spool, anew=True)
    assert trainer.says() == "ready: False"
    client = MailboxClient(rings / "rank-0.0.mailbox")
    client.post(CaptureRequest("cap-1", 0, "torch", 20, 1, 60.0, 50_000_000))
    # WHEN it is captured, with a step beforehand
    trainer.hears("go")
    imported = trainer.says()
    # THEN no module of torch has come into the process, other than of its profiler itself
    assert imported == "imported: []"
    wait_until(lambda: (spool / "cap-1.json").exists())
    assert names(spool / "cap-1.json").count("aten::add") == 20
    client.close()


BARE = """
    import sys, torch
    from sftriage import Monitor
    monitor = Monitor(rings=sys.argv[1], spool=sys.argv[2], rank=0, world_size=1)
    def train():
        with monitor.step(), monitor.stage("forward"):
            torch.ones(3) + 1
    train()
    print("ready:", "torch._inductor" in sys.modules, flush=True)
    sys.stdin.readline()
    before = set(sys.modules)
    for _ in range(25):
        train()
    new = [name for name in set(sys.modules) - before if name.startswith("torch.")]
    print("imported:", sorted(name for name in new if not name.startswith("torch.profiler.")), flush=True)
    sys.stdin.readline()
"""


ENDS_EXPORTS = "import threading; [each.join() for each in threading.enumerate() if each.name == 'sftriage-export']"
EVERYTHING = {"record_shapes": True, "profile_memory": True, "with_stack": True}
SETTLED, IN_A_ROW, MOST_GROWTH_KIB = 5, 20, 1024
"""The first captures fill caches, 1.4 MiB of them. The 20 after these grew the process by 0.1 MiB at the most."""


@pytest.mark.parametrize("options", [{}, EVERYTHING], ids=["plain", "everything"])
def test_twenty_captures_in_a_row_leave_memory_threads_and_files_as_they_were(job, spool, options):
    proc = Path(f"/proc/{job.trainer.process.pid}")

    def capture(number: int) -> int:
        asked = CaptureRequest(f"cap-{number}", 2, "torch", 20, 1, 60.0, 50_000_000, options)
        result = job.captures(asked)
        assert (result.state, result.last_step - result.first_step) == ("stored", 19), result
        (spool / f"cap-{number}.json").unlink()
        return result.size_bytes

    def status(name: str) -> int:
        lines = (proc / "status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))

    def files() -> int:
        return len(list((proc / "fd").iterdir()))

    # GIVEN a trainer that has been captured some times
    for number in range(SETTLED):
        capture(number)
    job.does(ENDS_EXPORTS)
    threads, opened, resident_kib = status("Threads"), files(), status("VmRSS")
    # WHEN it is captured twenty times in a row
    sizes = [capture(SETTLED + number) for number in range(IN_A_ROW)]
    # THEN it has no more threads and open files than before, once the last export is over
    job.does(ENDS_EXPORTS)
    wait_until(lambda: status("Threads") <= threads)
    assert files() == opened
    # AND it has not grown by what these traces hold
    assert status("VmRSS") - resident_kib < MOST_GROWTH_KIB < sum(sizes) / 1024 / 2


def test_a_training_that_ends_keeps_the_steps_it_has(job, spool):
    # GIVEN a capture of more steps than are left
    job.client.post(CaptureRequest("cap-1", 2, "torch", 50, 1, 60.0, 50_000_000))
    # (one step beforehand, one to warm up, and three)
    job.does("steps 5")
    # WHEN the script simply ends
    job.trainer.process.stdin.close()
    assert job.trainer.ends() == 0
    # THEN the trace of the steps that there were is whole
    result = job.result()
    assert (result.state, result.detail) == ("stored", "training ended after 3 of 50 steps")
    assert len(steps_in(spool / "cap-1.json")) == 3


def test_under_torch_distributed_the_trace_has_torchs_own_ranks(job, spool):
    # GIVEN a job of one rank that has initialised torch.distributed
    store = "torch.distributed.HashStore()"
    job.does(f"torch.distributed.init_process_group('gloo', store={store}, rank=0, world_size=1)")
    assert job.captures(REQUEST).state == "stored"
    # THEN what torch writes itself is left as it is
    info = json.loads((spool / "cap-1.json").read_text())["distributedInfo"]
    assert (info["backend"], info["rank"], info["world_size"]) == ("gloo", 0, 1)


def test_a_fork_during_a_capture_keeps_the_capture(job, spool):
    # GIVEN a capture under way, and a child forked there that takes steps of its own
    job.client.post(REQUEST)
    job.does("steps 3")
    job.does(
        "import os; pid = os.fork(); pid or (train(), os._exit(0)); exit = os.waitpid(pid, 0)[1]; assert exit == 0"
    )
    job.does("steps 4")
    # THEN the parent's capture is what it would have been
    assert job.result().state == "stored"
    assert len(steps_in(spool / "cap-1.json")) == 3
