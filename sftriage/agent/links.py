"""Reads what the ranks of a host send to other hosts: their TCP sockets (``sock_diag``), and RDMA ports.

A socket belongs to a rank if its process holds it. Where the processes are hidden, all sockets of the network
namespace count; the controller drops those whose other end is on no host of the job. Unprivileged: see `ss -ti`.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import struct
from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from ipaddress import ip_address
from pathlib import Path
from time import monotonic_ns, thread_time_ns, time_ns

from sftriage.base.process import Process, content_of
from sftriage.model.windows import LinkUse
from sftriage.trainer.layout import RingInfo

EVERY_NS = 1_000_000_000
REST_TIMES = 100
"""A reading is followed by a rest of this many times its CPU time, at least: it takes 1 % of a CPU at most."""
HOLDERS_NS = 10_000_000_000
"""How often to look which sockets the ranks hold, where there are unknown ones."""
LEAST_BYTES, MAX_PAIRS = 65536, 64
"""The least that a pair of addresses sends between two readings to count, and the most pairs: the largest count."""
ANSWER_S = 1.0

INFINIBAND = Path("/sys/class/infiniband")

_NETLINK_SOCK_DIAG, _BY_FAMILY, _DUMP, _DONE, _ERROR = 4, 20, 0x301, 3, 2
_INFO, _ESTABLISHED, _SIOCGIFADDR = 2, 1, 0x8915
_REQUEST = struct.Struct("=IHHIIBBBBI48x")
"""``nlmsghdr``, then ``inet_diag_req_v2``: the sockets of one family in some states, with their `tcp_info`."""
_HEADER, _ATTRIBUTE = struct.Struct("=IH10x"), struct.Struct("=HH")
_INODE, _ATTRIBUTES_AT = struct.Struct("=68xI"), 72
_TCP_INFO = struct.Struct("=7xB16xI72xI16xQ32xQQQ")
"""Whether too little data shaped the last delivery rate (bit 0); segments in flight; segments sent again; bytes
acknowledged; the last delivery rate, in bytes per second; microseconds with data to send, and those of them in which
the receiver's window was closed."""


@dataclass(frozen=True, slots=True)
class SocketUse:
    """One socket: segments in flight, and sent again; bytes acknowledged; time with data that the peer takes.

    ``delivered_per_s`` is the kernel's last estimate of the bytes that the path takes. It may be too high ``at_rest``,
    as of a small message after an exchange, which passes in one piece.
    """

    address: bytes
    peer: bytes
    in_flight: int
    again: int
    acked_bytes: int
    busy_us: int
    delivered_per_s: int
    at_rest: bool

    @classmethod
    def of(cls, message: bytes) -> SocketUse | None:
        """A socket of `sockets`; None if the kernel does not count these."""
        width, at = (4 if message[0] == socket.AF_INET else 16), _ATTRIBUTES_AT
        while at + _ATTRIBUTE.size <= len(message):
            length, kind = _ATTRIBUTE.unpack_from(message, at)
            if kind == _INFO and length >= _ATTRIBUTE.size + _TCP_INFO.size:
                found = _TCP_INFO.unpack_from(message, at + _ATTRIBUTE.size)
                flags, in_flight, again, acked, delivered_per_s, busy_us, closed_us = found
                at_rest = bool(flags & 1) and not in_flight
                address, peer = message[8 : 8 + width], message[24 : 24 + width]
                return cls(address, peer, in_flight, again, acked, busy_us - closed_us, delivered_per_s, at_rest)
            at += max(length + 3 & ~3, _ATTRIBUTE.size)
        return None


def sockets() -> Iterator[bytes]:
    """The established TCP sockets of this network namespace, as ``inet_diag_msg`` with attributes.

    Raises:
        OSError: the kernel does not answer.
    """
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, _NETLINK_SOCK_DIAG) as channel:
        channel.settimeout(ANSWER_S)
        for family in (socket.AF_INET, socket.AF_INET6):
            about = family, socket.IPPROTO_TCP, 1 << (_INFO - 1), 0, 1 << _ESTABLISHED
            channel.send(_REQUEST.pack(_REQUEST.size, _BY_FAMILY, _DUMP, 0, 0, *about))
            over = False
            while not over:
                data, at = channel.recv(1 << 16), 0
                while at < len(data):
                    length, kind = _HEADER.unpack_from(data, at)
                    if over := kind in (_DONE, _ERROR):
                        break
                    yield data[at + _HEADER.size : at + length]
                    at += length + 3 & ~3


def held_by(processes: Collection[Process]) -> set[int] | None:
    """The inodes of all sockets that some processes hold; None if one of them does not show its files here."""
    found = set()
    for process in processes:
        if not process.alive:
            return None
        try:
            with os.scandir(f"/proc/{process.pid}/fd") as files:
                for file in files:
                    with contextlib.suppress(FileNotFoundError):
                        name = os.readlink(file.path)  # noqa: PTH115  # (a path object takes twice as long)
                        if name.startswith("socket:["):
                            found.add(int(name[8:-1]))
        except OSError:
            return None
    return found


def rdma_ports(infiniband: Path = INFINIBAND) -> dict[str, tuple[int, float]]:
    """The bytes that each active RDMA port has sent, and its rate in bits per second."""
    found = {}
    for port in infiniband.glob("*/ports/*"):
        sent, rate = (content_of(port / name).split() for name in ("counters/port_xmit_data", "rate"))
        if b"ACTIVE" in content_of(port / "state") and sent and rate:
            # (the counter is of words of four bytes, the rate such as "100 Gb/sec (4X EDR)")
            with contextlib.suppress(ValueError):
                found[f"{port.parts[-3]}/{port.name}"] = 4 * int(sent[0]), float(rate[0]) * 1e9
    return found


