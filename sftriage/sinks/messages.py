"""What a webhook is told: a decision, a cause or a remedy, as a CloudEvent or as a line for people."""

from __future__ import annotations

import json
from datetime import datetime, timedelta, timezone
from typing import Any
from urllib.parse import quote

import msgspec

from sftriage.decisions import Decision, Verdict
from sftriage.events import CauseFound, RemedyChanged
from sftriage.records import plain
from sftriage.words.advice import remedy_told
from sftriage.words.captures import caused
from sftriage.words.decisions import decision_values, reason_sentence
from sftriage.words.verdicts import verdict_sentence

_MAX_TEXT = 3000


def cloud_event(job: str, run: str, verdict: Verdict, decision: Decision, cause: CauseFound | None = None) -> bytes:
    """A decision as a CloudEvent (1.0, JSON format, structured mode). Attempts share its id, so a receiver knows it.

    ``cause`` is why the suspect is slow, where a capture has shown that before.
    """
    data = {"verdict": plain(verdict), "decision": decision_values(decision), "cause": _cause_values(cause)}
    about = {"job": job, "run": run, "rules": list(decision.notify)}
    return _event("decision", event_id(decision), decision.time_s, steps_of(decision), {**about, **data})


def event_id(decision: Decision) -> str:
    """What the event of a decision goes by."""
    # A window is decided once, but a step that stalls again, or for others, is decided again.
    number = f"{decision.attempt}-{decision.first_step}-{decision.last_step}-{decision.label}"
    return f"{number}-{round(1000 * decision.time_s)}"


def cause_event(job: str, run: str, found: CauseFound, decision: Decision) -> bytes:
    """A cause as a CloudEvent about the same subject as the ``decision`` that was told before, whose id it has."""
    about = {"job": job, "run": run, "rules": list(decision.notify), "decision_id": event_id(decision)}
    data = {"capture_id": found.capture_id, "rank": found.rank, "cause": _cause_values(found)}
    return _event("cause", f"{found.capture_id}-{found.code}", found.time_s, steps_of(decision), {**about, **data})


def _event(kind: str, event_id: str, time_s: float, subject: str, data: dict[str, Any]) -> bytes:
    moment = datetime(1970, 1, 1, tzinfo=timezone.utc) + timedelta(seconds=time_s)
    event = {
        "specversion": "1.0",
        "id": event_id,
        "source": f"/sftriage/{quote(data['job'], safe='')}/{quote(data['run'], safe='')}",
        "type": f"dev.sftriage.{kind}",
        "time": moment.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
        "datacontenttype": "application/json",
        "subject": subject,
        "data": data,
    }
    return json.dumps(event, allow_nan=False).encode()


def _cause_values(cause: CauseFound | None) -> dict[str, Any] | None:
    names = ("code", "sure", "sentence", "place", "compared_with", "next_step")
    values = {} if cause is None else msgspec.to_builtins(cause)
    return {name: values[name] for name in names} if values else None


def slack_message(job: str, verdict: Verdict, decision: Decision, cause: CauseFound | None = None) -> bytes:
    """A decision as a line of text that Slack's incoming webhooks take, and the many that take the same."""
    done = f"{decision.outcome.capitalize()}: {reason_sentence(decision)}"
    return _line(f"{job}: {verdict_sentence(verdict)} {done}{'' if cause is None else f'. Why: {caused(cause)}'}")


def cause_message(job: str, found: CauseFound, decision: Decision) -> bytes:
    """A cause as such a line."""
    return _line(f"{job}: Why, of {steps_of(decision)}: {caused(found)} {found.next_step}")


def remedy_event(job: str, run: str, told: RemedyChanged, decision: Decision) -> bytes:
    """A remedy as a CloudEvent, about the same subject as the ``decision`` that was told before, whose id it has."""
    about = {"job": job, "run": run, "rules": list(decision.notify), "decision_id": event_id(decision)}
    data = {"remedy": {"says": remedy_told(told), **msgspec.to_builtins(told)}}
    number = f"{told.attempt}-{told.rank}-{told.state}-{round(1000 * told.time_s)}"
    return _event("remedy", number, told.time_s, steps_of(decision), {**about, **data})


def remedy_message(job: str, told: RemedyChanged) -> bytes:
    """A remedy as such a line."""
    return _line(f"{job}: {remedy_told(told)}")


def _line(text: str) -> bytes:
    text = text[:_MAX_TEXT].replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return json.dumps({"text": text}).encode()


def steps_of(decision: Decision) -> str:
    """The steps that a decision is about, in words."""
    first, last = decision.first_step, decision.last_step
    return f"step {first}" if first == last else f"steps {first} to {last}"
