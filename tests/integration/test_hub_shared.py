"""Jobs that share a NATS server: none can read or change another's, and an agent no more than is its own."""

import asyncio
import base64
import contextlib
import json
import time
from functools import partial

import pytest

from sftriage.fleet.hub import CONTROLLER_FILE, Hub, HubAddress, Subjects, agent_file, make_places
from tests.integration.hubs import Hosts
from tests.integration.processes import wait_until
from tests.integration.runs import captures
from tests.integration.shared_nats import JwtNats, SharedNats

nats = pytest.importorskip("nats", reason="many hosts want the extra `nats`")
pytest.importorskip("nkeys", reason="keys want the extra `nats`")
JOBS = {"a": ("host-0", "host-1"), "b": ("host-0", "host-1")}
B = Subjects.of("b")
SECRET = b"only-b-knows"
THEIRS = (SECRET, B.want.encode(), B.traces.encode())
MARK = b"somebody-was-here"
SOON_S, LONG_S = 1.0, 10.0
STREAMS = (B.stream, f"KV_{B.want}", f"KV_{B.lease}", f"OBJ_{B.traces}")
META = f"$O.{B.traces}.M." + base64.urlsafe_b64encode(b"c-1/trace").decode()


def stored(answer):
    """What a server has stored, where it answers that in base 64."""
    with contextlib.suppress(ValueError, KeyError, TypeError):
        return base64.b64decode(json.loads(answer)["message"]["data"])
    return b""


class Someone:
    """A connection with somebody's keys, and what it is told that it may not."""

    def __init__(self, address, inbox, own):
        self.address, self.inbox, self.own, self.refused = address, inbox, own, 0

    async def __aenter__(self):
        self.nc = await nats.connect(
            **self.address.options(), inbox_prefix=self.inbox, error_cb=self._error, allow_reconnect=False
        )
        return self

    async def __aexit__(self, *_):
        await self.nc.close()

    async def _error(self, error):
        self.refused += "permissions violation" in str(error)

    async def ask(self, subject, payload=b""):
        """What is answered; "" where it may not be asked, or nobody is there."""
        before, data = self.refused, payload if isinstance(payload, bytes) else json.dumps(payload).encode()
        # (what a consumer answers comes with the subject that it was told on, which `request` does not know)
        inbox = f"{self.inbox}.{self.nc.new_inbox().rpartition('.')[2]}"
        answers = await self.listen(inbox)
        await self.nc.publish(subject, data, reply=inbox)
        end_s = time.monotonic() + LONG_S
        while not answers and self.refused == before:
            assert time.monotonic() < end_s, f"nobody answers to {subject}"
            await asyncio.sleep(0.002)
        answer = bytes(answers[0].data) if answers else b""
        return b"" if b'"error"' in answer else answer + stored(answer)

    async def tell(self, subject, payload=MARK, **more):
        await self.nc.publish(subject, payload, **more)
        await self.nc.flush()
        return b""

    async def listen(self, subject):
        heard = []

        async def hear(message):
            heard.append(message)

        await self.nc.subscribe(subject, cb=hear)
        await self.nc.flush()
        return heard


class TheirJob:
    """Job b, with all that a job has on its server; somebody looks at it and tries to change it."""

    def __init__(self, server):
        self.hub = Hub(HubAddress(server.url, server.creds("b") / CONTROLLER_FILE), "b", B.lead)
        self.hub.call(self.hub.connect(), LONG_S)
        self.heard = []

    async def make(self):
        from nats.js.api import AckPolicy, ConsumerConfig, KeyValueConfig

        js, client = self.hub.js, self.hub.client
        for stream in await js.streams_info():
            await js.delete_stream(stream.config.name)
        await make_places(self.hub, B, SECRET.decode())
        await js.create_key_value(KeyValueConfig(B.lease))
        await js.add_consumer(B.stream, ConsumerConfig(durable_name=B.stream, ack_policy=AckPolicy.ALL))
        await self.say()
        (one,) = await (await js.pull_subscribe_bind(durable=B.stream, stream=B.stream)).fetch(1)
        self.ack = one.reply
        if not self.heard:
            for host in ("host-0", "host-1"):
                for subject in (B.up(host), B.down(host), B.query(host), f"{B.inbox(host)}.*"):
                    await client.subscribe(subject, cb=partial(self._hear, subject))
            await client.flush()
            self.heard.append(("the first", b""))

    async def say(self):
        js, client = self.hub.js, self.hub.client
        for host in ("host-0", "host-1"):
            await js.publish(B.up(host), SECRET)
            await (await js.key_value(B.want)).put(host, SECRET)
            for subject in (B.query(host), f"{B.inbox(host)}.1", f"{B.lead}.1", "_INBOX.x", "$JS.ACK.x"):
                await client.publish(subject, SECRET)
        await (await js.key_value(B.lease)).put("leader", SECRET)
        await (await js.object_store(B.traces)).put("c-1/trace", SECRET)
        await client.flush()

    async def _hear(self, listening, message):
        # (what a consumer delivers has the subject on which it was told first)
        self.heard.append((listening, bytes(message.data)))

    async def state(self):
        js = self.hub.js
        found = [
            (one.config.name, one.config.max_age, one.state.messages, one.state.last_seq)
            for one in sorted(await js.streams_info(), key=lambda one: one.config.name)
            if one.config.name in STREAMS
        ]
        with contextlib.suppress(nats.js.errors.NotFoundError):
            about = await js.consumer_info(B.stream, B.stream)
            found.append((about.ack_floor.stream_seq, about.delivered.stream_seq))
        return found, sorted(self.heard)


