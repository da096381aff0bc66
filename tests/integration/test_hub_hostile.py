"""Garbage, lies and floods on every subject of a job: dropped, counted, said once, and the job is judged on."""

import asyncio
import contextlib
import hashlib
import re
import socket
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest

from sftriage import __version__
from sftriage.fleet.hub import HubAddress, LogLeader, Subjects, make_places, taken_up
from sftriage.fleet.shipping import HostEnd
from sftriage.fleet.transfers import Fetching, HostCaptures
from sftriage.fleet.wire import VERSION, Orders, RunName, decode_orders, encode
from sftriage.model.captures import CaptureResult, Report
from sftriage.runs.recordings import load_recording
from sftriage.traces.manifest import Artefact
from sftriage.traces.store import LocalStore
from sftriage.windows.gather import Shape
from tests.integration.flooding import flood
from tests.integration.hubs import Hosts, connection, own_hub
from tests.integration.processes import peak_bytes
from tests.unit.conftest import manifest_of

nats = pytest.importorskip("nats", reason="many hosts want the extra `nats`")
PLACES = Subjects.of("job")
TRACE = b"a trace"
ARTEFACT = Artefact(
    name="trace.json",
    role="trace",
    media_type="application/json",
    size_bytes=len(TRACE),
    sha256=hashlib.sha256(TRACE).hexdigest(),
)
LONG_S = 60.0
FLOOD, MOST_BYTES = 10_000, 400 << 20


@pytest.fixture(scope="module")
def hub(tmp_path_factory):
    directory = tmp_path_factory.mktemp("hub")
    with own_hub(directory) as (_, port), connection(port, directory / "secret") as found:
        found.call(make_places(found, PLACES, "run-1"), LONG_S)
        yield found


def changed(manifest, **changes):
    return manifest.model_copy(update=changes).to_json()


