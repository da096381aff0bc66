"""The bundled hub: its address, its password, and its messages if it cannot start."""

import contextlib
import os
import shutil
import signal
import socket
import subprocess

import pytest

from sftriage.errors import UsageError
from sftriage.fleet import hub as fleet_hub
from sftriage.fleet.hub import Hub, HubAddress, HubError, Leader, Lease, Subjects
from sftriage.runtime import hub_server
from sftriage.runtime.hub_server import HubOptions, HubServer, is_up, listens_on, make_secret
from tests.integration.hubs import connection, own_hub
from tests.integration.processes import free_port, wait_until

pytest.importorskip("nats", reason="many hosts want the extra `nats`")


def stranger(url, credentials):
    return contextlib.closing(Hub(HubAddress(url, credentials), "test"))


def refused(port, credentials, why):
    with pytest.raises(HubError, match=why), connection(port, credentials):
        pass


@pytest.mark.parametrize("secret", [None, "s3cret-of-all-hosts\n"], ids=["a password", "a token"])
def test_it_accepts_only_clients_with_the_password(tmp_path, secret):
    file = tmp_path / "secret"
    if secret is not None:
        file.write_text(secret)
    (tmp_path / "wrong").write_text("sftriage:wrong")
    (tmp_path / "another").write_text("another")
    with own_hub(tmp_path) as (_, port):
        with connection(port, file) as hub:
            assert hub.connected_s is not None
        for wrong in ("wrong", "another"):
            refused(port, tmp_path / wrong, rf"refuses the credentials in .*{wrong}")
        refused(port, None, "without credentials: give --creds")
        # AND what it keeps is its owner's alone
        assert (tmp_path / "nats").stat().st_mode & 0o077 == 0
        assert (tmp_path / "nats" / "server.conf").stat().st_mode & 0o077 == 0


def test_a_refused_client_reports_that_though_its_next_try_fails_otherwise(tmp_path):
    # GIVEN a client that the hub has refused
    wrong = tmp_path / "wrong"
    wrong.write_text("sftriage:wrong")
    with own_hub(tmp_path) as (server, port), stranger(f"nats://127.0.0.1:{port}", wrong) as hub:
        with pytest.raises(HubError, match="refuses the credentials"):
            hub.call(hub.connect(), 10.0)
        # WHEN the connection is cut the next time
        server.close()
        with pytest.raises(HubError, match="refuses the credentials"):
            hub.call(hub.connect(), 10.0)
        # THEN the message is not about whether its host is up
        assert hub.unreachable() == f"the hub at nats://127.0.0.1:{port} refuses the credentials in {wrong}."


