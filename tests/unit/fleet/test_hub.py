"""Names on the hub, and what lets us in."""

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sftriage.errors import UsageError
from sftriage.fleet.hub import HubAddress, Places, token
from sftriage.runtime.many_hosts import HubOptions


@settings(max_examples=30)
@given(name=st.text(max_size=60))
def test_any_name_is_one_token_and_no_path(name):
    assert re.fullmatch(r"[A-Za-z0-9_-]{1,40}", token(name))


@given(names=st.lists(st.text("ab.*> /x-", max_size=6), unique=True, min_size=2, max_size=2))
def test_other_names_are_other_tokens(names):
    assert token(names[0]) != token(names[1])


def test_jobs_share_no_subject_and_no_bucket():
    one, other = Places.of("1234"), Places.of("1234.*")
    for name in ("stream", "want", "lease", "traces"):
        assert getattr(one, name) != getattr(other, name)
    assert one.up("a") == "sft.1234.up.a"
    assert "*" not in other.up("a")


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("user:pass:word\n", {"user": "user", "password": "pass:word"}),
        ("token\n", {"token": "token"}),
        ("", {}),
    ],
)
def test_what_lets_us_in_is_read_from_a_file(tmp_path, text, found):
    file = tmp_path / "creds"
    file.write_text(text)
    assert HubAddress("nats://a:1,nats://b:2", file).options() == {"servers": ["nats://a:1", "nats://b:2"]} | found


def test_credentials_that_nsc_makes_are_left_to_the_client(tmp_path):
    file = tmp_path / "creds"
    file.write_text("-----BEGIN NATS USER JWT-----\n...")
    assert HubAddress("nats://a", file).options()["user_credentials"] == str(file)
    with pytest.raises(UsageError, match="elsewhere"):
        HubAddress("nats://a", file.with_name("elsewhere")).options()


@pytest.mark.parametrize(
    ("hub", "server", "url"),
    [
        ("node-1", ("node-1", 7422), "nats://node-1:7422"),
        ("node-1:4222", ("node-1", 4222), "nats://node-1:4222"),
        ("fe80::1", ("fe80::1", 7422), "nats://[fe80::1]:7422"),
        ("[fe80::1]:4222", ("fe80::1", 4222), "nats://[fe80::1]:4222"),
    ],
)
def test_where_the_hub_is(hub, server, url):
    options = HubOptions.of("j1", hub, None, None, None)
    assert (options.server, options.address.url) == (server, url)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (("j1", None, None, None, None), "--hub HEAD, or --nats URL"),
        (("j1", "a", "nats://b", None, None), "give one of them"),
        ((None, None, None, None, None), "--hub HEAD, or --nats URL"),
        ((None, "a", None, None, None), "--job-id is missing"),
        (("", None, "nats://b", None, None), "--job-id is missing"),
    ],
)
def test_options_that_make_no_sense_say_so(given, said):
    with pytest.raises(UsageError, match=said):
        HubOptions.of(*given)


def test_which_host_leads(monkeypatch):
    assert HubOptions.of("j1", "127.0.0.1", None, None, None).leads
    assert not HubOptions.of("j1", "192.0.2.1", None, None, None).leads
    own = HubOptions.of("j1", None, "nats://b", None, None)
    for name in ("SLURM_NODEID", "NODE_RANK", "GROUP_RANK", "OMPI_COMM_WORLD_NODE_RANK", "PMI_NODE_RANK"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(UsageError, match="which host has the controller"):
        _ = own.leads
    monkeypatch.setenv("SLURM_NODEID", "1")
    assert not own.leads
    monkeypatch.setenv("SLURM_NODEID", "0")
    assert own.leads
