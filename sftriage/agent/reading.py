"""Reads one host's rings for the agent: logs every new step, returns it once, and shows what every rank is doing."""

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
from sftriage.agent.links import LinkReader
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

    ``report`` gets a permanent failure; ``there`` are the log's files, if known (see `StepLog`).

    Attributes:
        info: the ring's; with the stages of an earlier agent's log of it, if there is one that opens.
        broken: why the log cannot be written even by a working disk.
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
        report: Callable[[str], None],
        there: Mapping[str, Sequence[Path]] | None = None,
    ) -> None:
        self._kind, self._do, self._report = kind, do, report
        self._make = partial(StepLog, steps, info, kind=kind, kept=kept, there=there)
        self._queue = f"{kind} of {info.rank}.{info.attempt}"
        self._do(self._open, self._queue)
        self.info = info if self._log is None else self._log.info

    def take(self, steps: StepArrays, blocks: Set[int], cohort: str) -> None:
        """Log steps of the rank, whose cohort may have become known; thinning keeps ``blocks`` of them."""
        if len(steps):
            size_bytes = len(steps) * slot_bytes(self.info.schema)
            counted = Counted("steps" if self._kind == "steps" else "device times", len(steps), size_bytes)
            self._do(partial(self._append, steps, frozenset(blocks), cohort), self._queue, counted, waits=False)

    def rest(self) -> None:
        """Close the file until the next steps."""
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
        """Raise what a retry may mend; give up a log that belongs to another writer."""
        if refusal(error) is not None:
            raise error
        self._close()
        self.broken = error
        self._report(f"{error}; {BROKEN[self._kind]}")

    def _close(self) -> None:
        if self._log is not None:
            self._log.close()
            self._log = None


log = logging.getLogger("sftriage")

SETTLED_NS = 1_000_000_000


@dataclass(slots=True)
class _Rank:
    """One rank's ring, the log of its steps, and that of its device times once it uses a device."""

    ring: Ring
    log: RankLog
    device_log: RankLog | None = None

    def close(self) -> None:
        for file in (self.ring, self.log, self.device_log):
            if file is not None:
                file.close()


