"""The nsys executor, with a trainer that is real and an nsys that is not: what becomes of every fault."""

import contextlib
import errno
import os
import shutil
import sqlite3
import sys
import time
from collections import namedtuple
from types import SimpleNamespace

import pytest

from sftriage.agent import nsys
from sftriage.agent.nsys import NsysCapture, NsysPlace
from sftriage.errors import CaptureError
from sftriage.model.captures import CaptureRequest
from sftriage.trainer.monitor import Monitor
from sftriage.windows.rings import Ring

FAKE_NSYS = """#!/bin/sh
# Stands in for nsys where it has to fail: a file named for the subcommand takes the place of what it would do.
here=$(dirname "$0")
echo "$*" >> "$here/calls"
output() { for word; do case $word in --output=*) echo "${word#--output=}";; esac; done; }
[ -e "$here/$1.sh" ] && { subcommand=$1; . "$here/$subcommand.sh"; exit; }
case $1 in
--version) echo "NVIDIA Nsight Systems version 2022.4.2.1-df9881f" ;;
sessions) cat "$here/sessions" ;;
start) output "$@" > "$here/started" ;;
stop)
  [ -e "$here/started" ] || exit 1
  made="$(cat "$here/started").nsys-rep"; echo report > "$made"; printf 'Generated:\\n    %s\\n' "$made" ;;
export) cp "$here/export" "$(output "$@")" ;;
esac
"""
SESSIONS = """              ID         TIME                       STATE LAUNCH NAME
         1025708        00:04                    Launched      1 sft-run-0.0
"""


def make_export(path, steps, *, kernels=None, gpus=0, texts=()):
    """An export as nsys makes it, with the parts that are read."""
    path.unlink(missing_ok=True)
    with sqlite3.connect(path) as database:
        database.execute("CREATE TABLE StringIds (id INTEGER PRIMARY KEY, value TEXT)")
        database.execute("CREATE TABLE NVTX_EVENTS (start INTEGER, end INTEGER, text TEXT, textId INTEGER)")
        names = [*(f"ProfilerStep#{step}" for step in steps), *texts]
        database.executemany("INSERT INTO StringIds VALUES (?, ?)", list(enumerate(names)))
        # Half of the names are in the row itself, as unregistered strings are.
        rows = [(at, at + 1, None if at % 2 else name, at) for at, name in enumerate(names[: len(steps)])]
        database.executemany("INSERT INTO NVTX_EVENTS VALUES (?, ?, ?, ?)", rows)
        if kernels is not None:
            database.execute("CREATE TABLE CUPTI_ACTIVITY_KIND_KERNEL (start INTEGER)")
            database.executemany("INSERT INTO CUPTI_ACTIVITY_KIND_KERNEL VALUES (?)", [(0,)] * kernels)
        if gpus:
            database.execute("CREATE TABLE TARGET_INFO_GPU (name TEXT)")
            database.executemany("INSERT INTO TARGET_INFO_GPU VALUES (?)", [("H100",)] * gpus)
    database.close()


@pytest.fixture
def nvtx(monkeypatch):
    """The ranges that were opened and closed, in order."""
    ranges = []
    package = SimpleNamespace(push_range=ranges.append, pop_range=lambda: ranges.append("pop"))
    monkeypatch.setitem(sys.modules, "nvtx", package)
    # torch may have been imported by another test; this trainer has none.
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    return ranges


