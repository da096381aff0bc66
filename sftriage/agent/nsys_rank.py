"""Starts one rank under Nsight Systems and supervises it: the launcher runs this script in the rank's place.

It imports only the standard library, since it runs with ``python -I`` before the trainer, in every rank::

    torchrun ── this script ── nsys launch ── nsys-launcher ── this script again, which becomes the trainer
                     └── watcher

It keeps five promises that `nsys launch` alone does not:

- **The trainer always runs**: without nsys if that is missing, hangs or fails. The inner half waits for a message
  before it becomes the trainer, so the trainer cannot run twice.
- **The exit status is the trainer's.** If nsys's agent dies, ``nsys launch`` ends with status 0 while the trainer
  continues. This script waits for the trainer, and an unknown status is never 0.
- **Signals reach the trainer**, in its own session. When this script is killed, the watcher ends the trainer.
- **nsys stops in time.** If the agent that started a collection is killed, this script stops it a little later.
- **The trainer's environment stays out of the reports.** nsys copies its environment, so it gets a bare one; the inner
  half restores the real one. Standard output bypasses nsys, which would keep a copy and hold the pipe open.

Environment: ``SFTRIAGE_NSYS`` (the nsys binary), ``SFTRIAGE_NSYS_SESSION`` (prefix of the session's name),
``SFTRIAGE_NSYS_TRACE``, ``SFTRIAGE_NSYS_TMP`` (executable), ``SFTRIAGE_NSYS_ARMED`` (prefix of reports: see `Armed`),
and ``SFTRIAGE_NSYS_PYTHON``: torchrun's ``PYTHON_EXEC`` before this script took its place.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import resource
import select
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

INNER = "--sftriage-inner"
START_S = 60.0
"""How long nsys may take to start the rank's process; after that, the rank starts without nsys."""
STARTS = 3
"""How often to start nsys if it ends before the rank's process has started: on a busy machine its agent may be late
("Local Endpoint is not available")."""
REPORT_S = 60.0
"""How long nsys may take for its report once the rank has ended."""
NOTE_S = 5.0
KILL_GRACE_S = 10.0
UNKNOWN_STATUS = 70
"""The trainer's status is unknown: not 0, since a failure must not pass for a success."""
FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGCONT)
RANGE = "SFT_CAPTURE"
QUERY_S = 20.0
NOTE = "collecting"
"""``<tmp>/collecting-<rank>``: an agent's note that nsys collects for it (see `Deserted`)."""
POLL_S = 0.5
SLOW_POLL_S = 5.0
"""How often to check for a deserted collection."""
MOST_FAILURES = 10
MAX_PID = 1 << 22
SHARED_MEMORY = Path("/dev/shm")  # where nsys keeps its registry

_KEPT = ("PATH", "HOME", "USER", "LOGNAME", "LANG", "LC_ALL", "TZ", "LD_LIBRARY_PATH", "LD_PRELOAD")
_KEPT_PREFIXES = ("CUDA_", "NVIDIA_", "NSYS_")
_OURS = ("SFTRIAGE_NSYS", "PYTHON_EXEC")


def session_name(environment: dict[str, str]) -> str:
    """The name of this rank's session; each attempt of a restarted job has its own."""
    prefix = environment["SFTRIAGE_NSYS_SESSION"]
    return f"{prefix}-{environment.get('RANK', '0')}.{environment.get('TORCHELASTIC_RESTART_COUNT', '0')}"


def nsys_command(environment: dict[str, str]) -> list[str]:
    """The start of the nsys command line; the program to launch follows."""
    command = [environment["SFTRIAGE_NSYS"], "launch", f"--session-new={session_name(environment)}"]
    armed = [f"--nvtx-capture={RANGE}@*"] if environment.get("SFTRIAGE_NSYS_ARMED") else []
    return [*command, f"--trace={environment['SFTRIAGE_NSYS_TRACE']}", *armed]


def bare_environment(environment: dict[str, str]) -> dict[str, str]:
    """The environment for nsys, which it may write into its reports."""
    kept = {name: value for name, value in environment.items() if name in _KEPT or name.startswith(_KEPT_PREFIXES)}
    # (the trainer does not register the names of its ranges)
    return kept | {"TMPDIR": environment["SFTRIAGE_NSYS_TMP"], "NSYS_NVTX_PROFILER_REGISTER_ONLY": "0"}


