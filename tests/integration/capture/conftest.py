"""A stand-in for nsys, a trainer in this process, and an NVTX that notes its ranges."""

import contextlib
import sqlite3
import sys
import time
from types import SimpleNamespace

import pytest

from sftriage.capture.nsys import NsysCapture, NsysPlace
from sftriage.model.captures import CaptureRequest
from sftriage.recorder import Monitor
from sftriage.windows.rings import open_ring

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
    """An export as nsys makes it, as far as it is looked at."""
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
    seen = []
    package = SimpleNamespace(push_range=seen.append, pop_range=lambda: seen.append("pop"))
    monkeypatch.setitem(sys.modules, "nvtx", package)
    # torch may have been imported by another test; this trainer has none.
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    return seen


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
        """A trainer that is new, in the next attempt."""
        self.attempt += 1
        self.monitor = Monitor(("data", "backward"), rank=0, world_size=1, rings=self.rings, spool=self.spool)
        self.reader = open_ring(self.rings / f"rank-0.{self.attempt}.ring")

    def behaves(self, subcommand, script):
        """What nsys does for this subcommand, in place of what it would."""
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
        """Once its trainer has been told of the last one's end, at its next steps, the rank can be captured again."""
        self.step()
        self.step()
        with contextlib.closing(self.capture(capture_id="c-2")) as capture:
            return self.result(capture).state == "stored"

    def collecting(self, **changes):
        """A capture for which nsys has been started."""
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
