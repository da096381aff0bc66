"""Posts decisions, causes and remedies to the webhooks of the policy's rules, each with a severity.

Each webhook has its own `DeliveryQueue`, so one that hangs or fails does not delay the others or the triage. A URL is a
secret, since it grants write access: messages and logs contain its host only.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from functools import partial
from importlib import import_module
from typing import Any, Literal, TypeAlias
from urllib.parse import quote

import msgspec

from sftriage.model import events
from sftriage.model.captures import Decision, Trigger
from sftriage.model.verdicts import Verdict
from sftriage.model.windows import plain
from sftriage.policy.schema import Rule, Webhook
from sftriage.sinks.stream import CAPACITY, DeliveryQueue, Sink, close_all, keep_newest
from sftriage.words.decisions import caused, decision_values, reason_sentence
from sftriage.words.run import event_sentence
from sftriage.words.verdicts import span, verdict_sentence

_MAX_TEXT = 3000

Severity = Literal["critical", "warning", "info"]
_SEVERITIES: Mapping[str, Severity] = {"stalled": "critical", "suspect": "warning"}


@dataclass(frozen=True, slots=True)
class Message:
    """A message about a ``decision``, or about the end of the job. All attempts to deliver it share its ``number``."""

    kind: Literal["decision", "cause", "differences", "remedy", "broken"]
    number: str
    time_s: float
    decision: Decision | None
    data: Mapping[str, Any]
    text: str

    @property
    def severity(self) -> Severity:
        """How urgent it is: a job that hangs computes nothing until a person acts."""
        return "critical" if self.decision is None else _SEVERITIES.get(self.decision.label, "info")

    def event(self, job: str, run: str) -> bytes:
        """The message as a CloudEvent (1.0, JSON format, structured mode)."""
        moment = datetime(1970, 1, 1, tzinfo=timezone.utc) + timedelta(seconds=self.time_s)
        event = {
            "specversion": "1.0",
            "id": self.number,
            "source": f"/sftriage/{quote(job, safe='')}/{quote(run, safe='')}",
            "type": f"dev.sftriage.{self.kind}",
            "time": moment.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            "datacontenttype": "application/json",
            "subject": "job" if self.decision is None else span(self.decision.first_step, self.decision.last_step),
            "data": {
                "job": job,
                "run": run,
                "severity": self.severity,
                "rules": [] if self.decision is None else list(self.decision.notify),
                **self.data,
            },
        }
        return json.dumps(event, allow_nan=False).encode()

    def line(self, job: str) -> bytes:
        """The message as a line of text, in the format of Slack's incoming webhooks."""
        urgent = "[critical] " if self.severity == "critical" else ""
        text = f"{urgent}{job}: {self.text}"[:_MAX_TEXT].replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
        return json.dumps({"text": text}).encode()


def decided(verdict: Verdict, decision: Decision, cause: events.CauseFound | None = None) -> Message:
    """A message about a decision; ``cause`` is why the suspect is slow, if a capture has already shown that."""
    data = {"verdict": plain(verdict), "decision": decision_values(decision), "cause": _cause_values(cause)}
    text = f"{verdict_sentence(verdict)} {decision.outcome.capitalize()}: {reason_sentence(decision)}"
    if cause is not None:
        text = _with_next_step(cause) if verdict.label == "stalled" else f"{text}. Cause: {caused(cause)}"
    return Message("decision", event_id(decision), decision.time_s, decision, data, text)


def explained(found: events.CauseFound, decision: Decision) -> Message:
    """A message with the cause behind a decision that was sent before."""
    data = {"decision_id": event_id(decision), "capture_id": found.capture_id, "rank": found.rank}
    data |= {"cause": _cause_values(found)}
    text = _with_next_step(found)
    if decision.label != "stalled":
        text = f"Cause, for {span(decision.first_step, decision.last_step)}: {text}"
    return Message("cause", f"{found.capture_id}-{found.code}", found.time_s, decision, data, text)


def _with_next_step(found: events.CauseFound) -> str:
    return f"{caused(found)} {found.next_step}"


def remedied(found: events.RemedyChanged, decision: Decision) -> Message:
    """A message about a remedy for a decision that was sent before."""
    text = event_sentence(found)
    data = {"decision_id": event_id(decision), "remedy": {"says": text, **msgspec.to_builtins(found)}}
    number = f"{found.attempt}-{found.rank}-{found.state}-{round(1000 * found.time_s)}"
    return Message("remedy", number, found.time_s, decision, data, text)


