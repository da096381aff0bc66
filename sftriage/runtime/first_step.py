"""Watches for a job's first recorded step, and finds out why there is none: from /proc, rings and seams."""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import re
import shutil
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from sftriage.errors import RingError
from sftriage.model.windows import StageSchema
from sftriage.runtime.carrying import REPORTS
from sftriage.runtime.launcher import Launcher
from sftriage.runtime.nsys_launch import ELASTIC_MODULES
from sftriage.trainer.layout import RingInfo, find_rings
from sftriage.windows.gather import Shape
from sftriage.windows.rings import Ring
from sftriage.words.verdicts import counted

FREE_BYTES = 1 << 20
"""More than the largest ring of a rank."""


@dataclass(frozen=True, slots=True)
class Facts:
    """The known facts about a job and its end.

    ``hidden``: why the seams are missing in processes with torch: a flag of Python such as "-I", or a variable.
    ``fired``, ``failed``: by seam. ``status``: None for a job ended after its ``seconds``. ``ended_by``: a signal.
    """

    auto: bool
    steps: int = 0
    rings: int = 0
    torch: int = 0
    hidden: frozenset[str] = frozenset()
    fired: Mapping[str, int] = field(default_factory=dict)
    failed: Mapping[str, str] = field(default_factory=dict)
    by_hand: bool = False
    compiling: bool = False
    free_bytes: int | None = None
    place: str = "/dev/shm"
    over: bool = False
    status: int | None = None
    ended_by: int | None = None
    seconds: float | None = None


@dataclass(frozen=True, slots=True)
class Reason:
    """A reason: its code, a clause to print, and what to do about it where `doctor` has no lines to print."""

    code: str
    words: str
    advice: str = ""


def why_nothing(facts: Facts) -> Reason | None:
    """Why no step is recorded; None if one is. Uses only known facts."""
    if facts.steps:
        return None
    so_far = _so_far(facts)
    if not facts.over:
        return so_far
    if facts.ended_by is not None:
        return Reason("stopped", f"the job was stopped by {_signal_name(facts.ended_by)} before any step was recorded")
    if facts.seconds is not None and facts.status is None:
        return Reason(so_far.code, f"no step within {facts.seconds:g} s: {so_far.words}")
    if facts.status:
        failed = f"the job exited with status {facts.status} before any step was recorded"
        number = facts.status - 128
        why = f"{_signal_name(number)} ended it" if number in signal.valid_signals() else "see its output"
        return Reason("failed", f"{failed}: {why}")
    return so_far


def _so_far(facts: Facts) -> Reason:
    trains = bool(facts.rings or facts.by_hand or any(facts.fired.values()))
    if facts.auto and not trains:
        for reason in _HIDDEN:
            if reason.code in facts.hidden:
                return reason
    if not facts.auto and not facts.rings and RINGS.code in facts.hidden:
        return RINGS
    if not (facts.torch or trains):
        never = "imported torch" if facts.over else "has imported torch so far"
        return Reason("no_torch", f"no process of the job on this host {never}")
    if not facts.rings and facts.free_bytes is not None and facts.free_bytes < FREE_BYTES:
        return Reason("no_room", f"{facts.place} is too full for a recording ({facts.free_bytes >> 10} KiB free)")
    if why := facts.failed.get("optimizer"):
        return Reason("seam", f"the seam optimizer was switched off: {why}")
    if facts.by_hand or not facts.auto:
        if facts.rings:
            return Reason("monitor_unused", "the script's Monitor has not finished a step")
        if facts.by_hand:
            return Reason("monitor_elsewhere", "the script's Monitor records elsewhere (rings=)")
        return Reason("no_monitor", "the script creates no sftriage.Monitor, and --no-auto detects no stages")
    backwards, steps = facts.fired.get("backward", 0), facts.fired.get("optimizer", 0)
    if facts.rings or steps > 2:
        return Reason("first_step", "recording has begun, but no step has ended yet")
    if facts.compiling and facts.status is None:
        return Reason("compiling", "torch.compile is at work; recording begins with the third step")
    if steps:
        return Reason("few_steps", f"{counted(steps, 'optimizer step')} so far; recording begins with the third")
    why = "no torch.optim.Optimizer has made a step"
    return Reason("no_optimizer" if backwards else "no_step", why, _BY_HAND)


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


_BY_HAND = "if the script trains, `sftriage doctor -- COMMAND` prints the lines that record its loop"
RINGS = Reason("SFTRIAGE_RINGS", "SFTRIAGE_RINGS is missing in the trainers' environment: their launcher removed it")
_NO_PATH = "ignores PYTHONPATH"
_HIDDEN = (
    *(
        Reason(flag, f"the trainers' Python runs with {flag} and so {without}: leave {flag} out, or use Monitor")
        for flag, without in (("-I", _NO_PATH), ("-E", _NO_PATH), ("-S", "imports no sitecustomize"))
    ),
    RINGS,
    Reason("SFTRIAGE_SEAMS", "SFTRIAGE_SEAMS=off switches the seams off"),
    Reason(
        "PYTHONPATH",
        "the job overwrites PYTHONPATH, through which sftriage detects stages: extend it (PYTHONPATH=DIR:$PYTHONPATH), "
        "or use Monitor",
    ),
)

