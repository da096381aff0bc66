"""An S3 server of our own (moto's, in a process), and what stands before it and lets requests go wrong."""

import http.client
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import boto3
from moto.server import ThreadedMotoServer

BUCKET = "traces"
KEYS = {"AWS_ACCESS_KEY_ID": "id", "AWS_SECRET_ACCESS_KEY": "secret", "AWS_REGION": "us-east-1"}
_HELD_S = 600.0


def environment_of(url: str) -> dict[str, str]:
    """What obstore reads: where the server is, and credentials."""
    return {**KEYS, "AWS_ENDPOINT_URL": url, "AWS_ALLOW_HTTP": "true"}


class Server:
    def __init__(self, port: int, address: str = "127.0.0.1") -> None:
        self.port, self.url = port, f"http://{address}:{port}"
        self.client = boto3.client(
            "s3",
            endpoint_url=self.url,
            region_name=KEYS["AWS_REGION"],
            aws_access_key_id=KEYS["AWS_ACCESS_KEY_ID"],
            aws_secret_access_key=KEYS["AWS_SECRET_ACCESS_KEY"],
        )

    def objects(self) -> dict[str, int]:
        listed = self.client.list_objects_v2(Bucket=BUCKET).get("Contents", [])
        return {one["Key"]: one["Size"] for one in listed}

    def clear(self) -> None:
        for key in self.objects():
            self.client.delete_object(Bucket=BUCKET, Key=key)


@contextmanager
def served(address: str = "127.0.0.1", port: int = 0) -> Iterator[Server]:
    moto = ThreadedMotoServer(address, port, verbose=False)
    moto.start()
    try:
        server = Server(moto.get_host_and_port()[1], address)
        server.client.create_bucket(Bucket=BUCKET)
        yield server
    finally:
        moto.stop()


FAULTS = ("cut request", "cut answer", "error", "late error", "slow", "short")
"""What may go wrong with a request.

``cut request``: the connection ends in the middle of what is sent; it never reaches the server.
``cut answer``: the server has done it, and the connection ends in the middle of what it says.
``error``: 500, and the server has not done it; ``late error``: 500, and it has.
``slow``: the answer comes in pieces. ``short``: half of the answer, as if that were all.
``hold``, ``hold answer``: nothing happens, before or after the server has done it, until the test ends.
"""

INJECTED = b"<Error><Message>injected</Message></Error>"


class Proxy(ThreadingHTTPServer):
    """Passes requests on, with the faults that ``plan`` wants: from method and path to a fault, or None."""

    daemon_threads = True

    def __init__(self, server: Server) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.upstream_port = server.port
        self.plan: Callable[[str, str], str | None] = lambda method, path: None
        self.url = f"http://127.0.0.1:{self.server_address[1]}"
        self.faults = 0
        self.requests: list[tuple[str, str]] = []
        self.holding = threading.Event()
        self.ended = threading.Event()
        self._thread = threading.Thread(target=self.serve_forever, args=(0.02,))

    def handle_error(self, request: object, client_address: object) -> None:
        """A connection that a test cuts is no news."""

    def __enter__(self) -> "Proxy":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.ended.set()
        self.shutdown()
        self._thread.join()
        self.server_close()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Proxy

    def _pass(self) -> None:
        proxy = self.server
        length = int(self.headers.get("Content-Length", 0))
        proxy.requests.append((self.command, self.path))
        fault = proxy.plan(self.command, self.path)
        proxy.faults += fault is not None
        if fault == "cut request":
            self.rfile.read(length // 2)
            self._cut()
            return
        body = self.rfile.read(length)
        if fault == "error":
            self._answer(500, {}, INJECTED)
            return
        if fault == "hold":
            self._hold()
            return
        upstream = http.client.HTTPConnection("127.0.0.1", proxy.upstream_port, timeout=60)
        with closing(upstream):
            upstream.putrequest(self.command, self.path, skip_host=True, skip_accept_encoding=True)
            for name, value in self.headers.items():
                if name.lower() != "connection":
                    upstream.putheader(name, value)
            upstream.endheaders(body)
            answer = upstream.getresponse()
            content = answer.read()
        headers = {k: v for k, v in answer.getheaders() if k.lower() not in ("connection", "transfer-encoding")}
        if fault == "late error":
            self._answer(500, {}, INJECTED)
        elif fault == "hold answer":
            self._hold()
        elif fault == "short" and self.command == "GET":
            self._answer(answer.status, headers, content[: len(content) // 2])
        else:
            self._answer(answer.status, headers, content, fault)

    do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = _pass

    def _answer(self, status: int, headers: dict[str, str], content: bytes, fault: str | None = None) -> None:
        self.send_response_only(status)
        for name, value in headers.items():
            if name.lower() != "content-length" or self.command == "HEAD":
                self.send_header(name, value)
        if self.command != "HEAD":
            self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command == "HEAD":
            return
        if fault == "cut answer":
            self.wfile.write(content[: len(content) // 2])
            self._cut()
            return
        piece = max(1, len(content) // 4) if fault == "slow" else max(1, len(content))
        for start in range(0, len(content), piece):
            self.wfile.write(content[start : start + piece])
            self.server.ended.wait(0.05 if fault == "slow" else 0.0)

    def _hold(self) -> None:
        self.server.holding.set()
        self.server.ended.wait(_HELD_S)
        self._cut()

    def _cut(self) -> None:
        self.close_connection = True
        with suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)

    def log_message(self, *_: object) -> None:
        """Nobody reads it."""