class Rank:
    """A trainer in this process, an nsys beside it, and captures of it."""

    def __init__(self, directory):
        self.bin, self.spool, self.tmp, self.rings = (directory / name for name in ("bin", "spool", "tmp", "rings"))
        for path in (self.bin, self.spool, self.tmp, self.rings):
            path.mkdir()
        self.nsys = self.bin / "nsys"
        self.nsys.write_text(FAKE_NSYS, encoding="utf-8")
        self.nsys.chmod(0o700)
        (self.bin / "sessions").write_text(SESSIONS, encoding="utf-8")
        make_export(self.bin / "export", range(1000))
        self.place = NsysPlace(self.nsys, "sft-run", ("nvtx", "osrt"), self.tmp)
        self.attempt = -1
        self.train_again()
        self.trains = True

    def train_again(self):
        self.attempt += 1
        self.monitor = Monitor(("data", "backward"), rank=0, world_size=1, rings=self.rings, spool=self.spool)
        self.reader = Ring(self.rings / f"rank-0.{self.attempt}.ring")

    def behaves(self, subcommand, script):
        (self.bin / f"{subcommand}.sh").write_text(script, encoding="utf-8")

    def look(self):
        return self.reader.status()

    def step(self):
        with self.monitor.step(), self.monitor.stage("data"):
            time.sleep(0.001)

    def request(self, capture_id="c-1", **changes):
        fields = {"steps": 3, "warmup_steps": 1, "max_seconds": 20, "max_bytes": 10**7, "options": {}}
        return CaptureRequest(capture_id, 0, "nsys", **{**fields, **changes})

    def capture(self, **changes):
        mailbox = self.rings / f"rank-0.{self.attempt}.mailbox"
        return NsysCapture(self.request(**changes), self.place, mailbox, self.spool, self.look)

    def result(self, capture):
        """Train until the capture has ended."""
        end_s = time.monotonic() + 60.0
        while (result := capture.poll()) is None:
            assert time.monotonic() < end_s, "no result"
            if self.trains:
                self.step()
        return result

    def fails(self, **changes):
        """The reason for which a capture fails that leaves nothing."""
        with contextlib.closing(self.capture(**changes)) as capture:
            result = self.result(capture)
        assert result.state == "failed", result.detail
        assert not list(self.spool.glob("*.nsys-rep")) + list(self.spool.glob(".*"))
        return result.detail

    def can_be_captured(self):
        """Once its trainer knows the end of the last capture, at its next steps, the rank can be captured again."""
        self.step()
        self.step()
        with contextlib.closing(self.capture(capture_id="c-2")) as capture:
            return self.result(capture).state == "stored"

    def collecting(self, **changes):
        capture = self.capture(**changes)
        while not (self.bin / "started").exists():
            # (no step after the look that may see that nsys has started)
            self.step()
            assert capture.poll() is None
        return capture

    def calls(self):
        return [line.split()[0] for line in (self.bin / "calls").read_text(encoding="utf-8").splitlines()]


@pytest.fixture
def rank(tmp_path):
    made = Rank(tmp_path)
    yield made
    made.monitor.close()
    made.reader.close()