def differing(found: events.DifferencesFound, decision: Decision) -> Message:
    """A message with what differs between the suspect of a decision that was sent before and its peers."""
    text = event_sentence(found)
    data = {"decision_id": event_id(decision), "differences": {"says": text, **msgspec.to_builtins(found)}}
    return Message("differences", f"{event_id(decision)}-differences", found.time_s, decision, data, text)


def broken(event: events.JobBroken) -> Message:
    """A message about a job, or an attempt of it, that ended early."""
    values = {name: value for name, value in msgspec.to_builtins(event).items() if name not in ("type", "version")}
    text = event_sentence(event)
    return Message("broken", f"{event.attempt}-broken", event.time_s, None, {"broken": {"says": text, **values}}, text)


def event_id(decision: Decision) -> str:
    """The id of a decision's CloudEvent."""
    # A window has one decision, but one step may stall several times.
    number = f"{decision.attempt}-{decision.first_step}-{decision.last_step}-{decision.label}"
    return f"{number}-{round(1000 * decision.time_s)}"


def _cause_values(cause: events.CauseFound | None) -> dict[str, Any] | None:
    names = ("code", "sure", "sentence", "place", "compared_with", "next_step")
    values = {} if cause is None else msgspec.to_builtins(cause)
    return {name: values[name] for name in names} if values else None


log = logging.getLogger("sftriage")

GIVE_UP_S = 600.0
"""Maximum time for all attempts to deliver a message."""
CLOSE_S = 10.0
"""Maximum time to deliver queued messages at the end of a run."""
_Suspect: TypeAlias = "tuple[tuple[int, ...], str | None]"
"""Ranks and stage: what a window's verdict and a capture's trigger share. Of a stall, its attempt and step, and ""."""


