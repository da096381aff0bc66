"""Rings between real processes: killed writers, forked children, readers at full speed, and system calls."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import textwrap

import pytest

from sftriage.trainer import moments
from sftriage.trainer.layout import find_rings
from sftriage.trainer.monitor import Monitor
from sftriage.windows.rings import Ring
from tests import needs
from tests.disks import small_disk
from tests.integration.namespaces import printed_elsewhere
from tests.integration.processes import wait_until

TRAIN_FOR_EVER = """
    import sys
    from sftriage import Monitor
    monitor = Monitor(rings=sys.argv[1], slots=int(sys.argv[2]))
    print("ready", flush=True)
    while True:
        with monitor.step():
            for name in ("data", "forward", "backward", "optimizer"):
                with monitor.stage(name):
                    pass
"""


def test_the_steps_of_a_killed_trainer_are_readable(train, rings):
    # GIVEN a trainer that is killed in the middle of a stage
    trainer = train(
        """
        import sys
        from sftriage import Monitor
        monitor = Monitor(rings=sys.argv[1])
        for _ in range(100):
            with monitor.step():
                with monitor.stage("forward"):
                    pass
        with monitor.step():
            with monitor.stage("backward"):
                print("in backward", flush=True)
                sys.stdin.readline()
        """,
        rings,
    )
    assert trainer.says() == "in backward"
    with Ring(rings / "rank-0.0.ring") as reader:
        status = reader.status()
        assert (status.alive, status.stage, status.step, status.published) == (True, "backward", 100, 100)
        assert 0 <= status.stage_age_ns <= status.step_age_ns
        trainer.process.kill()
        trainer.ends()
        # THEN from outside one sees that it is gone, where it was, and every step that it had published
        status = reader.status()
        assert (status.alive, status.closed, status.stage, status.step) == (False, False, "backward", 100)
        batch = reader.read()
        assert [record.step for record in batch.steps.records()] == list(range(100))
        assert (batch.missed, batch.torn) == (0, 0)
    # AND the rank starts again beside it, as the next attempt
    with Monitor(rings=rings) as monitor:
        assert monitor.info is not None
        assert monitor.info.attempt == 1


@pytest.mark.parametrize("slots", [3, 4096])
def test_a_reader_at_full_speed_loses_no_step_uncounted(train, rings, slots):
    # GIVEN a trainer that does nothing but steps, in a small ring or a large one, and a reader without a pause
    trainer = train(TRAIN_FOR_EVER, rings, slots)
    trainer.says()
    with Ring(rings / "rank-0.0.ring") as reader:
        read = missed = torn = 0
        expected = 0

        def look() -> None:
            nonlocal read, missed, torn, expected
            batch = reader.read()
            for record in batch.steps.records():
                # THEN steps come in order, each once, whole
                assert record.step >= expected
                assert len(record.durations_ns) == 5
                assert record.complete
                expected = record.step + 1
            read += len(batch.steps)
            missed += batch.missed
            torn += batch.torn

        while read < 10_000 and missed < 100_000:
            look()
            assert trainer.process.poll() is None
        # AND a status taken at any moment makes sense
        stages = {reader.status().stage for _ in range(200)}
        assert stages <= {None, "data", "forward", "backward", "optimizer", "other"}
        # AND when the trainer is stopped, every step that it published has been read, or is counted as lost
        trainer.process.send_signal(signal.SIGSTOP)
        look()
        look()
        assert read + missed + torn == reader.status().published
        assert torn == 0
        assert read > 0
        trainer.process.send_signal(signal.SIGCONT)


STEADY = """
    import os, sys
    from sftriage import Monitor
    monitor = Monitor(rings=sys.argv[1])
    def steps(count):
        for number in range(count):
            with monitor.step(kind=("", "train")[number % 2], work=number) if number % 3 else monitor.step():
                monitor.note(work=number + 1)
                for name in ("data", "forward", "backward", "optimizer"):
                    with monitor.stage(name):
                        sum(range(50))
    def mark(name):
        try:
            os.stat(name)
        except FileNotFoundError:
            pass
    def waits_on_its_pipe(thread):
        with open(f"/proc/self/task/{thread}/wchan") as file:
            return "pipe" in file.read()
    while not any(map(waits_on_its_pipe, os.listdir("/proc/self/task"))):
        pass
    steps(5000)
    mark("/sftriage-mark-begin")
    steps(1000)
    mark("/sftriage-mark-end")
    os.getppid()
