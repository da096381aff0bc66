"""Messages arrive or are given up in time; a webhook delays nothing, and its secret URL is never shown."""

import json
import logging
import shutil
import ssl
import subprocess
import threading
import time
from dataclasses import replace

import pytest
import urllib3
from msgspec.structs import replace as replaced

from sftriage.model.captures import Decision, Trigger
from sftriage.model.events import (
    CauseFound,
    Departure,
    Difference,
    DifferencesFound,
    JobBroken,
    PolicyChanged,
    RemedyChanged,
    WindowJudged,
)
from sftriage.model.verdicts import Suspect, Verdict
from sftriage.policy.schema import Rule, Webhook
from sftriage.sinks import posting, webhooks
from sftriage.sinks.posting import RETRY
from sftriage.sinks.stream import Stream
from sftriage.sinks.webhooks import Webhooks, decided
from sftriage.words.run import event_sentence
from tests.unit.sinks.hooks import DEADLINE_S, hooked

SUSPECT = Suspect("rank", (2,), "data", 0.02, 0.2, 0.9, rank=2)
VERDICT = Verdict(160, 209, "suspect", (), (SUSPECT,), 0.1, {"data": 0.1}, {"data": 2}, {"coverage": 1.0})
DECIDED = (1_800_000_000.25, 160, 209, "suspect", "ignore", "observe_only", "page-me", {"rule": "page-me"})
DECISION = Decision(*DECIDED, notify=("page-me",))
CLOUD, SLACK = Webhook(url_from_env="HOOK"), Webhook(format="slack", url_from_env="HOOK")
AT_ONCE = RETRY.new(backoff_factor=0.001, backoff_jitter=0.0)
RULES = {}  # in force
GIVEN_UP_S = 0.5
"""Long for a retry that comes at once, and short to wait for."""


@pytest.fixture(autouse=True)
def no_proxy(monkeypatch):
    monkeypatch.setenv("no_proxy", "127.0.0.1")


@pytest.fixture
def hook(monkeypatch):
    """A webhook, at the address in $HOOK."""
    with hooked() as hook:
        monkeypatch.setenv("HOOK", hook.url)
        yield hook


@pytest.fixture
def make(monkeypatch):
    """Webhooks that are tried again at once, or as these constants of the module say; closed at the end."""
    made = []

    def make(**constants):
        for name, value in {"retry": AT_ONCE, "close_s": DEADLINE_S, **constants}.items():
            monkeypatch.setattr(posting if hasattr(posting, name.upper()) else webhooks, name.upper(), value)
        made.append(Webhooks("res net", "run-1", lambda: RULES))
        return made[-1]

    yield make
    for one in made:
        one.close()
    # None of them is to be heard in the next test: an attempt under way ends with its hook.
    for thread in threading.enumerate():
        if thread.name.startswith(posting.THREADS):
            thread.join(DEADLINE_S)
            assert not thread.is_alive()
    RULES.clear()


def rule(name, *to):
    notify = [{"webhook": one.model_dump(exclude_none=True)} for one in to]
    return Rule.model_validate({"name": name, "match": {"gain": ">= 10%"}, "notify": notify})


def tell(webhooks, *to, number=0, **verdict):
    RULES["page-me"] = rule("page-me", *to)
    webhooks.take(WindowJudged(replace(VERDICT, **verdict), replace(DECISION, attempt=number)))


def attempt_of(event):
    return event["data"]["decision"]["attempt"]


def is_logged(caplog, words):
    """Wait until the log has these words."""
    deadline_s = time.monotonic() + DEADLINE_S
    while words not in caplog.text and time.monotonic() < deadline_s:
        threading.Event().wait(0.005)
    return words in caplog.text


def test_a_decision_arrives_as_a_cloud_event_with_its_verdict(make, hook):
    tell(make(), CLOUD)
    path, headers, event = hook.next()
    assert path == "/hook/top-secret"
    assert headers["Content-Type"] == "application/cloudevents+json; charset=utf-8"
    # (tests/golden/recorded/webhooks.txt has whole events)
    assert (event["source"], event["data"]["rules"]) == ("/sftriage/res%20net/run-1", ["page-me"])
    assert event["data"]["decision"]["words"] == "observe-only: rule page-me matched"


