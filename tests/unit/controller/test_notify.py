"""Who wants to be told is told, or given up on in time; who tells never waits, and never shows a secret."""

import json
import logging
import shutil
import ssl
import subprocess
import threading
import time
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sftriage.controller.controller import Controller
from sftriage.controller.notices import Notice, Origin, cloud_event, notice_of, slack_message
from sftriage.controller.notify import Counts, Destination, Notifier, Retrying
from sftriage.policy.loading import parse
from sftriage.records import Decision, StageSchema, Suspect, Verdict, Window
from sftriage.runs.journal import Journal
from tests.unit.controller.hooks import DEADLINE_S, hooked

SUSPECT = Suspect("rank", (2,), "data", 0.02, 0.2, 0.9, rank=2)
VERDICT = Verdict(160, 209, "suspect", (), (SUSPECT,), 0.1, {"data": 0.1}, {"data": 2}, {"coverage": 1.0})
DECISION = Decision(1_800_000_000.25, 160, 209, "suspect", "ignore", "observe-only: rule page-me matched", "page-me")
NOTICE = notice_of(VERDICT, DECISION, Origin("res net", "run-1"), ("page-me",))
CLOUD, SLACK = Destination("cloudevents", url_from_env="HOOK"), Destination("slack", url_from_env="HOOK")


class Pace:
    """A clock that stands still until somebody waits on it, and then is there at once."""

    def __init__(self):
        self.now_s = 0.0
        self.waited = []

    def now(self):
        return self.now_s

    def wait(self, condition, seconds):
        if seconds is None:
            condition.wait(DEADLINE_S)
        else:
            self.waited.append(seconds)
            self.now_s += seconds


@pytest.fixture(autouse=True)
def no_proxy(monkeypatch):
    monkeypatch.setenv("no_proxy", "127.0.0.1")


@pytest.fixture
def pace():
    return Pace()


@pytest.fixture
def make(pace):
    """A notifier whose waits take no time; closed at the end."""
    made = []

    def make(**options):
        made.append(Notifier(now=pace.now, wait=pace.wait, draw=lambda: 0.0, **options))
        return made[-1]

    yield make
    for notifier in made:
        notifier.close(DEADLINE_S)


def numbered(number):
    return Notice(str(number), "/sftriage/j/r", f"steps {number}", float(number), f"text {number}", {"number": number})


def reached(notifier, counts):
    """Wait until the notifier's counts are these."""
    deadline_s = time.monotonic() + DEADLINE_S
    while notifier.counts != counts and time.monotonic() < deadline_s:
        threading.Event().wait(0.005)
    return notifier.counts == counts


def test_a_decision_arrives_as_a_cloud_event_with_its_verdict(make, monkeypatch):
    with hooked() as hook:
        monkeypatch.setenv("HOOK", hook.url)
        notifier = make()
        notifier.notify(NOTICE, [CLOUD])
        path, headers, event = hook.next()
        assert notifier.close(DEADLINE_S) == Counts(delivered=1)
    assert path == "/hook/top-secret"
    assert headers["Content-Type"] == "application/cloudevents+json; charset=utf-8"
    assert {name: event[name] for name in event if name != "data"} == {
        "specversion": "1.0",
        "id": "0-160-209-suspect-1800000000250",
        "source": "/sftriage/res%20net/run-1",
        "type": "dev.sftriage.decision",
        "time": "2027-01-15T08:00:00.250Z",
        "datacontenttype": "application/json",
        "subject": "steps 160 to 209",
    }
    assert event["data"]["rules"] == ["page-me"]
    assert event["data"]["decision"]["outcome"] == "ignore"
    assert event["data"]["verdict"]["suspects"][0]["ranks"] == [2]


