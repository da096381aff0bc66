"""Where an absent rank is: facts of the kernel and of Python first, then frames, then the text of the line."""

import pytest

from sftriage.model.hangs import INTERPRETER, SourceLine, ThreadEvidence, Wait, WorkerEvidence
from sftriage.verdict.blocked import blocked_of

from .hang_cases import TORCH, library, line, rank, silent, thread

SITE = "/usr/lib/python3/site-packages"
LOADER = library("_try_get_data", f"{SITE}/torch/utils/data/dataloader.py")
WAIT, EVENT = library("wait", "python3/threading.py"), SourceLine("wait", "python3/threading.py", 600)
JOIN = library("join", "python3/threading.py")
POLL = library("_poll", "python3/multiprocessing/connection.py")
SYNCHRONIZE = "python3/multiprocessing/synchronize.py"
AT = "inside"


def place(source):
    return line("lookup", 48, source)


CASES = [
    # Facts
    ("file_lock", [place("")], {"syscall": "flock"}, ""),
    ("file_lock", [library("acquire", f"{SITE}/torch/serialization.py"), place("")], {"syscall": "fcntl"}, None),
    ("disk", [place("fsync(f)")], {"syscall": "fsync"}, ""),
    ("disk", [place("f.read()")], {"syscall": "read", "path": "/data/shard-7"}, ""),
    ("disk", [place("f.read()")], {"state": "D"}, ""),
    ("pipe", [place("f.read()")], {"syscall": "read", "path": "pipe:[4711]"}, ""),
    ("pipe", [place("open(path)")], {"syscall": "openat", "path": "/data/fifo", "wchan": "wait_for_partner"}, ""),
    ("pipe", [place("os.read(fd, 9)")], {"syscall": "read", "path": "/data/fifo", "wchan": "fifo_pipe_read"}, ""),
    ("pipe", [place("input()")], {"syscall": "read", "path": "standard input"}, ""),
    ("pipe", [place("s.recv(1)")], {"syscall": "recvfrom", "path": "unix:/run/cache.sock"}, ""),
    ("unknown", [place("f.read()")], {"syscall": "read", "path": "/dev/pts/3"}, ""),
    ("unknown", [place("f.read()")], {"syscall": "read", "path": "/data/shard-7", "state": "R"}, ""),
    ("disk", [place("os.stat(path)")], {"syscall": "newfstatat", "path": "/data/shard-7", "state": "S"}, ""),
    ("socket", [place("f.read()")], {"syscall": "read", "path": "socket:"}, ""),
    ("socket", [place("s.recv(1)  # with a timeout")], {"syscall": "poll", "path": "10.0.0.7:443"}, ""),
    ("socket", [POLL, place("")], {"syscall": "read", "path": "10.0.0.7:443"}, None),
    ("socket", [place("")], {"syscall": "recvfrom", "path": "10.0.0.7:443"}, ""),
    ("subprocess", [place("")], {"syscall": "wait4"}, ""),
    ("subprocess", [place("")], {"state": "D", "wchan": "kernel_clone"}, ""),
    ("stopped", [place("")], {"state": "D", "wchan": "__refrigerator"}, ""),
    ("stopped", [place("time.sleep(1)")], {"state": "T"}, ""),
    ("queue", [place("q.get()")], {"lock": "q", "syscall": "futex", "is_queue": True}, ""),
    ("lock", [WAIT, library("get", "python3/queue.py"), place("")], {"lock": INTERPRETER}, "wait of threading.py"),
    ("lock", [place("cache.get(key)")], {"lock": "self._lock", "syscall": "futex"}, ""),
    ("sleep", [place("pause()")], {"syscall": "clock_nanosleep"}, ""),
    ("sleep", [library("pause", f"{SITE}/tenacity/nap.py"), place("")], {"syscall": "clock_nanosleep"}, None),
    ("sleep", [library("sleep", f"{SITE}/urllib3/util/retry.py"), place("")], {"syscall": "clock_nanosleep"}, None),
    ("python", [place("n += 1")], {"cpu_fraction": 0.97, "state": "R"}, ""),
    (
        "native",
        [library("matmul", f"{SITE}/numpy/linalg.py"), place("")],
        {"cpu_fraction": 0.97},
        "matmul of linalg.py",
    ),
    # Frames
    ("queue", [WAIT, library("get", "python3/queue.py"), place("")], {"syscall": "futex"}, "get of queue.py"),
    ("queue", [POLL, library("get", "python3/multiprocessing/queues.py"), place("")], {}, "get of queues.py"),
    ("event", [WAIT, place("with condition: condition.wait()")], {"syscall": "futex"}, "wait of threading.py"),
    ("event", [WAIT, library("wait", SYNCHRONIZE), place("")], {"syscall": "futex"}, "wait of synchronize.py"),
    ("lock", [WAIT, library("acquire", "python3/threading.py"), place("")], {}, "acquire of threading.py"),
    ("lock", [library("__enter__", SYNCHRONIZE), place("")], {"syscall": "futex"}, "__enter__ of synchronize.py"),
    ("event", [WAIT, EVENT, place("")], {"syscall": "futex"}, "wait of threading.py"),
    ("thread", [JOIN, place("")], {}, "join of threading.py"),
    ("event", [WAIT, library("result", "python3/concurrent/futures/_base.py"), place("")], {}, "wait of threading.py"),
    ("thread", [JOIN, library("shutdown", "python3/concurrent/futures/thread.py"), place("")], {}, None),
    ("worker", [POLL, LOADER, place("")], {"syscall": "poll"}, "_try_get_data of dataloader.py"),
    ("recv", [library("recv", TORCH), place("")], {"peer": 3}, "recv of distributed_c10d.py"),
    ("send", [library("isend", TORCH), library("send", TORCH), place("")], {"peer": 3}, "send of distributed_c10d.py"),
    ("collective", [library("wrapper", "c10d_logger.py"), library("barrier", TORCH), place("")], {}, None),
    ("checkpoint", [library("save", f"{SITE}/torch/serialization.py"), place("")], {"syscall": "fsync"}, None),
    ("checkpoint", [library("_save", f"{SITE}/torch/serialization.py"), place("")], {"state": "D"}, None),
    ("compile", [library("_compile", f"{SITE}/torch/_dynamo/convert_frame.py"), place("")], {}, None),
    ("compile", [library("compile", f"{SITE}/triton/compiler/compiler.py"), place("")], {"cpu_fraction": 1.0}, None),
    ("import", [library("exec_module", "<frozen importlib._bootstrap_external>"), place("import x")], {}, None),
    ("socket", [library("recv_into", "python3/socket.py"), place("")], {"syscall": "recvfrom"}, None),
    (
        "socket",
        [library("read", "python3/ssl.py"), library("urlopen", f"{SITE}/urllib3/response.py"), place("")],
        {},
        None,
    ),
    ("subprocess", [library("_try_wait", "python3/subprocess.py"), place("")], {}, None),
    ("pipe", [POLL, place("pipe.recv()")], {"syscall": "poll"}, None),
    ("file_lock", [library("acquire", f"{SITE}/filelock/_api.py"), place("")], {"syscall": "clock_nanosleep"}, None),
    # The text of the line
    ("lock", [place("with second: pass")], {}, ""),
    ("lock", [place("with self._locks[key]:")], {"syscall": "futex"}, ""),
    ("lock", [place("self._lock.acquire()")], {}, ""),
    ("file_lock", [place("fcntl.flock(lock, fcntl.LOCK_EX)")], {}, ""),
    ("sleep", [place("time.sleep(600)")], {}, ""),
    # No evidence, no claim
    ("unknown", [place("time.sleep(1); f()")], {"syscall": "futex"}, ""),
    ("unknown", [place("with torch.no_grad():")], {}, ""),
    ("unknown", [place("with lock: x = f()")], {}, ""),
    ("unknown", [place("time.sleep(1)")], {"state": "R"}, ""),
    ("unknown", [place("x = f()")], {"syscall": "poll"}, ""),
    (
        "unknown",
        [library("call", f"{SITE}/torch/_dynamo/eval_frame.py"), place("model(x)")],
        {"syscall": "futex"},
        None,
    ),
]


