"""A job on a NATS server of an operator, whose credentials are tokens that are signed, as `nsc` makes them."""

import sys

import pytest

pytest.importorskip("nats", reason="many hosts want the extra `nats`")
pytest.importorskip("nkeys", reason="keys want the extra `nats`")

from sftriage.fleet.hub import Hub, HubAddress, HubError, Subjects
from tests.integration.jwt_nats import JwtNats
from tests.integration.processes import wait_until
from tests.integration.runs import captures
from tests.integration.test_many_hosts_killed import Hosts

LONG_S = 10.0


class HostsWithTokens(Hosts):
    """Two hosts of a job and its controller, each with credentials of its own, in an account of the job's."""

    def start_hub(self):
        return JwtNats(self.directory / "nats", {"job": ("host-0", "host-1"), "other": ()})

    def sftriage(self, name, *options):
        who = options[options.index("--name") + 1] if name == "agent" else name
        about = ("--job-id", "job", "--nats", self.hub.url, "--creds", self.hub.creds("job", who))
        return self.start(sys.executable, "-m", "sftriage", name, *about, *options)


def test_a_job_goes_by_signed_tokens_and_nobody_else_sees_it(tmp_path, environment):
    # GIVEN a job on a server of an operator, in the job's own account
    hosts = HostsWithTokens(tmp_path, environment)
    try:
        # WHEN it is judged, and a rank of its is slow
        wait_until(lambda: (hosts.run / "captures").is_dir() and captures(hosts.run), 90.0)
        # THEN with the token of another account nothing of it is there
        assert streams_seen(hosts.hub, "other") == []
        assert Subjects.of("job").stream in streams_seen(hosts.hub, "job")
        hosts.end()
        # AND the trace has come from its host, and nobody was refused anything
        (capture,) = captures(hosts.run)
        assert capture.capture.host == f"host-{capture.capture.rank // 2}"
        assert hosts.hub.violations == []
    finally:
        hosts.close()


def test_a_token_that_another_operator_has_signed_lets_nobody_in(tmp_path):
    # GIVEN two servers, each of an operator of its own
    servers = [JwtNats(tmp_path / name, {"job": ()}) for name in ("one", "two")]
    try:
        # WHEN somebody comes to the one with what the other has signed
        address = HubAddress(servers[0].url, servers[1].creds("job", "controller"))
        hub = Hub(address, "stranger", Subjects.of("job").lead)
        # THEN it is said that these credentials do not do
        with pytest.raises(HubError, match=r"(?i)authorization|credentials"):
            hub.call(hub.connect(), LONG_S)
        hub.close()
    finally:
        for server in servers:
            server.close()


def streams_seen(server, job):
    """What streams there are for the controller of a job."""
    hub = Hub(HubAddress(server.url, server.creds(job, "controller")), "looking", Subjects.of(job).lead)
    try:
        hub.call(hub.connect(), LONG_S)
        return sorted(one.config.name for one in hub.call(hub.js.streams_info(), LONG_S))
    finally:
        hub.close()