def test_slack_gets_a_line_of_text_without_markup(make, hook):
    tell(make(), SLACK)
    _, headers, message = hook.next()
    assert headers["Content-Type"] == "application/json"
    assert message == {
        "text": "res net: Rank 2 is slow in data: it costs the job 20.0 ms of each slow step (20%), in 90% of "
        "steps 160 to 209; chronic. Ignore: observe-only: rule page-me matched"
    }
    marked = decided(VERDICT, replace(DECISION, parameters={"rule": "x" * 9000})).line("<!channel> & <b>")
    text = json.loads(marked)["text"]
    assert text.startswith("&lt;!channel&gt; &amp; &lt;b&gt;")
    assert len(text) < 4000


UNREADABLE = ("soon", "", "-5", "9" * 5000, "Thu, 01 Jan 1970 00:00:00 GMT")
TOO_LONG = ("86400", "Fri, 31 Dec 2100 23:59:59 GMT", "9" * 60)


def busy(seconds):
    return 503, {"Retry-After": seconds}


@pytest.mark.parametrize(
    "fault", [500, 502, 503, 408, 429, "drop", *map(busy, UNREADABLE)], ids=lambda one: str(one)[:30]
)
def test_a_temporary_failure_is_retried_with_the_same_event(make, hook, caplog, fault):
    hook.answers = [fault, fault]
    webhooks = make()
    tell(webhooks, CLOUD)
    events = [hook.next()[2] for _ in range(3)]
    webhooks.close()
    assert hook.received.empty()
    assert events[0] == events[1] == events[2]
    # AND one line says so
    assert caplog.text.count("trying again") == 1
    assert "not delivered" not in caplog.text


@pytest.mark.parametrize(
    "answer",
    [400, 401, 403, 404, 410, 501, (302, {"Location": "/elsewhere"}), *map(busy, TOO_LONG)],
    ids=lambda one: str(one)[:30],
)
def test_a_permanent_failure_is_tried_once_and_logged(make, hook, caplog, answer):
    status = answer[0] if isinstance(answer, tuple) else answer
    hook.answers = [answer]
    tell(make(), CLOUD)
    hook.next()
    assert is_logged(caplog, f"gave up on steps 160 to 209 after 1 tries: 127.0.0.1: answered {status}")
    # AND a redirect leads nowhere
    assert hook.received.empty()


def test_retry_after_is_respected(make, hook):
    # GIVEN a webhook that is busy for a second
    hook.answers = [(429, {"Retry-After": "1"})]
    tell(make(), CLOUD)
    hook.next()
    sent_s = time.monotonic()
    hook.next()
    # THEN that is what is waited, and not the instant that it would have been
    assert time.monotonic() - sent_s > 0.9


def test_a_webhook_that_stays_down_is_given_up_and_logged(make, hook, monkeypatch, caplog):
    hook.answers = [500] * 1000
    tell(make(give_up_s=GIVEN_UP_S), CLOUD)
    assert is_logged(caplog, "tries: 127.0.0.1: answered 500")
    # AND waits that double make few tries of it
    assert 1 < hook.received.qsize() < 20
    # AND so is a closed port
    with hooked() as gone:
        monkeypatch.setenv("HOOK", gone.url)
    tell(make(give_up_s=GIVEN_UP_S), CLOUD)
    assert is_logged(caplog, "tries: 127.0.0.1: ConnectionRefusedError: Connection refused")


def test_an_attempt_without_an_answer_times_out_and_is_retried(make, hook, caplog):
    hook.answers = ["hang"]
    tell(make(attempt_s=0.3), CLOUD)
    assert hook.next()[2] == hook.next()[2]
    assert "127.0.0.1: no answer in time; trying again" in caplog.text


def test_a_hanging_webhook_delays_nothing_and_drops_its_oldest_messages(make, hook, caplog):
    # GIVEN a webhook that hangs on the first message
    hook.answers = ["hang"]
    webhooks = make(capacity=3, attempt_s=DEADLINE_S)
    tell(webhooks, CLOUD)
    assert attempt_of(hook.next()[2]) == 0
    # WHEN more come than there is room for
    for number in range(1, 11):
        tell(webhooks, CLOUD, number=number)
    # THEN all are accepted at once, the oldest queued ones are dropped, and the log says so
    assert caplog.text.count("webhook of $HOOK cannot keep up: dropping its oldest events") == 1
    # AND once it lets go, what was being delivered arrives, and then the newest
    hook.over.set()
    assert [attempt_of(hook.next()[2]) for _ in range(4)] == [0, 8, 9, 10]


