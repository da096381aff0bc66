"""Captures that a host has stored, sent to where they are asked for: to the store of their run, or through the hub."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from sftriage.decisions import Report
from sftriage.errors import CaptureError
from sftriage.fleet.hub import Hub, Places
from sftriage.fleet.messages import RunName
from sftriage.fleet.transfers import Tell, Transfer
from sftriage.words.amounts import size

if TYPE_CHECKING:
    from nats.js import JetStreamContext
    from nats.js.object_store import ObjectStore

log = logging.getLogger("sftriage")

AGAIN_S, OBJECT_S = 1.0, 600.0
FULL = 10077
"""What the hub says where a bucket has no room."""
SLACK_BYTES = 1 << 20
"""What the hub needs of a bucket beside the bytes of the traces in it."""


class KeptCaptures(Protocol):
    """The captures that a host has stored. Whatever is asked of it may take its time."""

    def manifest(self, capture_id: str, run: RunName) -> tuple[bytes, dict[str, Path]]:
        """The manifest of a capture, under its run's name, and the files that it names."""

    def copied(self, capture_id: str, run: RunName, transfer: Transfer) -> bool:
        """Put a copy into the store of its run, if this host has that one; whether it is there, and verified."""


class Sending:
    """Sends captures, and tells how far it is.

    Args:
        hub: connected, or to be waited for.
        places: of the job.
        kept: what there is to send.
        name: of this host, for people.
        tell: hears of progress.
        wanted: whether anybody waits for a capture still.
    """

    def __init__(
        self, hub: Hub, places: Places, kept: KeptCaptures, name: str, tell: Tell, wanted: Callable[[str], bool]
    ) -> None:
        self._hub, self._places, self._kept, self._name = hub, places, kept, name
        self._tell, self._wanted = tell, wanted

    async def sent(self, report: Report, run: RunName) -> Report:
        """What a report of a stored capture comes to: it is where the controller finds it, or has failed."""
        loop, capture_id, where = asyncio.get_running_loop(), report.result.capture_id, ""
        try:
            manifest, files = await loop.run_in_executor(None, self._kept.manifest, capture_id, run)
            where = f" in {next(iter(files.values())).parent}" if files else ""
            total_bytes = sum(path.stat().st_size for path in files.values())
            copying = Transfer(report.result, f"uploading from {self._name}:", total_bytes, self._tell)
            elsewhere = await loop.run_in_executor(None, self._kept.copied, capture_id, run, copying)
            # (of what is in a store, only the manifest goes through the hub)
            some = {} if elsewhere else files
            sending = Transfer(report.result, f"sending from {self._name}:", total_bytes, self._tell)
            while not await self._put(capture_id, manifest, some, sending):
                await asyncio.sleep(AGAIN_S)
                if not self._wanted(capture_id):
                    raise CaptureError("it is waited for no longer")
            return replace(report, elsewhere=elsewhere)
        except Exception as error:
            why = f"it is stored on {self._name}{where}, and could not be sent: {error}"
            return replace(report, result=replace(report.result, state="failed", detail=why))

    async def _put(self, capture_id: str, manifest: bytes, files: dict[str, Path], transfer: Transfer) -> bool:
        """Put a capture onto the hub; False where that is to be tried again."""
        from nats.js.errors import APIError

        if self._hub.connected_s is None:
            return False
        bucket, sent = self._places.traces, []
        try:
            traces = await _outgoing(self._hub.js, bucket)
            if files:
                most_bytes = (await traces.status()).stream_info.config.max_bytes or -1
                if most_bytes >= 0:
                    _check_room(sum(path.stat().st_size for path in files.values()), most_bytes - SLACK_BYTES)
            for name, path in files.items():
                with path.open("rb") as file:
                    whole = traces.put(f"{capture_id}/{name}", transfer.reading(file))
                    sent.append(await asyncio.wait_for(whole, OBJECT_S))
            await traces.put(f"{capture_id}/", manifest)
        except CaptureError:
            raise
        except (APIError, OSError) as error:
            if isinstance(error, APIError) and error.err_code == FULL:
                transfer.say("waiting for room on the hub, which is full of other traces")
                # (of two that are there in part, neither would ever find room for the rest)
                for info in sent:
                    with contextlib.suppress(Exception):
                        await self._hub.js.purge_stream(f"OBJ_{bucket}", subject=f"$O.{bucket}.C.{info.nuid}")
                return False
            if isinstance(error, APIError) and error.code != 404 and (error.code or 500) < 500:
                raise
            if isinstance(error, OSError) and not isinstance(error, (TimeoutError, ConnectionError)):
                raise
            log.debug("a trace was not sent", exc_info=True)
            return False
        except Exception:
            log.debug("a trace was not sent", exc_info=True)
            return False
        return True


async def _outgoing(js: JetStreamContext, bucket: str) -> ObjectStore:
    """The bucket of traces for whom it is one way: nothing in it may be read by an agent, nor has to be."""
    from nats.js.errors import ObjectNotFoundError
    from nats.js.object_store import ObjectStore

    class Outgoing(ObjectStore):
        async def get_info(self, *_: Any) -> Any:
            raise ObjectNotFoundError

    await js.stream_info(f"OBJ_{bucket}")
    return Outgoing(bucket, f"OBJ_{bucket}", js)


def _check_room(size_bytes: int, most_bytes: int) -> None:
    """Refuse what would never find room on the hub.

    Raises:
        CaptureError: it would not; the message says what to do.
    """
    if size_bytes > most_bytes:
        why = f"its {size(size_bytes)} are more than the hub takes ({size(most_bytes)})"
        raise CaptureError(f"{why}: give the job a --store, or capture fewer steps")
