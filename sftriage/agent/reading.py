"""Reading one host's rings: every new step is kept, and told once; what every rank is doing now."""

from __future__ import annotations

import logging
import socket
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from operator import attrgetter
from pathlib import Path

from sftriage.agent.counting import Counting
from sftriage.base.loops import LogOnce
from sftriage.errors import RingError
from sftriage.model.windows import JobStatus, RankStatus, ReadCounts, StageSchema
from sftriage.traces.disk import Counted, Do, at_once, refusal
from sftriage.trainer.layout import RingInfo, find_rings
from sftriage.windows.decoding import Batch, Copied, StepArrays, batches, slot_bytes, together
from sftriage.windows.logs import LOG_KIND
from sftriage.windows.rings import Ring, Rows, status_of
from sftriage.windows.steplog import KeptSteps, StepLog, blocks_of

BROKEN = {"steps": "steps are judged but not kept", LOG_KIND: "device times are judged but not kept"}


class RankLog:
    """One log of a rank, of its steps or of its device times (``kind``).

    ``say`` gets what cannot be kept at all; ``there`` are its files, where they are known (see `StepLog`).

    Attributes:
        info: the ring's; with the stages that an earlier agent's log of it has, if that could be opened.
        broken: why nothing can be kept here, whatever the disk takes.
    """

    broken: RingError | None = None
    _log: StepLog | None = None

    def __init__(
        self,
        steps: Path,
        info: RingInfo,
        kind: str,
        kept: KeptSteps | None,
        do: Do,
        say: Callable[[str], None],
        there: Mapping[str, Sequence[Path]] | None = None,
    ) -> None:
        self._kind, self._do, self._say = kind, do, say
        self._make = partial(StepLog, steps, info, kind=kind, kept=kept, there=there)
        self._queue = f"{kind} of {info.rank}.{info.attempt}"
        self._do(self._open, self._queue)
        self.info = info if self._log is None else self._log.info

    def take(self, steps: StepArrays, blocks: Set[int], cohort: str) -> None:
        """Keep steps of the rank, which is of a cohort by now; ``blocks`` of them stay where others are thinned."""
        if len(steps):
            size_bytes = len(steps) * slot_bytes(self.info.schema)
            counted = Counted("steps" if self._kind == "steps" else "device times", len(steps), size_bytes)
            self._do(partial(self._append, steps, frozenset(blocks), cohort), self._queue, counted, waits=False)

    def rest(self) -> None:
        if self._log is not None:
            self._log.close()

    def close(self) -> None:
        self._do(self._close, self._queue, waits=False)

    def _open(self) -> None:
        if self._log is None and self.broken is None:
            try:
                self._log = self._make()
            except RingError as error:
                self._fails(error)

    def _append(self, steps: StepArrays, blocks: frozenset[int], cohort: str) -> None:
        self._open()
        if (log := self._log) is None:
            return
        try:
            if log.info.schema != self.info.schema:
                raise RingError(f"{log.path}: has other stages")
            if log.info.cohort != cohort:
                log.join(cohort)
            log.append(steps, blocks)
        except RingError as error:
            self._fails(error)

    def _fails(self, error: RingError) -> None:
        """A disk that refuses is tried again; a log that is another writer's is none of ours."""
        if refusal(error) is not None:
            raise error
        self._close()
        self.broken = error
        self._say(f"{error}; {BROKEN[self._kind]}")

    def _close(self) -> None:
        if self._log is not None:
            self._log.close()
            self._log = None


log = logging.getLogger("sftriage")

SETTLED_NS = 1_000_000_000


@dataclass(slots=True)
class _Rank:
    """One rank's ring, and the logs of its steps: of the device's times once it runs on one."""

    ring: Ring
    log: RankLog
    device_log: RankLog | None = None

    def close(self) -> None:
        for file in (self.ring, self.log, self.device_log):
            if file is not None:
                file.close()