@pytest.mark.parametrize("fault", [500, "hang", "drip"], ids=str)
def test_a_webhook_that_is_down_delays_no_other(make, monkeypatch, caplog, fault):
    other = Webhook(url_from_env="OTHER")
    with hooked(fault) as down, hooked() as up:
        monkeypatch.setenv("HOOK", down.url)
        monkeypatch.setenv("OTHER", up.url)
        # GIVEN a wait that does take its time
        webhooks = make(retry=RETRY.new(backoff_factor=1800.0, backoff_max=3600.0), give_up_s=7200.0, close_s=0.2)
        down.answers.append(500)
        tell(webhooks, CLOUD, other, number=1)
        tell(webhooks, CLOUD, other, number=2)
        assert [attempt_of(up.next()[2]) for _ in range(2)] == [1, 2]
        # THEN the end does not wait for it
        started_s = time.monotonic()
        webhooks.close()
        assert time.monotonic() - started_s < DEADLINE_S / 2


def test_closing_delivers_queued_messages(make, hook, caplog):
    webhooks = make()
    for number in range(20):
        tell(webhooks, CLOUD, number=number)
    webhooks.close()
    assert hook.received.qsize() == 20
    assert caplog.text == ""


@pytest.mark.parametrize("answer", ["hang", "drip"])
def test_closing_ends_by_its_deadline(make, hook, caplog, answer):
    hook.answers = [answer]
    webhooks = make(attempt_s=DEADLINE_S, close_s=0.2)
    tell(webhooks, CLOUD)
    tell(webhooks, CLOUD, number=1)
    hook.next()
    # The webhook never answers: without its deadline, this would only end with the attempt.
    webhooks.close()
    assert "webhook of $HOOK hangs: gave up on it, with 1 events undelivered" in caplog.text


def test_closing_starts_nothing_and_a_second_close_keeps_the_deadline(make):
    before, webhooks = threading.active_count(), make()
    webhooks.close()
    end_s = webhooks.close_by_s
    webhooks.close()
    assert (webhooks.close_by_s, threading.active_count()) == (end_s, before)


def test_a_decision_that_cannot_be_serialised_does_not_stop_others(make, hook, caplog):
    webhooks = make()
    tell(webhooks, CLOUD, numbers={"bad": object()})
    tell(webhooks, CLOUD, numbers={"nan": float("nan")})
    tell(webhooks, CLOUD, number=3)
    assert attempt_of(hook.next()[2]) == 3
    assert "after 1 tries: TypeError" in caplog.text


@pytest.mark.parametrize(
    ("secret", "problem"),
    [
        ("", "the variable is not set"),
        ("file:///etc/passwd", "begins with https:// or http://"),
        ("ftp://hooks.example/secret-1", "begins with https:// or http://"),
        ("hooks.example/secret-1", "begins with https:// or http://"),
        ("http://[::1/secret-1", "is not a URL"),
        ("http://h:port-secret-1/x", "is not a URL"),
        ("http://127.0.0.1:1/a b/secret-1", "characters that a URL cannot have"),
        ("http://127.0.0.1:1/secret-1\r\nX: y", "characters that a URL cannot have"),
    ],
)
def test_an_invalid_url_is_logged_but_never_shown(make, monkeypatch, caplog, secret, problem):
    monkeypatch.setenv("HOOK", secret)
    webhooks = make()
    # WHEN it is checked at the start, and when a message is due
    RULES["page-me"] = rule("page-me", CLOUD)
    webhooks.start()
    assert f"webhook of $HOOK: {'the' if problem[0] != 't' else ''}" in caplog.text
    assert f"{problem}; no notification can be sent" in caplog.text
    tell(webhooks, CLOUD)
    webhooks.close()
    assert f" after 1 tries: {'the secret ' if not problem.startswith('the') else ''}" in caplog.text
    assert "secret-1" not in caplog.text
    assert "passwd" not in caplog.text


