"""Whatever is no message of a job, sent to everybody in it by somebody who knows the password of its hub."""

import asyncio
import base64
import secrets
import zlib
from collections.abc import Sequence
from dataclasses import replace

import msgspec
import nats

from sftriage.fleet.hub import HubAddress, Subjects
from sftriage.fleet.wire import MAX_UNPACKED_BYTES, decode_shipment, encode
from sftriage.model.captures import CaptureResult, Report

NAMES = ("nobody", "x-controller", "\x1b[31mred", "\u202eabc", "a\x07b", "n" * 900)
"""Hosts that there are not, and that no host can be."""


async def flood(address: HubAddress, places: Subjects, agents: Sequence[str], count: int, seed: bytes = b"") -> int:
    """Send about so many messages over all subjects; how many that were.

    They are noise, damaged and whole messages of the job, old ones in another order, versions that are not read, bombs,
    and messages that lie about who sends them and what they have.
    """
    client = await nats.connect(**address.options(), pending_size=64 << 20)
    js = client.jetstream()
    seen = await js.get_last_msg(places.stream, places.up(agents[0]))
    old = [await js.get_msg(places.stream, seq=seen.seq - back) for back in range(min(20, seen.seq))]
    subjects = [name(agent) for name in (places.up, places.down, places.query) for agent in agents]
    subjects += [f"$KV.{places.want}.{agent}" for agent in (*agents, "nobody")]
    subjects += [f"$KV.{places.lease}.leader", f"{places.lead}.x", f"{places.inbox(agents[0])}.x"]
    subjects += [f"$O.{places.traces}.C.x", f"$O.{places.traces}.M.{base64.urlsafe_b64encode(b'c-1/').decode()}"]
    subjects += [places.up(name) for name in NAMES]
    foreign = [subject for subject in subjects if subject not in map(places.up, agents)]
    sent, loops, much = 0, 0, bomb()
    while sent < count:
        whole = bytearray(seen.data)
        whole[4 + secrets.randbelow(len(whole) - 4)] ^= 0x55
        noise = secrets.token_bytes(secrets.randbelow(3000))
        for data in (noise, b"SFT\x01" + noise, bytes(whole), b"SFT\xff" + seen.data[4:], b"", b"SFT\x03"):
            for subject in subjects:
                await client.publish(subject, data)
                sent += 1
        for subject in foreign:
            # (to the agents' own subjects, whole messages come as they were, below)
            await client.publish(subject, seen.data)
            sent += 1
        for message in old:
            await client.publish(message.subject, message.data)
            sent += 1
        if loops % 10 == 0:
            # (what is large, or becomes so, takes its time)
            for subject in [*map(places.up, agents), *map(places.down, agents)]:
                await client.publish(subject, much)
                await client.publish(subject, b"SFT\x01" + (secrets.token_bytes(900_000) if loops < 20 else b""))
                sent += 2
        loops += 1
        for lie in lies(seen.data, agents):
            await client.publish(places.up(agents[0]), lie)
            sent += 1
        await client.flush()
        await asyncio.sleep(0)
    await client.close()
    return sent


def bomb() -> bytes:
    packer = zlib.compressobj(9)
    parts = [packer.compress(b"\0" * (1 << 20)) for _ in range((MAX_UNPACKED_BYTES >> 20) + 1)]
    return b"SFT\x01" + b"".join(parts) + packer.flush()


def lies(data: bytes, agents: Sequence[str]) -> list[bytes]:
    """Messages of an agent that are not so: that it is another one, has its ranks, reports on what nobody asked for."""
    real = decode_shipment(data)
    mine = msgspec.structs.replace(real, rows=(), status=None, reports=())
    rank, info = next(iter(real.rows[-1].ranks.items()))
    another = (rank + len(real.rows[-1].ranks)) % info.world_size
    ranks = {another: replace(info, rank=another, pid=1)}
    claim = replace(real.rows[-1], steps=real.rows[-1].steps[:0], device_steps=None, device_over=(), ranks=ranks)
    report = Report(CaptureResult("c-1", rank, "stored", "\x1b[31mdone"))
    some = (real, {"agent": agents[1]}), (mine, {"rows": (claim,)}), (mine, {"reports": (report,)})
    found = [msgspec.structs.replace(message, **changes) for message, changes in some]
    return [encode(one) for one in found]