log = logging.getLogger("sftriage")

POLL_S, OFTEN_S, SELDOM_S = 1.0, 15.0, 5.0
"""How often to check rings; and processes, which costs more, during and after the first seconds."""
AGAIN_S = 60.0
"""How often to log why nothing is recorded yet, once torch is imported."""
ALL_S = 10.0
"""How long to wait for the first steps of the other ranks, after the first rank's."""
_TAKES_VALUE = ("-W", "-X", "--check-hash-based-pycs")
_LAUNCHERS = (*ELASTIC_MODULES, "torchrun")


class Processes:
    """What /proc shows of a launcher and the processes it started; ``added`` was added to their environment.

    Attributes:
        torch: the processes that had torch loaded.
        hidden: as in `Facts`; what is true of all of them but launchers. (torch's compile workers have a PYTHONPATH of
            their own.)
    """

    def __init__(self, added: Mapping[str, str]) -> None:
        self._added = added
        self.torch: set[int] = set()
        self.hidden: frozenset[str] = frozenset()
        self._found_one = False

    def check(self, launcher: int) -> None:
        for pid in {launcher, *_below(launcher)} - self.torch:
            with contextlib.suppress(OSError):
                place = Path(f"/proc/{pid}")
                if b"/libtorch" not in (place / "maps").read_bytes():
                    continue
                self.torch.add(pid)
                words = [os.fsdecode(word) for word in (place / "cmdline").read_bytes().split(b"\0")]
                if not any(word.endswith(_LAUNCHERS) for word in words):
                    entries = map(os.fsdecode, (place / "environ").read_bytes().split(b"\0"))
                    pairs = (entry.partition("=") for entry in entries)
                    hidden = hides({name: value for name, _, value in pairs}, words, self._added)
                    self.hidden = self.hidden & hidden if self._found_one else frozenset(hidden)
                    self._found_one = True


def hides(environment: Mapping[str, str], words: Sequence[str], added: Mapping[str, str]) -> set[str]:
    """Why a process does not get the variables in ``added``: see `Facts`."""
    found = flags_of(words) & {"I", "E", "S"}
    hidden = {f"-{flag}" for flag in found}
    if environment.get("SFTRIAGE_RINGS") != added.get("SFTRIAGE_RINGS"):
        hidden.add("SFTRIAGE_RINGS")
    if environment.get("SFTRIAGE_SEAMS") == "off":
        hidden.add("SFTRIAGE_SEAMS")
    ours = added.get("PYTHONPATH", "").split(os.pathsep)[0]
    if ours not in environment.get("PYTHONPATH", "").split(os.pathsep):
        hidden.add("PYTHONPATH")
    return hidden


def flags_of(words: Sequence[str]) -> set[str]:
    """The one-letter flags of a Python with this command line."""
    found: set[str] = set()
    rest = iter(words[1:] if words and "python" in Path(words[0]).name else ())
    for word in rest:
        if word in _TAKES_VALUE:
            next(rest, None)
        elif not word.startswith("-"):
            break
        elif word[1:2] not in ("", "-", "W", "X"):
            letters, *ends = re.split("[cm]", word[1:], maxsplit=1)
            found |= set(letters)
            if ends:
                break
    return found


def _below(pid: int) -> list[int]:
    found: list[int] = []
    for children in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            for child in map(int, children.read_text(encoding="ascii").split()):
                found += (child, *_below(child))
    return found


def reports_in(directory: Path) -> list[Mapping[str, Any]]:
    """The reports of the seams in a job's processes (`sftriage.trainer.seams.patches`)."""
    found = []
    for path in sorted(directory.glob("*.json")):
        with contextlib.suppress(OSError, ValueError):
            found.append(json.loads(path.read_text(encoding="utf-8")))
    return found


def with_reports(known: Facts, reports: Sequence[Mapping[str, Any]]) -> Facts:
    """The known facts, with those of these reports."""
    fired: Counter[str] = Counter()
    failed: dict[str, str] = {}
    for report in reports:
        fired |= Counter(report["fired"])
        failed |= report["failed"]
    by_hand, compiling = (any(report.get(name) for report in reports) for name in ("by_hand", "compiling"))
    torch = max(known.torch, len(reports))
    return replace(known, torch=torch, fired=fired, failed=failed, by_hand=by_hand, compiling=compiling)


