"""Metrics are written whole, and what goes wrong with them stays with them."""

import logging
import os
import subprocess
import sys
import time

import pytest
from prometheus_client import CollectorRegistry, Gauge

from sftriage.controller.controller import Judged
from sftriage.records import Decision, Verdict
from sftriage.runs.directory import RunInfo
from sftriage.sinks import exposition
from sftriage.sinks.exposition import TextFile
from sftriage.sinks.metering import Metering, Wanted

TOKEN = "0123456789abcdef"
DEADLINE_S = 30.0


@pytest.fixture
def registry() -> CollectorRegistry:
    registry = CollectorRegistry()
    Gauge("something", "Something.", registry=registry).set(7)
    return registry


def test_the_file_is_whole_and_says_at_last_how_it_ended(registry, tmp_path, monkeypatch):
    monkeypatch.setattr(exposition, "WRITE_EVERY_S", 0.01)
    path = tmp_path / "job.prom"
    value = registry._names_to_collectors["something"]
    file = TextFile(path)
    file.serve(registry)
    end = time.monotonic() + DEADLINE_S
    while not path.exists():
        assert time.monotonic() < end
    # WHEN it is read again and again while it is written
    for number in range(200):
        value.set(number)
        lines = path.read_text().splitlines()
        assert lines[-1].startswith("something ")
        assert len(lines) == 3
    value.set(999)
    file.close()
    # THEN what was said before the end is in it, and nothing else is left in the directory
    assert path.read_text().splitlines()[-1] == "something 999.0"
    assert list(tmp_path.iterdir()) == [path]


def test_a_disk_that_fails_is_said_once_and_tried_again(registry, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(exposition, "WRITE_EVERY_S", 0.01)
    place = tmp_path / "place"
    place.mkdir()
    file = TextFile(place / "job.prom")
    place.rename(tmp_path / "away")
    with caplog.at_level(logging.WARNING, "sftriage"):
        file.serve(registry)
        end = time.monotonic() + DEADLINE_S
        while not caplog.records:
            assert time.monotonic() < end
        (tmp_path / "away").rename(place)
        while not (place / "job.prom").exists():
            assert time.monotonic() < end
        file.close()
    assert [record.getMessage() for record in caplog.records] == [
        f"metrics: {place / 'job.prom'} cannot be written: No such file or directory; it is tried again"
    ]


class Broken:
    """Says that it cannot, whatever it is asked."""

    def __getattr__(self, name):
        raise RuntimeError("broken")


def test_metrics_that_fail_are_said_once_and_stop_nobody(tmp_path, caplog):
    # GIVEN metrics and spans whose every part fails
    meter = Metering(Wanted(file=tmp_path / "x.prom"))
    info = RunInfo("run-1", "job", "2027-01-01T00:00:00+00:00", ("true",), "default", "0" * 64, str(tmp_path))
    broken = Broken()
    meter.start(info, broken, broken)
    meter._metrics = meter._spans = broken
    verdict = Verdict(0, 9, "healthy", (), (), 0.1, {}, {}, {})
    judged = Judged(verdict, Decision(1.0, 0, 9, "healthy", "ignore", "healthy"))
    # WHEN triage goes on
    for _ in range(3):
        meter.judged(judged)
        meter.asked(judged.decision)
        meter.learnt(None)
        meter.captured(None, None)
        meter.looked(ended=True)
    meter.close()
    # THEN nothing was raised, and each failure was said once
    said = [record.getMessage() for record in caplog.records]
    assert said
    assert len(said) == len(set(said))


def test_a_directory_for_metrics_of_many_processes_is_somebody_elses(tmp_path):
    # GIVEN a training job whose own metrics are gathered from many processes
    code = (
        "from sftriage.sinks.metering import Metering, Wanted\n"
        "import os, sys\n"
        "Metering(Wanted(file=__import__('pathlib').Path(sys.argv[1])))\n"
        "from sftriage.sinks.metrics import Metrics\n"
        "Metrics('j', 'r', version='1', started_s=0.0)\n"
        "print(os.environ['PROMETHEUS_MULTIPROC_DIR'])\n"
    )
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    environment = {**os.environ, "PROMETHEUS_MULTIPROC_DIR": str(theirs)}
    out = subprocess.run(
        [sys.executable, "-c", code, tmp_path / "x.prom"], env=environment, capture_output=True, text=True, timeout=60
    )
    # THEN the job still has its directory, and ours are not in it
    assert out.stdout.strip() == str(theirs), out.stderr
    assert list(theirs.iterdir()) == []
