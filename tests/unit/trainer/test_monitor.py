"""Making a monitor: whose it is, where it records, and when it does not."""

import contextlib
import os
import resource
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from sftriage.agent.executor import MailboxClient
from sftriage.errors import SchemaError, UsageError
from sftriage.trainer import recording
from sftriage.trainer.layout import RingFile
from sftriage.trainer.monitor import Monitor
from sftriage.windows.rings import Ring

SELECT_TAKES = 1024
"""Descriptors below this are what select() takes."""

TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "TORCHELASTIC_RUN_ID": "run-1",
    "TORCHELASTIC_RESTART_COUNT": "2",
}


def use(monitor: Monitor) -> None:
    with monitor.step(), monitor.stage("data"):
        pass


def test_torchruns_environment_identifies_the_rank(tmp_path, monkeypatch):
    # GIVEN torchrun's environment, and a directory for rings in it
    for name, value in (TORCHRUN | {"SFTRIAGE_RINGS": str(tmp_path)}).items():
        monkeypatch.setenv(name, value)
    with Monitor() as monitor:
        use(monitor)
        # THEN its ring and mailbox are there, and say so
        with Ring(tmp_path / "rank-5.2.ring") as ring, MailboxClient(tmp_path / "rank-5.2.mailbox") as mailbox:
            info = ring.info
            assert (info.rank, info.world_size, info.local_rank, info.attempt) == (5, 8, 1, 2)
            assert (info.job, info.host, info.cohort, info.pid) == ("run-1", os.uname().nodename, "", os.getpid())
            assert info.schema.stages == ("data", "forward", "backward", "optimizer", "other")
            assert info.schema.sync == ("backward",)
            assert mailbox.info == info == monitor.info
            assert len(ring.read().steps) == 1


def distributed(*, initialised=True, rank=3, ranks=4):
    """What a job has of torch.distributed."""
    return SimpleNamespace(
        is_available=lambda: True,
        is_initialized=lambda: initialised,
        get_rank=lambda: int(rank),
        get_world_size=lambda: ranks,
    )


OPEN_MPI = {"OMPI_COMM_WORLD_RANK": "5", "OMPI_COMM_WORLD_SIZE": "8", "OMPI_COMM_WORLD_LOCAL_RANK": "1"}
SLURM = {"SLURM_PROCID": "2", "SLURM_STEP_NUM_TASKS": "4", "SLURM_LOCALID": "0"}


ALONE = {"rank": 0, "world_size": 1, "local_rank": 0}
TWO = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1"}
NAMED = {"SFTRIAGE_HOST": "node-3", "SFTRIAGE_COHORT": "pp0"}
BY_HAND = {"rank": 1, "world_size": 2, "local_rank": 0, "host": "h", "cohort": "c"}


def at(rank: int, world_size: int, local_rank: int) -> dict[str, int]:
    return {"rank": rank, "world_size": world_size, "local_rank": local_rank}


