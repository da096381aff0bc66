"""Names on the hub, and what lets us in."""

import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sftriage.errors import UsageError
from sftriage.fleet import hub
from sftriage.fleet.hub import HubAddress, LogLeader, Subjects, token
from sftriage.runtime.hub_server import HubOptions


@settings(max_examples=30)
@given(name=st.text(max_size=60))
def test_any_name_is_one_token_and_no_path(name):
    assert re.fullmatch(r"[A-Za-z0-9_-]{1,40}", token(name))


@given(names=st.lists(st.text("ab.*> /x-", max_size=6), unique=True, min_size=2, max_size=2))
def test_other_names_are_other_tokens(names):
    assert token(names[0]) != token(names[1])


def test_jobs_share_no_subject_and_no_bucket():
    one, other = Subjects.of("1234"), Subjects.of("1234.*")
    for name in ("stream", "want", "lease", "traces"):
        assert getattr(one, name) != getattr(other, name)
    assert one.up("a") == "sft.1234.up.a"
    assert "*" not in other.up("a")


SEED = "SUACSSL3UAHUDXKFSNVUZRF5UHPMWZ6BFDTJ7M6USDXIEDNPPQYYYCU3VY"


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("user:pass:word\n", {"user": "user", "password": "pass:word"}),
        ("token\n", {"token": "token"}),
        ("", {}),
        (f"{SEED}\n", {"nkeys_seed_str": SEED}),
        ("-----BEGIN NATS USER JWT-----\n...", {"user_credentials": "creds"}),
    ],
)
def test_what_lets_us_in_is_read_from_a_file(tmp_path, monkeypatch, text, found):
    monkeypatch.chdir(tmp_path)
    (file := Path("creds")).write_text(text)
    monkeypatch.setattr(hub, "find_spec", lambda name: name)
    assert HubAddress("nats://a:1,nats://b:2", file).options() == {"servers": ["nats://a:1", "nats://b:2"]} | found
    # AND of an nkey, what reads it has to be installed
    if text not in ("", "token\n", "user:pass:word\n"):
        monkeypatch.setattr(hub, "find_spec", lambda name: None)
        with pytest.raises(UsageError, match=r"creds holds an nkey, which needs: pip install nkeys"):
            HubAddress("nats://a", file).options()


def test_of_a_directory_of_credentials_each_takes_its_own(tmp_path):
    (tmp_path / "agents.nk").write_text("all")
    (tmp_path / "agent-a.nk").write_text("a")
    address = HubAddress("nats://h", tmp_path)
    assert address.of("agent-a.nk", "agents.nk").credentials.name == "agent-a.nk"
    assert address.of("agent-b.nk", "agents.nk").credentials.name == "agents.nk"
    # AND a missing one is reported when it is read, and a single file is for all
    with pytest.raises(UsageError, match=r"controller\.nk: .*No such file"):
        address.of("controller.nk").options()
    assert HubAddress("nats://h", tmp_path / "agents.nk").of("agent-a.nk").credentials.name == "agents.nk"


def test_an_invalid_certificate_is_reported(tmp_path):
    for text in (None, "no certificate"):
        if text is not None:
            (tmp_path / "ca.pem").write_text(text)
        with pytest.raises(UsageError, match=r"ca\.pem: not a certificate of the hub's CA: "):
            HubAddress("tls://a", None, tmp_path / "ca.pem").options()


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
    options = HubOptions("j1", hub)
    assert (options.server, options.address.url) == (server, url)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (("j1",), "--hub HEAD, or --nats URL"),
        (("j1", "a", "nats://b"), "give only one of them"),
        (("",), "--hub HEAD, or --nats URL"),
        (("", "a"), "--job-id is missing"),
        (("", None, "nats://b"), "--job-id is missing"),
    ],
)
def test_options_that_make_no_sense_say_so(given, message):
    with pytest.raises(UsageError, match=message):
        HubOptions(*given)


def test_which_host_leads(monkeypatch):
    assert HubOptions("j1", "127.0.0.1").leads
    assert not HubOptions("j1", "192.0.2.1").leads
    own = HubOptions("j1", None, "nats://b")
    for name in ("SLURM_NODEID", "NODE_RANK", "GROUP_RANK", "OMPI_COMM_WORLD_NODE_RANK", "PMI_NODE_RANK"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(UsageError, match="which host runs the controller"):
        _ = own.leads
    monkeypatch.setenv("SLURM_NODEID", "1")
    assert not own.leads
    monkeypatch.setenv("SLURM_NODEID", "0")
    assert own.leads


def test_one_of_those_that_share_a_file_logs_until_it_releases_it(tmp_path):
    one, other = LogLeader(tmp_path / "speaker"), LogLeader(tmp_path / "speaker")
    assert (one.should_log(), other.should_log(), one.should_log()) == (True, False, True)
    one.release()
    assert (other.should_log(), one.should_log()) == (True, False)
    other.release()
    # AND where nothing can be shared, each logs
    assert LogLeader(tmp_path / "none" / "speaker").should_log()