def reading(*subjects):
    """Listening on subjects while something is told on each."""

    async def attempt(who, job):
        heard = [await who.listen(subject) for subject in subjects]
        await job(TheirJob.say)
        await who.nc.flush()
        return b"".join(bytes(message.data) for some in heard for message in some)

    return attempt


def asking(subject, payload=b""):
    async def attempt(who, _):
        return await who.ask(subject, payload)

    return attempt


def telling(subject, **more):
    async def attempt(who, _):
        return await who.tell(subject, **more)

    return attempt


def consuming(stream, **more):
    async def attempt(who, _):
        config = {"deliver_policy": "all", "ack_policy": "none", "name": "looking", **more}
        made = await who.ask(f"$JS.API.CONSUMER.CREATE.{stream}.looking", {"stream_name": stream, "config": config})
        if not made:
            return b""
        return await who.ask(f"$JS.API.CONSUMER.MSG.NEXT.{stream}.looking", {"batch": 1})

    return attempt


def pushed(stream):
    async def attempt(who, _):
        heard = await who.listen(f"{who.inbox}.pushed")
        config = {"deliver_policy": "all", "ack_policy": "none", "name": "p"}
        config |= {"deliver_subject": f"{who.inbox}.pushed"}
        made = await who.ask(f"$JS.API.CONSUMER.CREATE.{stream}.p", {"stream_name": stream, "config": config})
        end_s = time.monotonic() + (LONG_S if made else 0.0)
        while not heard and time.monotonic() < end_s:
            await asyncio.sleep(0.01)
        return b"".join(bytes(message.data) for message in heard)

    return attempt


def filled(**how):
    """A stream of one's own that is filled with what is in another one."""

    async def attempt(who, _):
        made = await who.ask("$JS.API.STREAM.CREATE.mine", {"name": "mine", **how})
        # (what never comes is waited for a second; the job's own controller has it in that time, or later)
        end_s = time.monotonic() + ((LONG_S if who.own else SOON_S) if made else 0.0)
        while time.monotonic() < end_s:
            found = await who.ask("$JS.API.STREAM.MSG.GET.mine", {"seq": 1})
            if found:
                return found
        return b""

    return attempt


async def republished(who, _):
    config = {"name": "mine", "subjects": ["mine"]}
    config["republish"] = {"src": "mine", "dest": B.down("host-1")}
    await who.ask("$JS.API.STREAM.CREATE.mine", config)
    await who.tell("mine")
    return b""


async def delivered(who, _):
    """What is one's own, delivered to where another listens."""
    await who.ask("$JS.API.STREAM.CREATE.mine", {"name": "mine", "subjects": ["mine"]})
    await who.tell("mine")
    config = {"ack_policy": "none", "name": "p", "deliver_subject": B.down("host-1")}
    await who.ask("$JS.API.CONSUMER.CREATE.mine.p", {"stream_name": "mine", "config": config})
    return b""


async def answering(who, job):
    async def answer(message):
        await message.respond(SECRET)

    await who.nc.subscribe(B.query("host-0"), cb=answer)
    await who.nc.flush()
    end_s = time.monotonic() + (LONG_S if who.own else SOON_S)
    while time.monotonic() < end_s:
        # (a server promises of a question that it comes once at most)
        with contextlib.suppress(nats.errors.TimeoutError):
            return (await job(lambda its: its.hub.client.request(B.query("host-0"), b"", timeout=SOON_S))).data
    return b""


