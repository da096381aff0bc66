"""What the ranks of a host send: real sockets, by their processes, and RDMA ports of a made tree."""

import os
import socket
import struct
import subprocess
import sys
from dataclasses import replace

import pytest

from sftriage.agent import links
from sftriage.agent.links import LinkReader, SocketUse, held_by, rdma_ports, sockets
from sftriage.base.process import Process
from tests.unit.fleet.shipments import info

ME = Process.of(os.getpid())
OURS = replace(info(0, world_size=4), pid=ME.pid, pid_start_ticks=ME.start_ticks)


@pytest.fixture
def channel():
    """Both ends of a TCP connection."""
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as one:
        other, _ = server.accept()
        with other:
            yield one, other


@pytest.fixture
def reader(tmp_path, monkeypatch):
    monkeypatch.setattr(links, "EVERY_NS", 0)
    monkeypatch.setattr(links, "REST_TIMES", 0)
    return LinkReader(tmp_path)


def exchanged(one, other, n_bytes):
    """Send and receive so many bytes."""
    while n_bytes > 0:
        one.sendall(bytes(min(n_bytes, 1 << 15)))
        n_bytes -= 1 << 15
        left = 1 << 15
        while left > 0:
            left -= len(other.recv(left))


def test_a_socket_has_its_counters_and_belongs_to_the_process_that_holds_it(channel):
    # GIVEN a connection over which something was sent
    one, other = channel
    exchanged(one, other, 1 << 20)
    # WHEN the kernel is asked for all sockets THEN it is there, with what was sent and whose it is
    inodes = {os.fstat(end.fileno()).st_ino for end in channel}
    found = [SocketUse.of(message) for message in sockets() if struct.unpack_from("=I", message, 68)[0] in inodes]
    assert len(found) == 2
    assert {use.peer for use in found} == {socket.inet_aton("127.0.0.1")}
    assert max(use.acked_bytes for use in found) >= 1 << 20
    assert inodes <= held_by([ME])
    # AND a process that has ended, or another one of the same number, shows nothing
    assert held_by([Process(ME.pid, ME.start_ticks + 1)]) is None


def test_what_is_sent_within_a_host_is_no_link(channel, reader):
    # GIVEN a rank that sends to another one of its own host WHEN it is read THEN no link is used
    reader.read([OURS])
    exchanged(*channel, 1 << 20)
    assert reader.read([OURS]) == ()


SENDS = """
import socket, sys
one = socket.create_connection(("127.0.0.2", int(sys.argv[1])), source_address=("127.0.0.1", 0))
for line in sys.stdin:
    one.sendall(bytes(int(line)))
    print("sent", flush=True)
"""


def test_a_link_has_what_its_sockets_sent_since_the_last_reading_whoever_else_sends(reader, channel):
    # GIVEN a rank that sends to another address, beside this process
    with socket.create_server(("127.0.0.2", 0)) as server:
        command = [sys.executable, "-c", SENDS, str(server.getsockname()[1])]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as rank:
            other, _ = server.accept()
            its = replace(OURS, pid=rank.pid, pid_start_ticks=Process.of(rank.pid).start_ticks)
            with other:
                assert reader.read([its]) == ()
                # WHEN both send
                exchanged(*channel, 1 << 20)
                rank.stdin.write("3000000\n")
                rank.stdin.flush()
                left = 3_000_000
                while left > 0:
                    left -= len(other.recv(left))
                assert rank.stdout.readline() == "sent\n"
                # THEN its link has that, and no other
                (use,) = reader.read([its])
                assert (use.address, use.peer) == ("127.0.0.1", "127.0.0.2")
                assert use.sent_bytes == pytest.approx(3_000_000, abs=70_000)
                assert 0.0 <= use.busy_s <= (use.end_ns - use.begin_ns) / 1e9
                # AND nothing new afterwards
                assert reader.read([its]) == ()
                rank.stdin.close()


def test_an_rdma_port_has_what_it_sent_at_its_rate(tmp_path, reader):
    # GIVEN two ports, one of which is down, and a file that no kernel writes
    for name, state, rate in (
        ("0", "4: ACTIVE", "100 Gb/sec (4X EDR)"),
        ("1", "1: DOWN", "10"),
        ("2", "4: ACTIVE", "?"),
    ):
        port = tmp_path / f"mlx5_{name}" / "ports" / "1"
        (port / "counters").mkdir(parents=True)
        (port / "state").write_text(state)
        (port / "rate").write_text(rate)
        (port / "counters" / "port_xmit_data").write_text("1000\n")
    assert rdma_ports(tmp_path) == {"mlx5_0/1": (4000, 100e9)}
    # WHEN the first one sends THEN its link has what it sent, in words of four bytes, at its rate
    reader.read([OURS])
    (tmp_path / "mlx5_0/ports/1/counters/port_xmit_data").write_text("1001000\n")
    (use,) = reader.read([OURS])
    assert (use.address, use.peer, use.sent_bytes, use.bits_per_s) == ("mlx5_0/1", "", 4_000_000, 100e9)