class FirstStep:
    """Shows when a job's first steps are recorded, and once a minute why they are not.

    ``added`` was added to the job's environment, ``auto`` says whether seams find its stages. ``note`` gets the reason
    whenever it changes, and "" once a step is recorded.
    """

    def __init__(
        self,
        rings: Path,
        added: Mapping[str, str],
        shape: Shape,
        show: Callable[[str], None],
        note: Callable[[str], None] = lambda _: None,
        *,
        auto: bool,
    ) -> None:
        self._rings, self._auto = rings, auto
        self._shape, self._show, self._note = shape, show, note
        self._processes, self._checked_s = Processes(added), 0.0
        self._since_s: float | None = None
        self._free_bytes: int | None = None
        self._torch_s: float | None = None
        self._first_s: float | None = None
        self._logged_s = 0.0
        self._noted = ""
        self._step_s = math.inf
        self.recorded = False

    def follow(self, launcher: Launcher) -> None:
        """Check until the job has ended; only logs errors."""
        while not launcher.ended.wait(None if self.recorded else POLL_S):
            with suppressed():
                self.check(launcher.pid, time.monotonic())
        with suppressed():
            self.end(launcher.status, launcher.last_signal)

    def check(self, launcher: int, now_s: float) -> None:
        """Check once, and show changes. ``now_s`` is on a monotonic clock."""
        if self.recorded:
            return
        begun, world_size = self._begun()
        if begun:
            self._first_s = now_s if self._first_s is None else self._first_s
            if len(begun) >= world_size or now_s >= self._first_s + ALL_S:
                self.recorded = True
                shutil.rmtree(self._rings / REPORTS, ignore_errors=True)
                about = tuple(self._shape.first_verdict_step(0, step_s) + 2 for step_s in (0.0, self._step_s))
                self._show(begun_sentence(len(begun), world_size, begun[0].schema, about))
                self._note("")
            return
        self._since_s = now_s if self._since_s is None else self._since_s
        if now_s < self._since_s + OFTEN_S or now_s >= self._checked_s + SELDOM_S:
            self._checked_s = now_s
            self._processes.check(launcher)
        with contextlib.suppress(OSError):
            free_bytes = shutil.disk_usage(self._rings).free
            self._free_bytes = min(free_bytes, self._free_bytes or free_bytes)
        if self._processes.torch and self._torch_s is None:
            self._torch_s = self._logged_s = now_s
        if self._torch_s is not None and now_s >= self._logged_s + AGAIN_S:
            self._logged_s = now_s
            minutes = round((now_s - self._torch_s) / 60)
            why = self._why(self._facts())
            self._show(f"no step is recorded yet, {counted(minutes, 'minute')} after torch was imported: {why}")

    def end(self, status: int | None, ended_by: int | None) -> None:
        """The job has ended: show why nothing was recorded, if nothing was."""
        begun, world_size = self._begun()
        if self.recorded or begun:
            if not self.recorded:
                self._show(begun_sentence(len(begun), world_size, begun[0].schema))
                self._note("")
            self.recorded = True
            return
        facts = replace(self._facts(), over=True, status=status, ended_by=ended_by)
        self._show(f"nothing was recorded: {self._why(facts)}")

    def _facts(self) -> Facts:
        known = Facts(
            self._auto,
            rings=len(find_rings(self._rings)),
            torch=len(self._processes.torch),
            hidden=self._processes.hidden,
            free_bytes=self._free_bytes,
            place=str(self._rings.parent),
        )
        return with_reports(known, reports_in(self._rings / REPORTS))

    def _why(self, facts: Facts) -> str:
        reason = why_nothing(facts)
        why = "" if reason is None else "; ".join(filter(None, (reason.words, reason.advice)))
        if why != self._noted:
            self._noted = why
            self._note(why)
        return why

    def _begun(self) -> tuple[list[RingInfo], int]:
        begun, world_size = {}, 0
        for path in find_rings(self._rings):
            with contextlib.suppress(OSError, RingError), Ring(path) as ring:
                world_size = max(world_size, ring.info.world_size)
                if ring.status().published:
                    begun[ring.info.rank] = ring.info
                    for took_ns in ring.read().steps.durations_ns_BS.sum(axis=1).tolist():
                        self._step_s = min(self._step_s, took_ns * 1e-9)
        return list(begun.values()), world_size


@contextlib.contextmanager
def suppressed() -> Iterator[None]:
    """Log exceptions for debugging: they must not affect the job."""
    try:
        yield
    except Exception:
        log.debug("cannot watch for the job's first step", exc_info=True)


def begun_sentence(ranks: int, world_size: int, schema: StageSchema, first_verdict: Sequence[int] = ()) -> str:
    """Which ranks are recorded, and at which step the first verdict comes: usually, and at the earliest."""
    names = [f"{name} (sync)" if name in schema.sync else name for name in schema.stages[:-1]]
    these = counted(ranks, "rank") if ranks >= world_size else f"{ranks} of {counted(world_size, 'rank')} here"
    recording = f"Recording {these}: {', '.join(names)}."
    if not first_verdict:
        return recording
    usual, soonest = first_verdict
    if soonest < usual:
        return f"{recording} First verdict by step {usual}, or about step {soonest} if all steps take as long as these."
    return f"{recording} First verdict about step {usual}."
