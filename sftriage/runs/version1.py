"""Entries of a journal of version 1, whose decisions were sentences, as entries of version 2: codes with parameters.

For every sentence that version 1 wrote there is a pattern here, and `words` makes the same sentence again of what the
pattern finds. A sentence that nobody knows is kept as it is, as the reason ``recorded``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from datetime import datetime, timezone
from typing import Any

from sftriage.records import Cause, Decision, Parameter, ReasonCode
from sftriage.words import reason_sentence

_LONGEST = 20_000

_RANKS = r"(?:rank (?P<rank>\d+)|(?P<rank_count>\d+) ranks)"
_STANDS = rf"(?P<reasons>[^:]*?)(?:: {_RANKS} in (?P<stage>.+?)(?: and (?P<more_ranks>\d+) more)?)?"
_BESIDE = r"(?:; beside it ranks? (?P<controls>\d+(?:, \d+)*), to compare with|(?P<none>; no healthy peer .* found))?"
_UNTIL = r"(?P<until_s>\d+-\d\d-\d\dT\d\d:\d\d:\d\dZ)"
_OF_RULE = r" of rule (?P<rule>\S+)"

_PATTERNS: tuple[tuple[ReasonCode, str], ...] = (
    ("healthy", "healthy"),
    ("one_off", "one-off, and has passed"),
    ("no_rank_named", r"\w+, but no rank is named"),
    ("no_rule_matched", r"no rule is about \w+"),
    ("no_rule_matched", rf"scope (?P<scope>\w+) is not one of (?P<scopes>.*){_OF_RULE}"),
    ("no_rule_matched", rf"(?:a whole rank|stage (?P<stage>\S+)) is not one of (?P<stages>.*){_OF_RULE}"),
    ("no_rule_matched", rf"pattern (?P<pattern>\S+) is not one of (?P<patterns>.*){_OF_RULE}"),
    (
        "no_rule_matched",
        r"(?:gain (?P<share>\S+)% under (?P<min_share>\S+)%)?(?: and )?"
        rf"(?:gain (?P<gain_s>\S+) ms under (?P<min_gain_s>\S+) ms)?{_OF_RULE}",
    ),
    ("observe_only", rf"observe-only: rule (?P<rule>\S+?) matched(?:, {_STANDS})?"),
    ("waits_for_windows", r"rule (?P<rule>\S+): window (?P<window>\d+) of (?P<windows>\d+)"),
    ("rank_hangs", r"rank (?P<rank>\d+) hangs inside capture (?P<capture_id>\S+): its stacks, from outside"),
    (
        "rule_matched",
        rf"rule (?P<rule>\S+): (?P<stage>.+) of {_RANKS} would save (?P<gain_s>\S+) ms a step \((?P<share>\S+)%\), "
        rf"in (?P<persistence>\S+)% of the steps{_BESIDE}",
    ),
    ("rule_matched", rf"rule (?P<rule>\S+): {_STANDS}{_BESIDE}"),
    ("captures_per_run", r"captures_per_run: (?P<captures>\d+) of (?P<limit>\d+) captures made"),
    ("active", rf"active: captures are (?:never allowed again|not allowed until {_UNTIL})"),
    (
        "overhead_budget",
        r"overhead_budget: captures have cost (?P<spent_s>\S+) s of the (?P<budget_s>\S+) s "
        rf"that are (?P<budget_share>\S+)% of the run so far, until {_UNTIL}",
    ),
    (
        "captures_per_hour",
        rf"captures_per_hour: (?P<captures>\d+) of (?P<limit>\d+) captures asked for, until {_UNTIL}",
    ),
    ("cooldown", rf"cooldown{_OF_RULE} until {_UNTIL}"),
    (
        "after_failures",
        rf"the last (?:capture|(?P<failures>\d+) captures){_OF_RULE} failed or (?:was|were) refused, "
        rf"next attempt from {_UNTIL} on",
    ),
    ("rank_busy", r"rank (?P<rank>\d+) is being captured already \((?P<capture_id>.*)\)"),
    (
        "concurrent_ranks",
        r"concurrent_ranks: (?P<running>\d+) of (?P<limit>\d+) ranks are being captured, "
        r"(?P<wanted>\d+) more asked for",
    ),
    (
        "no_such_rank",
        r"no rank (?P<ranks>\d+(?:, \d+)*) in this job: (?:none so far|0 to (?P<last_rank>\d+))",
    ),
    ("captures_left", r"(?P<wanted>\d+) ranks asked for, (?P<left>\d+) captures left"),
    ("asked", r"(?P<who>.*?) asked for it: (?P<why>.*)"),
)
_KNOWN = tuple((code, re.compile(pattern, re.DOTALL)) for code, pattern in _PATTERNS)
# These can be any words, and are known by what was decided.
_OF_LABEL: Mapping[str, tuple[ReasonCode, re.Pattern[str]]] = {
    "needs_evidence": ("undecided", re.compile(r"(?P<reasons>.*)", re.DOTALL)),
    "stalled": ("standstill", re.compile(_STANDS, re.DOTALL)),
}


def upgraded(entry: dict[str, Any]) -> dict[str, Any] | None:
    """A decoded entry of version 1 as the values of an event of version 2; None where it is of a type unknown here.

    Raises:
        ValueError: it is no entry.
    """
    try:
        make = _EVENTS.get(entry["type"])
        return None if make is None else {"type": entry["type"], **make(entry), "version": 2}
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"no entry of a journal: {error}") from error


def _decided(entry: dict[str, Any]) -> dict[str, Any]:
    kept = dict(entry["decision"])
    resolves, label, outcome = kept.pop("resolves", ""), kept.get("label", "suspect"), kept.get("outcome", "")
    code, parameters = translated(kept["reason"], label=label, outcome=outcome, resolves=resolves)
    kept |= {"reason": code, "parameters": dict(parameters)}
    return {"decision": kept, "triggers": entry.get("triggers", {})}


def _evidence(entry: dict[str, Any]) -> dict[str, Any]:
    known = entry["evidence"]
    gpus = known.get("gpus") or {}
    first_step = known.get("first_step", 0)
    return {
        "time_s": gpus.get("time_s", known.get("time_s", 0.0)),
        "first_step": first_step,
        "last_step": known.get("last_step", first_step),
        "remarks": gpus.get("remarks", []),
        "gpus": {name: value for name, value in gpus.items() if name not in ("time_s", "remarks")} or None,
        "ready_fraction": known.get("bucket_ready"),
    }


def _result(entry: dict[str, Any]) -> dict[str, Any]:
    result = entry["result"]
    # What is stored now was done then.
    return {"time_s": 0.0, "result": {**result, "state": {"done": "stored"}.get(result["state"], result["state"])}}


_EVENTS: Mapping[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "window": lambda entry: {"verdict": entry["verdict"], **_decided(entry)},
    "ask": lambda entry: {
        "type": "manual_request",
        "request": {"request_id" if name == "ask_id" else name: value for name, value in entry["ask"].items()},
        **_decided(entry),
    },
    "beside": lambda entry: {"type": "follow_up", "capture_id": entry["capture_id"], **_decided(entry)},
    "capture": _result,
    "policy": lambda entry: dict(entry["change"]),
    "cost": lambda entry: dict(entry["cost"]),
    "evidence": _evidence,
}


def translated(
    sentence: str, *, label: Cause, outcome: str, resolves: str = ""
) -> tuple[ReasonCode, Mapping[str, Parameter]]:
    """The code and the parameters of which `words.reason_sentence` makes a sentence of version 1."""
    first = [_OF_LABEL[label]] if outcome == "hold" and label in _OF_LABEL else []
    for code, pattern in [*first, *_KNOWN] if len(sentence) <= _LONGEST else ():
        found = pattern.fullmatch(sentence)
        if found is None:
            continue
        try:
            parameters = _parameters(code, found)
        except ValueError:
            continue
        # Names can hold anything: what does not give the same sentence again was something else.
        if reason_sentence(Decision(0.0, 0, 0, label, "hold", code, None, parameters)) == sentence:
            return code, parameters
    return "recorded", {"text": sentence, "resolves": resolves}


def _parameters(code: ReasonCode, found: re.Match[str]) -> dict[str, Parameter]:
    texts = {name: text for name, text in found.groupdict().items() if text is not None}
    if texts.pop("none", None) is not None:
        texts["controls"] = ""
    if texts.get("stage") == "all local stages":
        del texts["stage"]
    # A scope, stage or pattern that a rule is not about, and nothing in particular.
    if "stages" in texts:
        texts.setdefault("stage", "")
    if code == "after_failures":
        texts.setdefault("failures", "1")
    if texts.get("reasons") == "no reason given":
        texts["reasons"] = ""
    return {name: _READ.get(name, str)(text) for name, text in texts.items()}


def _time(text: str) -> float:
    return datetime.strptime(text.zfill(20), "%Y-%m-%dT%H:%M:%SZ").replace(tzinfo=timezone.utc).timestamp()


def _names(text: str) -> tuple[str, ...]:
    return tuple(text.split(", ")) if text else ()


_RANK_COUNTS = ("rank", "rank_count", "more_ranks", "last_rank")
_COUNTS = ("window", "windows", "captures", "limit", "failures", "running", "wanted", "left")
_READ: Mapping[str, Callable[[str], Parameter]] = {
    **dict.fromkeys((*_RANK_COUNTS, *_COUNTS), int),
    **dict.fromkeys(("share", "min_share", "persistence", "budget_share"), lambda text: float(text) / 100),
    **dict.fromkeys(("gain_s", "min_gain_s"), lambda text: float(text) / 1000),
    **dict.fromkeys(("spent_s", "budget_s"), float),
    **dict.fromkeys(("reasons", "scopes", "stages", "patterns"), _names),
    **dict.fromkeys(("controls", "ranks"), lambda text: tuple(map(int, _names(text)))),
    "until_s": _time,
}