class RankRings:
    """The rings of the ranks on one host, as they appear and end. ``do`` writes every step into directory ``steps``."""

    def __init__(self, rings: Path, steps: Path, kept: KeptSteps | None = None, do: Do = at_once) -> None:
        self._rings = rings
        self._log_once = LogOnce(log)
        self._log = partial(RankLog, steps, kept=kept, do=do, say=self._log_once)
        self._ranks: dict[Path, _Rank] = {}
        # Of each generation: what its ranks keep of steps that are thinned.
        self._blocks: defaultdict[int, set[int]] = defaultdict(set)
        self._counting = Counting(steps, self._log_once, kept, do)
        # Of each generation: the stages and the number of ranks.
        self._agreed: dict[int, tuple[StageSchema, int]] = {}
        self._host, self._position = socket.gethostname(), 0
        self._looked_ns = -1
        self._counts = ReadCounts()

    def rows(self) -> list[Rows]:
        """The steps that were written since the last call, by generation; also of one that has appeared, if none."""
        self.look()
        copied: dict[Path, Copied] = {}
        for path, one in list(self._ranks.items()):
            with self._giving_up(path):
                copied[path] = one.ring.copied()
        found: dict[int, list[tuple[_Rank, Batch]]] = {}
        for path, batch in self._decoded(copied).items():
            one = self._ranks[path]
            with self._giving_up(path):
                self._take(one, batch)
                found.setdefault(one.ring.info.attempt, []).append((one, batch))
        self._position += 1
        # A step's own clock is the host's monotonic one, which nobody else can read.
        wall_ns = time.time_ns() - time.monotonic_ns()
        return [self._of_generation(generation, of, wall_ns) for generation, of in sorted(found.items())]

    def telemetry(self) -> ReadCounts:
        return self._counts

    def rewind(self, n_steps: int) -> None:
        """Have so many of the steps of each rank that were told last be told once more; counts begin anew."""
        self._counts = ReadCounts(problems=self._counts.problems)
        for path, one in list(self._ranks.items()):
            with self._giving_up(path):
                one.ring, before = one.ring.reopened(n_steps), one.ring
                before.close()

    def _decoded(self, copied: Mapping[Path, Copied]) -> dict[Path, Batch]:
        try:
            return dict(zip(copied, batches(list(copied.values())), strict=True))
        except Exception:
            # Some rank's moments: each by itself shows whose.
            found: dict[Path, Batch] = {}
            for path, one in copied.items():
                with self._giving_up(path):
                    (found[path],) = batches([one])
            return found

    def _take(self, one: _Rank, batch: Batch) -> None:
        info = one.log.info
        self._counts.steps += len(batch.steps)
        self._counts.missed += batch.missed
        self._counts.torn += batch.torn
        if batch.misuse:
            self._log_once(
                f"rank {info.rank} leaves stages that are not open, or in the wrong order; their"
                " times are taken as well as they can be"
            )
        if one.ring.late_stages:
            self._log_once(
                f"rank {info.rank} declared {', '.join(one.ring.late_stages)} after it had begun recording; what they"
                " take is counted with the stage around them"
            )
        if batch.steps.capturing_B.any():
            self._blocks[info.attempt] |= blocks_of(batch.steps)
        blocks, cohort = self._blocks[info.attempt], one.ring.info.cohort
        one.log.take(batch.steps, blocks, cohort)
        if one.ring.on_device and one.device_log is None:
            # Made at once, and empty where no times come: whoever judges the run later knows what the host's are worth.
            one.device_log = self._log(info, LOG_KIND)
        if one.device_log is not None:
            one.device_log.take(batch.device, blocks, cohort)
        if len(batch.steps):
            self._counting.look(info)

    def _of_generation(self, generation: int, found: list[tuple[_Rank, Batch]], wall_ns: int) -> Rows:
        schema, world_size = self._agreed[generation]
        on_device = [(one.ring, batch.device) for one, batch in found if one.ring.on_device]
        return Rows(
            generation=generation,
            schema=schema,
            world_size=world_size,
            ranks={info.rank: info for info in self.infos if info.attempt == generation},
            steps=self._counting.laid_over(generation, together([batch.steps for _, batch in found])),
            device_steps=together([device for _, device in on_device]) if on_device else None,
            device_over=tuple(
                ring.info.rank for ring, device in on_device if (ring.over or ring.untimed) and not len(device)
            ),
            wall_ns=wall_ns,
            agent=self._host,
            position=self._position,
        )

    def statuses(self) -> JobStatus | None:
        """What the ranks of the newest generation are doing now; None before there is one."""
        self.look()
        newest = max((one.ring.info.attempt for one in self._ranks.values()), default=0)
        ranks, about = [], None
        for path, one in list(self._ranks.items()):
            # (one that records other stages counts as missing)
            if one.ring.info.attempt != newest or (about is not None and one.ring.info.schema != about.schema):
                continue
            with self._giving_up(path):
                ranks.append(one.ring.status())
                about = about or one.ring.info
        if about is None:
            return None
        return status_of(about.schema, about.world_size, ranks, newest)

    def status(self, info: RingInfo) -> RankStatus | None:
        """What one rank is doing now; None where that cannot be read."""
        ring = next((ring for ring in self._open_rings() if ring.info == info), None)
        try:
            return None if ring is None else ring.status()
        except Exception:  # (whoever reads its steps gives it up)
            return None

    @property
    def ranks(self) -> dict[int, RingInfo]:
        """The newest ring of each rank, by rank."""
        return {info.rank: info for info in sorted(self.infos, key=attrgetter("attempt"))}

    @property
    def infos(self) -> list[RingInfo]:
        return [ring.info for ring in self._open_rings()]

    def alive(self, info: RingInfo) -> bool:
        """Whether the process of a rank is there: that one, and not another one that has started since."""
        of = info.rank, info.attempt
        return any(ring.writer_alive for ring in self._open_rings() if (ring.info.rank, ring.info.attempt) == of)

    def writes(self, pid: int, start_ticks: int) -> bool:
        """Whether a process is there, and writes one of the rings."""
        its = (one for one in self._open_rings() if (one.info.pid, one.info.pid_start_ticks) == (pid, start_ticks))
        return any(ring.writer_alive for ring in its)

    def _open_rings(self) -> list[Ring]:
        # (another thread may take rings up meanwhile)
        return [one.ring for one in list(self._ranks.values())]

    def close(self) -> None:
        for one in self._ranks.values():
            one.close()
        self._counting.close()
        self._ranks.clear()

    def look(self) -> None:
        try:
            changed_ns = self._rings.stat().st_mtime_ns
        except OSError:
            changed_ns = 0
        if changed_ns == self._looked_ns:
            return
        # A directory that has just changed may do so again within the same tick of its clock.
        self._looked_ns = changed_ns if time.time_ns() - changed_ns > SETTLED_NS else -1
        found: dict[Path, tuple[Ring, RankLog]] = {}
        for path in find_rings(self._rings):
            if path not in self._ranks and str(path) not in self._counts.problems:
                with self._giving_up(path):
                    found[path] = self._opened(path)
        # Of rings that appear together, most are right.
        for (generation, about), _ in Counter(_about(ring.info) for ring, _ in found.values()).most_common():
            self._agreed.setdefault(generation, about)
        for path, (ring, kept) in found.items():
            self._ranks[path] = _Rank(ring, kept)
            generation, about = _about(ring.info)
            if about != self._agreed[generation]:
                self._give_up(path, f"{path}: rank {ring.info.rank} records different stages from the other ranks")

    def _opened(self, path: Path) -> tuple[Ring, RankLog]:
        # The windows of a generation, and its logs, are of the same stages from beginning to end.
        ring = Ring(path, grows=False)
        try:
            if ring.info.file_name("ring") != path.name:
                raise RingError(f"{path}: its header belongs to {ring.info.file_name('ring')}")
            kept = self._log(ring.info, "steps")
            if kept.broken is not None:
                raise kept.broken
            ring.info = replace(ring.info, schema=kept.info.schema)
        except BaseException:
            ring.close()
            raise
        return ring, kept

    @contextmanager
    def _giving_up(self, path: Path) -> Iterator[None]:
        """Give up a ring that raises anything: one rank's damage costs no other rank."""
        try:
            yield
        except Exception as error:
            known = isinstance(error, RingError)
            self._give_up(path, str(error) if known else f"{path}: {type(error).__name__}: {error}")

    def _give_up(self, path: Path, reason: str) -> None:
        """A ring that cannot be read lowers coverage; it does not end the job's triage."""
        log.warning("%s; its rank counts as missing", reason)
        self._counts.problems[str(path)] = reason
        if path in self._ranks:
            self._ranks.pop(path).close()


def _about(info: RingInfo) -> tuple[int, tuple[StageSchema, int]]:
    return info.attempt, (info.schema, info.world_size)