@pytest.mark.parametrize(("code", "frames", "wait", "inside"), CASES)
def test_facts_come_before_frames_before_text(code, frames, wait, inside):
    # GIVEN a main thread, and another that is elsewhere
    other = thread(line("other", 1), main=False, name="other", syscall="flock")
    threads = (other, ThreadEvidence("MainThread", True, tuple(frames), Wait(**wait)))
    # WHEN it is judged
    blocked = blocked_of(rank(5, threads=threads))
    # THEN it is blocked as the strongest evidence shows, at the program's own line
    assert (blocked.rank, blocked.code, blocked.place) == (5, code, frames[-1])
    assert inside is None or blocked.inside == inside
    assert blocked.peer == (wait.get("peer") if code in ("recv", "send") else None)


@pytest.mark.parametrize(
    ("source", "wait", "about"),
    [
        ("with self._lock:", {}, "self._lock"),
        ("if cold: self.lock.acquire()", {}, "self.lock"),
        ("with self._lock:", {"lock": "cache.lock"}, "cache.lock"),
        ("read()", {"syscall": "flock", "path": "/data/s.lock"}, "/data/s.lock"),
        ("read()", {"syscall": "recvfrom", "path": "10.0.0.7:443"}, "10.0.0.7:443"),
        ("read()", {"syscall": "read", "path": "pipe:[4711]"}, ""),
        ("read()", {"syscall": "read", "path": "standard input"}, "its standard input"),
        ("read()", {"syscall": "read", "path": "/data/fifo", "wchan": "fifo_pipe_read"}, "the pipe /data/fifo"),
        ("read()", {"syscall": "read", "path": "unix:/run/s"}, "the socket unix:/run/s"),
        ("read()", {"state": "t"}, "a debugger"),
        ("read()", {"state": "D", "wchan": "__refrigerator"}, "the freezer of its cgroup"),
        ("read()", {"state": "T"}, ""),
    ],
)
def test_a_block_names_what_it_is_about_and_its_holder(source, wait, about):
    holder = line("refresh", 42)
    blocked = blocked_of(rank(5, threads=[thread(place(source), held_by="refresher", held_at=holder, **wait)]))
    assert (blocked.about, blocked.held_by, blocked.held_at, blocked.pid) == (about, "refresher", holder, 105)