@pytest.mark.parametrize("answers", [[500] * 50, [404], ["drop"] * 50, [(301, {"Location": "http://x/y"})]], ids="abcd")
def test_no_failure_logs_the_secret(make, monkeypatch, caplog, answers):
    caplog.set_level(logging.DEBUG)
    with hooked(*answers) as hook:
        monkeypatch.setenv("HOOK", hook.url.replace("http://", "http://user:pass-word@"))
        tell(make(give_up_s=GIVEN_UP_S), CLOUD)
        _, headers, _ = hook.next()
        assert is_logged(caplog, "gave up")
    assert headers["Authorization"] == "Basic dXNlcjpwYXNzLXdvcmQ="
    assert "127.0.0.1" in caplog.text
    assert "top-secret" not in caplog.text + repr(CLOUD)
    assert "pass-word" not in caplog.text
    # AND other uses of the library are still logged
    with hooked() as hook:
        urllib3.request("POST", hook.url, body=b"{}")
    assert "POST /hook" in caplog.text


def test_the_proxy_of_the_environment_is_used(make, monkeypatch, caplog):
    with hooked() as proxy:
        monkeypatch.setenv("HOOK", "http://user:pw@hooks.example/top-secret")
        monkeypatch.setenv("http_proxy", f"me:too@127.0.0.1:{proxy.port}")
        tell(make(), CLOUD)
        path, headers, _ = proxy.next()
    assert path == "http://hooks.example/top-secret"
    assert headers["proxy-authorization"] == "Basic bWU6dG9v"
    assert headers["Authorization"] == "Basic dXNlcjpwdw=="


@pytest.fixture(scope="module")
def certificate(tmp_path_factory):
    """A self-signed certificate for this host and its key, in one file."""
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("makes its certificate with openssl")
    path = tmp_path_factory.mktemp("tls") / "both.pem"
    command = f"{openssl} req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes"
    command += " -days 2 -subj /CN=test -addext subjectAltName=IP:127.0.0.1"
    made = subprocess.run([*command.split(), "-keyout", "-", "-out", "-"], capture_output=True, check=True, timeout=60)
    path.write_bytes(made.stdout)
    return path


@pytest.mark.parametrize("trusted", [True, False], ids=["trusted", "not trusted"])
def test_https_requires_a_trusted_certificate(make, monkeypatch, caplog, certificate, trusted):
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(certificate)
    with hooked(tls=tls) as hook:
        monkeypatch.setenv("HOOK", hook.url)
        if trusted:
            monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
        tell(make(give_up_s=GIVEN_UP_S), CLOUD)
        if trusted:
            assert attempt_of(hook.next()[2]) == 0
        else:
            assert is_logged(caplog, "gave up")
            assert hook.received.empty()
    assert ("its certificate is refused" in caplog.text) is not trusted


def test_a_secret_file_is_read_for_each_attempt(make, tmp_path, caplog):
    with hooked() as hook:
        kept = tmp_path / "url"
        # GIVEN a file that is not there
        tell(make(), Webhook(url_from_file=str(kept)))
        assert is_logged(caplog, "No such file or directory; trying again")
        # WHEN it comes, with a line's end as files have it
        kept.write_text(hook.url + "\n", encoding="utf-8")
        assert hook.next()[0] == "/hook/top-secret"


def test_each_webhook_of_the_rules_gets_one_message_and_others_none(make, hook):
    # GIVEN two rules that name the same address, one of them in another form too, and a rule that has gone
    RULES.update({"page-me": rule("page-me", CLOUD, SLACK), "me-too": rule("me-too", CLOUD)})
    RULES["other"] = rule("other", Webhook(url_from_env="OTHER"))
    stream = Stream([make()])
    stream.start()
    # WHEN two rules notify of one decision, and none of the next
    stream.publish(WindowJudged(VERDICT, replace(DECISION, notify=("page-me", "me-too", "gone"))))
    stream.publish(WindowJudged(VERDICT, replace(DECISION, notify=())))
    stream.close(DEADLINE_S)
    # THEN the address got one message in each form
    assert hook.received.qsize() == 2
    event, _ = sorted((hook.next()[2] for _ in range(2)), key=lambda body: "text" in body)
    assert event["data"]["rules"] == ["page-me", "me-too", "gone"]


def test_webhooks_that_cannot_work_are_logged_when_policies_change(make, monkeypatch, caplog):
    monkeypatch.delenv("HOOK", raising=False)
    webhooks = make()
    webhooks.start()
    assert caplog.text == ""
    # WHEN a new rule has a webhook whose address is missing
    RULES["page-me"] = rule("page-me", CLOUD)
    webhooks.take(PolicyChanged(1.0, "refused", ()))
    assert caplog.text == ""
    webhooks.take(PolicyChanged(1.0, "changed", ()))
    assert "webhook of $HOOK: the variable is not set; no notification can be sent" in caplog.text