class RankRings:
    """The rings of the ranks on one host, as they appear and end. ``do`` runs the writes to the directory ``steps``."""

    def __init__(self, rings: Path, steps: Path, kept: KeptSteps | None = None, do: Do = at_once) -> None:
        self._rings = rings
        self._log_once = LogOnce(log)
        self._log = partial(RankLog, steps, kept=kept, do=do, report=self._log_once)
        self._ranks: dict[Path, _Rank] = {}
        # By generation: the blocks of steps that thinning keeps.
        self._blocks: defaultdict[int, set[int]] = defaultdict(set)
        self._counting = Counting(rings, steps, self._log_once, kept, do)
        self._links = LinkReader()
        # By generation: the stages and the number of ranks.
        self._agreed: dict[int, tuple[StageSchema, int]] = {}
        self._host, self._position = socket.gethostname(), 0
        self._listed_ns = -1
        self._counts = ReadCounts()

    def rows(self) -> list[Rows]:
        """The new steps since the last call, by generation; a new generation comes even without steps."""
        self.refresh()
        copied: dict[Path, Copied] = {}
        for path, rank in list(self._ranks.items()):
            with self._giving_up(path):
                copied[path] = rank.ring.copied()
        found: dict[int, list[tuple[_Rank, Batch]]] = {}
        for path, batch in self._decoded(copied).items():
            rank = self._ranks[path]
            with self._giving_up(path):
                self._take(rank, batch)
                found.setdefault(rank.ring.info.attempt, []).append((rank, batch))
        self._position += 1
        # Steps are on the host's monotonic clock, which other hosts cannot read.
        wall_ns = time.time_ns() - time.monotonic_ns()
        rows = [self._of_generation(generation, of, wall_ns) for generation, of in sorted(found.items())]
        if rows and len(rows[-1].ranks) < rows[-1].world_size:
            # (of a job with ranks on other hosts)
            rows[-1] = replace(rows[-1], links=self._links.read(tuple(rows[-1].ranks.values())))
        return rows

    def telemetry(self) -> ReadCounts:
        return self._counts

    def rewind(self, n_steps: int) -> None:
        """Return the last ``n_steps`` steps of each rank once more; counts begin anew."""
        self._counts = ReadCounts(problems=self._counts.problems)
        for path, rank in list(self._ranks.items()):
            with self._giving_up(path):
                rank.ring, before = rank.ring.reopened(n_steps), rank.ring
                before.close()

    def _decoded(self, copied: Mapping[Path, Copied]) -> dict[Path, Batch]:
        try:
            return dict(zip(copied, batches(list(copied.values())), strict=True))
        except Exception:
            # Decode each alone, to find the rank whose moments are invalid.
            found: dict[Path, Batch] = {}
            for path, part in copied.items():
                with self._giving_up(path):
                    (found[path],) = batches([part])
            return found

    def _take(self, rank: _Rank, batch: Batch) -> None:
        info = rank.log.info
        self._counts.steps += len(batch.steps)
        self._counts.missed += batch.missed
        self._counts.torn += batch.torn
        if batch.misuse:
            self._log_once(
                f"rank {info.rank} leaves stages that are not open, or in the wrong order; their"
                " times are taken as well as they can be"
            )
        if rank.ring.late_stages:
            self._log_once(
                f"rank {info.rank} declared {', '.join(rank.ring.late_stages)} after it had begun recording; what they"
                " take is counted with the stage around them"
            )
        if batch.steps.capturing_B.any():
            self._blocks[info.attempt] |= blocks_of(batch.steps)
        blocks, cohort = self._blocks[info.attempt], rank.ring.info.cohort
        rank.log.take(batch.steps, blocks, cohort)
        if rank.ring.on_device and rank.device_log is None:
            # Create it at once, even if no times come: then a later reader knows that this rank used a device.
            rank.device_log = self._log(info, LOG_KIND)
        if rank.device_log is not None:
            rank.device_log.take(batch.device, blocks, cohort)
        if len(batch.steps):
            self._counting.read(info)

    def _of_generation(self, generation: int, found: list[tuple[_Rank, Batch]], wall_ns: int) -> Rows:
        schema, world_size = self._agreed[generation]
        on_device = [(rank.ring, batch.device) for rank, batch in found if rank.ring.on_device]
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
        """What the ranks of the newest generation are doing now; None before the first."""
        self.refresh()
        newest = max((rank.ring.info.attempt for rank in self._ranks.values()), default=0)
        ranks, about = [], None
        for path, rank in list(self._ranks.items()):
            # (a rank with other stages counts as missing)
            if rank.ring.info.attempt != newest or (about is not None and rank.ring.info.schema != about.schema):
                continue
            with self._giving_up(path):
                ranks.append(rank.ring.status())
                about = about or rank.ring.info
        if about is None:
            return None
        return status_of(about.schema, about.world_size, ranks, newest)

    def status(self, info: RingInfo) -> RankStatus | None:
        """What one rank is doing now; None if its ring cannot be read."""
        ring = next((ring for ring in self._open_rings() if ring.info == info), None)
        try:
            return None if ring is None else ring.status()
        except Exception:  # (reading its steps gives it up)
            return None

    def stat(self, info: RingInfo) -> bytes:
        """The kernel's ``stat`` of a rank's main thread, as far as it is open; OSError if the process has ended."""
        return self._counting.stat(info)

    @property
    def ranks(self) -> dict[int, RingInfo]:
        """The newest ring of each rank, by rank."""
        return {info.rank: info for info in sorted(self.infos, key=attrgetter("attempt"))}

    @property
    def infos(self) -> list[RingInfo]:
        return [ring.info for ring in self._open_rings()]

    def alive(self, info: RingInfo) -> bool:
        """Whether a rank's process runs: the one that made this ring, not a later one."""
        of = info.rank, info.attempt
        return any(ring.writer_alive for ring in self._open_rings() if (ring.info.rank, ring.info.attempt) == of)

    def writes(self, pid: int, start_ticks: int) -> bool:
        """Whether a process is running and writes one of the rings."""
        found = (
            ring for ring in self._open_rings() if (ring.info.pid, ring.info.pid_start_ticks) == (pid, start_ticks)
        )
        return any(ring.writer_alive for ring in found)

    def _open_rings(self) -> list[Ring]:
        # (another thread may add rings meanwhile)
        return [rank.ring for rank in list(self._ranks.values())]

    def close(self) -> None:
        for rank in self._ranks.values():
            rank.close()
        self._counting.close()
        self._ranks.clear()

    def refresh(self) -> None:
        """Open the rings that have appeared."""
        try:
            changed_ns = self._rings.stat().st_mtime_ns
        except OSError:
            changed_ns = 0
        if changed_ns == self._listed_ns:
            return
        # A directory that has just changed may change again within the same tick of its clock.
        self._listed_ns = changed_ns if time.time_ns() - changed_ns > SETTLED_NS else -1
        found: dict[Path, tuple[Ring, RankLog]] = {}
        for path in find_rings(self._rings):
            if path not in self._ranks and str(path) not in self._counts.problems:
                with self._giving_up(path):
                    found[path] = self._opened(path)
        # Among rings that appear together, the majority has the right stages.
        for (generation, about), _ in Counter(_about(ring.info) for ring, _ in found.values()).most_common():
            self._agreed.setdefault(generation, about)
        for path, (ring, kept) in found.items():
            self._ranks[path] = _Rank(ring, kept)
            generation, about = _about(ring.info)
            if about != self._agreed[generation]:
                self._give_up(path, f"{path}: rank {ring.info.rank} records different stages from the other ranks")

    def _opened(self, path: Path) -> tuple[Ring, RankLog]:
        # A generation keeps its stages to the end, in its windows and in its logs.
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
        """Give up a ring on any exception: a damaged ring must not affect other ranks."""
        try:
            yield
        except Exception as error:
            known = isinstance(error, RingError)
            self._give_up(path, str(error) if known else f"{path}: {type(error).__name__}: {error}")

    def _give_up(self, path: Path, reason: str) -> None:
        """Drop a ring that cannot be read: coverage falls, and triage continues."""
        log.warning("%s; its rank counts as missing", reason)
        self._counts.problems[str(path)] = reason
        if path in self._ranks:
            self._ranks.pop(path).close()


def _about(info: RingInfo) -> tuple[int, tuple[StageSchema, int]]:
    return info.attempt, (info.schema, info.world_size)
