"""What is told to the world outside: a decision, as a CloudEvent for programs or as a line of text for people."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from typing import Any
from urllib.parse import quote

from sftriage.records import Decision, Verdict, plain
from sftriage.words import verdict_sentence

EVENT_TYPE = "dev.sftriage.decision"
_MAX_TEXT = 3000


@dataclass(frozen=True, slots=True)
class Notice:
    """What is told: a decision and its verdict as plain data, and the same in a line for people.

    ``notice_id`` is unique within ``source``, a URI reference that names the job and its run; the attempts to deliver a
    notice share it, so that a receiver knows a notice that it has already.
    """

    notice_id: str
    source: str
    subject: str
    time_s: float
    text: str
    data: Mapping[str, Any]


def cloud_event(notice: Notice) -> bytes:
    """The notice as a CloudEvent (1.0, JSON format, structured mode)."""
    moment = datetime(1970, 1, 1, tzinfo=timezone.utc) + timedelta(seconds=notice.time_s)
    event = {
        "specversion": "1.0",
        "id": notice.notice_id,
        "source": notice.source,
        "type": EVENT_TYPE,
        "time": moment.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
        "datacontenttype": "application/json",
        "subject": notice.subject,
        "data": notice.data,
    }
    return json.dumps(event, allow_nan=False).encode()


def slack_message(notice: Notice) -> bytes:
    """The notice as a message that Slack's incoming webhooks take, and the many that take the same."""
    text = notice.text[:_MAX_TEXT].replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return json.dumps({"text": text}).encode()


@dataclass(frozen=True, slots=True)
class Origin:
    """Whose decisions these are."""

    job: str
    run_id: str

    @property
    def source(self) -> str:
        """The job and the run as a URI reference."""
        return f"/sftriage/{quote(self.job, safe='')}/{quote(self.run_id, safe='')}"


def notice_of(verdict: Verdict, decision: Decision, origin: Origin, rules: tuple[str, ...]) -> Notice:
    """The notice of one decision.

    Args:
        verdict: what was found.
        decision: what was done about it.
        origin: whose it is.
        rules: the rules that want it told.
    """
    steps = f"steps {decision.first_step} to {decision.last_step}"
    if decision.first_step == decision.last_step:
        steps = f"step {decision.first_step}"
    # A window is decided once, but a step that stalls again, or for others, is decided again.
    number = f"{decision.attempt}-{decision.first_step}-{decision.last_step}-{decision.label}"
    return Notice(
        notice_id=f"{number}-{round(1000 * decision.time_s)}",
        source=origin.source,
        subject=steps,
        time_s=decision.time_s,
        text=f"{origin.job}: {verdict_sentence(verdict)} {decision.outcome.capitalize()}: {decision.reason}",
        data={
            "job": origin.job,
            "run": origin.run_id,
            "rules": list(rules),
            "verdict": plain(verdict),
            "decision": plain(decision),
        },
    )
