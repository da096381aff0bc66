"""Metrics are written whole, and what goes wrong with them stays with them."""

import logging
import os
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request

import pytest
from prometheus_client import CollectorRegistry, Gauge

from sftriage.model.events import JobSeen, Received
from sftriage.sinks import metrics
from sftriage.sinks.metering import Metering
from sftriage.sinks.metrics import TextFile
from sftriage.sinks.stream import Stream
from sftriage.web.serving import Access, MetricsEndpoint

TOKEN = "0123456789abcdef"
DEADLINE_S = 30.0


@pytest.fixture
def registry() -> CollectorRegistry:
    registry = CollectorRegistry()
    Gauge("something", "Something.", registry=registry).set(7)
    return registry


def test_the_file_is_whole_and_says_at_last_how_it_ended(registry, tmp_path, monkeypatch):
    monkeypatch.setattr(metrics, "WRITE_EVERY_S", 0.01)
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
    monkeypatch.setattr(metrics, "WRITE_EVERY_S", 0.01)
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
        f"metrics: {place / 'job.prom'} cannot be written: No such file or directory; trying again"
    ]


def test_nothing_is_made_where_nothing_was_asked_for():
    metering = Metering()
    assert (metering.sinks("job", "run-1", 1.0), metering.url) == ([], None)


def test_what_was_asked_for_goes_out_from_the_start_of_a_run_to_its_end(tmp_path, monkeypatch):
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:1")
    # (what is left of it is over before another test looks at the log)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "0.1")
    before = set(threading.enumerate())
    access = Access.to("127.0.0.1", None, "give one")
    metering = Metering(lambda: MetricsEndpoint("127.0.0.1", 0, access), tmp_path / "x.prom", otel=True)
    stream = Stream(metering.sinks("job", "run-1", 1.0))
    # GIVEN nothing but a port that is bound
    assert set(threading.enumerate()) <= before
    # WHEN the run goes on THEN that can be asked for
    stream.start()
    stream.publish(JobSeen(2.0, Received(25), None, 0.0, 0.0))
    end = time.monotonic() + DEADLINE_S
    while (
        'sftriage_telemetry_steps_total{job_name="job"} 25.0'
        not in urllib.request.urlopen(metering.url).read().decode()
    ):
        assert time.monotonic() < end
    # AND how it ended is in the file
    stream.close(DEADLINE_S)
    assert 'sftriage_run_active{job_name="job"} 0.0' in (tmp_path / "x.prom").read_text()
    with pytest.raises(urllib.error.URLError):
        urllib.request.urlopen(metering.url)


def test_a_directory_for_metrics_of_many_processes_is_somebody_elses(tmp_path):
    # GIVEN a training job whose own metrics are gathered from many processes
    code = (
        "from sftriage.sinks.metering import Metering\n"
        "import os, sys\n"
        "Metering(file=__import__('pathlib').Path(sys.argv[1]))\n"
        "from sftriage.sinks.metrics import Metrics\n"
        "Metrics('j', 'r', 0.0)\n"
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
