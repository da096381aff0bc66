"""NATS servers that jobs share: configured as docs/many-hosts.md tells its owner to, or as `nsc` sets one up."""

import base64
import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import nkeys

from sftriage.fleet.hub import CONTROLLER_FILE, agent_file
from sftriage.runtime.hub_server import nats_server
from tests.integration.processes import DEADLINE_S, free_port, wait_until

CONFIGURATION = """
listen: "127.0.0.1:{port}"
jetstream {{ store_dir: "{directory}/jetstream" }}
accounts {{
{accounts}
}}
"""
DOCS = Path(__file__).parents[2] / "docs"
USER = re.compile(r'^ *\{ nkey: "KEY_OF_(?:HOST|AGENTS)".*?\n *\} \}\n', re.DOTALL | re.MULTILINE)


def documented(page: str, account: str) -> str:
    """The account that a page of the documentation shows, as it goes into ``accounts { }``."""
    (found,) = re.findall(rf"^ *{account} \{{\n.*?\n *\]\n *\}}\n", (DOCS / page).read_text(), re.DOTALL | re.MULTILINE)
    return str(found)


def permissions(job: str, host: str) -> dict[str, list[str]]:
    """The subjects that a host of a job may publish and subscribe to."""
    text = documented("many-hosts.md", "sft_JOB").replace("JOB", job).replace("HOST", host)
    return {
        what: re.findall(r'"(.*?)"', re.search(rf"{what}: {{ allow: \[(.*?)\]", text, re.DOTALL)[1])
        for what in ("publish", "subscribe")
    }


def account(text: str, keys: Path, agents: Mapping[str, str]) -> str:
    """An account with keys that are made: a controller's, and an agent's in a file of each of these names."""
    (user,) = USER.findall(text)
    keys.mkdir(mode=0o700, parents=True, exist_ok=True)
    users = [re.sub("KEY_OF_[A-Z]+", new_key(keys / file), user).replace("HOST", host) for host, file in agents.items()]
    text = text.replace(user, "".join(users))
    return text.replace("KEY_OF_CONTROLLER", new_key(keys / CONTROLLER_FILE))


def new_key(path: Path) -> str:
    """Make an nkey in a file, as ``nk -gen user`` does; its public part."""
    seed = nkeys.encode_seed(os.urandom(32), nkeys.PREFIX_BYTE_USER)
    path.touch(mode=0o600)
    path.write_bytes(seed + b"\n")
    key: bytes = nkeys.from_seed(bytearray(seed)).public_key
    return key.decode()


class OwnersNats:
    """A server in a process of its own, of somebody who has an account for each job. Subclasses configure it."""

    def __init__(self, directory: Path) -> None:
        self.directory, self.port = directory, free_port()
        directory.mkdir()
        self.url = f"nats://127.0.0.1:{self.port}"
        self.log, self.configuration = directory / "server.log", directory / "server.conf"

    def begin(self) -> None:
        with self.log.open("wb") as log:
            command = [nats_server(), "-c", str(self.configuration)]
            self.process = subprocess.Popen(command, stdout=log, stderr=log)
        self.says(b"Server is ready")

    def says(self, what: bytes) -> None:
        wait_until(lambda: what in self.log.read_bytes() or self.process.poll() is not None, 60.0)
        assert self.process.poll() is None, self.log.read_text()

    @property
    def violations(self) -> list[str]:
        return [line for line in self.log.read_text("utf-8", "replace").splitlines() if "Violation" in line]

    def close(self) -> None:
        self.process.terminate()
        self.process.wait(DEADLINE_S)


class SharedNats(OwnersNats):
    """A server with an account for each of some jobs, whose keys are in `creds`."""

    def __init__(self, directory: Path, jobs: Mapping[str, Sequence[str]]) -> None:
        super().__init__(directory)
        self._accounts: list[str] = []
        self._configure()
        self.begin()
        for job, hosts in jobs.items():
            # (jobs come and go while it runs)
            text = documented("many-hosts.md", "sft_JOB").replace("JOB", job)
            self._accounts.append(f"{len(self._accounts)}.conf")
            text = account(text, self.creds(job), {host: agent_file(host) for host in hosts})
            (directory / self._accounts[-1]).write_text(text, encoding="utf-8")
        self._configure()
        self.process.send_signal(signal.SIGHUP)
        self.says(b"Reloaded server configuration")

    def _configure(self) -> None:
        accounts = "\n".join(f'  include "{name}"' for name in self._accounts)
        text = CONFIGURATION.format(port=self.port, directory=self.directory, accounts=accounts)
        self.configuration.write_text(text, encoding="utf-8")

    def creds(self, job: str, who: str = "") -> Path:
        return self.directory / f"keys-{job}"


OPERATOR = """
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
    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.seed = nkeys.encode_seed(os.urandom(32), getattr(nkeys, f"PREFIX_BYTE_{kind.upper()}")).decode()
        self._pair = nkeys.from_seed(bytearray(self.seed.encode()))
        self.public = self._pair.public_key.decode()

    def signed(self, whose: "Key", **claims: Any) -> str:
        now_s = int(time.time())
        about = {"jti": whose.public, "iat": now_s, "iss": self.public, "name": whose.kind, "sub": whose.public}
        about["nats"] = {"type": whose.kind, "version": 2, **claims}
        text = ".".join(_base64(json.dumps(part).encode()) for part in ({"typ": "JWT", "alg": "ed25519-nkey"}, about))
        return f"{text}.{_base64(self._pair.sign(text.encode()))}"


def _base64(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).decode().rstrip("=")


class JwtNats(OwnersNats):
    """A server with an account for each of some jobs; credentials of their parts are in `creds`."""

    def __init__(self, directory: Path, jobs: Mapping[str, tuple[str, ...]]) -> None:
        super().__init__(directory)
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
        about = {"operator": operator.signed(operator), "system": system.public, "preload": json.dumps(accounts)}
        text = OPERATOR.format(port=self.port, directory=directory, **about)
        self.configuration.write_text(text, encoding="utf-8")
        self.begin()

    def creds(self, job: str, who: str) -> Path:
        return self.directory / f"{job}-{who}.creds"

    @staticmethod
    def _let_in(account: Key, path: Path, claims: Mapping[str, Any]) -> None:
        user = Key("user")
        token = account.signed(user, **dict.fromkeys(("subs", "data", "payload"), -1), **claims)
        path.touch(mode=0o600)
        path.write_text(CREDENTIALS.format(token=token, seed=user.seed), encoding="ascii")