@lru_cache(64)
def speed_of(address: str) -> float:
    """The speed of the interface with an IPv4 address, in bits per second; 0 if unknown."""
    with contextlib.suppress(OSError, ValueError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as channel:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):
                found = fcntl.ioctl(channel, _SIOCGIFADDR, struct.pack("256s", name.encode()))
                if socket.inet_ntoa(found[20:24]) == address:
                    return max(0.0, float(content_of(Path("/sys/class/net") / name / "speed")) * 1e6)
    return 0.0


@lru_cache(1 << 12)
def text_of(address: bytes) -> str:
    """An address as text; an IPv4 address in an IPv6 socket as such."""
    found = ip_address(address)
    return str(getattr(found, "ipv4_mapped", None) or found)


def use_of(host: str, some: Sequence[SocketUse], took_s: float, begin_ns: int, end_ns: int) -> LinkUse:
    """The sockets of a pair of addresses together: they share the link, and their time counts once."""
    bulk = [use for use in some if use.acked_bytes >= LEAST_BYTES]
    in_flight = sum(use.delivered_per_s for use in bulk if use.in_flight)
    address, peer = map(text_of, (some[0].address, some[0].peer))
    return LinkUse(
        *(host, address, peer, begin_ns, end_ns, sum(use.acked_bytes for use in some)),
        busy_s=min(took_s, max(use.busy_us for use in some) / 1e6),
        again=sum(use.again for use in some),
        delivered_bits_per_s=8.0 * (in_flight or max((use.delivered_per_s for use in bulk), default=0)),
        at_rest=all(use.at_rest for use in bulk),
        speed_bits_per_s=speed_of(address),
    )


class LinkReader:
    """Reads what the ranks of this host have sent to others since the last reading, at most once a second.

    ``infiniband`` is where the kernel shows RDMA ports.
    """

    def __init__(self, infiniband: Path = INFINIBAND) -> None:
        self._infiniband = infiniband
        self._due_ns = self._holders_ns = 0
        self._last_ns, self._last_at_ns = 0, 0
        self._sockets: dict[int, SocketUse] = {}
        self._ports: dict[str, tuple[int, float]] = {}
        self._processes: frozenset[Process] = frozenset()
        self._ours: set[int] | None = set()
        self._others: set[int] = set()

    def read(self, ranks: Sequence[RingInfo]) -> tuple[LinkUse, ...]:
        """What the ranks with these rings sent; nothing if it is not known, or a reading is not due."""
        now_ns, at_ns = monotonic_ns(), time_ns()
        if now_ns < self._due_ns:
            return ()
        began_ns = thread_time_ns()
        try:
            of_pair = self._read_sockets(frozenset(Process(of.pid, of.pid_start_ticks) for of in ranks), now_ns)
        except (OSError, struct.error):
            of_pair = {}
        before, self._ports = self._ports, rdma_ports(self._infiniband)
        begin_ns, begin_at_ns = self._last_ns, self._last_at_ns
        self._last_ns, self._last_at_ns = now_ns, at_ns
        self._due_ns = now_ns + max(EVERY_NS, REST_TIMES * (thread_time_ns() - began_ns))
        if not begin_ns or not ranks:
            return ()
        host, took_s = ranks[0].host, (now_ns - begin_ns) / 1e9
        found = [
            use_of(host, some, took_s, begin_at_ns, at_ns)
            for some in of_pair.values()
            if sum(use.acked_bytes for use in some) >= LEAST_BYTES
        ]
        for name, (sent, bits_per_s) in self._ports.items():
            sent -= before.get(name, (sent, 0.0))[0]
            if sent >= LEAST_BYTES and bits_per_s > 0.0:
                busy_s = min(took_s, 8 * sent / bits_per_s)
                found.append(LinkUse(host, name, "", begin_at_ns, at_ns, sent, busy_s, 0, bits_per_s, at_rest=False))
        return tuple(sorted(found, key=lambda use: -use.sent_bytes)[:MAX_PAIRS])

    def _read_sockets(self, processes: frozenset[Process], now_ns: int) -> dict[tuple[bytes, bytes], list[SocketUse]]:
        """What each socket of the ranks did since the last reading, by its addresses."""
        messages = {_INODE.unpack_from(message)[0]: message for message in sockets()}
        new = messages.keys() - self._others - (self._ours or set())
        if new and (processes != self._processes or now_ns >= self._holders_ns):
            self._processes, self._holders_ns = processes, now_ns + HOLDERS_NS
            self._ours = held_by(processes)
            self._others = set() if self._ours is None else messages.keys() - self._ours
        now = {
            inode: use
            for inode, message in messages.items()
            if (self._ours is None or inode in self._ours) and (use := SocketUse.of(message)) is not None
        }
        here = {use.address for use in now.values()}
        before, self._sockets = self._sockets, now
        of_pair = defaultdict(list)
        for inode, use in now.items():
            # What is sent to an address of this host takes no link.
            last = before.get(inode)
            if last is None or last.acked_bytes == use.acked_bytes or use.peer in here:
                continue
            counted = ("again", "acked_bytes", "busy_us")
            of_pair[use.address, use.peer].append(
                replace(use, **{name: max(0, getattr(use, name) - getattr(last, name)) for name in counted})
            )
        return of_pair