def test_a_stall_names_its_step_and_the_missing_ranks():
    stall = Verdict(10, 10, "stalled", ("not_arrived",), (SUSPECT,), 60.0, {}, {}, {})
    found = {"reasons": ("not_arrived",), "rank": 2, "stage": "data"}
    held = Decision(1.0, 10, 10, "stalled", "hold", "standstill", None, found)
    assert json.loads(decided(stall, held).line("j"))["text"] == (
        "[critical] j: Stalled: no rank has moved for 60 s in step 10; these ranks are not with the "
        "others, which are in a sync stage: rank 2 in data. Hold: not_arrived: rank 2 in data"
    )
    assert json.loads(decided(stall, held).event("j", "r"))["subject"] == "step 10"


# Why


ID = "w160-209-r2-page-me"
CAUSE = CauseFound(1_800_000_009.5, ID, 2, "sleep", True, "Rank 2 sleeps.")
TRIGGER = Trigger(160, 209, "suspect", "rank", (2,), "data", 0.02, 0.2, 0.9, "default", "0" * 64, "page-me")


def judged(notify=("page-me",), capture_id=ID, number=0, **verdict):
    decision = replace(DECISION, notify=notify, attempt=number)
    return WindowJudged(replace(VERDICT, **verdict), decision, {capture_id: TRIGGER} if capture_id else {})


def test_a_cause_follows_the_message_about_its_suspect_once(make, hook):
    # GIVEN a message about a suspect that is captured
    webhooks, RULES["page-me"] = make(), rule("page-me", CLOUD)
    webhooks.take(judged())
    sent = hook.next()[2]
    assert sent["data"]["cause"] is None
    # WHEN the capture shows why, from the suspect's trace alone and again beside the control's
    webhooks.take(CAUSE)
    webhooks.take(replaced(CAUSE, sentence="Rank 2 sleeps; rank 3 does not."))
    # AND another of its captures shows the same
    webhooks.take(judged(notify=(), capture_id="another"))
    webhooks.take(replaced(CAUSE, capture_id="another"))
    webhooks.close()
    # THEN one message follows: of another type, about the same steps, with the id of the first
    why = hook.next()[2]
    assert hook.received.empty()
    assert (why["type"], why["id"]) == ("dev.sftriage.cause", f"{ID}-sleep")
    assert (why["source"], why["subject"]) == (sent["source"], sent["subject"])
    assert (why["data"]["decision_id"], why["data"]["cause"]["sentence"]) == (sent["id"], "Rank 2 sleeps.")


def test_later_messages_about_a_suspect_contain_the_cause(make, hook):
    # GIVEN a cause that was found before any message was due
    webhooks, RULES["page-me"] = make(), rule("page-me", CLOUD, SLACK)
    webhooks.take(judged(notify=()))
    webhooks.take(CAUSE)
    # WHEN a message about the suspect is due
    webhooks.take(judged(capture_id=""))
    webhooks.close()
    # THEN the message says why, in both forms, and no other one is needed
    messages = [hook.next()[2] for _ in range(2)]
    (event,) = (one for one in messages if "data" in one)
    (line,) = (one["text"] for one in messages if "text" in one)
    assert event["data"]["cause"]["code"] == "sleep"
    assert line.endswith(". Cause: Rank 2 sleeps.")
    assert hook.received.empty()


REMEDY = RemedyChanged(1_800_000_020.0, 0, 240, "stragglar", "kept", "helps", 2, "rank 2", "data")


DIFFERENCES = DifferencesFound(1_800_000_001.0, 0, "rank 2", (2,), (0, 1), (Difference("num_workers", 1, 4, 2),))


@pytest.mark.parametrize(("event", "kind"), [(REMEDY, "remedy"), (DIFFERENCES, "differences")])
def test_a_remedy_and_what_differs_follow_the_message_about_the_straggler(make, hook, event, kind):
    # GIVEN a message about a suspect WHEN more becomes known of it THEN a message says so
    webhooks, RULES["page-me"] = make(), rule("page-me", CLOUD)
    webhooks.take(judged())
    sent = hook.next()[2]
    webhooks.take(event)
    webhooks.close()
    after = hook.next()[2]
    assert (after["type"], after["subject"]) == (f"dev.sftriage.{kind}", sent["subject"])
    assert after["data"][kind]["says"] == event_sentence(event)
    assert after["data"]["decision_id"] == sent["id"]