def trainer_environment(real: dict[str, str], bare: dict[str, str], injected: dict[str, str]) -> dict[str, str]:
    """The trainer's own environment, with what nsys has added to the bare one."""
    ours = {name: value for name, value in real.items() if not name.startswith(_OURS)}
    if real.get("SFTRIAGE_NSYS_PYTHON"):
        ours["PYTHON_EXEC"] = real["SFTRIAGE_NSYS_PYTHON"]
    added = {name: value for name, value in injected.items() if bare.get(name) != value}
    # (Python sets it itself if the locale is C)
    added.pop("LC_CTYPE", None)
    return ours | added | {"NSYS_NVTX_PROFILER_REGISTER_ONLY": "0"}


def trainer_command(arguments: list[str], environment: dict[str, str]) -> list[str]:
    """The rank's command: the arguments, or torchrun's Python with them, if this script replaced that Python."""
    if arguments[:1] == ["--"]:
        return arguments[1:]
    return [environment.get("SFTRIAGE_NSYS_PYTHON") or _python_of(os.getppid()), *arguments]


def main() -> int:
    """The outer half: see the module."""
    if sys.argv[1:2] == [INNER]:
        return inner(int(sys.argv[2]))
    environment = dict(os.environ)
    command = trainer_command(sys.argv[1:], environment)
    plain = trainer_environment(environment, {}, {})
    plain.pop("NSYS_NVTX_PROFILER_REGISTER_ONLY", None)
    try:
        rank = started(command, environment)
    except OSError as error:
        _log(f"nsys cannot be started ({error.strerror}); this rank runs without it")
        rank = None
    if rank is None:
        os.execvpe(command[0], command, plain)
    return rank.wait()


def started(command: list[str], environment: dict[str, str]) -> Rank | None:
    """Start the rank under nsys; None if nsys failed. Raises OSError if there is no nsys."""
    end_s = time.monotonic() + START_S
    for _ in range(STARTS):
        release_registry()
        rank = Rank(command, environment)
        if rank.begun(end_s):
            return rank
        rank.give_up()
        if time.monotonic() >= end_s:
            break
        # (the rest of its session would be taken for the rank's)
        session = RankSession(environment)
        session.run("shutdown", f"--session={session.name}")
    _log("nsys did not start this rank, which runs without it")
    return None


def release_registry(directory: Path = SHARED_MEMORY) -> None:
    """Remove nsys's session registry if a killed process holds its lock, on which every nsys of the host hangs.

    The registry's second word is the owner's PID, 0 while it is unlocked. A lock lasts microseconds, so an owner that
    stays is dead, not merely in another PID namespace.
    """
    for path in directory.glob("NSys-*"):
        with contextlib.suppress(OSError):
            owner = _owner(path)
            if 0 < owner < MAX_PID and not Path(f"/proc/{owner}").exists():
                time.sleep(0.1)
                if _owner(path) == owner:
                    path.unlink()


def _owner(registry: Path) -> int:
    with registry.open("rb") as file:
        return int.from_bytes(file.read(16)[8:], "little")