def test_slack_gets_a_line_of_text_in_which_nothing_is_markup(make, monkeypatch):
    with hooked() as hook:
        monkeypatch.setenv("HOOK", hook.url)
        make().notify(NOTICE, [SLACK])
        _, headers, message = hook.next()
    assert headers["Content-Type"] == "application/json"
    assert message == {
        "text": "res net: Rank 2 is slow in data: it costs the job 20.0 ms of each 100.0 ms step (20%), in 90% of "
        "steps 160 to 209; chronic. Ignore: observe-only: rule page-me matched"
    }
    marked = Notice("1", "/s", "s", 0.0, "<!channel> & <b>" + "x" * 9000, {})
    text = json.loads(slack_message(marked))["text"]
    assert text.startswith("&lt;!channel&gt; &amp; &lt;b&gt;")
    assert len(text) < 4000


@pytest.mark.parametrize("fault", [500, 502, 503, 408, 429, "drop"], ids=str)
def test_a_fault_that_may_pass_is_tried_again_with_the_same_event(make, monkeypatch, fault):
    with hooked(fault, fault) as hook:
        monkeypatch.setenv("HOOK", hook.url)
        notifier = make()
        notifier.notify(NOTICE, [CLOUD])
        events = [hook.next()[2] for _ in range(3)]
        assert notifier.close(DEADLINE_S) == Counts(delivered=1)
    assert events[0] == events[1] == events[2]


@pytest.mark.parametrize("answer", [400, 401, 403, 404, 410, 501, (302, {"Location": "/elsewhere"})], ids=str)
def test_what_will_not_pass_is_tried_once_and_said(make, monkeypatch, caplog, answer):
    with hooked(answer) as hook:
        monkeypatch.setenv("HOOK", hook.url)
        notifier = make()
        notifier.notify(NOTICE, [CLOUD])
        hook.next()
        assert reached(notifier, Counts(failed=1))
        # AND a redirect leads nowhere
        assert hook.received.empty()
    status = answer[0] if isinstance(answer, tuple) else answer
    assert f"127.0.0.1: answered {status}" in caplog.text


def test_who_asks_for_time_is_given_it(make, monkeypatch, pace):
    # GIVEN a webhook that is busy for 37 seconds
    with hooked((429, {"Retry-After": "37"})) as hook:
        monkeypatch.setenv("HOOK", hook.url)
        make().notify(NOTICE, [CLOUD])
        hook.next()
        hook.next()
    # THEN that is what was waited, and not the second that it would have been
    assert pace.waited == [37.0]


def test_who_asks_for_more_time_than_there_is_is_given_up(make, monkeypatch, caplog):
    with hooked((503, {"Retry-After": "86400"})) as hook:
        monkeypatch.setenv("HOOK", hook.url)
        notifier = make()
        notifier.notify(NOTICE, [CLOUD])
        assert reached(notifier, Counts(failed=1))
    assert "given up after 1 tries" in caplog.text


def test_waits_grow_and_end(make, monkeypatch, caplog, pace):
    # GIVEN a webhook that is down for good
    with hooked(*[500] * 50) as hook:
        monkeypatch.setenv("HOOK", hook.url)
        notifier = make(retrying=Retrying(first_s=1.0, longest_s=8.0, give_up_s=30.0))
        notifier.notify(NOTICE, [CLOUD])
        # THEN it is given up within the time, and said
        assert reached(notifier, Counts(failed=1))
    assert pace.waited == [0.5, 1.0, 2.0, 4.0, 4.0, 4.0, 4.0, 4.0, 4.0]
    assert "given up after 10 tries: 127.0.0.1: answered 500" in caplog.text


def test_a_port_where_nobody_listens_is_given_up_too(make, monkeypatch, caplog):
    with hooked() as hook:
        url = hook.url
    monkeypatch.setenv("HOOK", url)
    notifier = make(retrying=Retrying(give_up_s=5.0))
    notifier.notify(NOTICE, [CLOUD])
    assert reached(notifier, Counts(failed=1))
    assert "ConnectionRefusedError" in caplog.text


@pytest.mark.parametrize("answer", ["hang", "drip"])
def test_an_answer_that_does_not_end_is_cut_off_and_tried_again(make, monkeypatch, answer):
    with hooked(answer) as hook:
        monkeypatch.setenv("HOOK", hook.url)
        notifier = make(attempt_s=0.3)
        notifier.notify(NOTICE, [CLOUD])
        assert hook.next()[2] == hook.next()[2]
        assert notifier.close(DEADLINE_S) == Counts(delivered=1)


