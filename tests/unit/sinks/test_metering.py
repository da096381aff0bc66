"""Metrics are served to who may read them and written whole; what goes wrong with them stays with them."""

import http.client
import logging
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, Gauge
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics

from sftriage.access import Access
from sftriage.controller.controller import Judged
from sftriage.errors import UsageError
from sftriage.records import Decision, Verdict
from sftriage.runs.directory import RunInfo
from sftriage.sinks import scraping
from sftriage.sinks.metering import Meter, Metering, Wanted, meter_of
from sftriage.sinks.scraping import MAX_REQUESTS, Endpoint, TextFile

TOKEN = "0123456789abcdef"
DEADLINE_S = 30.0


@pytest.fixture
def registry() -> CollectorRegistry:
    registry = CollectorRegistry()
    Gauge("something", "Something.", registry=registry).set(7)
    return registry


@pytest.fixture
def serve(registry, monkeypatch):
    """An endpoint on a free port of this machine; its host and port."""
    monkeypatch.setattr(scraping, "POLL_S", 0.01)
    endpoints = []

    def serve(token=None, host="127.0.0.1") -> tuple[str, int]:
        endpoint = Endpoint(host, 0, Access.to(host, token, "give one"))
        endpoints.append(endpoint)
        endpoint.serve(registry)
        return "127.0.0.1", int(endpoint.url.rsplit(":", 1)[1].partition("/")[0])

    yield serve
    for endpoint in endpoints:
        endpoint.close()


def ask(at, path="/metrics", method="GET", **headers):
    connection = http.client.HTTPConnection(*at, timeout=DEADLINE_S)
    try:
        connection.request(method, path, headers={name.replace("_", "-"): value for name, value in headers.items()})
        answer = connection.getresponse()
        return answer, answer.read().decode()
    finally:
        connection.close()


def test_the_format_is_the_one_that_is_asked_for(serve):
    at = serve()
    answer, text = ask(at)
    assert (answer.status, answer.headers["Content-Type"].partition(";")[0]) == (200, "text/plain")
    assert "something 7.0" in text
    answer, text = ask(at, Accept="application/openmetrics-text; version=1.0.0")
    assert answer.headers["Content-Type"].startswith("application/openmetrics-text")
    assert [family.name for family in parse_openmetrics(text)] == ["something"]
    assert answer.headers["Cache-Control"] == "no-store"


@pytest.mark.parametrize(
    ("token", "request_", "status"),
    [
        (None, {}, 200),
        (None, {"Host": "localhost:1"}, 200),
        (None, {"Host": "evil.example.org"}, 421),
        (None, {"path": "/metrics?name[]=none"}, 200),
        (None, {"path": "/"}, 404),
        (None, {"path": "/metrics/../etc/passwd"}, 404),
        (None, {"method": "POST"}, 405),
        (None, {"method": "DELETE"}, 405),
        (TOKEN, {}, 401),
        (TOKEN, {"Authorization": "Bearer fedcba9876543210"}, 401),
        (TOKEN, {"Authorization": f"Bearer {TOKEN}"}, 200),
        (TOKEN, {"Authorization": f"Bearer {TOKEN}", "Host": "node-7.cluster.local:9400"}, 200),
        (TOKEN, {"path": "/"}, 401),
    ],
)
def test_who_is_answered(serve, token, request_, status):
    answer, text = ask(serve(token), **request_)
    assert answer.status == status
    # AND who is refused learns nothing
    assert ("something" in text) is (status == 200)
    if status == 401:
        assert answer.headers["WWW-Authenticate"].startswith("Bearer")


def test_a_port_that_is_taken_is_said_in_a_line():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(UsageError, match=f"cannot listen on 127.0.0.1 port {port}: Address already in use"):
            meter_of(Wanted(port=port))


def test_an_address_that_is_not_ours_is_said_in_a_line():
    with pytest.raises(UsageError, match=r"cannot listen on 203\.0\.113\.7 port 0"):
        Endpoint("203.0.113.7", 0, Access.to("203.0.113.7", TOKEN, ""))


def test_clients_that_say_nothing_do_not_keep_others_out_for_ever(serve, monkeypatch):
    monkeypatch.setattr(scraping._Handler, "timeout", 0.2)
    at = serve()
    # GIVEN as many connections as are answered at a time, all of them silent
    silent = [socket.create_connection(at, timeout=DEADLINE_S) for _ in range(MAX_REQUESTS + 4)]
    # THEN each is let go of
    for one in silent:
        assert one.recv(1) == b""
        one.close()
    # AND then others are answered
    end = time.monotonic() + DEADLINE_S
    while True:
        try:
            assert ask(at)[0].status == 200
            break
        except (ConnectionError, http.client.BadStatusLine):
            assert time.monotonic() < end


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        (Wanted(host="0.0.0.0"), "nothing is served without --metrics-port"),
        (Wanted(token_file=Path("x")), "nothing is served without --metrics-port"),
        (Wanted(port=0, host="0.0.0.0"), "give one with --metrics-token-file, or in SFTRIAGE_METRICS_TOKEN"),
        (Wanted(port=0, token_file=Path("/nowhere/token")), "/nowhere/token: No such file"),
        (Wanted(per_rank=True), "--metrics-port or --metrics-file"),
        (Wanted(otel_steps=True), "give --otel"),
        (Wanted(file=Path("/tmp/metrics.txt")), r"files that end in \.prom"),
        (Wanted(file=Path("/nowhere/x.prom")), "no directory that can be written to"),
    ],
)
def test_what_makes_no_sense_is_said_before_the_job_starts(wanted, message, monkeypatch):
    monkeypatch.delenv("SFTRIAGE_METRICS_TOKEN", raising=False)
    with pytest.raises(UsageError, match=message):
        meter_of(wanted)


@pytest.mark.parametrize("missing", ["prometheus_client", "opentelemetry.exporter.otlp.proto.http"])
def test_a_library_that_is_missing_is_named_with_its_extra(missing, monkeypatch):
    monkeypatch.setitem(sys.modules, missing, None)
    wanted, extra = (Wanted(port=0), "metrics") if missing == "prometheus_client" else (Wanted(otel=True), "otel")
    with pytest.raises(UsageError, match=rf"install sftriage\[{extra}\]"):
        meter_of(wanted)


@pytest.mark.parametrize("variable", ["OTEL_EXPORTER_OTLP_PROTOCOL", "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL"])
def test_a_protocol_that_is_not_spoken_is_said(variable, monkeypatch):
    monkeypatch.setenv(variable, "grpc")
    with pytest.raises(UsageError, match=r"http/protobuf, and .* asks for grpc"):
        meter_of(Wanted(otel=True))


def test_a_variable_that_is_none_is_said(monkeypatch):
    monkeypatch.setenv("OTEL_SPAN_ATTRIBUTE_COUNT_LIMIT", "many")
    with pytest.raises(UsageError, match="OpenTelemetry cannot be set up"):
        meter_of(Wanted(otel=True))


def test_nothing_is_made_where_nothing_was_asked_for():
    meter = meter_of(Wanted())
    assert (type(meter), meter.url) == (Meter, None)


def test_the_file_is_whole_and_says_at_last_how_it_ended(registry, tmp_path, monkeypatch):
    monkeypatch.setattr(scraping, "WRITE_EVERY_S", 0.01)
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
    monkeypatch.setattr(scraping, "WRITE_EVERY_S", 0.01)
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
        "from sftriage.sinks.metering import meter_of, Wanted\n"
        "import os, sys\n"
        "meter_of(Wanted(file=__import__('pathlib').Path(sys.argv[1])))\n"
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