class Rank:
    """The trainer under nsys, from outside."""

    def __init__(self, command: list[str], environment: dict[str, str]) -> None:
        self._tmp = Path(environment["SFTRIAGE_NSYS_TMP"])
        self._pid = 0
        bare = bare_environment(environment)
        self._armed = Armed(environment) if environment.get("SFTRIAGE_NSYS_ARMED") else None
        self._session = self._armed or Deserted(environment)
        self._ours, self._theirs = _pair()
        self._alive_read, self._alive_write = os.pipe()
        self._standard = [os.dup(number) for number in range(3)]
        os.set_inheritable(self._theirs, True)
        self._message = {"command": command, "real": environment, "bare": bare}
        inner_command = [sys.executable, "-I", "-S", str(Path(__file__).resolve()), INNER, str(self._theirs)]
        self._nsys = subprocess.Popen(
            [*nsys_command(environment), *inner_command],
            env=bare,
            pass_fds=(self._theirs,),
            # nsys's own output is not the job's.
            stdout=2,
            # (on a signal to our group, nsys would end the trainer with a status of its own)
            start_new_session=True,
        )
        os.close(self._theirs)

    def begun(self, end_s: float) -> bool:
        """Wait for the inner half and let it become the trainer; return whether it did before the deadline."""
        stream = b""
        while not stream.endswith(b"\n") and (left_s := end_s - time.monotonic()) > 0:
            ready, _, _ = select.select([self._ours], [], [], min(left_s, 0.2))
            if ready:
                if not (part := os.read(self._ours, 100)):
                    return False
                stream += part
            elif self._nsys.poll() is not None:
                return False
        if not stream.endswith(b"\n"):
            return False
        self._pid = int(stream)
        self._trainer = os.pidfd_open(self._pid)
        self._note = self._tmp / f"nsys_termination_status_{self._pid}"
        self._watch()
        for signum in FORWARDED:
            signal.signal(signum, self._forward)
        # Sent, not inherited: some of the processes that nsys starts in between outlive the trainer.
        with socket.socket(fileno=self._ours) as ours:
            socket.send_fds(ours, [b"."], self._standard)
            # (names decoded with surrogateescape survive JSON)
            ours.sendall(json.dumps(self._message).encode("ascii") + b"\n")
        self._close_standard()
        return True

    def give_up(self) -> None:
        for number in (self._ours, self._alive_read, self._alive_write):
            os.close(number)
        self._close_standard()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._nsys.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._nsys.wait(KILL_GRACE_S)

    def _close_standard(self) -> None:
        for number in self._standard:
            os.close(number)

    def wait(self) -> int:
        """Wait for the trainer and return its status; die of the same signal if one ended it."""
        nsys = os.pidfd_open(self._nsys.pid)
        poll_s = SLOW_POLL_S if self._armed is None else POLL_S
        while not (ended := select.select([self._trainer, nsys], [], [], poll_s)[0]):
            self._session.poll_session()
        if self._trainer in ended:
            status = self._status_of(nsys)
        else:
            # nsys or its agent has died: its status is not that of the trainer, which continues.
            select.select([self._trainer], [], [])
            status = self._noted()
        if 128 < status < 128 + signal.NSIG:
            _die(status - 128)
        return status

    def _status_of(self, nsys: int) -> int:
        """The trainer's status by nsys, which may finish a report first."""
        if not select.select([nsys], [], [], REPORT_S)[0]:
            _log(f"nsys still runs {REPORT_S:.0f} s after its rank ended: killing it")
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._nsys.pid, signal.SIGKILL)
            return self._noted()
        # nsys removes its launcher's note once it has read it. If the note still exists, nsys died as the trainer
        # ended, and its 0 means nothing.
        status = self._nsys.wait()
        return self._noted() if status == 0 and self._note.exists() else status

    def _noted(self) -> int:
        """The status in the note of nsys's launcher: whether a signal ended the trainer, and the signal or status."""
        end_s = time.monotonic() + NOTE_S
        while time.monotonic() < end_s:
            with contextlib.suppress(OSError, ValueError):
                signalled, status = map(int, self._note.read_text(encoding="ascii").split())
                self._note.unlink()
                return 128 + status if signalled else status
            time.sleep(0.05)
        return UNKNOWN_STATUS

    def _forward(self, signum: int, _frame: object) -> None:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._trainer, signum)

    def _watch(self) -> None:
        """Fork the watcher, which sees its pipe close when this process ends in any way."""
        if os.fork():
            os.close(self._alive_read)
            return
        try:
            os.setsid()
            os.close(self._alive_write)
            os.close(self._ours)
            self._close_standard()
            for number in range(3):
                os.close(number)
            os.read(self._alive_read, 1)
            for signum in (signal.SIGTERM, signal.SIGKILL):
                with contextlib.suppress(ProcessLookupError):
                    signal.pidfd_send_signal(self._trainer, signum)
                if select.select([self._trainer], [], [], KILL_GRACE_S)[0]:
                    break
        finally:
            os._exit(0)