def test_nobody_waits_while_a_webhook_hangs_and_the_oldest_make_room(make, monkeypatch, caplog):
    # GIVEN a webhook that hangs on the first message
    with hooked("hang") as hook:
        monkeypatch.setenv("HOOK", hook.url)
        notifier = make(capacity=3, attempt_s=DEADLINE_S)
        notifier.notify(numbered(0), [CLOUD])
        hook.next()
        # WHEN more come than there is room for
        for number in range(1, 11):
            notifier.notify(numbered(number), [CLOUD])
        # THEN they are all taken at once, the oldest that wait are dropped, and that is said
        assert notifier.counts == Counts(dropped=7)
        assert "the queue is full" in caplog.text
        # AND once it answers, what was being delivered arrives, and then the newest
        hook.over.set()
        assert [hook.next()[2]["data"]["number"] for _ in range(4)] == [0, 8, 9, 10]


def test_one_destination_that_is_down_holds_up_no_other(make, monkeypatch):
    with hooked(*[500] * 50) as down, hooked() as up:
        monkeypatch.setenv("HOOK", down.url)
        monkeypatch.setenv("OTHER", up.url)
        # GIVEN waits that do take their time
        notifier = Notifier(Retrying(first_s=3600.0, longest_s=3600.0, give_up_s=7200.0))
        other = Destination("cloudevents", url_from_env="OTHER")
        notifier.notify(numbered(1), [CLOUD, other])
        notifier.notify(numbered(2), [CLOUD, other])
        assert [up.next()[2]["data"]["number"] for _ in range(2)] == [1, 2]
        # WHEN it is closed, an attempt that lies beyond the deadline is not waited for
        assert reached(notifier, Counts(delivered=2))
        assert notifier.close(DEADLINE_S) == Counts(delivered=2, failed=2)
        assert not notifier._thread.is_alive()


def test_closing_delivers_what_waits(make, monkeypatch):
    with hooked() as hook:
        monkeypatch.setenv("HOOK", hook.url)
        notifier = make()
        for number in range(20):
            notifier.notify(numbered(number), [CLOUD])
        assert notifier.close(DEADLINE_S) == Counts(delivered=20)
        # AND what comes later is counted, and starts nothing
        notifier.notify(numbered(20), [CLOUD])
        assert notifier.counts == Counts(delivered=20, dropped=1)


def test_closing_takes_no_longer_than_it_may(monkeypatch, caplog):
    with hooked("hang", "hang") as hook:
        monkeypatch.setenv("HOOK", hook.url)
        notifier = Notifier(attempt_s=DEADLINE_S)
        notifier.notify(numbered(0), [CLOUD])
        notifier.notify(numbered(1), [CLOUD])
        hook.next()
        # The webhook never answers: without its deadline, this would only end with the attempt.
        assert notifier.close(0.2) == Counts(failed=2)
    assert "2 notices were not delivered" in caplog.text


def test_closing_what_never_had_anything_to_say_starts_nothing():
    before = threading.active_count()
    assert Notifier().close(DEADLINE_S) == Counts()
    assert threading.active_count() == before


def test_a_notice_that_cannot_be_written_out_does_not_end_the_others(make, monkeypatch, caplog):
    with hooked() as hook:
        monkeypatch.setenv("HOOK", hook.url)
        notifier = make()
        notifier.notify(Notice("1", "/s", "steps 1", 0.0, "", {"bad": object()}), [CLOUD])
        notifier.notify(Notice("2", "/s", "steps 2", 0.0, "", {"nan": float("nan")}), [CLOUD])
        notifier.notify(numbered(3), [CLOUD])
        assert hook.next()[2]["id"] == "3"
        assert notifier.close(DEADLINE_S) == Counts(delivered=1, failed=2)
    assert "steps 1 given up after 1 tries: TypeError" in caplog.text


