"""Which rank of a job went first, how, and what became of the others, in a sentence. Pure."""

from __future__ import annotations

import signal
from pathlib import PurePath
from typing import TYPE_CHECKING

from sftriage.model.windows import OTHER
from sftriage.words.hangs import hang_sentence
from sftriage.words.verdicts import capitalized, size, some_ranks

if TYPE_CHECKING:
    from sftriage.model.events import Departure, JobBroken, Place

_MAX_SHOWN = 3
"""Groups of ranks that a sentence lists, of those that went first and of the others."""


def broken_sentence(event: JobBroken, host: str = "") -> str:
    """Why an attempt of a job ended early; if that is judged by the ranks of one of its hosts alone, by which."""
    departures = (*event.first, *event.others)
    missing = sum(len(departure.ranks) for departure in departures) < event.world_size
    hosts = missing or len({host for departure in departures for host in departure.hosts}) > 1
    where = f"on {host}, " if missing and host else ""
    parts = [_first(event, hosts=hosts and not where), *(_followed(each, event) for each in event.others[:_MAX_SHOWN])]
    attempt = f"Attempt {event.attempt}: " if event.restarted or event.attempt else ""
    reason = "" if event.mismatch is None else f" {hang_sentence(event.mismatch)}"
    restarted = " The job was restarted." if event.restarted else ""
    text = f"{attempt}{capitalized(where + '; '.join(parts))}.{reason}{restarted}"
    # (messages and file names are the program's own: nothing of them may steer a terminal)
    return "".join(char if char.isprintable() else "?" for char in text)


def _first(event: JobBroken, *, hosts: bool) -> str:
    if not event.first:
        here = hosts and len({host for departure in event.others for host in departure.hosts}) == 1
        return f"no rank is known to have gone first{' on this host' if here else ''}"
    if len(event.first) > 1:
        listed = "; ".join(f"{_subject(each, hosts=hosts)}: {_how(each)}" for each in event.first[:_MAX_SHOWN])
        return f"it is not certain which rank went first: {listed}"
    (only,) = event.first
    went = "ended" if len(only.ranks) >= event.world_size else "went first"
    return f"{_subject(only, hosts=hosts)} {went}: {_how(only)}"


def _subject(departure: Departure, *, hosts: bool) -> str:
    on = f" on {', '.join(departure.hosts)}" if hosts and 0 < len(departure.hosts) <= _MAX_SHOWN else ""
    ranks = f"{some_ranks(departure.ranks)}{on}"
    return ranks if departure.worker is None else f"{ranks}'s DataLoader worker (process {departure.worker})"


def _how(departure: Departure) -> str:
    where = _where(departure)
    match departure.how:
        case "raised":
            return f"{': '.join(filter(None, (departure.error, departure.message)))},{where}"
        case "worker":
            return f"{_status(departure)}, while the rank was{where}"
        case "left":
            return f"it ended in order (exit status 0){where}"
        case "silent":
            return f"the host no longer reports; last{where}"
        case "died" | "gave_up":
            return f"it died{where}, exit status unknown"
    return f"{_status(departure)}{where}"


def _followed(departure: Departure, event: JobBroken) -> str:
    ranks, then = some_ranks(departure.ranks), " then" if event.first else ""
    many = len(departure.ranks) > 1
    if departure.how == "gave_up":
        return f"{ranks}{then} failed{_where(departure)}: {departure.message}"
    if departure.how == "silent":
        return f"the host of {ranks} no longer reports"
    if departure.how in ("raised", "worker"):
        return f"{ranks}{then} failed: {_how(departure)}"
    if departure.how == "killed":
        return f"{ranks},{_where(departure)}, {'were' if many else 'was'}{then} {_status(departure)}"
    ended = "in order" if departure.how == "left" else f"with {_status(departure)}"
    return f"{ranks} ended {ended}{_where(departure)}"


def _where(departure: Departure) -> str:
    """The line, stage and step."""
    place, step = departure.place, departure.step
    line = "" if place is None else _line(place)
    if step < 0:
        return line or " before its first recorded step"
    if departure.stage is None:
        return f"{line} after step {step}"
    if departure.stage == OTHER:
        return f"{line} between stages (step {step})"
    return f"{line} in {departure.stage} (step {step})" if departure.stage else f"{line} in step {step}"


def _line(place: Place) -> str:
    line = f"{PurePath(place.file).name}:{place.line}"
    return f" at {line}" if place.function.startswith("<") else f" at {place.function} ({line})"


def _status(departure: Departure) -> str:
    status = departure.status
    if status is None:
        return "exit status unknown"
    if status >= 0:
        return f"exit status {status}"
    try:
        name = signal.Signals(-status).name
    except ValueError:
        name = f"signal {-status}"
    if not departure.out_of_memory:
        return f"killed by {name}"
    limit = "" if departure.limit_bytes is None else f"; the limit of its cgroup is {size(departure.limit_bytes)}"
    by = "the kernel's log" if departure.out_of_memory == "kernel_log" else "its cgroup"
    return f"killed by {name} (out of memory, by {by}{limit})"