class RankSession:
    """Runs nsys commands on this rank's session, in the environment of its launch: nsys finds it in no other."""

    def __init__(self, environment: dict[str, str]) -> None:
        self.name = session_name(environment)
        self._nsys, self._bare = environment["SFTRIAGE_NSYS"], bare_environment(environment)

    def run(self, *words: str) -> tuple[int, str]:
        try:
            found = subprocess.run(
                [self._nsys, *words],
                env=self._bare,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                timeout=QUERY_S,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            release_registry()
            return 1, str(error)
        return found.returncode, found.stdout.decode("utf-8", "replace")


class Deserted(RankSession):
    """Stops a collection whose agent was killed, which would otherwise grow until the job ends.

    The agent's note has its capture, and the latest time of its end on the host's monotonic clock.
    """

    def __init__(self, environment: dict[str, str]) -> None:
        super().__init__(environment)
        self._tmp = Path(environment["SFTRIAGE_NSYS_TMP"])
        self._note = self._tmp / f"{NOTE}-{environment.get('RANK', '0')}"

    def poll_session(self) -> None:
        """Stop a collection that is overdue, and remove its files. Never raises."""
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            note = json.loads(self._note.read_text(encoding="utf-8"))
            if time.monotonic() < note["until_s"]:
                return
            self.run("stop", f"--session={self.name}")
            for leftover in self._tmp.glob(f"{note['capture_id']}.*"):
                leftover.unlink()
            self._note.unlink()
            _log(f"stopped nsys: capture {note['capture_id']} was not ended in time")


class Armed(RankSession):
    """Has nsys wait for the trainer's ranges, for an agent in another container that cannot reach the session.

    Each range gives one report, which appears whole as ``<prefix>-<rank>.<attempt>.<number>``. The file
    ``<prefix>-<rank>.<attempt>.armed`` exists while nsys waits for the next range. (With nsys's own
    ``--capture-range-end=repeat``, no report appears until the job ends.)
    """

    def __init__(self, environment: dict[str, str]) -> None:
        super().__init__(environment)
        name = self.name.removeprefix(environment["SFTRIAGE_NSYS_SESSION"])
        self._prefix = f"{environment['SFTRIAGE_NSYS_ARMED']}{name}"
        self._made = Path(environment["SFTRIAGE_NSYS_TMP"]) / f"armed{name}"
        self._ready = Path(f"{self._prefix}.armed")
        # The agent in another container may be another user.
        mode = environment.get("SFTRIAGE_FILE_MODE", "")
        self._mode = int(mode, 8) & 0o666 if re.fullmatch("[0-7]+", mode) else None
        self._number = 0
        self._waits = False
        self._failures = 0

    def poll_session(self) -> None:
        """Arm nsys, or move its report into place. Gives up after repeated failures. Never raises."""
        with contextlib.suppress(OSError):
            self._poll()

    def _poll(self) -> None:
        if self._failures >= MOST_FAILURES:
            return
        if not self._waits:
            self._arm()
        elif (made := self._report()) is not None and self._idle():
            # (an importer may have converted it meanwhile)
            made = self._report() or made
            target = Path(f"{self._prefix}.{self._number}{made.suffix}")
            partial = target.with_name(f".{target.name}.partial")
            shutil.move(made, partial)
            if self._mode is not None:
                partial.chmod(self._mode)
            self._ready.unlink(missing_ok=True)
            self._waits = False
            partial.replace(target)

    def _arm(self) -> None:
        self._number += 1
        status, output = self.run(
            *("start", f"--session={self.name}", "--sample=none", "--cpuctxsw=none", "--capture-range=nvtx"),
            *("--capture-range-end=stop", f"--output={self._made}", "--force-overwrite=true"),
        )
        self._waits = status == 0
        if self._waits:
            self._failures = 0
            self._ready.touch(mode=0o600)
        else:
            self._failures += 1
            _log(f"nsys could not be armed: {output.strip()[-200:]}")

    def _report(self) -> Path | None:
        reports = [self._made.with_name(self._made.name + suffix) for suffix in (".nsys-rep", ".qdstrm")]
        return next((path for path in reports if path.exists()), None)

    def _idle(self) -> bool:
        _, output = self.run("sessions", "list")
        return any({"Launched", self.name} <= set(line.split()) for line in output.splitlines())


def inner(channel: int) -> int:
    """The inner half, under nsys with the bare environment: become the trainer once its command arrives."""
    stream = b""
    standard: list[int] = []
    with socket.socket(fileno=channel) as outer, contextlib.suppress(OSError):
        outer.sendall(f"{os.getpid()}\n".encode("ascii"))
        _, standard, _, _ = socket.recv_fds(outer, 1, 3)
        while not stream.endswith(b"\n") and (part := outer.recv(1 << 16)):
            stream += part
    if not stream.endswith(b"\n"):
        return UNKNOWN_STATUS  # (the outer half has given up)
    message = json.loads(stream)
    for number, kept in enumerate(standard):
        os.dup2(kept, number)
        os.close(kept)
    environment = trainer_environment(message["real"], message["bare"], dict(os.environ))
    command = message["command"]
    try:
        # (exec, because nsys reads the environment of a started process)
        os.execvpe(command[0], command, environment)
    except OSError as error:
        _log(f"cannot start {command[0]}: {error.strerror}")
        return 127


def _python_of(pid: int) -> str:
    """The launcher's own Python, by the name with which it was started (in a venv that is a link)."""
    exe = Path(f"/proc/{pid}/exe").resolve()
    with contextlib.suppress(OSError, IndexError):
        name = os.fsdecode(Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[0])
        found = shutil.which(name)
        if found is not None and Path(found).resolve() == exe:
            return found
    return str(exe)


def _pair() -> tuple[int, int]:
    ours, theirs = socket.socketpair()
    return ours.detach(), theirs.detach()


def _die(signum: int) -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with contextlib.suppress(OSError):
        signal.signal(signum, signal.SIG_DFL)
    os.kill(os.getpid(), signum)


def _log(text: str) -> None:
    sys.stderr.write(f"sftriage: {text}\n")
    sys.stderr.flush()


if __name__ == "__main__":
    sys.exit(main())