def test_a_taken_port_is_reported(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        not_started(port, tmp_path, rf"cannot start the hub on 127.0.0.1:{port}: .*in use")
    # AND where another job's hub has it, which answers as ours would
    with own_hub(tmp_path) as (_, port):
        not_started(port, tmp_path, "perhaps by another job's hub")


def not_started(port, directory, why):
    make_secret(directory / "secret")
    with pytest.raises(UsageError, match=why):
        HubServer(("127.0.0.1", port), directory / "other", directory / "secret")


def test_a_second_job_of_a_name_leaves_the_first_ones_password_and_nothing_else(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    options = HubOptions("job", hub=f"127.0.0.1:{free_port()}")
    server = options.start(options.secret.with_name("job"))
    try:
        before = sorted(options.secret.parent.iterdir())
        with pytest.raises(UsageError, match="choose another port with --hub HOST:PORT"):
            options.start(options.secret.with_name("job-2"))
        assert sorted(options.secret.parent.iterdir()) == before
    finally:
        options.forget(server)
    assert list(options.secret.parent.iterdir()) == []


def test_two_jobs_of_a_name_on_ports_of_their_own_have_passwords_of_their_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    first, second = (HubOptions("job", hub=f"127.0.0.1:{free_port()}") for _ in range(2))
    with contextlib.ExitStack() as held:
        for number, options in enumerate((first, second)):
            server = options.start(options.secret.with_name(f"job-{number}"))
            held.callback(options.forget, server)
            if number == 0:
                ended = held.pop_all()
        assert first.secret.read_text() != second.secret.read_text()
        ended.close()
        assert not first.secret.exists()
        hub = Hub(second.address, "host")
        held.callback(hub.close)
        hub.call(hub.connect(), 20.0)
    assert list(first.secret.parent.iterdir()) == []


def test_a_password_is_made_once_and_is_its_owners_alone(tmp_path):
    make_secret(tmp_path / "new" / "secret")
    text = (tmp_path / "new" / "secret").read_text()
    make_secret(tmp_path / "new" / "secret")
    assert (tmp_path / "new" / "secret").read_text() == text
    assert [one.name for one in (tmp_path / "new").iterdir()] == ["secret"]
    assert (tmp_path / "new" / "secret").stat().st_mode & 0o077 == 0
    assert len(text) > 40


def test_a_name_that_is_a_loopback_address_here_is_none_for_others(monkeypatch):
    def resolve(host, port, **_):
        address = {"node-1": "127.0.1.1", "node-2": "192.0.2.2"}[host]
        return [(socket.AF_INET, socket.SOCK_STREAM, 0, "", (address, 0))]

    monkeypatch.setattr(hub_server.socket, "getaddrinfo", resolve)
    assert [listens_on(one) for one in ("node-1", "node-2", "127.0.0.1", "::1", "localhost")] == [
        "0.0.0.0",
        "node-2",
        "127.0.0.1",
        "::1",
        "localhost",
    ]


@pytest.mark.skipif(shutil.which("openssl") is None, reason="certificates are made with openssl")
def test_connections_are_encrypted_with_certificates(tmp_path):
    tls = tmp_path / "tls"
    tls.mkdir()
    made = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    made += ["-days", "1", "-subj", "/CN=hub", "-addext", "subjectAltName=IP:127.0.0.1"]
    subprocess.run([*made, "-keyout", tls / "key.pem", "-out", tls / "cert.pem"], check=True, capture_output=True)
    (tls / "ca.pem").write_bytes((tls / "cert.pem").read_bytes())
    with own_hub(tmp_path, tls=tls) as (_, port):
        with connection(port, tmp_path / "secret", tls / "ca.pem", "tls") as hub:
            assert hub.connected_s is not None
        # AND whoever does not know who signed the certificate tells it nothing
        why = r"CERTIFICATE_VERIFY_FAILED.*: ca\.pem in the --tls directory"
        with stranger(f"tls://127.0.0.1:{port}", tmp_path / "secret") as hub, pytest.raises(HubError, match=why):
            hub.call(hub.connect(), 3.0)


def test_a_server_that_is_ended_is_there_again_until_it_is_closed(tmp_path):
    # GIVEN a hub that is kept
    with own_hub(tmp_path) as (server, port):
        server.keep()
        before = server.pid
        with connection(port, tmp_path / "secret") as hub:
            # WHEN it is ended, as SLURM does with all processes of a job
            os.kill(before, signal.SIGTERM)
            # THEN it is there again, and who was connected is so again
            wait_until(lambda: server.pid != before)
            wait_until(lambda: is_up("127.0.0.1", port) and hub.connected_s is not None)
    # AND once it is closed it stays away
    assert not is_up("127.0.0.1", port)


def test_a_lease_that_expires_while_its_holder_is_read_is_taken(tmp_path, monkeypatch):
    from nats.js.errors import KeyNotFoundError
    from nats.js.kv import KeyValue

    monkeypatch.setattr(fleet_hub, "TTL_S", 2.0)
    monkeypatch.setattr(fleet_hub, "RENEW_S", 0.5)
    secret = tmp_path / "secret"
    with own_hub(tmp_path) as (_, port), connection(port, secret) as second:
        # GIVEN a controller that leads, and is let go
        with connection(port, secret) as first:
            Lease(first, Subjects.of("job"), Leader("run-1", "node-a", 1))
        # WHEN another one is refused the lease, and finds no holder
        read, reads = KeyValue._get, []

        async def gone(self, key, *more, **options):
            reads.append(key)
            if len(reads) == 1:
                raise KeyNotFoundError
            return await read(self, key, *more, **options)

        monkeypatch.setattr(KeyValue, "_get", gone)
        # THEN it leads once that has gone
        assert Lease(second, Subjects.of("job"), Leader("run-1", "node-b", 2)).lost == ""
        assert reads