async def system(who, _):
    """What a server tells of who comes and goes."""
    heard = await who.listen("$SYS.>")
    async with Someone(who.address, who.inbox, who.own):
        pass
    await who.nc.flush()
    return SECRET if heard else b""


KV, OBJ = f"KV_{B.want}", f"OBJ_{B.traces}"
READS = {
    **{f"subscribe {subject}": reading(subject) for subject in (B.up("host-1"), B.down("host-1"), B.query("host-1"))},
    "subscribe own": reading(B.down("host-0"), B.query("host-0"), f"{B.inbox('host-0')}.>"),
    **{f"subscribe {one}": reading(one) for one in ("sft.>", ">", f"{B.inbox('host-1')}.>", f"{B.lead}.>")},
    **{f"subscribe {one}": reading(one) for one in ("_INBOX.>", f"$KV.{B.want}.>", f"$O.{B.traces}.>", "$JS.>")},
    "answer": answering,
    "stream list": asking("$JS.API.STREAM.LIST"),
    "stream info": asking(f"$JS.API.STREAM.INFO.{B.stream}"),
    "stream info of what is wanted": asking(f"$JS.API.STREAM.INFO.{KV}"),
    "stream get": asking(f"$JS.API.STREAM.MSG.GET.{B.stream}", {"seq": 1}),
    "consumer": consuming(B.stream),
    "consumer of the controller": asking(f"$JS.API.CONSUMER.MSG.NEXT.{B.stream}.{B.stream}", {"batch": 1}),
    "consumer that pushes": pushed(B.stream),
    "key-value get": asking(f"$JS.API.STREAM.MSG.GET.{KV}", {"last_by_subj": f"$KV.{B.want}.host-1"}),
    "key-value direct get": asking(f"$JS.API.DIRECT.GET.{KV}.$KV.{B.want}.host-1"),
    "key-value direct get by number": asking(f"$JS.API.DIRECT.GET.{KV}", {"seq": 1}),
    "key-value direct get of its own": asking(f"$JS.API.DIRECT.GET.{KV}.$KV.{B.want}.host-0"),
    "key-value watch": pushed(KV),
    "lease get": asking(f"$JS.API.STREAM.MSG.GET.KV_{B.lease}", {"last_by_subj": f"$KV.{B.lease}.leader"}),
    "object get": pushed(OBJ),
    "object direct get": asking(f"$JS.API.DIRECT.GET.{OBJ}.{META}"),
    "sources": filled(sources=[{"name": B.stream}]),
    "mirror": filled(mirror={"name": B.stream}),
    "events of the server": system,
    "servers": asking("$SYS.REQ.SERVER.PING"),
    "account of the server": asking(f"$SYS.REQ.ACCOUNT.{B.stream}.JSZ"),
}
NOBODYS = {"events of the server", "servers", "account of the server"}
CHANGES = {
    **{f"publish {one}": telling(one) for one in (B.up("host-1"), B.down("host-1"), B.query("host-1"))},
    "publish own": telling(B.up("host-0")),
    **{f"publish {one}": telling(one) for one in (B.down("host-0"), f"{B.inbox('host-1')}.1")},
    "key-value put": telling(f"$KV.{B.want}.host-1"),
    "key-value put of its own": telling(f"$KV.{B.want}.host-0"),
    "lease put": telling(f"$KV.{B.lease}.leader"),
    "object put": telling(f"$O.{B.traces}.C.x"),
    "stream update": asking(
        f"$JS.API.STREAM.UPDATE.{B.stream}", {"name": B.stream, "subjects": [B.up()], "max_age": 10**12}
    ),
    "stream delete": asking(f"$JS.API.STREAM.DELETE.{B.stream}"),
    "stream purge": asking(f"$JS.API.STREAM.PURGE.{B.stream}"),
    "key-value purge": asking(f"$JS.API.STREAM.PURGE.{KV}"),
    "lease delete": asking(f"$JS.API.STREAM.DELETE.KV_{B.lease}"),
    "object purge": asking(f"$JS.API.STREAM.PURGE.{OBJ}"),
    "message delete": asking(f"$JS.API.STREAM.MSG.DELETE.{B.stream}", {"seq": 1}),
    "consumer delete": asking(f"$JS.API.CONSUMER.DELETE.{B.stream}.{B.stream}"),
    "acknowledge": None,
    "stream that republishes": republished,
    "consumer that delivers": delivered,
    "answer to another": telling(f"$JS.API.DIRECT.GET.{OBJ}.{META}", reply=B.down("host-1")),
}
OF_AN_AGENT = {
    "subscribe own",
    "answer",
    "stream info of what is wanted",
    "key-value direct get of its own",
    "publish own",
    "object put",
    "object purge",
}
MAY = {
    ("b", "controller"): {*READS, *CHANGES} - NOBODYS,
    ("b", "agent"): OF_AN_AGENT,
    ("a", "controller"): set(),
    ("a", "agent"): set(),
}


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    found = SharedNats(tmp_path_factory.mktemp("shared") / "nats", JOBS)
    yield found
    found.close()