def test_a_thread_that_cannot_start_is_nobodys_problem(make, monkeypatch, caplog):
    def none_left(self):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", none_left)
    make().notify(NOTICE, [CLOUD])
    assert "a notice could not be queued" in caplog.text


@pytest.mark.parametrize(
    ("secret", "said"),
    [
        ("", "the variable is not set"),
        ("file:///etc/passwd", "begins with https:// or http://"),
        ("ftp://hooks.example/secret-1", "begins with https:// or http://"),
        ("hooks.example/secret-1", "begins with https:// or http://"),
        ("http://[::1/secret-1", "is not a URL"),
        ("http://h:port-secret-1/x", "is not a URL"),
        ("http://127.0.0.1:1/a b/secret-1", "characters that no URL has"),
        ("http://127.0.0.1:1/secret-1\r\nX: y", "characters that no URL has"),
    ],
)
def test_a_secret_that_is_no_address_is_said_but_never_shown(make, monkeypatch, caplog, secret, said):
    monkeypatch.setenv("HOOK", secret)
    notifier = make()
    notifier.notify(NOTICE, [CLOUD])
    assert reached(notifier, Counts(failed=1))
    assert said in caplog.text
    assert "webhook of $HOOK" in caplog.text
    assert "secret-1" not in caplog.text
    assert "passwd" not in caplog.text


@pytest.mark.parametrize("answers", [[500] * 50, [404], ["drop"] * 50, [(301, {"Location": "http://x/y"})]], ids=str)
def test_whatever_goes_wrong_no_secret_is_logged(make, monkeypatch, caplog, answers):
    caplog.set_level(logging.DEBUG)
    with hooked(*answers) as hook:
        monkeypatch.setenv("HOOK", hook.url.replace("http://", "http://user:pass-word@"))
        notifier = make(retrying=Retrying(give_up_s=10.0))
        notifier.notify(NOTICE, [CLOUD])
        _, headers, _ = hook.next()
        assert reached(notifier, Counts(failed=1))
    assert headers["Authorization"] == "Basic dXNlcjpwYXNzLXdvcmQ="
    assert "127.0.0.1" in caplog.text
    assert "top-secret" not in caplog.text + repr(CLOUD)
    assert "pass-word" not in caplog.text


@pytest.fixture(scope="module")
def certificate(tmp_path_factory):
    """A certificate for this host that only who is told so trusts, and its key, in one file."""
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("makes its certificate with openssl")
    path = tmp_path_factory.mktemp("tls") / "both.pem"
    command = f"{openssl} req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=test -addext subjectAltName=IP:127.0.0.1"
    made = subprocess.run([*command.split(), "-keyout", "-", "-out", "-"], capture_output=True, check=True, timeout=60)
    path.write_bytes(made.stdout)
    return path


@pytest.mark.parametrize(
    ("trusted", "counts"), [(True, Counts(delivered=1)), (False, Counts(failed=1))], ids=["trusted", "not trusted"]
)
def test_https_is_spoken_to_who_has_a_certificate_and_to_nobody_else(
    make, monkeypatch, caplog, certificate, trusted, counts
):
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(certificate)
    with hooked(tls=tls) as hook:
        monkeypatch.setenv("HOOK", hook.url)
        if trusted:
            monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
        notifier = make(retrying=Retrying(give_up_s=2.0))
        notifier.notify(NOTICE, [CLOUD])
        assert reached(notifier, counts)
        assert hook.received.qsize() == (1 if trusted else 0)
    assert ("its certificate is refused" in caplog.text) is not trusted


def test_a_secret_in_a_file_is_read_anew_for_each_attempt(make, tmp_path, caplog):
    with hooked() as hook:
        kept = tmp_path / "url"
        notifier = make(retrying=Retrying(give_up_s=5.0))
        destination = Destination("cloudevents", url_from_file=str(kept))
        # GIVEN a file that is not there
        notifier.notify(NOTICE, [destination])
        assert reached(notifier, Counts(failed=1))
        assert "No such file" in caplog.text
        # WHEN it comes, with a line's end as files have it
        kept.write_text(hook.url + "\n", encoding="utf-8")
        notifier.notify(NOTICE, [destination])
        assert hook.next()[0] == "/hook/top-secret"