class Webhooks(Sink):
    """Posts a run's decisions, causes, remedies and early end; ``rules`` returns the rules in force, by name.

    Once a capture shows the cause, a second message about the same steps follows. Later decisions about that suspect
    contain the cause.
    """

    name = "webhooks"

    def __init__(self, job: str, run: str, rules: Callable[[], Mapping[str, Rule]]) -> None:
        self.job, self.run = job, run
        self.closing, self.close_by_s = threading.Event(), float("inf")
        self._rules = rules
        self._queues: dict[Webhook, DeliveryQueue] = {}
        self._failing: set[Webhook] = set()
        # The last decision sent and the cause, by suspect; and the suspect, by capture id.
        self._sent: dict[_Suspect, Decision] = {}
        self._causes: dict[_Suspect, events.CauseFound] = {}
        self._suspects: dict[str, _Suspect] = {}
        need_posting(rules().values())

    def start(self) -> None:
        """Log webhooks without a valid URL now, rather than when a notification is due."""
        rules = self._rules()
        for webhook in _webhooks_of(rules, rules):
            from sftriage.sinks.posting import UndeliveredError, url_of

            try:
                url_of(webhook)
            except UndeliveredError as error:
                log.error("notify %s: %s; no notification can be sent", _name_of(webhook), error)

    def take(self, event: events.Event | events.Observation) -> None:
        match event:
            case events.PolicyChanged(kind="changed"):
                self.start()
            case events.WindowJudged():
                self._requested(event.triggers, _stall_of(event.verdict))
                if event.decision.notify:
                    self._decided(event.verdict, event.decision)
            case events.FollowUpDecided():
                self._requested(event.triggers)
            case events.CauseFound():
                self._explained(event)
            case events.RemedyChanged():
                self._follow_up((event.rank,), partial(remedied, event))
            case events.DifferencesFound():
                self._follow_up(event.ranks, partial(differing, event))
            case events.JobBroken():
                # (a rule that notifies of a job that hangs notifies of this too)
                rules = [name for name, rule in self._rules().items() if rule.match.label == "stalled"]
                self._send(rules, "the end of the job", partial(broken, event))

    def _requested(self, triggers: Mapping[str, Trigger], stall: _Suspect | None = None) -> None:
        for capture_id, trigger in triggers.items():
            of = trigger.ranks, None if trigger.scope == "host" else trigger.stage
            keep_newest(self._suspects, capture_id, stall or of)

    def _decided(self, verdict: Verdict, decision: Decision) -> None:
        cause = None
        suspect = _stall_of(verdict) or (verdict.suspects[0].identity[1:] if verdict.suspects else None)
        if suspect is not None:
            keep_newest(self._sent, suspect, decision)
            cause = self._causes.get(suspect)
        self._post(decision, partial(decided, verdict, decision, cause))

    def _explained(self, found: events.CauseFound) -> None:
        suspect = self._suspects.get(found.capture_id)
        # (that a hang has no known reason is news, too)
        if suspect is None or (found.code == "unknown" and suspect[1] != ""):
            return
        # (captures of several ranks, and of the control, may show the same cause)
        known, decision = self._causes.get(suspect), self._sent.get(suspect)
        if known is not None and found.code == "unknown":
            return
        keep_newest(self._causes, suspect, found)
        if decision is not None and (known is None or known.code != found.code):
            self._post(decision, partial(explained, found, decision))

    def _follow_up(self, ranks: tuple[int, ...], make: Callable[[Decision], Message]) -> None:
        """Post what became known of these ranks, if a decision about them was sent."""
        decisions = [decision for (sent, _), decision in self._sent.items() if sent[: events.MAX_COMPARED] == ranks]
        if decisions:
            newest = max(decisions, key=lambda decision: decision.time_s)
            self._post(newest, partial(make, newest))

    def _post(self, decision: Decision, make: Callable[[], Message]) -> None:
        self._send(decision.notify, span(decision.first_step, decision.last_step), make)

    def _send(self, rules: Iterable[str], about: str, make: Callable[[], Message]) -> None:
        for webhook in _webhooks_of(self._rules(), rules):
            if webhook not in self._queues:
                self._queues[webhook] = DeliveryQueue(_name_of(webhook), CAPACITY)
                self._queues[webhook].start()
            self._queues[webhook].put(partial(self._deliver, webhook, about, make))

    def close(self) -> None:
        """Deliver queued messages within `CLOSE_S` of the first call."""
        if not self.closing.is_set():
            self.close_by_s = time.monotonic() + CLOSE_S
        self.closing.set()
        queues, self._queues = self._queues, {}
        close_all(queues.values(), self.close_by_s)

    def _deliver(self, webhook: Webhook, about: str, make: Callable[[], Message]) -> None:
        from sftriage.sinks.posting import RETRY, UndeliveredError

        give_up_by_s, retry = time.monotonic() + GIVE_UP_S, RETRY
        while True:
            try:
                self._attempt(webhook, make())
            except UndeliveredError as caught:
                error = caught
            except Exception as caught:
                # Not its text, which may quote the URL.
                error = UndeliveredError(type(caught).__name__, retry=False)
            else:
                self._failing.discard(webhook)
                return
            retry = retry.increment("POST", "")
            due_s = time.monotonic() + max(retry.get_backoff_time(), error.after_s)
            again = error.retry and due_s <= give_up_by_s
            if again and webhook not in self._failing:
                self._failing.add(webhook)
                log.warning("notify %s: %s; trying again", _name_of(webhook), error)
            if not again or not self._wait(due_s):
                tries = len(retry.history)
                log.error("notify %s: gave up on %s after %d tries: %s", _name_of(webhook), about, tries, error)
                return

    def _attempt(self, webhook: Webhook, message: Message) -> None:
        from sftriage.sinks.posting import post, url_of

        if webhook.format == "slack":
            body, content_type = message.line(self.job), "application/json"
        else:
            body = message.event(self.job, self.run)
            content_type = "application/cloudevents+json; charset=utf-8"
        post(url_of(webhook), body, content_type)

    def _wait(self, due_s: float) -> bool:
        if self.closing.wait(due_s - time.monotonic()) and due_s < self.close_by_s:
            time.sleep(max(0.0, due_s - time.monotonic()))
        return due_s < self.close_by_s


def need_posting(rules: Iterable[Rule]) -> None:
    """Raises ModuleNotFoundError if a rule notifies, and urllib3 is not installed: call this before the job starts."""
    if any(rule.notify for rule in rules):
        import_module("sftriage.sinks.posting")


def _stall_of(verdict: Verdict) -> _Suspect | None:
    return ((verdict.attempt, verdict.first_step), "") if verdict.label == "stalled" else None


def _webhooks_of(rules: Mapping[str, Rule], names: Iterable[str]) -> Iterable[Webhook]:
    found = [rules[name] for name in names if name in rules]
    return dict.fromkeys(notify.webhook for rule in found for notify in rule.notify)


def _name_of(webhook: Webhook) -> str:
    source = webhook.url_from_file if webhook.url_from_env is None else f"${webhook.url_from_env}"
    return f"{'slack' if webhook.format == 'slack' else 'webhook'} of {source}"