"""


@needs.strace
def test_a_steady_step_makes_no_system_call(rings, tmp_path):
    # GIVEN a trainer under strace, past its first turn of the ring and its answering thread's start
    strace = shutil.which("strace")
    output = tmp_path / "strace.txt"
    probe = subprocess.run([strace, "-o", output, "true"], capture_output=True, timeout=60)
    if probe.returncode:
        pytest.skip(f"strace may not trace here: {probe.stderr.decode().strip()}")
    subprocess.run(
        [strace, "-f", "-o", output, sys.executable, "-c", textwrap.dedent(STEADY), rings], check=True, timeout=120
    )
    calls = [re.sub(r"^\d+ +", "", line) for line in output.read_text().splitlines()]
    begin = next(index for index, call in enumerate(calls) if "/sftriage-mark-begin" in call)
    end = next(index for index, call in enumerate(calls) if "/sftriage-mark-end" in call)
    # THEN a thousand steps lie between the two marks, and nothing else
    assert calls[begin + 1 : end] == []
    # AND the trace does see a call where there is one
    assert any(call.startswith("getppid") for call in calls[end:])


def test_a_file_system_that_fills_while_a_rank_records_costs_it_nothing(train, tmp_path):
    # GIVEN a rank that has begun to record, and has not touched most of its ring
    with small_disk(tmp_path / "small", "4m") as small:
        trainer = train(
            """
            import sys
            from sftriage import Monitor
            monitor = Monitor(rings=sys.argv[1], slots=256)
            for n in range(2000):
                if n == 1:
                    print("begun", flush=True)
                    sys.stdin.readline()
                with monitor.step(), monitor.stage("forward"):
                    pass
            print(monitor.active, flush=True)
            sys.stdin.readline()
            """,
            small.path,
        )
        assert trainer.says() == "begun"
        # WHEN others take all the room there is, down to the last page
        small.fill()
        trainer.process.stdin.write(b"\n")
        trainer.process.stdin.flush()
        # THEN it goes on, and what it records can be read
        assert trainer.says() == "True"
        with Ring(small.path / "rank-0.0.ring") as reader:
            assert reader.status().published == 2000
            assert reader.read().steps.step_B[-1] == 1999


def test_a_living_writer_shows_in_another_pid_namespace(train, rings):
    # GIVEN a trainer, and a reader to which its process id says nothing
    trainer = train(TRAIN_FOR_EVER, rings, 64)
    trainer.says()
    code = "import sys; from sftriage.windows.rings import Ring; print(Ring(sys.argv[1]).writer_alive)"
    # THEN it is seen to live, and to be gone once it was killed
    assert printed_elsewhere(code, rings / "rank-0.0.ring") == "True\n"
    trainer.process.kill()
    trainer.ends()
    assert printed_elsewhere(code, rings / "rank-0.0.ring") == "False\n"


OF_TWO = """
    import sys
    import torch.distributed as dist
    import sftriage
    dist.init_process_group("gloo", init_method="file://" + sys.argv[2], rank=int(sys.argv[3]), world_size=2)
    with sftriage.Monitor(rings=sys.argv[1]) as monitor:
        with monitor.step(), monitor.stage("data"):
            pass
    dist.barrier()
    dist.destroy_process_group()
