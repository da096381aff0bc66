"""Metrics are served to who may read them, beside a job and never in its way."""

import gzip
import http.client
import socket

import pytest
from prometheus_client import CollectorRegistry, Gauge
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics

from sftriage.errors import UsageError
from sftriage.web.serving import Access, MetricsEndpoint, metrics_app
from tests.unit.web.asking import LOCAL, ask

TOKEN = "0123456789abcdef"
DEADLINE_S = 30.0


@pytest.fixture
def registry() -> CollectorRegistry:
    registry = CollectorRegistry()
    Gauge("something", "Something.", registry=registry).set(7)
    return registry


@pytest.fixture
def served(registry):
    """An endpoint on a free port of this machine; its host and port."""
    endpoint = MetricsEndpoint("127.0.0.1", 0, Access.to("127.0.0.1", None, ""))
    endpoint.serve(registry)
    yield "127.0.0.1", int(endpoint.url.rsplit(":", 1)[1].partition("/")[0])
    endpoint.close()


def scrape(at, **headers):
    connection = http.client.HTTPConnection(*at, timeout=DEADLINE_S)
    try:
        connection.request("GET", "/metrics", headers=headers)
        answer = connection.getresponse()
        return answer, answer.read()
    finally:
        connection.close()


def test_the_format_is_the_one_that_is_asked_for(served):
    answer, text = scrape(served)
    assert (answer.status, answer.headers["Content-Type"].partition(";")[0]) == (200, "text/plain")
    assert b"something 7.0" in text
    answer, text = scrape(served, Accept="application/openmetrics-text; version=1.0.0")
    assert answer.headers["Content-Type"].startswith("application/openmetrics-text")
    assert [family.name for family in parse_openmetrics(text.decode())] == ["something"]
    assert answer.headers["Cache-Control"] == "no-store"


@pytest.mark.parametrize(
    ("token", "request_", "status"),
    [
        (None, {}, 200),
        (None, {"host": "evil.example.org"}, 421),
        (None, {"path": "/metrics?name[]=none"}, 200),
        (None, {"path": "/"}, 404),
        (None, {"path": "/metrics/../etc/passwd"}, 404),
        (None, {"method": "POST"}, 405),
        (TOKEN, {}, 401),
        (TOKEN, {"authorization": "Bearer fedcba9876543210"}, 401),
        (TOKEN, {"authorization": f"Bearer {TOKEN}"}, 200),
        (TOKEN, {"authorization": f"Bearer {TOKEN}", "host": "node-7.cluster.local:9400"}, 200),
        (TOKEN, {"path": "/"}, 401),
    ],
)
def test_who_is_answered(registry, token, request_, status):
    app = metrics_app(registry, Access.to("127.0.0.1", token, "give one"))
    headers = {"host": "127.0.0.1:9400"} | {k: v for k, v in request_.items() if k not in ("path", "method")}
    target, method = request_.get("path", "/metrics"), request_.get("method", "GET")
    answer = ask(app, target, method=method, headers=list(headers.items()))
    assert answer.status == status
    # AND who is refused learns nothing
    assert ("something" in answer.text) is (status == 200)
    if status == 401:
        assert "Bearer" in answer.headers["www-authenticate"]


def test_many_metrics_are_compressed_for_who_takes_them_so(registry):
    for number in range(100):
        Gauge(f"other_{number}", "Another.", registry=registry)
    app = metrics_app(registry, Access.to("127.0.0.1", None, ""))
    plain, packed = (ask(app, "/metrics", headers=[*LOCAL, *more]) for more in ([], [("accept-encoding", "gzip")]))
    assert packed.headers["content-encoding"] == "gzip"
    assert gzip.decompress(packed.body) == plain.body


def test_what_cannot_be_listened_on_is_said_in_a_line():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(UsageError, match=f"cannot listen on 127.0.0.1 port {port}: Address already in use"):
            MetricsEndpoint("127.0.0.1", port, Access.to("127.0.0.1", None, ""))
    # AND an address that is not ours
    with pytest.raises(UsageError, match=r"cannot listen on 203\.0\.113\.7 port 0"):
        MetricsEndpoint("203.0.113.7", 0, Access.to("203.0.113.7", TOKEN, ""))