def test_a_capture_marks_its_steps_and_leaves_a_report(rank, nvtx):
    # GIVEN a rank that trains in a session of its own
    capture = rank.capture(options={"sqlite": True})
    capture.start()
    result = rank.result(capture)
    # THEN the steps are those that the trainer marked, warm-up excluded
    assert (result.state, result.last_step - result.first_step + 1) == ("stored", 3), result.detail
    opened = [name for name in nvtx if name.startswith("ProfilerStep")]
    assert opened == [f"ProfilerStep#{step}" for step in range(result.first_step, result.last_step + 1)]
    # AND they lie in one range, with their stages inside
    assert (nvtx[0], nvtx[-1], nvtx.count("pop")) == ("SFT_CAPTURE", "pop", len(nvtx) // 2)
    assert nvtx[2] == "sftriage:data"
    # AND nsys was called in this order, without sampling
    assert rank.calls() == ["--version", "sessions", "start", "stop", "export"]
    started = (rank.bin / "calls").read_text(encoding="utf-8").splitlines()[2]
    assert "--session=sft-run-0.0" in started
    assert "--sample=none --cpuctxsw=none" in started
    # AND report and export are in the spool under the capture's name, and gone once it is closed
    names = [(one.path.name, one.name) for one in capture.products()]
    assert names == [("c-1.nsys-rep", "trace.nsys-rep"), ("c-1.sqlite", "trace.sqlite")]
    assert all(one.path.stat().st_mode & 0o077 == 0 for one in capture.products())
    assert set(result.timings_s) == {"start", "run", "stop", "export"}
    capture.close()
    assert [*rank.spool.iterdir(), *rank.tmp.iterdir()] == []


@pytest.fixture
def no_nvtx(monkeypatch):
    monkeypatch.setitem(sys.modules, "nvtx", None)
    monkeypatch.delitem(sys.modules, "torch", raising=False)


def test_without_nvtx_the_steps_come_from_the_ring(rank, no_nvtx):
    capture = rank.capture()
    result = rank.result(capture)
    # THEN the capture is made, of at least as many steps as requested, and says where they come from
    assert result.state == "stored"
    assert result.last_step - result.first_step + 1 >= 3
    assert "taken from the ring: no NVTX in the trainer" in result.detail
    # AND an export that was not requested is not kept
    assert [one.name for one in capture.products()] == ["trace.nsys-rep"]
    assert [path.name for path in rank.spool.iterdir()] == ["c-1.nsys-rep"]
    capture.close()


FAULTS = {
    "a version that cannot be read": ({"--version": "echo Hello"}, "cannot parse the version"),
    "a version that is too old": ({"--version": "echo version 2021.3.2"}, "nsys 2021.3 is too old: 2021.4 is needed"),
    "sessions cannot be listed": ({"sessions": "echo no agent; exit 3"}, "no sessions: no agent"),
    "the session has vanished": ({"sessions": "echo nothing"}, "the session vanished"),
    "another collection in it": ({"sessions": f"echo '{SESSIONS}' | sed s/Launched/Collection/"}, "is busy: Coll"),
    "it does not start": ({"start": "echo Connection refused; exit 1"}, "nsys start: Connection refused"),
    "it does not stop": ({"stop": "echo Connection to the Agent lost.; exit 1"}, "nsys stop: Connection to the Agent"),
    "it leaves no report": ({"stop": "echo Generated:"}, "left no report"),
    "an importer that is not there": (
        {"stop": 'made="$(cat "$here/started").qdstrm"; echo x > $made; echo " $made"'},
        "no QdstrmImporter",
    ),
    "a report that cannot be opened": ({"export": "echo Invalid file; exit 1"}, "cannot be opened: nsys export: Inv"),
    "an export that is none": ({"export": 'echo x > "$(output "$@")"'}, "export cannot be read"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_every_fault_of_nsys_is_a_failed_capture_with_its_reason(rank, nvtx, monkeypatch, fault):
    monkeypatch.setattr(nsys, "IMPORTERS", ())
    scripts, reason = FAULTS[fault]
    for subcommand, script in scripts.items():
        rank.behaves(subcommand, script)
    assert reason in rank.fails()
    # AND the rank can be captured again
    for path in rank.bin.glob("*.sh"):
        path.unlink()
    assert rank.can_be_captured()


@pytest.mark.parametrize("subcommand", ["--version", "sessions", "start", "stop", "export"])
def test_an_nsys_that_hangs_is_killed_and_the_capture_failed(rank, nvtx, monkeypatch, subcommand):
    rank.behaves(subcommand, f"echo $$ > {rank.bin}/pid; exec sleep 100")
    for module, name in ((nsys, "QUERY_S"), (nsys, "STOP_S"), (nsys, "CONVERT_S")):
        monkeypatch.setattr(module, name, 0.5)
    # WHEN a capture is requested; training continues meanwhile
    capture = rank.capture()
    result = rank.result(capture)
    # THEN it failed for that reason, and that nsys is gone
    assert (result.state, "hung" in result.detail) == ("failed", True)
    with pytest.raises(ProcessLookupError):
        os.kill(int((rank.bin / "pid").read_text(encoding="ascii")), 0)
    (rank.bin / f"{subcommand}.sh").unlink()
    capture.close()


def without_nsys(rank, patch):
    rank.nsys.unlink()


def full_before(rank, patch):
    patch.setattr(shutil, "disk_usage", lambda _: namedtuple("usage", "total used free")(10, 9, 1))


def full_as_the_report_is_taken(rank, patch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device", "the spool")

    patch.setattr(shutil, "move", full)


def without_steps(rank, patch):
    make_export(rank.bin / "export", ())


def without_kernels(rank, patch):
    make_export(rank.bin / "export", range(1000), gpus=1, kernels=0)
    rank.place = NsysPlace(rank.nsys, "sft-run", ("nvtx", "cuda"), rank.tmp)


def without_training(rank, patch):
    rank.trains = False


@pytest.mark.parametrize(
    ("spoil", "changes", "reason", "calls"),
    [
        (without_nsys, {}, "nsys cannot be started: No such file", 0),
        (full_before, {}, "the disk is full: 1 bytes free", 0),
        (without_training, {"max_seconds": 0.3}, "began no step within the time-box", 2),
        (full_as_the_report_is_taken, {}, "No space left on device", 5),
        (without_steps, {}, "lacks the NVTX ranges of steps", 5),
        (without_kernels, {}, "no GPU kernel", 5),
        (lambda rank, patch: None, {"max_bytes": 3}, "at most 3 were allowed", 4),
    ],
)
def test_what_is_amiss_around_nsys_is_a_reason_and_nsys_does_no_more(
    rank, nvtx, monkeypatch, spoil, changes, reason, calls
):
    spoil(rank, monkeypatch)
    assert reason in rank.fails(**changes)
    called = rank.calls() if calls else (rank.bin / "calls").exists()
    assert called == (["--version", "sessions", "start", "stop", "export"][:calls] or False)


def test_a_disk_that_fills_up_meanwhile_is_a_reason_though_nsys_says_all_is_well(rank, nvtx, tmp_path):
    # GIVEN an nsys that cannot write where it should: it writes elsewhere, and its exit status is 0
    elsewhere = tmp_path / "nsys-report-1.qdstrm"
    says = "echo \"Failed to create 'x.qdstrm': No space left on device.\""
    rank.behaves("stop", f"{says}; echo x > {elsewhere}; echo '  {elsewhere}'")
    # THEN that is the reason, and what it wrote elsewhere is gone
    assert "No space left on device" in rank.fails()
    assert not elsewhere.exists()


def test_a_rank_that_hangs_after_some_steps_gives_those(rank, nvtx, monkeypatch):
    # GIVEN a rank that takes two steps once nsys collects, and then hangs in the third
    monkeypatch.setattr(nsys, "MARGIN_S", 0.1)
    capture = rank.collecting(max_seconds=1, steps=50)
    while capture._began is None:
        assert capture.poll() is None
    first = rank.look().step + 1
    rank.step()
    rank.step()
    with rank.monitor.step(), rank.monitor.stage("data"):
        # WHEN its time is up
        rank.trains = False
        result = rank.result(capture)
    assert (result.state, result.first_step, result.last_step) == ("stored", first, first + 1), result.detail
    assert "taken from the ring" in result.detail
    capture.close()


def test_a_capture_that_is_called_off_stops_nsys_and_keeps_nothing(rank, nvtx):
    capture = rank.collecting(steps=1000, max_seconds=50)
    capture.cancel()
    result = rank.result(capture)
    assert (result.state, result.detail) == ("failed", "cancelled")
    capture.close()
    # (without waiting for the stop of a deserted session)
    capture._abandoned._process.wait(30)
    assert rank.calls()[-1] == "stop"
    assert rank.can_be_captured()


def test_what_a_killed_agent_left_collecting_is_stopped_and_its_report_not_kept(rank, nvtx):
    # GIVEN an agent that was killed while nsys was collecting for it
    killed = rank.collecting(capture_id="killed", steps=1000)
    assert killed.poll() is None
    rank.behaves(
        "sessions",
        f"grep -q ^stop $here/calls && state=Launched || state=Collection; echo '{SESSIONS}' | sed s/Launched/$state/",
    )
    rank.monitor.close()
    killed._mailbox.close()
    rank.train_again()
    # WHEN the next one captures the rank
    capture = rank.capture()
    result = rank.result(capture)
    # THEN it can; the unclaimed report is gone
    assert result.state == "stored", result.detail
    assert rank.calls()[4:8] == ["sessions", "stop", "sessions", "start"]
    assert not list(rank.tmp.glob("killed*"))
    capture.close()
    assert list(rank.tmp.iterdir()) == []


@pytest.fixture
def armed(rank):
    """A rank whose session is out of reach."""
    rank.place = NsysPlace(rank.nsys, "none", ("nvtx",), rank.tmp, rank.spool / "armed")
    return rank


def test_an_armed_rank_gives_its_report_by_itself(armed, nvtx):
    (armed.spool / "armed-0.0.armed").touch()
    stale = armed.spool / "armed-0.0.1.nsys-rep"
    stale.write_text("old", encoding="ascii")
    capture = armed.capture()
    while "pop" not in nvtx[-1:] or nvtx.count("pop") < len(nvtx) / 2:
        assert capture.poll() is None
        armed.step()
    # WHEN the range has been closed and the report comes
    (armed.spool / "armed-0.0.2.nsys-rep").write_text("new", encoding="ascii")
    result = armed.result(capture)
    # THEN it is that report, not an older one, and nsys did not list sessions
    assert result.state == "stored", result.detail
    assert capture.products()[0].path.read_text(encoding="ascii") == "new"
    assert armed.calls() == ["--version", "export"]
    capture.close()
    assert [path.name for path in armed.spool.iterdir()] == ["armed-0.0.armed"]


@pytest.mark.parametrize(
    ("marker", "reason"), [(False, "rank 0 is not armed"), (True, "no report came within 0.3 s of the last step")]
)
def test_an_armed_rank_without_a_report_is_a_failed_capture(armed, nvtx, monkeypatch, marker, reason):
    monkeypatch.setattr(nsys, "STOP_S", 0.3)
    if marker:
        (armed.spool / "armed-0.0.armed").touch()
    assert reason in armed.fails(max_seconds=20 if marker else 0.5)


def test_an_armed_rank_without_nvtx_is_a_failed_capture(armed, no_nvtx):
    assert "an armed rank must open NVTX ranges itself: no NVTX in the trainer" in armed.fails()


def test_an_armed_rank_is_not_sampled(armed):
    with pytest.raises(CaptureError, match="option sample: an armed rank cannot be sampled"):
        armed.capture(options={"sample": "cpu"})


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"trace": ["cuda"]}, "cuda cannot be traced: the rank was launched under nsys with nvtx,osrt only"),
        ({"trace": ["everything"]}, "option trace"),
        ({"trace": []}, "option trace"),
        ({"sample": "gpu"}, "option sample"),
        ({"speed": 1}, "unknown options: speed"),
    ],
)
def test_a_request_that_makes_no_sense_is_refused_at_once(rank, options, reason):
    with pytest.raises(CaptureError, match=reason):
        rank.capture(options=options)
