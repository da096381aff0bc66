"""What is asked for of metrics and spans, by options of `sftriage run` and `sftriage attach`."""

import sys
from pathlib import Path

import pytest

from sftriage.commands.job_options import MetricsOptions
from sftriage.errors import UsageError
from sftriage.sinks.metering import Metering


def metering_of(**wanted: object) -> Metering:
    return MetricsOptions(**wanted).metering()


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        ({"metrics_host": "0.0.0.0"}, "nothing is served without --metrics-port"),
        ({"metrics_token_file": Path("x")}, "nothing is served without --metrics-port"),
        (
            {"metrics_port": 0, "metrics_host": "0.0.0.0"},
            "give one with --metrics-token-file, or in SFTRIAGE_METRICS_TOKEN",
        ),
        ({"metrics_port": 0, "metrics_token_file": Path("/nowhere/token")}, "/nowhere/token: No such file"),
        ({"metrics_per_rank": True}, "--metrics-port or --metrics-file"),
        ({"metrics_file": Path("/tmp/metrics.txt")}, r"files that end in \.prom"),
        ({"metrics_file": Path("/nowhere/x.prom")}, "no directory that can be written to"),
    ],
)
def test_what_makes_no_sense_is_said_before_the_job_starts(wanted, message, monkeypatch):
    monkeypatch.delenv("SFTRIAGE_METRICS_TOKEN", raising=False)
    with pytest.raises(UsageError, match=message):
        metering_of(**wanted)


@pytest.mark.parametrize("missing", ["prometheus_client", "opentelemetry.exporter.otlp.proto.http"])
def test_a_library_that_is_missing_is_named_with_its_extra(missing, monkeypatch):
    monkeypatch.setitem(sys.modules, missing, None)
    wanted, extra = ({"metrics_port": 0}, "metrics") if missing == "prometheus_client" else ({"otel": True}, "otel")
    with pytest.raises(UsageError, match=rf"install sftriage\[{extra}\]"):
        metering_of(**wanted)


@pytest.mark.parametrize("variable", ["OTEL_EXPORTER_OTLP_PROTOCOL", "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL"])
def test_a_protocol_that_is_not_spoken_is_said(variable, monkeypatch):
    monkeypatch.setenv(variable, "grpc")
    with pytest.raises(UsageError, match=r"http/protobuf, and .* asks for grpc"):
        metering_of(otel=True)


def test_a_variable_that_is_none_is_said(monkeypatch):
    monkeypatch.setenv("OTEL_SPAN_ATTRIBUTE_COUNT_LIMIT", "many")
    with pytest.raises(UsageError, match="OpenTelemetry cannot be set up"):
        metering_of(otel=True)


def test_nothing_is_made_where_nothing_was_asked_for():
    meter = metering_of()
    assert (type(meter), meter.url) == (Metering, None)