STALL = {"first_step": 60, "last_step": 60, "label": "stalled", "suspects": ()}
HANG = replaced(CAUSE, code="different_sizes", sentence="Rank 2 called it with 7.", next_step="Compare.")


def stalls(capture_id=ID, number=0, **verdict):
    decision = replace(DECISION, first_step=60, last_step=60, label="stalled", time_s=1_800_000_000.0 + number)
    return WindowJudged(replace(VERDICT, **STALL, **verdict), decision, {capture_id: TRIGGER} if capture_id else {})


def test_why_a_job_hangs_is_critical_and_first_in_the_message(make, hook):
    # GIVEN a message about a slow rank, and one about a stall that names no rank
    webhooks, RULES["page-me"] = make(), rule("page-me", CLOUD)
    webhooks.take(judged(capture_id="other"))
    webhooks.take(stalls())
    slow, stall = hook.next()[2], hook.next()[2]
    assert [one["data"]["severity"] for one in (slow, stall)] == ["warning", "critical"]
    # WHEN its capture shows why, THEN a message says so, and so does a later one about the same stall
    webhooks.take(HANG)
    why = hook.next()[2]
    assert (why["data"]["severity"], why["data"]["decision_id"]) == ("critical", stall["id"])
    RULES["page-me"] = rule("page-me", SLACK)
    webhooks.take(stalls(capture_id="", number=1))
    assert hook.next()[2] == {"text": "[critical] res net: Rank 2 called it with 7. Compare."}
    # AND that it is not known is said as well, of the next stall
    webhooks.take(stalls("next", 2, attempt=1))
    assert hook.next()[2]["text"].startswith("[critical] res net: Stalled: ")
    webhooks.take(replaced(HANG, capture_id="next", code="unknown", sentence="It is not known."))
    assert hook.next()[2] == {"text": "[critical] res net: It is not known. Compare."}
    webhooks.close()
    assert hook.received.empty()


def test_a_job_that_ends_early_is_critical_where_a_rule_notifies_of_stalls(make, hook):
    # GIVEN a rule about stragglers with one destination, and one about stalls with another
    webhooks, RULES["page-me"] = make(), rule("page-me", SLACK)
    about = {
        "name": "hangs",
        "match": {"label": "stalled"},
        "notify": [{"webhook": CLOUD.model_dump(exclude_none=True)}],
    }
    RULES["hangs"] = Rule.model_validate(about)
    webhooks.take(JobBroken(1_800_000_000.25, 0, (Departure((2,), "exited", status=3, stage="data", step=60),)))
    webhooks.close()
    sent = hook.next()[2]
    assert (sent["type"], sent["subject"], sent["data"]["severity"]) == ("dev.sftriage.broken", "job", "critical")
    assert sent["data"]["broken"]["says"] == "Rank 2 ended: exit status 3 in data (step 60)."
    assert sent["data"]["broken"]["first"][0]["ranks"] == [2]
    assert hook.received.empty()


NO_MESSAGE = {
    "a remedy for another rank": ([judged()], replaced(REMEDY, rank=3)),
    "what differs on another rank": ([judged()], replaced(DIFFERENCES, ranks=(3,))),
    "a cause that is not known": ([judged()], replaced(CAUSE, code="unknown")),
    "a suspect without a message": ([judged(notify=())], CAUSE),
    "another suspect": ([judged(suspects=(replace(SUSPECT, ranks=(3,)),))], CAUSE),
    "a capture that a person requested": ([judged(capture_id="")], CAUSE),
}


@pytest.mark.parametrize("case", NO_MESSAGE)
def test_no_message_follows(make, hook, case):
    webhooks, RULES["page-me"] = make(), rule("page-me", CLOUD)
    before, found = NO_MESSAGE[case]
    for one in before:
        webhooks.take(one)
    webhooks.take(found)
    webhooks.close()
    # THEN there is at most the decision's message, and nothing after it
    types = [hook.next()[2]["type"] for _ in before if before[0].decision.notify]
    assert set(types) <= {"dev.sftriage.decision"}
    assert hook.received.empty()
