"""The sampled stacks of stored captures, as pages draw them: read once, wherever they lie, and kept for a while."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterable, Mapping

from starlette.exceptions import HTTPException
from starlette.responses import PlainTextResponse, Response

from sftriage.errors import SftriageError
from sftriage.reduce.flames import FOLDED_NAME, collapsed
from sftriage.reduce.samples import StackSamples, samples_in
from sftriage.sampling.sampler import NAME
from sftriage.traces.files import verified
from sftriage.traces.manifest import Artefact, Manifest
from sftriage.traces.stores import Store, are_beside
from sftriage.web.downloads import pieces_of
from sftriage.web.flames import FlameGraph, Sampled, flame_graph
from sftriage.web.page import reading_stored
from sftriage.words.amounts import size

KEPT = 8
MOST_BYTES = 8 * 2**20
"""Of a file that a page draws: of four threads, a minute."""


class Stacks:
    """What reads them. Its methods may be called from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: OrderedDict[str, StackSamples] = OrderedDict()

    def drawn(
        self, manifest: Manifest, store: Store, others: Iterable[tuple[Manifest, Store]], query: Mapping[str, str]
    ) -> FlameGraph | str | None:
        """The flame graph of a capture; in words why there is none; None where no stacks were sampled.

        Args:
            manifest: the capture.
            store: where it is.
            others: those among which the one to compare it with is.
            query: see `flame_graph`.
        """
        if (artefact := stacks_of(manifest)) is None:
            return None
        if artefact.size_bytes > MOST_BYTES:
            return f"{size(artefact.size_bytes)} are too many for a page; the file can be downloaded"
        try:
            beside = next((one for one in others if are_beside(manifest, one[0]) and stacks_of(one[0])), None)
            pair = [(manifest, store), beside] if beside is not None else [(manifest, store)]
            # Of a control's capture, too, the suspect is drawn first.
            pair.sort(key=lambda one: one[0].capture.role != "suspect")
            its, *control = (Sampled(one, self.read(one, where)) for one, where in pair)
            return flame_graph(its, next(iter(control), None), query)
        except SftriageError as error:
            return str(error)

    def read(self, manifest: Manifest, store: Store) -> StackSamples:
        """The samples of a capture that has some.

        Raises:
            SftriageError: they cannot be read, or are not what was stored.
        """
        artefact = manifest.artefact(NAME)
        with self._lock:
            known = self._kept.get(artefact.sha256)
        if known is None:
            wrong = f"{NAME}: not what its manifest says; it was put as sha256 {artefact.sha256}"
            known = samples_in(b"".join(verified(pieces_of(store, manifest, artefact), artefact, wrong)), NAME)
        with self._lock:
            self._kept[artefact.sha256] = known
            self._kept.move_to_end(artefact.sha256)
            while len(self._kept) > KEPT:
                self._kept.popitem(last=False)
        return known

    def folded(self, manifest: Manifest, store: Store) -> Response:
        """The stacks of a capture as a file of collapsed stacks."""
        if stacks_of(manifest) is None:
            raise HTTPException(404, "In this capture no stacks were sampled.")
        with reading_stored():
            text = "".join(f"{line}\n" for line in collapsed(self.read(manifest, store)))
        headers = {"Content-Disposition": f'attachment; filename="{manifest.capture_id}-{FOLDED_NAME}"'}
        return PlainTextResponse(text, headers=headers)


def stacks_of(manifest: Manifest) -> Artefact | None:
    """The file of the stacks that were sampled in a capture, if they were."""
    return next((one for one in manifest.artefacts if one.name == NAME), None)