@given(st.integers(1, 5000), st.floats(0, 1), st.none() | st.floats(0, 1e6))
def test_a_wait_is_never_shorter_than_asked_for_nor_longer_than_the_longest(failures, drawn, after_s):
    waited_s = Retrying(1.0, 60.0, 600.0).wait_s(failures, drawn, after_s)
    assert waited_s >= max(after_s or 0.0, 0.5)
    assert waited_s <= max(after_s or 0.0, 60.0)


@given(st.floats(0, 1))
def test_waits_double_whatever_is_drawn(drawn):
    waits = [Retrying().wait_s(failures, drawn, None) for failures in range(1, 6)]
    assert all(later == pytest.approx(2 * earlier) for earlier, later in pairwise(waits))


POLICY = """
apiVersion: sftriage.dev/v1alpha1
kind: TriagePolicy
metadata: {name: test}
spec:
  rules:
    - name: page-me
      match: {gain: ">= 30%"}
      notify: [{webhook: {url_from_env: HOOK}}, {webhook: {url_from_env: HOOK, format: slack}}]
      cooldown: 1h
    - name: page-me-too
      match: {gain: ">= 10%"}
      notify: [{webhook: {url_from_env: HOOK}}]
"""
SCHEMA = StageSchema(("data", "backward", "other"), ("backward",))


def window(first_step, late_s):
    """Twenty steps of four ranks; rank 2 is late in data, and the others wait for it in backward."""
    local_R = np.array([0.01, 0.01, 0.01 + late_s, 0.01])
    durations_NRS = np.zeros((20, 4, 3))
    durations_NRS[:, :, 0] = local_R
    durations_NRS[:, :, 1] = 0.02 + local_R.max() - local_R
    return Window(SCHEMA, first_step, durations_NRS)


def test_what_a_rule_wants_told_is_told_once_by_the_controller_and_not_again_before_its_cooldown(
    make, monkeypatch, tmp_path
):
    with hooked() as hook:
        monkeypatch.setenv("HOOK", hook.url)
        notifier = make()
        journal = Journal(tmp_path / "decisions.jsonl")
        policy = parse(POLICY, "test.yaml")
        controller = Controller(policy, journal, tmp_path / "state.json", notifier, Origin("job", "run-1"))
        # WHEN a suspect is there for three windows
        for first_step, late_s in ((0, 0.0), (20, 0.02), (40, 0.02), (60, 0.02)):
            controller.take(window(first_step, late_s), now_s=100.0 + first_step)
        # THEN both forms have been told of the first, and no address twice though two rules name it
        assert notifier.close(DEADLINE_S) == Counts(delivered=2)
        event, message = sorted((hook.next()[2] for _ in range(2)), key=lambda body: "text" in body)
    assert (event["source"], event["subject"]) == ("/sftriage/job/run-1", "steps 20 to 39")
    assert event["data"]["rules"] == ["page-me", "page-me-too"]
    assert message["text"].startswith("job: Rank 2 is slow in data: it costs the job 20.0 ms of each 50.0 ms step")
    # AND the address is not on record
    assert "top-secret" not in (tmp_path / "decisions.jsonl").read_text() + (tmp_path / "state.json").read_text()


def test_a_stall_says_the_step_and_who_is_missed():
    stall = Verdict(10, 10, "stalled", ("not_arrived",), (SUSPECT,), 60.0, {}, {}, {})
    held = Decision(1.0, 10, 10, "stalled", "hold", "not_arrived: rank 2 in data")
    notice = notice_of(stall, held, Origin("j", "r"), ())
    assert notice.text == (
        "j: Stalled: no rank has moved for 60 s in step 10; the others wait for ranks that have not arrived: "
        "rank 2 in data. Hold: not_arrived: rank 2 in data"
    )
    assert json.loads(cloud_event(notice))["subject"] == "step 10"
