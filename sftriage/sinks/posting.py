"""Posts a message to a webhook of the policy, by urllib3, which is optional (`sftriage[notify]`).

A URL is a secret, since it grants write access: errors contain its host only.
"""

from __future__ import annotations

import base64
import logging
import os
from contextlib import suppress
from pathlib import Path
from ssl import SSLCertVerificationError
from urllib.parse import unquote
from urllib.request import getproxies, proxy_bypass

import urllib3
from urllib3.exceptions import HTTPError
from urllib3.util import Retry, Url, make_headers, parse_url

from sftriage import __version__
from sftriage.errors import SftriageError
from sftriage.policy.schema import Webhook

ATTEMPT_S = 10.0
"""Timeout of one attempt."""
RETRY = Retry(
    None,
    allowed_methods=None,
    status_forcelist={408, 425, 429, *range(500, 600)} - {501, 505},
    backoff_factor=0.5,
    backoff_max=60.0,
    backoff_jitter=0.5,
)
_MAX_SECRET_BYTES = 8192
THREADS = ("sftriage-webhook of ", "sftriage-slack of ")
"""Beginnings of the names of the threads that post."""

# urllib3 logs each request's path.
logging.getLogger("urllib3.connectionpool").addFilter(lambda record: not (record.threadName or "").startswith(THREADS))


class UndeliveredError(SftriageError):
    """An attempt failed: whether to ``retry``, in ``after_s`` seconds at the earliest."""

    def __init__(self, message: str, *, retry: bool, after_s: float = 0.0) -> None:
        super().__init__(message)
        self.retry, self.after_s = retry, after_s


def url_of(webhook: Webhook) -> Url:
    """The URL of a webhook, read for each attempt: a secret may be renewed while a job runs."""
    try:
        if webhook.url_from_env is not None:
            text = os.environ.get(webhook.url_from_env, "")
        else:
            with Path(webhook.url_from_file or "").open("rb") as file:
                text = file.read(_MAX_SECRET_BYTES).decode()
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or "not text"
        raise UndeliveredError(f"the secret cannot be read: {why}", retry=True) from None
    if not (text := text.strip()):
        in_file = webhook.url_from_env is None
        raise UndeliveredError("the secret is empty" if in_file else "the variable is not set", retry=in_file)
    if not text.isascii() or not text.isprintable() or " " in text:
        raise UndeliveredError("the secret contains characters that a URL cannot have", retry=False)
    try:
        url = parse_url(text)
    except ValueError:
        raise UndeliveredError("the secret is not a URL", retry=False) from None
    if url.scheme not in ("http", "https") or not url.host:
        raise UndeliveredError("the secret must be a URL that begins with https:// or http://", retry=False)
    return url


def _http(url: Url) -> urllib3.PoolManager:
    proxy = getproxies().get(url.scheme or "")
    if not proxy or proxy_bypass(url.netloc or ""):
        return urllib3.PoolManager()
    proxy_url = parse_url(proxy if "://" in proxy else f"http://{proxy}")
    headers = make_headers(proxy_basic_auth=unquote(proxy_url.auth)) if proxy_url.auth else None
    return urllib3.ProxyManager(proxy_url._replace(auth=None).url, proxy_headers=headers)


def post(url: Url, body: bytes, content_type: str) -> None:
    """Post once, by the proxy of the environment; raises UndeliveredError."""
    headers = {"Content-Type": content_type, "User-Agent": f"sftriage/{__version__}"}
    if url.auth is not None:
        headers["Authorization"] = "Basic " + base64.b64encode(unquote(url.auth).encode()).decode()
    to, timeout = url._replace(auth=None, fragment=None).url, urllib3.Timeout(total=ATTEMPT_S)
    try:
        with _http(url) as http:
            response = http.request(
                "POST", to, body, headers=headers, preload_content=False, redirect=False, retries=False, timeout=timeout
            )
            response.close()
    except (HTTPError, OSError, ValueError) as error:
        raise UndeliveredError(f"{url.host}: {_reason_of(error)}", retry=True) from None
    if not 200 <= response.status < 300:
        after_s = 0.0
        with suppress(HTTPError, ValueError, OverflowError):
            after_s = float(RETRY.get_retry_after(response) or 0)
        retry = RETRY.is_retry("POST", response.status)
        raise UndeliveredError(f"{url.host}: answered {response.status}", retry=retry, after_s=after_s)


def _reason_of(error: BaseException) -> str:
    """The first error of the chain, without the URL, which some exceptions quote."""
    while error.__context__ is not None:
        error = error.__context__
    if isinstance(error, SSLCertVerificationError):
        return f"its certificate is refused: {error.verify_message}"
    if isinstance(error, TimeoutError):
        return "no answer in time"
    strerror = getattr(error, "strerror", None)
    return f"{type(error).__name__}: {strerror}" if strerror else type(error).__name__
