"""A local webhook that gives the configured answers and keeps the requests."""

import json
import socket
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from queue import Queue

DEADLINE_S = 20.0


class Hook:
    """Answers requests one after the other from ``answers``; 200 once they have run out.

    An answer is a status, a status with headers, "drop" (cut the connection), "hang" (never answer), or "drip" (send
    the answer a byte at a time, without end).
    """

    def __init__(self, answers, tls=None):
        self.answers = list(answers)
        self.received = Queue()
        self.over = threading.Event()
        hook = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                body = self.rfile.read(int(self.headers["Content-Length"]))
                hook.received.put((self.path, dict(self.headers), body))
                answer = hook.answers.pop(0) if hook.answers else 200
                if answer == "drop":
                    self.connection.shutdown(socket.SHUT_RDWR)
                elif answer == "hang":
                    hook.over.wait(DEADLINE_S)
                elif answer == "drip":
                    self.wfile.write(b"HTTP/1.1 200 OK\r\nX-Slow: ")
                    while not hook.over.wait(0.05):
                        self.wfile.write(b"x")
                else:
                    status, headers = answer if isinstance(answer, tuple) else (answer, {})
                    self.send_response(status)
                    for name, value in headers.items():
                        self.send_header(name, value)
                    self.end_headers()

            def log_message(self, *_):
                pass

        class Server(ThreadingHTTPServer):
            daemon_threads = True

            def handle_error(self, request, client_address):
                pass  # a client that gives up is what is being tested

        self.server = Server(("127.0.0.1", 0), Handler)
        self.scheme = "http" if tls is None else "https"
        if tls is not None:
            self.server.socket = tls.wrap_socket(self.server.socket, server_side=True)
        self.port = self.server.server_address[1]

    @property
    def url(self):
        return f"{self.scheme}://127.0.0.1:{self.port}/hook/top-secret"

    def next(self):
        """The next request: path, headers and body. Fails if none comes."""
        path, headers, body = self.received.get(timeout=DEADLINE_S)
        return path, headers, json.loads(body)


@contextmanager
def hooked(*answers, tls=None):
    hook = Hook(answers, tls)
    thread = threading.Thread(target=hook.server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield hook
    finally:
        hook.over.set()
        hook.server.shutdown()
        hook.server.server_close()
        thread.join(DEADLINE_S)