@pytest.mark.parametrize(
    ("frames", "wait", "code"),
    [
        ([JOIN, place("")], {"lock": "loader"}, "thread"),
        ([library("_shutdown", "python3/threading.py")], {}, "thread"),
        ([library("_try_wait", "python3/subprocess.py"), place("")], {"path": "pipe:[4711]"}, "subprocess"),
    ],
)
def test_a_thread_or_process_that_is_awaited_holds_nothing(frames, wait, code):
    wait = Wait(**wait, held_by="refresher")
    blocked = blocked_of(rank(5, threads=[ThreadEvidence("MainThread", True, tuple(frames), wait)]))
    assert (blocked.code, blocked.about, blocked.held_by) == (code, "refresher", "")


def worker(pid, state="S", at=None, exit_status=None):
    idle = library("get", "python3/multiprocessing/queues.py")
    # (it was forked by a line of the program)
    forked = (library("_worker_loop", "site-packages/torch/utils/data/_utils/worker.py"), line("train", 300))
    frames = (idle, line("__getitem__", at), *forked) if at else (idle, *forked)
    return WorkerEvidence(pid, state, "", (thread(*frames),), exit_status=exit_status)


@pytest.mark.parametrize(
    ("workers", "found"),
    [
        ([worker(1), worker(2, "T"), worker(3, at=19)], (2, "T", None)),
        ([worker(1, "D", 20), worker(2, exit_status=-9)], (2, "gone", None)),
        ([worker(1), worker(2, "Z")], (2, "gone", None)),
        ([worker(1, at=None), worker(2, at=19)], (2, "S", 19)),
        ([worker(1)], (1, "S", None)),
        ([worker(1), worker(2)], (None, "", None)),  # any of them
        ([], (None, "", None)),
    ],
)
def test_the_worker_that_hangs_is_the_dead_one_the_stopped_one_or_the_busy_one(workers, found):
    blocked = blocked_of(rank(5, threads=[thread(LOADER, place("next(batches)"))], workers=tuple(workers)))
    assert blocked.code == "worker"
    assert (blocked.worker, blocked.worker_state, blocked.worker_at and blocked.worker_at.line) == found


@pytest.mark.parametrize(
    ("state", "wchan", "code", "about"),
    [
        ("T", "do_signal_stop", "stopped", ""),
        ("t", "ptrace_stop", "stopped", "a debugger"),
        ("S", "do_freezer_trap", "stopped", "the freezer of its cgroup"),
        ("R", "", "native", ""),
        ("D", "folio_wait_bit", "disk", ""),
        ("S", "futex_do_wait", "unknown", ""),
    ],
)
def test_without_stacks_the_kernel_alone_tells(state, wchan, code, about):
    blocked = blocked_of(silent(3, state=state, wchan=wchan, step=7, stage="data", exit_status=None))
    assert (blocked.code, blocked.about) == (code, about)
    assert (blocked.place, blocked.step, blocked.stage) == (None, 7, "data")
