"""The steps of all hosts are kept, however many they are, with no file open in between."""

import errno
import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from sftriage.runtime.controlling import LOGS_PER_SECOND, KeptRows
from sftriage.traces import disk
from sftriage.traces.disk import Disk
from sftriage.windows.decoding import CAPTURING, FLAGS
from sftriage.windows.logs import LOG_KIND, LogReader
from sftriage.windows.steplog import find_logs
from tests.unit.fleet.shipments import info, steps

RANKS = (0, 1)


class Kept:
    """A run directory's steps, of a controller that can be started again, at a time that is told."""

    def __init__(self, directory: Path) -> None:
        self.directory, self.now_s = directory, 0.0
        self.start()

    def start(self) -> None:
        self.disk = Disk()
        self.rows = KeptRows(self.directory, None, self.disk, clock=lambda: self.now_s)

    def take(self, agent, position, ranks, first, count, *, generation=0, device=None, capturing=False):
        infos = {rank: replace(info(rank, world_size=10_000), attempt=generation) for rank in ranks}
        some = steps(ranks, first, count)
        some.slots_BW[:, FLAGS] = CAPTURING * capturing
        self.rows.take(agent, position, generation, infos, some, device)

    def turn(self, passed_s=1.0):
        self.now_s += passed_s
        self.rows.turn()
        self.disk.drain(20.0) if self.rows.position is None else self.written()

    def written(self):
        """What was asked of the disk is done; what is held back stays so."""
        self.disk.do(lambda: None, "test", last=True)

    def steps_of(self, rank, kind="steps"):
        (log,) = (one for one in find_logs(self.directory, kind) if one.rank == rank)
        return LogReader(*log.segments, kind=kind).read().step_B.tolist()


@pytest.fixture
def kept(tmp_path):
    made = Kept(tmp_path)
    yield made
    made.disk.close()


def files_open(directory):
    links = Path("/proc/self/fd").iterdir()
    return sum(os.path.realpath(link).startswith(str(directory)) for link in links)


def test_steps_of_a_small_job_are_written_at_once(kept):
    kept.take("a", 1, RANKS, 0, 3)
    kept.take("b", 2, (2, 3), 0, 2, device=steps((2,), 0, 1))
    kept.turn(0.25)
    assert [kept.steps_of(rank) for rank in range(4)] == [[0, 1, 2]] * 2 + [[0, 1]] * 2
    # AND device times beside them, empty where a rank has shown none, though others of its host have
    assert (kept.steps_of(2, LOG_KIND), kept.steps_of(3, LOG_KIND)) == ([0], [])
    assert kept.rows.position is None
    assert files_open(kept.directory) == 0


def test_of_a_large_job_so_many_logs_are_written_a_second_and_what_waits_is_not_acknowledged(kept):
    n_hosts = LOGS_PER_SECOND
    for number in range(n_hosts):
        kept.take(f"host-{number}", number + 1, (2 * number, 2 * number + 1), 0, 2)
    # WHEN a second has gone by
    kept.turn()
    # THEN half of the hosts' logs are there, and the others wait, in the order in which they came
    assert len(find_logs(kept.directory)) == LOGS_PER_SECOND
    assert kept.rows.position == n_hosts // 2 + 1
    # AND what comes meanwhile waits with them
    kept.take("host-0", n_hosts + 1, (0, 1), 2, 1)
    kept.turn()
    assert kept.rows.position == n_hosts + 1
    kept.turn()
    assert kept.steps_of(0) == [0, 1, 2]
    assert (kept.rows.position, files_open(kept.directory)) == (None, 0)


def test_what_waits_is_written_where_somebody_wants_to_read_it(kept):
    for number in range(LOGS_PER_SECOND):
        kept.take(f"host-{number}", number + 1, (2 * number, 2 * number + 1), 0, 2)
    kept.disk.settle()
    assert len(find_logs(kept.directory)) == 2 * LOGS_PER_SECOND
    assert kept.rows.position is None


def test_steps_that_a_profiler_touched_wait_for_nothing(kept):
    for number in range(LOGS_PER_SECOND):
        kept.take(f"host-{number}", number + 1, (2 * number, 2 * number + 1), 0, 2)
    last = 2 * LOGS_PER_SECOND - 1
    kept.take(f"host-{LOGS_PER_SECOND - 1}", 10**6, (last - 1, last), 2, 1, capturing=True)
    kept.written()
    assert kept.steps_of(last) == [0, 1, 2]


def test_another_controller_goes_on_where_the_logs_end(kept):
    kept.take("a", 1, RANKS, 0, 3)
    kept.turn()
    kept.disk.close()
    kept.start()
    # WHEN what the first one had not acknowledged comes again, and more
    kept.take("a", 2, RANKS, 1, 5)
    kept.turn()
    assert kept.steps_of(0) == kept.steps_of(1) == [0, 1, 2, 3, 4, 5]


def test_another_process_of_a_rank_has_a_log_of_its_own(kept):
    kept.take("a", 1, RANKS, 0, 3)
    kept.take("a", 2, RANKS, 0, 2, generation=1)
    kept.turn()
    assert {(log.attempt, log.rank) for log in find_logs(kept.directory)} == {(0, 0), (0, 1), (1, 0), (1, 1)}


def test_what_the_disk_refuses_is_there_once_later(kept, monkeypatch):
    refused = []
    write = os.pwrite

    def once(descriptor, data, at):
        if len(refused) < 3:
            refused.append(at)
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(descriptor, data, at)

    monkeypatch.setattr(os, "pwrite", once)
    monkeypatch.setattr(disk, "RETRY_S", 0.01)
    kept.take("a", 1, RANKS, 0, 4)
    kept.rows.turn()
    kept.disk.drain(20.0)
    assert len(refused) == 3
    assert kept.steps_of(0) == kept.steps_of(1) == [0, 1, 2, 3]


def test_steps_of_ranks_that_lie_mixed_are_kept_by_rank(kept):
    some = steps(RANKS, 0, 4)
    mixed = some[np.argsort(some.step_B, kind="stable")]
    kept.rows.take("a", 1, 0, {rank: info(rank) for rank in RANKS}, mixed, None)
    kept.turn()
    assert kept.steps_of(0) == kept.steps_of(1) == [0, 1, 2, 3]
