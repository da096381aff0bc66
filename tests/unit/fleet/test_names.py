"""Names of hubs are looked up, and whoever looks them up can end."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import subprocess
import sys

import pytest

from sftriage.fleet.names import HubLoop

ENDS = """
import socket, threading, time
socket.getaddrinfo = lambda *_, **__: time.sleep(3600)
from sftriage.fleet.hub import Hub, HubAddress
hub = Hub(HubAddress("nats://nobody:7422"), "me")
hub.start(hub.connect())
while not any(one.name == "sftriage-name" for one in threading.enumerate()):
    time.sleep(0.01)
hub.close()
"""


def test_a_name_server_that_does_not_answer_holds_up_no_end():
    """GIVEN a connection whose hub's name is being looked up WHEN it is let go of THEN its process ends"""
    pytest.importorskip("nats", reason="many hosts want the extra `nats`")
    subprocess.run([sys.executable, "-c", ENDS], check=True, timeout=60)


def test_a_name_is_what_the_system_says_and_one_that_there_is_not_is_an_error():
    with contextlib.closing(HubLoop()) as loop:
        assert loop.run_until_complete(loop.getaddrinfo("127.0.0.1", 80)) == socket.getaddrinfo("127.0.0.1", 80)
        with pytest.raises(socket.gaierror):
            loop.run_until_complete(loop.getaddrinfo("nobody.invalid", 80))


def test_an_answer_that_nobody_waits_for_any_more_is_let_go(monkeypatch):
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: [])
    with contextlib.closing(HubLoop()) as loop:
        asked = loop.create_task(loop.getaddrinfo("127.0.0.1", 80))
        loop.call_soon(asked.cancel)
        with pytest.raises(asyncio.CancelledError):
            loop.run_until_complete(asked)
        loop.run_until_complete(asyncio.sleep(0.05))