CAPTURE = manifest_of("c-1", ARTEFACT, rank=3)
LIES = {
    "nothing": (b"", "not a manifest: document: Invalid JSON"),
    "no manifest": (b"\x1b[31m{", "not a manifest"),
    "of another capture": (changed(CAPTURE, capture_id="c-2"), "its manifest is of another capture"),
    "of another rank": (manifest_of("c-1", ARTEFACT, rank=2).to_json(), "its manifest is of another capture"),
    "a path": (CAPTURE.to_json().replace(b'"trace.json"', b'"../../trace"'), "not a manifest: artefacts.0.name"),
    "a manifest of gigabytes": (b" " * (5 << 20), "more data than its manifest says"),
    "smaller than it is": (
        changed(CAPTURE, artefacts=(ARTEFACT.model_copy(update={"size_bytes": 3}),)),
        "trace.json has 7 bytes; its manifest says 3",
    ),
    "other bytes": (changed(CAPTURE, artefacts=(ARTEFACT.model_copy(update={"sha256": "0" * 64}),)), "damaged"),
    "a link": (CAPTURE.to_json(), "another name"),
    "more than it says": (CAPTURE.to_json(), "more data than its manifest says"),
    "garbage about it": (CAPTURE.to_json(), "could not be fetched"),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_trace_that_is_not_what_it_says_is_refused(hub, tmp_path, lie):
    # GIVEN a capture on the hub that is not what it says it is
    manifest, why = LIES[lie]
    spool, store = tmp_path / "spool", LocalStore(tmp_path / "run")
    spool.mkdir()

    async def put():
        traces = await hub.js.object_store(PLACES.traces)
        await traces.put("c-1/trace.json", TRACE)
        await traces.put("c-1/", manifest)
        about = await traces.get_info("c-1/trace.json")
        meta = f"$O.{PLACES.traces}.M.Yy0xL3RyYWNlLmpzb24="
        if lie == "a link":
            about.options.link = nats.js.api.ObjectLink(bucket=PLACES.traces, name="c-1/")
            await traces.put("c-1/trace.json", b"", about.meta)
        if lie == "more than it says":
            await hub.js.publish(f"$O.{PLACES.traces}.C.{about.nuid}", b"more of it")
        if lie == "garbage about it":
            await hub.js.publish(meta, b"\x1b[31m{garbage", headers={"Nats-Rollup": "sub"})

    hub.call(put(), LONG_S)
    # WHEN it is fetched
    fetching = Fetching(store, spool, RunName("job", "run-1"))
    report = Report(CaptureResult("c-1", 3, "stored"))
    found = hub.call(fetching.fetched(hub, PLACES.traces, report, lambda _: None), LONG_S)
    # THEN it is no capture of the run, for that reason, and nothing of it is left
    assert found.result.state == "failed"
    assert why in found.result.detail
    assert found.result.detail.isprintable()
    assert store.ids() == frozenset()
    assert [path.name for path in tmp_path.rglob("*") if path.is_file() and path.name != ".lock"] == []


def test_a_flood_is_dropped_and_counted_and_the_job_is_judged_on(tmp_path, environment):
    flooded(Hosts(tmp_path, environment), FLOOD)


def flooded(hosts, count):
    try:
        # GIVEN a job on two hosts that is judged
        hosts.judged(40)
        # WHEN everybody in it is sent what is no message, and what lies
        address = HubAddress(f"nats://127.0.0.1:{hosts.address[1]}", hosts.secret)
        sent = asyncio.run(flood(address, PLACES, ("host-0", "host-1"), count))
        # THEN it is judged on, in as much memory as before
        hosts.judged(60)
        most_bytes = [peak_bytes(process.pid) for process in (hosts.controller, *hosts.agents)]
        steps = hosts.end()
    finally:
        hosts.close()
    assert max(most_bytes) < MOST_BYTES
    # AND it is as if nothing had been sent: every step of every rank is there, of its own host, and of one generation
    assert {one["numbers"]["coverage"] for one in hosts.windows} == {1.0}
    assert {one["attempt"] for one in hosts.windows} == {0}
    (window,) = load_recording(hosts.run).windows(Shape(steps, steps, 0))
    assert window.hosts == ("host-0", "host-0", "host-1", "host-1")
    assert not np.isnan(window.durations_NRS).any()
    # AND each thing is said once, by each process that it came to
    said = hosts.said.splitlines()
    assert all(line.isprintable() for line in said)
    who = Counter(
        line.partition(" a message of host ")[2].split(": ")[0] for line in said if "refused a message of host " in line
    )
    assert who == dict.fromkeys(("host-0", "host-1", "nobody", "x-controller", "other names"), 1)
    assert len([line for line in said if "cannot read" in line]) == 4
    # AND how many there were, at the end
    (line,) = [line for line in said if "refused: " in line and " messages of host " in line]
    counts = [int(number.replace(",", "")) for number in re.findall(r"([0-9,]+) messages", line)]
    assert sent / 4 < sum(counts) < sent


def test_an_agent_says_once_that_its_controller_is_of_another_version(hub, tmp_path, caplog):
    # GIVEN an agent, and a controller whose messages are of other versions
    end = HostEnd(None, hub, PLACES, "node-a", "boot", "1", HostCaptures(tmp_path), LogLeader(tmp_path / "speaker"))
    whole = encode(Orders(7, agent="node-a"))
    for version in (VERSION + 1, VERSION - 1, VERSION + 1, VERSION, 255):
        hub.call(end._heard(SimpleNamespace(data=whole[:3] + bytes([version]) + whole[4:])), LONG_S)
    # THEN it takes what is of its own, and says of the others once, in a line, what is wrong
    assert end._orders == decode_orders(whole)
    apart = f"messages of version {VERSION + 1}, where this sftriage ({__version__}) reads version {VERSION}"
    assert caplog.messages == [f"host node-a: cannot read the controller's orders: {apart}"]
    # AND what is another agent's it does not take
    hub.call(end._heard(SimpleNamespace(data=encode(Orders(9, agent="node-b")))), LONG_S)
    assert end._orders.epoch == 7


HEADERS = (b" \xff\r\n\r\n", b" 503 \xff\r\n\r\n", b"\r\n\r\n", b"\r\n\xff: \xff\r\n\r\n", b" 1\r\n\xff\r\n\r\n")
POISON = (
    b"PUB sft.job.up.\xff\xfe 1\r\nx\r\n",
    *(b"HPUB sft.job.up.a %d %d\r\nNATS/1.0%bx\r\n" % (8 + len(one), 9 + len(one), one) for one in HEADERS),
)


def test_what_the_client_cannot_read_ends_nothing(hub, caplog):
    # GIVEN messages whose subjects and headers are bytes that are no text, and one that is whole after each
    host, port = hub.address.url.removeprefix("nats://").split(":")
    user, password = hub.address.credentials.read_text().strip().split(":")
    connect = f'CONNECT {{"user":"{user}","pass":"{password}","verbose":false,"headers":true}}\r\nPING\r\n'
    with socket.create_connection((host, int(port)), LONG_S) as raw:
        raw.recv(4096)
        raw.sendall(connect.encode())
        for poison in POISON:
            raw.sendall(poison + b"PUB sft.job.up.a 5\r\nwhole\r\n")
        raw.sendall(b"PING\r\n")
        raw.settimeout(LONG_S)
        answers = b""
        while answers.count(b"PONG") < 2:
            answers += raw.recv(4096) or pytest.fail(f"it has hung up: {answers}")

    async def read():
        consumer, found = await taken_up(hub, PLACES, 1), []
        while found.count(b"whole") < len(POISON):
            with contextlib.suppress(nats.errors.TimeoutError):
                found += [message.data for message in await consumer.fetch(50, 0.5)]
        return found

    # WHEN they are read THEN all that is whole comes, on the same connection, and it is said once
    assert hub.call(read(), LONG_S).count(b"whole") == len(POISON)
    assert len([said for said in caplog.messages if "cannot read" in said]) == 1
