"""Waiting for the host that starts a job's hub, which may be the last one to start, or none of the job's."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Mapping
from ipaddress import ip_address
from pathlib import Path

from sftriage.errors import UsageError

log = logging.getLogger("sftriage")

SECRET_S, HINT_S, UP_S = 600.0, 10.0, 20.0
"""How long the hub's host may take to make its password; after how long a person is told that it is waited for; and how
long that file may take to be seen here once the hub is up."""
LOOK_S, ANSWER_S = 0.5, 1.0


def wait_for_secret(
    secret: Path,
    host: str,
    port: int,
    patience_s: float,
    environment: Mapping[str, str],
    over: Callable[[], bool] = lambda: False,
) -> None:
    """Wait until there is the file with what lets us in to a hub, or the wait is ``over``.

    Raises:
        UsageError: there will be none; the message says what to do.
    """
    began_s, up_s, told = time.monotonic(), float("inf"), False
    while not (secret.is_file() or over()):
        now_s = time.monotonic()
        if now_s >= min(began_s + patience_s, up_s + UP_S):
            raise UsageError(
                f"{secret} is not there: {host} makes it, in a directory that all hosts share; where they share none,"
                " put the same USER:PASSWORD into a file on each, and name that with --creds"
            )
        if up_s > now_s and is_up(host, port):
            up_s = now_s
        elif up_s > now_s and now_s > began_s + HINT_S and not told:
            told = True
            check_slurm_host(host, environment)
            log.warning("%s waits for %s, which is to start the hub", socket.gethostname(), host)
        # (to look into the directory has a file server asked again, which to look for a name may not)
        with contextlib.suppress(OSError), os.scandir(secret.parent) as entries:
            next(entries, None)
        time.sleep(LOOK_S)


def is_up(host: str, port: int) -> bool:
    """Whether a NATS server listens there."""
    try:
        with socket.create_connection((host, port), ANSWER_S) as server:
            return server.recv(5) == b"INFO "
    except OSError:
        return False


def check_slurm_host(host: str, environment: Mapping[str, str]) -> None:
    """See that a host is one of the SLURM job's, where this is one.

    Raises:
        UsageError: it is not; the message says which there are.
    """
    hosts = slurm_hosts(environment)
    if hosts and host.partition(".")[0] not in hosts and _is_name(host):
        some = f"{', '.join(hosts[:3])}{', ...' if len(hosts) > 3 else ''}"
        raise UsageError(f"--hub {host} is none of this job's hosts, which are {some}: give it the first of them")


def slurm_hosts(environment: Mapping[str, str]) -> list[str]:
    """The hosts of this step or job of SLURM; none where this is none, or nobody says."""
    nodes = environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_JOB_NODELIST")
    if not nodes or shutil.which("scontrol") is None:
        return []
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        shown = ["scontrol", "show", "hostnames", nodes]
        return subprocess.run(shown, capture_output=True, text=True, timeout=10.0, check=True).stdout.split()
    return []


def _is_name(host: str) -> bool:
    try:
        ip_address(host)
    except ValueError:
        return True
    return False