"""


def test_each_process_of_a_job_without_torchrun_records_as_its_rank(train, rings, tmp_path):
    # GIVEN two processes that find each other by a file: they know who they are by torch.distributed alone
    trainers = [train(OF_TWO, rings, tmp_path / "meeting", rank) for rank in range(2)]
    assert [trainer.ends() for trainer in trainers] == [0, 0]
    # THEN each has a ring of its own, of a job of two
    found = []
    for path in find_rings(rings):
        with Ring(path) as ring:
            found.append((ring.info.rank, ring.info.world_size, len(ring.read().steps)))
    assert found == [(0, 2, 1), (1, 2, 1)]


TRAINER = """
    import multiprocessing, os, subprocess, sys
    rings, form, made = sys.argv[1:]
    os.environ |= {"SFTRIAGE_RINGS": rings, "SFTRIAGE_RECORDER": form}
    held = {}
    # (before any hook of the recorder's: what it drops is finalized in the child while that is the parent's still)
    os.register_at_fork(after_in_child=held.clear)
    import torch
    from sftriage.trainer.seams import patches

    net = torch.nn.Linear(8, 8)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    if made == "auto":
        patches.imported("torch")

    class Samples(torch.utils.data.Dataset):
        def __len__(self):
            return 4

        def __getitem__(self, index):
            return torch.ones(8)

    loader = torch.utils.data.DataLoader(Samples(), num_workers=1, multiprocessing_context="fork")

    def train():
        for batch in loader:
            net(batch).sum().backward()
            optimizer.step()

    def forked(act):
        child = os.fork()
        if not child:
            held.clear()
            act()
            sys.exit()
        assert os.waitpid(child, 0)[1] == 0

    def in_a_process():
        process = multiprocessing.get_context("fork").Process(target=train_alone)
        process.start()
        process.join()
        assert process.exitcode == 0

    def train_alone(steps=4):
        for _ in range(steps):
            net(torch.ones(1, 8)).sum().backward()
            optimizer.step()

    shapes = {
        "two epochs of workers": lambda: [train(), train()],
        "exit": lambda: forked(lambda: None),
        "_exit": lambda: forked(lambda: os._exit(0)),
        "train": lambda: forked(train_alone),
        "process": in_a_process,
        "preexec": lambda: subprocess.run(["true"], check=True, preexec_fn=held.clear),
    }
    if made == "by hand":
        from sftriage import Monitor
        held["monitor"] = Monitor()
        with held["monitor"].step():
            pass
    else:
        train_alone(30)
    assert sys.modules["sftriage.trainer.moments"].FORM.name.lower() == form
    print(flush=True)
    for name in iter(input, ""):
        shapes[name]()
        print(flush=True)
"""


@pytest.mark.parametrize("made", ["auto", "by hand"])
@pytest.mark.parametrize("form", ["c", "python"])
def test_a_child_changes_nothing_of_its_parents(train, rings, form, made):
    # GIVEN a trainer that is recorded
    if form == "c" and moments.FORM.name != "C":
        pytest.skip(moments.WHY_NOT_C)
    trainer = train(TRAINER, rings, form, made)
    trainer.says()
    there = sorted(path.name for path in rings.iterdir())
    assert "rank-0.0.asks" in there
    asks, answer = rings / "rank-0.0.asks", rings / "rank-0.0.stacks"
    with Ring(rings / "rank-0.0.ring") as ring:
        for shape in ("exit", "_exit", "two epochs of workers", "process", "preexec", "train", "exit"):
            # WHEN it forks
            before = ring.status().published
            trainer.hears(shape)
            trainer.says()
            # THEN every file is there, the ring is open, and holds no step of the child's
            assert set(there) <= {path.name for path in rings.iterdir()}
            status = ring.status()
            assert (status.closed, status.alive) == (False, True)
            assert status.published - before == (8 if (shape, made) == ("two epochs of workers", "auto") else 0)
            # AND the trainer still says where it stands
            descriptor = os.open(asks, os.O_WRONLY | os.O_NONBLOCK)
            os.write(descriptor, f"{before}-{shape}\n".encode())
            os.close(descriptor)
            wait_until(
                lambda said=f"{before}-{shape}": answer.exists() and json.loads(answer.read_text())["asked"] == said
            )
            answer.unlink()
        trainer.hears("")
        assert trainer.ends() == 0
        assert ring.status().closed
    assert not (rings / "rank-0.0.asks").exists()
