"""Why a job hangs, by its journal, and the evidence as a table: ranks in the same place in one row."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass

import msgspec

from sftriage.errors import InputError, SftriageError
from sftriage.model.events import CauseFound, WindowJudged
from sftriage.model.hangs import HangEvidence, RankEvidence
from sftriage.model.verdicts import Verdict
from sftriage.runs.decisions import JournalTail, Note, WindowRow
from sftriage.runs.directory import RunDirectory
from sftriage.traces.manifest import Manifest
from sftriage.traces.store import Store
from sftriage.words.hangs import call_words, ending_words, group_words, line_words, rank_ranges
from sftriage.words.verdicts import counted

MAX_SHOWN_BYTES = 32 * 1024 * 1024
MAX_ROWS = 32
"""Rows of the table; the last one counts the ranks of all others."""

HEADINGS = ("rank", "host", "step", "where", "in which call", "state")

_STATES = {"T": "stopped (SIGSTOP)", "t": "stopped by a debugger", "D": "waits for a disk", "Z": "has ended"}
"""What the kernel says of a rank that does not answer."""


@dataclass(frozen=True, slots=True)
class HangRow:
    """Ranks in the same place, in words."""

    ranks: str
    host: str
    step: str
    where: str
    call: str
    state: str

    @property
    def cells(self) -> tuple[str, ...]:
        return (self.ranks, self.host, self.step, self.where, self.call, self.state)


def requested_in(rows: Sequence[WindowRow], stalled: WindowRow | Verdict) -> frozenset[str]:
    """The captures that a stall has led to: all windows on the same step count."""
    same = ("stalled", stalled.attempt, stalled.first_step)
    alike = (row for row in rows if (row.label, row.attempt, row.first_step) == same)
    return frozenset(request.capture_id for row in alike for request in row.requests)


def hang_found(
    rows: Sequence[WindowRow], notes: Sequence[Note], stalled: WindowRow | Verdict | None
) -> CauseFound | None:
    """Why the job hangs in a stalled window, as its captures have shown it last; None for any other window.

    A later capture that does not show it, as of a job that is ended meanwhile, takes nothing back.
    """
    requested = requested_in(rows, stalled) if stalled is not None and stalled.label == "stalled" else ()
    found = [note for note in notes if isinstance(note, CauseFound) and note.capture_id in requested]
    return max(reversed(found), key=lambda note: note.code != "unknown", default=None)


def hang_in(directory: RunDirectory, window: WindowJudged | None = None) -> CauseFound | None:
    """The same for a window of a run, by default its last one."""
    journal = JournalTail(directory.decisions)
    journal.follow()
    rows = journal.record.rows
    return hang_found(rows, journal.record.notes, window.verdict if window else rows[-1] if rows else None)


def read_hang(store: Store, manifest: Manifest) -> HangEvidence:
    """The evidence in a capture of a whole job that hangs.

    Raises:
        InputError: it is damaged, or of another version.
    """
    file = manifest.artefacts[0]
    try:
        return msgspec.json.decode(b"".join(store.content(manifest, file)), type=HangEvidence)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise InputError(f"{manifest.capture_id}: {file.name} cannot be read: {error}") from None


def hang_rows_of(store: Store, manifest: Manifest) -> list[HangRow]:
    """The table of a capture for a page; empty if it is of another kind, or too large or damaged to be shown."""
    if manifest.of_hang and manifest.artefacts[0].size_bytes <= MAX_SHOWN_BYTES:
        with suppress(SftriageError, OSError):
            return hang_rows(read_hang(store, manifest))
    return []


def hang_rows(evidence: HangEvidence) -> list[HangRow]:
    """The table: ranks at fault first, then the others."""
    at_fault = frozenset(() if evidence.hang is None else evidence.hang.ranks)
    together: dict[tuple[str, ...], list[RankEvidence]] = {}
    for rank in sorted(evidence.ranks, key=lambda each: (each.rank not in at_fault, each.rank)):
        together.setdefault((_step(rank), _where(rank), _calls(rank), _state(rank)), []).append(rank)
    rows = [_row(ranks, *cells) for cells, ranks in together.items()]
    if len(rows) > MAX_ROWS:
        others = [rank for ranks in list(together.values())[MAX_ROWS - 1 :] for rank in ranks]
        rows[MAX_ROWS - 1 :] = [_row(others, "", "in other places", "", "")]
    return rows


def _row(ranks: list[RankEvidence], step: str, where: str, call: str, state: str) -> HangRow:
    hosts = list(dict.fromkeys(rank.host for rank in ranks))
    host = hosts[0] if len(hosts) == 1 else counted(len(hosts), "host")
    return HangRow(rank_ranges([rank.rank for rank in ranks]), host, step, where, call, state)


def _step(rank: RankEvidence) -> str:
    return f"{rank.step}" if rank.step >= 0 else ""


def _where(rank: RankEvidence) -> str:
    """The program's own line, or else the innermost one."""
    frames = next((thread.frames for thread in rank.threads if thread.main), ())
    place = next((frame for frame in frames if frame.own), next(iter(frames), None))
    return "" if place is None else line_words(place)


def _calls(rank: RankEvidence) -> str:
    return "; ".join(_pending(rank))


def _pending(rank: RankEvidence) -> Iterator[str]:
    """The oldest call that has not ended in each group."""
    for group in rank.groups:
        if group.pending:
            number = min(group.pending)
            at = number - group.first
            position = group.calls[at] if 0 <= at < len(group.calls) else -1
            op = call_words(rank.calls[position]) if 0 <= position < len(rank.calls) else "a collective"
            name = "" if group.description == "default_pg" else group.name
            yield f"{op}, #{number} of {group_words(name)}"


def _state(rank: RankEvidence) -> str:
    if rank.alive is False:
        return f"dead ({ending_words(rank.exit_status)})"
    if rank.closed:
        return "has stopped recording"
    if not rank.answered:
        return _STATES.get(rank.state) or rank.problem or "does not answer"
    return "between steps" if rank.stage is None else f"in {rank.stage}"