@pytest.mark.parametrize(("whose", "role"), list(MAY), ids=lambda one: one)
def test_nobody_can_do_with_a_job_what_is_not_theirs_to_do(server, whose, role):
    # GIVEN a job on a server that others share, with all that a job has there
    job = TheirJob(server)
    places = Subjects.of(whose)
    leads = role == "controller"
    address = HubAddress(server.url, server.creds(whose)).of(CONTROLLER_FILE if leads else agent_file("host-0"))
    inbox = places.lead if leads else places.inbox("host-0")

    def of_job(what):
        return asyncio.wrap_future(job.hub.later(what(job)))

    async def tried():
        done = set()
        await of_job(TheirJob.make)
        before = await of_job(TheirJob.state)
        for name, attempt in {**READS, **CHANGES}.items():
            # WHEN somebody with the job's keys, or another's, tries each thing that there is to do
            async with Someone(address, inbox, whose == "b") as who:
                found = await (attempt or telling(job.ack, payload=b"+ACK"))(who, of_job)
                for _ in range(500 if name in MAY[whose, role] - {*READS} else 3):
                    after = await of_job(TheirJob.state)
                    if after != before:
                        break
                    await asyncio.sleep(0.01)
                if after != before if name in CHANGES else any(one in found for one in THEIRS):
                    done.add(name)
                await who.ask("$JS.API.STREAM.DELETE.mine")
            if after != before:
                await of_job(TheirJob.make)
                before = await of_job(TheirJob.state)
        return done

    try:
        # THEN they can do what is theirs, and nothing else
        assert asyncio.run(tried()) == MAY[whose, role]
        assert role == "controller" or server.violations
    finally:
        job.hub.close()


class HostsOfAnOwner(Hosts):
    """Two hosts of a job and its controller, each with credentials of its own, on a server that others share."""

    def __init__(self, directory, environment, server):
        self.server = server
        super().__init__(directory, environment)

    def start_hub(self):
        return self.server(self.directory / "nats", {"job": ("host-0", "host-1"), "other": ()})

    def sftriage(self, name, *options):
        self.who = options[options.index("--name") + 1] if name == "agent" else name
        return super().sftriage(name, *options)

    @property
    def where(self):
        return "--job-id", "job", "--nats", self.hub.url, "--creds", self.hub.creds("job", self.who)


@pytest.mark.parametrize("server", [SharedNats, JwtNats], ids=["keys", "signed tokens"])
def test_a_job_has_all_the_permissions_that_it_needs_and_nobody_else_sees_it(tmp_path, environment, server):
    # GIVEN a job on a server with the account that the documentation shows, or with tokens that its owner has signed
    hosts = HostsOfAnOwner(tmp_path, environment, server)
    try:
        # WHEN it is judged, and a rank of its is slow
        wait_until(lambda: (hosts.run / "captures").is_dir() and captures(hosts.run), 90.0)
        # THEN with the credentials of another account nothing of it is there
        assert streams_seen(hosts.hub, "other") == []
        assert Subjects.of("job").stream in streams_seen(hosts.hub, "job")
        hosts.end()
        # AND the trace has come from its host, and nobody was refused anything
        (capture,) = captures(hosts.run)
        # (on a busy machine another rank may be the first that is slow)
        assert capture.capture.host == f"host-{capture.capture.rank // 2}"
        assert hosts.hub.violations == []
    finally:
        hosts.close()


def streams_seen(server, job):
    address = HubAddress(server.url, server.creds(job, "controller")).of(CONTROLLER_FILE)
    with contextlib.closing(Hub(address, "looking", Subjects.of(job).lead)) as hub:
        hub.call(hub.connect(), LONG_S)
        return sorted(one.config.name for one in hub.call(hub.js.streams_info(), LONG_S))
