"""One POST to a webhook: over within its time however slowly the other side answers, and to nowhere else.

A webhook's address is a secret: who knows it may write there. No message and no representation here has more of it than
the host.
"""

from __future__ import annotations

import base64
import email.utils
import io
import socket
import ssl
import time
from dataclasses import dataclass, field
from functools import partial
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from typing import Any
from urllib.error import URLError
from urllib.parse import unquote, urlsplit
from urllib.request import HTTPHandler, HTTPSHandler, OpenerDirector, ProxyHandler, Request

from sftriage import __version__
from sftriage.errors import SftriageError

_RETRIED = frozenset({408, 425, 429})
"""Client errors that say "later" and not "never". All of 5xx are tried again, but 501 and 505."""
_NEVER = frozenset({501, 505})


class DeliveryError(SftriageError):
    """A webhook did not take a message. ``retry`` says whether trying again may help, ``after_s`` not before when."""

    def __init__(self, message: str, *, retry: bool, after_s: float | None = None) -> None:
        super().__init__(message)
        self.retry = retry
        self.after_s = after_s


@dataclass(frozen=True, slots=True)
class Address:
    """Where a webhook is. Only the host is ever shown."""

    host: str
    url: str = field(repr=False)
    authorization: str | None = field(default=None, repr=False)

    @classmethod
    def of(cls, text: str) -> Address:
        """The address that a secret holds; a user and password in it become basic authentication.

        Raises:
            DeliveryError: it is no http or https URL. Nothing of it is in the message.
        """
        url = text.strip()
        try:
            parts = urlsplit(url)
            host, port = parts.hostname, parts.port
        except ValueError:
            raise DeliveryError("the secret is not a URL", retry=False) from None
        if parts.scheme not in ("http", "https") or not host:
            raise DeliveryError("the secret is not a URL that begins with https:// or http://", retry=False)
        if not url.isascii() or not url.isprintable() or " " in url:
            raise DeliveryError("the secret holds characters that no URL has", retry=False)
        authorization = None
        if parts.username is not None:
            pair = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
            authorization = "Basic " + base64.b64encode(pair.encode()).decode()
        place = f"[{host}]" if ":" in host else host
        clean = parts._replace(netloc=place if port is None else f"{place}:{port}", fragment="")
        return cls(host, clean.geturl(), authorization)


def post(address: Address, body: bytes, content_type: str, timeout_s: float) -> None:
    """Send ``body``, in no more than ``timeout_s`` once the host's name is resolved. Redirects are not followed.

    Raises:
        DeliveryError: it was not taken.
    """
    headers = {"Content-Type": content_type, "User-Agent": f"sftriage/{__version__}", "Connection": "close"}
    if address.authorization is not None:
        headers["Authorization"] = address.authorization
    request = Request(address.url, data=body, headers=headers, method="POST")
    try:
        with _opener(time.monotonic() + timeout_s).open(request, timeout=timeout_s) as response:
            status, after = response.status, response.headers.get("Retry-After")
    except (OSError, HTTPException, ValueError) as error:
        raise DeliveryError(_said(error), retry=True) from None
    if not 200 <= status < 300:
        retry = status in _RETRIED or (status >= 500 and status not in _NEVER)
        raise DeliveryError(f"answered {status}", retry=retry, after_s=retry_after_s(after, time.time()))


def retry_after_s(header: str | None, now_s: float) -> float | None:
    """How long a ``Retry-After`` header asks to wait (RFC 9110, 10.2.3), or None where it says nothing readable.

    Args:
        header: seconds, or a date.
        now_s: seconds since the epoch.
    """
    text = (header or "").strip()
    if text.isdecimal() and text.isascii():
        return float(text[:15])
    try:
        return max(0.0, email.utils.parsedate_to_datetime(text).timestamp() - now_s)
    except (ValueError, TypeError, OverflowError):
        return None


def _said(error: Exception) -> str:
    """What went wrong, without the address, which some of the exceptions quote."""
    if isinstance(error, URLError) and isinstance(error.reason, Exception):
        return _said(error.reason)
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"its certificate is refused: {error.verify_message}"
    if isinstance(error, TimeoutError):
        return "no answer in time"
    strerror = getattr(error, "strerror", None)
    return f"{type(error).__name__}: {strerror}" if strerror else type(error).__name__


def _opener(deadline_s: float) -> OpenerDirector:
    """Put together from what is wanted, so that files, FTP and redirects are not there to be switched off."""
    opener = OpenerDirector()
    for handler in (ProxyHandler(), _Http(deadline_s), _Https(deadline_s)):
        opener.add_handler(handler)
    return opener


class _Http(HTTPHandler):
    def __init__(self, deadline_s: float) -> None:
        super().__init__()
        self._deadline_s = deadline_s

    def http_open(self, req: Request) -> HTTPResponse:
        return self.do_open(partial(_connection, HTTPConnection, self._deadline_s), req)


class _Https(HTTPSHandler):
    def __init__(self, deadline_s: float) -> None:
        super().__init__()
        self._deadline_s = deadline_s

    def https_open(self, req: Request) -> HTTPResponse:
        return self.do_open(partial(_connection, HTTPSConnection, self._deadline_s), req)


def _connection(kind: type[HTTPConnection], deadline_s: float, host: str, **options: Any) -> HTTPConnection:
    made = kind(host, **options)
    made.response_class = partial(_Response, deadline_s=deadline_s)  # type: ignore[assignment]  # it is called as one
    return made


class _Response(HTTPResponse):
    """A response whose every read ends by one deadline."""

    def __init__(self, sock: socket.socket, *, deadline_s: float, **options: Any) -> None:
        super().__init__(sock, **options)
        unbounded, self.fp = self.fp, io.BufferedReader(_Bounded(sock, deadline_s))
        unbounded.close()


class _Bounded(io.RawIOBase):
    """A socket's timeout is for each read: who sends a byte a second would never reach it."""

    def __init__(self, sock: socket.socket, deadline_s: float) -> None:
        self._sock, self._deadline_s = sock, deadline_s
        self._raw = sock.makefile("rb", buffering=0)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any, /) -> int | None:
        left_s = self._deadline_s - time.monotonic()
        if left_s <= 0:
            raise TimeoutError
        self._sock.settimeout(left_s)
        return self._raw.readinto(buffer)

    def close(self) -> None:
        self._raw.close()
        super().close()