# What the environment says, what torch has, and the arguments; whom that is.
WHO = {
    "srun": (SLURM, None, {}, at(2, 4, 0)),
    "Open MPI": (OPEN_MPI, None, {}, at(5, 8, 1)),
    "MPICH": ({"PMI_RANK": "3", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1"}, None, {}, at(3, 4, 1)),
    "no local rank": ({"PMI_RANK": "3", "PMI_SIZE": "4"}, None, {}, at(3, 4, 0)),
    "mpirun starts a daemon a node by srun": (SLURM | OPEN_MPI, None, {}, at(5, 8, 1)),
    "srun starts torchrun": (SLURM | TWO, None, {}, at(1, 2, 1)),
    "torch goes before SLURM": (SLURM, distributed(), {}, at(3, 4, 0)),
    "a batch script is no task": ({"SLURM_PROCID": "0", "SLURM_NTASKS": "4", "SLURM_LOCALID": "0"}, None, {}, ALONE),
    "torch alone": ({}, distributed(), {}, at(3, 4, 0)),
    "torchrun goes before torch": (TWO, distributed(), {}, at(1, 2, 1)),
    "a size alone says no rank": ({"WORLD_SIZE": "4"}, distributed(), {}, at(3, 4, 0)),
    "torch is not initialised": ({}, distributed(initialised=False), {}, ALONE),
    "torch is broken": ({}, distributed(rank=None), {}, ALONE),
    "arguments go first": (TORCHRUN | NAMED | {"SFTRIAGE_JOB": "mine"}, None, BY_HAND, BY_HAND | {"job": "mine"}),
    "names": (NAMED, None, {}, {"host": "node-3", "cohort": "pp0"}),
    "an empty argument": (NAMED, None, {"cohort": ""}, {"host": "node-3", "cohort": ""}),
    "empty variables": (dict.fromkeys(NAMED, ""), None, {}, {"host": os.uname().nodename, "cohort": ""}),
    "too long": (
        {"SFTRIAGE_HOST": "n" * 300, "SFTRIAGE_COHORT": "a\nb"},
        None,
        {},
        {"host": "n" * 255, "cohort": "a?b"},
    ),
}


@pytest.mark.parametrize(("environment", "found", "arguments", "who"), WHO.values(), ids=WHO)
def test_arguments_identify_the_rank_then_torchrun_torch_mpi_and_slurm(
    tmp_path, monkeypatch, environment, found, arguments, who
):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setitem(sys.modules, "torch.distributed", found)
    with Monitor(rings=tmp_path, **arguments) as monitor:
        assert {name: getattr(monitor.info, name) for name in who} == who


@pytest.mark.parametrize(
    ("stages", "sync"),
    [
        ({}, ("backward",)),
        ({"stages": ["data", "backward"]}, ("backward",)),
        ({"stages": ("data", "forward")}, ()),
        ({"stages": iter(("work", "other"))}, ()),
        ({"sync": ()}, ()),
        ({"stages": ("fwd",), "sync": ("fwd",)}, ("fwd",)),
    ],
)
def test_backward_is_the_default_sync_stage_if_declared(tmp_path, stages, sync):
    with Monitor(**stages, rings=tmp_path) as monitor:
        assert monitor.info.schema.sync == sync


@pytest.mark.parametrize(
    ("error", "settings"),
    [
        *((SchemaError, {"stages": stages}) for stages in (("",), ("a", "a"), "data")),
        *((SchemaError, {"sync": sync}) for sync in ("backward", ("nowhere",))),
        *((UsageError, {"rank": rank}) for rank in (-1, "0", True, 1)),
        *((UsageError, {"slots": slots}) for slots in (0, 1 << 21, 8.0)),
        (UsageError, {"rank": 4, "world_size": 4}),
        (UsageError, {"host": 7}),
    ],
)
def test_wrong_arguments_raise_in_an_inert_monitor_too(settings, error):
    with pytest.raises(error):
        Monitor(**settings)


@pytest.mark.parametrize(
    ("environment", "directory"),
    [
        *(({"RANK": rank}, ".") for rank in ("abc", "-1", "1_0", "")),
        ({"RANK": "3", "WORLD_SIZE": "2"}, "."),
        ({}, "missing"),
    ],
)
def test_an_invalid_environment_is_one_warning_and_an_inert_monitor(
    tmp_path, monkeypatch, caplog, environment, directory
):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monitor = Monitor(rings=tmp_path / directory)
    use(monitor)
    use(monitor)
    assert (len(caplog.records), monitor.active, list(tmp_path.iterdir())) == (1, False, [])
    assert next(iter(environment), directory) in caplog.text or "rank 3 of a world of 2" in caplog.text


def test_without_a_directory_nothing_is_written_or_logged(tmp_path, monkeypatch, caplog):
    monkeypatch.chdir(tmp_path)
    monitor = Monitor()
    use(monitor)
    with monitor.step(5), monitor.stage("unknown"), monitor.stage(["unhashable"]):
        pass
    monitor.close()
    assert (monitor.info, monitor.active, caplog.records, list(tmp_path.iterdir())) == (None, False, [], [])


@pytest.mark.parametrize("full_at", [".ring", ".mailbox"])
def test_a_full_disk_is_one_warning_and_leaves_nothing_behind(tmp_path, caplog, monkeypatch, full_at):
    # GIVEN a disk without room for the ring, or for the mailbox after it
    real = os.posix_fallocate

    def nearly_full(descriptor: int, offset: int, size: int) -> None:
        if full_at in Path(f"/proc/self/fd/{descriptor}").readlink().name:
            raise OSError(28, "No space left on device")
        real(descriptor, offset, size)

    monkeypatch.setattr(os, "posix_fallocate", nearly_full)
    monitor = Monitor(rings=tmp_path)
    # THEN nobody waits for a rank that does not record
    assert (len(caplog.records), monitor.active) == (1, False)
    assert list(tmp_path.iterdir()) == []


def test_a_rank_is_recorded_by_one_monitor_at_a_time(tmp_path, caplog):
    first = Monitor(rings=tmp_path, rank=3, world_size=4)
    # WHEN another one is made for the same rank THEN it is inert, and says why
    second = Monitor(rings=tmp_path, rank=3, world_size=4)
    assert not second.active
    assert [row.getMessage().split(": ")[-1] for row in caplog.records] == ["another monitor already records rank 3"]
    # AND once the first is closed the next one is another attempt
    first.close()
    third = Monitor(rings=tmp_path, rank=3, world_size=4)
    assert third.info.attempt == 1
    third.close()


def test_the_ring_of_a_dead_or_unknown_writer_is_left_alone(tmp_path, make_info):
    # GIVEN a ring whose writer died without closing it, and a file of that name that is no ring
    dead = RingFile(tmp_path, make_info(rank=0), 4)
    dead.close()
    (tmp_path / "rank-0.1.ring").write_bytes(b"mine")
    before = dead.path.read_bytes()
    # WHEN the rank starts again THEN it takes the next attempt that is free
    with Monitor(rings=tmp_path) as monitor:
        # (without an environment it is rank 0 of 1)
        assert (monitor.info.rank, monitor.info.world_size, monitor.info.job) == (0, 1, "")
        assert monitor.info.attempt == 2
    assert dead.path.read_bytes() == before
    assert (tmp_path / "rank-0.1.ring").read_bytes() == b"mine"


def test_importing_the_recorder_needs_only_the_standard_library():
    # GIVEN an interpreter without site-packages WHEN it imports and uses the recorder
    root = str(Path(__file__).parents[3])
    script = (
        f"import sys; sys.path.insert(0, {root!r})\n"
        "import sftriage, sftriage.trainer\n"
        "with sftriage.Monitor().step(): pass\n"
        "known = sys.stdlib_module_names | {'sftriage', '__main__'}\n"
        "print(sorted({name.partition('.')[0] for name in sys.modules} - known))"
    )
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", script], check=True, timeout=60, capture_output=True, text=True
    )
    # THEN nothing from elsewhere is loaded
    assert done.stdout.strip() == "[]"


def test_a_trainer_with_thousands_of_open_files_closes_as_any_other(tmp_path, caplog):
    # GIVEN a process with more open files than select() takes (data loader workers hand tensors over as such)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < 2 * SELECT_TAKES:
        pytest.skip(f"this process may have no more than {hard} open files")
    resource.setrlimit(resource.RLIMIT_NOFILE, (2 * SELECT_TAKES, hard))
    try:
        with contextlib.ExitStack() as opened:
            for _ in range(SELECT_TAKES):
                opened.enter_context(Path(os.devnull).open())
            before = set(threading.enumerate())
            monitor = Monitor(rings=tmp_path)
            (answering,) = set(threading.enumerate()) - before
            with monitor.step():
                pass
            # WHEN it closes
            monitor.close()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    # THEN there is nothing to say, and the thread that answers ends
    assert not caplog.records
    answering.join(10)
    assert not answering.is_alive()


@pytest.mark.usefixtures("form")
def test_a_recording_does_not_outlive_its_monitor(tmp_path):
    # GIVEN twenty monitors, one after another THEN none is kept (the fork hook and the finalizer know them all)
    before = len(recording._recordings)
    for _ in range(20):
        Monitor(rings=tmp_path, slots=1).close()
    assert len(recording._recordings) <= before + 1
