"""A run that is looked at again and again, or one that is waited for."""

from __future__ import annotations

from pathlib import Path

from sftriage.errors import InputError
from sftriage.runs.directory import run_so_far
from sftriage.runs.picture import MAX_CAPTURES, Picture, Recorders, picture
from sftriage.runs.source import RunSource, View
from sftriage.traces.uploads import Outbox, Upload
from sftriage.windows.logs import StepLogs
from sftriage.words import place


class Watched:
    """A run that is looked at again and again, or one that is waited for."""

    def __init__(self, run: Path | None) -> None:
        self._run = run
        self._source = RunSource(lambda: run_so_far(run))
        self._logs: StepLogs | None = None
        self._uploads: dict[str, Upload] = {}
        self._last: tuple[View, Recorders, dict[str, Upload]] | None = None
        self._picture = Picture("waiting", self.place)

    @property
    def place(self) -> str:
        """Where the run is, or is waited for."""
        found = self._source.directory or self._run
        return "the first on this machine" if found is None else place(found)

    def look(self) -> View:
        """The run as it is now.

        Raises:
            InputError: what is there is no run, or a newer sftriage's, or cannot be read.
        """
        try:
            view = self._source.view()
            if view.has_ended():
                # What was written between the look at its journal and its end.
                view = self._source.view()
        except OSError as error:
            raise InputError(f"{self.place}: {error.strerror or error}") from error
        if view.problem:
            raise InputError(view.problem)
        return view

    def picture(self, view: View) -> Picture:
        """What there is to show; made anew only where something has changed."""
        recorders, uploads = self._recorders(view), self._look_at_uploads(view)
        if self._last is None or self._last[0] is not view or self._last[1:] != (recorders, uploads):
            self._last = (view, recorders, uploads)
            self._picture = picture(view, recorders, self.place, uploads)
        return self._picture

    def _look_at_uploads(self, view: View) -> dict[str, Upload]:
        """How far the newest captures are on their way elsewhere. What has arrived is not looked at again."""
        if self._source.directory is None:
            return {}
        outbox, found = Outbox(self._source.directory), {}
        for one in view.captures[:MAX_CAPTURES]:
            known = self._uploads.get(one.capture_id)
            upload = known if known is not None and known.state == "stored" else outbox.upload(one.capture_id)
            if upload is not None:
                found[one.capture_id] = upload
        self._uploads = found
        return found

    def _recorders(self, view: View) -> Recorders:
        if self._source.directory is None:
            return Recorders()
        if self._logs is None:
            self._logs = StepLogs(self._source.directory / "steps")
        self._logs.look()
        attempt = view.rows[-1].attempt if view.rows else max(self._logs.attempts, default=0)
        ranks = self._logs.attempts.get(attempt, {})
        return Recorders(len(ranks), max((one.info.world_size for one in ranks.values()), default=0))
