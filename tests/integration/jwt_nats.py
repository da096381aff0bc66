"""A NATS server of an operator, as `nsc` sets one up: who may do what is in tokens that keys have signed (JWT)."""

import base64
import json
import os
import socket
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import nkeys

from sftriage.runtime.hub_server import nats_server
from tests.integration.processes import DEADLINE_S, wait_until
from tests.integration.shared_nats import permissions

CONFIGURATION = """
listen: "127.0.0.1:{port}"
jetstream {{ store_dir: "{directory}/jetstream" }}
operator: {operator}
system_account: {system}
resolver: MEMORY
resolver_preload: {preload}
"""
CREDENTIALS = """\
-----BEGIN NATS USER JWT-----
{token}
------END NATS USER JWT------

************************* IMPORTANT *************************
NKEY Seed printed below can be used to sign and prove identity.

-----BEGIN USER NKEY SEED-----
{seed}
------END USER NKEY SEED------
"""
ALL = dict.fromkeys(("subs", "data", "payload", "imports", "exports", "conn", "leaf", "streams", "consumer"), -1)
ROOM = {"disk_storage": 8 << 30, "mem_storage": 0, "wildcards": True}


class Key:
    """A key of an operator, an account or a user."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.seed = nkeys.encode_seed(os.urandom(32), getattr(nkeys, f"PREFIX_BYTE_{kind.upper()}")).decode()
        self._pair = nkeys.from_seed(bytearray(self.seed.encode()))
        self.public = self._pair.public_key.decode()

    def signed(self, whose: "Key", **claims: Any) -> str:
        """A token that says what another key may do."""
        now_s = int(time.time())
        about = {"jti": whose.public, "iat": now_s, "iss": self.public, "name": whose.kind, "sub": whose.public}
        about["nats"] = {"type": whose.kind, "version": 2, **claims}
        text = ".".join(_base64(json.dumps(part).encode()) for part in ({"typ": "JWT", "alg": "ed25519-nkey"}, about))
        return f"{text}.{_base64(self._pair.sign(text.encode()))}"


def _base64(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).decode().rstrip("=")


class JwtNats:
    """A server with an account for each of some jobs; credentials of their parts are in `creds`."""

    def __init__(self, directory: Path, jobs: Mapping[str, tuple[str, ...]]) -> None:
        self.directory = directory
        directory.mkdir()
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        self.url = f"nats://127.0.0.1:{port}"
        operator, system = Key("operator"), Key("account")
        accounts = {system.public: operator.signed(system, limits=ALL)}
        for job, agents in jobs.items():
            account = Key("account")
            accounts[account.public] = operator.signed(account, limits={**ALL, **ROOM})
            self._let_in(account, self.creds(job, "controller"), {})
            for agent in agents:
                may = permissions(job, agent)
                claims = {name[:3]: {"allow": subjects} for name, subjects in may.items()}
                claims |= {"resp": {"max": 1, "ttl": 10**11}}
                self._let_in(account, self.creds(job, agent), claims)
        configuration, self.log = directory / "server.conf", directory / "server.log"
        about = {"operator": operator.signed(operator), "system": system.public, "preload": json.dumps(accounts)}
        configuration.write_text(CONFIGURATION.format(port=port, directory=directory, **about), encoding="utf-8")
        with self.log.open("wb") as log:
            self._process = subprocess.Popen([nats_server(), "-c", str(configuration)], stdout=log, stderr=log)
        wait_until(lambda: b"Server is ready" in self.log.read_bytes() or self._process.poll() is not None, 60.0)
        assert self._process.poll() is None, self.log.read_text()

    def creds(self, job: str, who: str) -> Path:
        """The credentials of one part of a job."""
        return self.directory / f"{job}-{who}.creds"

    @staticmethod
    def _let_in(account: Key, path: Path, claims: Mapping[str, Any]) -> None:
        user = Key("user")
        token = account.signed(user, **dict.fromkeys(("subs", "data", "payload"), -1), **claims)
        path.touch(mode=0o600)
        path.write_text(CREDENTIALS.format(token=token, seed=user.seed), encoding="ascii")

    @property
    def violations(self) -> list[str]:
        """What the server says that somebody may not do."""
        return [line for line in self.log.read_text("utf-8", "replace").splitlines() if "Violation" in line]

    def close(self) -> None:
        self._process.terminate()
        self._process.wait(DEADLINE_S)
