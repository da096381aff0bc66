"""Who may read what listens here: by which names it may be called, and whether the token is right.

A Host header has to be one of ours: a page somewhere else that has its name point to this address (DNS rebinding) is
refused. A token comes as the password of HTTP Basic or as a Bearer token; never in an address, which ends up in
histories and logs.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import ipaddress
import logging
import os
import re
import shlex
import stat
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from sftriage.errors import UsageError

MIN_TOKEN_LENGTH = 16
MAX_TOKEN_BYTES = 4096

_HOST = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9.-]+)(?::(\d{1,5}))?")
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
_OTHERS = stat.S_IRWXG | stat.S_IRWXO
_LOOPBACK_NAMES = frozenset({"localhost", "127.0.0.1", "::1"})

log = logging.getLogger("sftriage")


def is_loopback(host: str) -> bool:
    """Whether an address to listen on can be reached from this machine alone."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def token_of(path: Path | None, variable: str) -> str | None:
    """The token in a file, or else the one in an environment variable; None where there is neither.

    It is no option itself: a command line can be read by everybody on the machine.

    Raises:
        UsageError: the file cannot be read, is no token's, or others can read it or put another in its place.
    """
    if path is None:
        return os.environ.get(variable) or None
    try:
        with path.open("rb") as file:
            _refuse_shared(path, os.fstat(file.fileno()), os.getuid())
            token = file.read(MAX_TOKEN_BYTES + 1)
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}") from error
    try:
        return token.decode("ascii").strip()
    except UnicodeDecodeError as error:
        raise UsageError(f"{path}: a token is printable ASCII characters") from error


def _refuse_shared(path: Path, about: os.stat_result, uid: int) -> None:
    """Refuse a token file that is not its reader's alone, with what mends it; root may share one that root owns."""
    if not stat.S_ISREG(about.st_mode):
        # A pipe from a program that knows the token.
        return
    file, mode = shlex.quote(str(path)), stat.S_IMODE(about.st_mode)
    if about.st_uid not in (uid, 0):
        raise UsageError(f"{path}: this token belongs to another user (uid {about.st_uid}); make one of your own")
    if mode & _OTHERS_WRITE or (mode & _OTHERS and about.st_uid == uid):
        raise UsageError(f"{path}: other users of this machine can use this token (mode {mode:04o}): chmod 600 {file}")
    if mode & stat.S_IROTH:
        log.warning("%s: everybody on this machine can read this token; as root: chmod o-r %s", path, file)
    for directory in {path.absolute().parent, path.resolve().parent}:
        where = directory.stat()
        # In a sticky one, as /tmp is, nobody can move what is another's.
        if where.st_uid not in (uid, 0) or (where.st_mode & _OTHERS_WRITE and not where.st_mode & stat.S_ISVTX):
            mend = f"chmod go-w {shlex.quote(str(directory))}" if where.st_uid == uid else "keep it elsewhere"
            raise UsageError(
                f"{path}: others can put another token in its place, for they can write to {directory}: {mend}"
            )


@dataclass(frozen=True, slots=True)
class Access:
    """Who may read.

    Attributes:
        names: what may be in a Host header, lower case, with a port or for any; addresses too, if not ``any_address``.
        any_address: any plain address is right: nobody's name can be made to point at one.
        token_sha256: the digest of the token, or None where none is wanted.
        any_name: any Host header is right: what comes by many names, and has a token.
    """

    names: frozenset[str]
    any_address: bool = False
    token_sha256: bytes | None = None
    any_name: bool = False

    @classmethod
    def to(cls, host: str, token: str | None, wanted: str, names: Iterable[str] = ()) -> Access:
        """What goes for what listens on ``host``; ``names`` are others that it is reached by.

        Raises:
            UsageError: it can be reached from elsewhere and there is no token, which ``wanted`` says how to give; or
                the token is easily guessed.
        """
        if token is None and not is_loopback(host):
            raise UsageError(f"{host} can be reached from other machines, so a token is wanted: {wanted}")
        if token is not None and (len(token) < MIN_TOKEN_LENGTH or not token.isascii() or not token.isprintable()):
            raise UsageError(f"a token is at least {MIN_TOKEN_LENGTH} printable ASCII characters")
        known = {host.lower(), *(name.lower() for name in names)} | (_LOOPBACK_NAMES if is_loopback(host) else set())
        digest = None if token is None else hashlib.sha256(token.encode()).digest()
        return cls(frozenset(known), not is_loopback(host), digest)

    def knows(self, host: str) -> bool:
        """Whether a Host header is right."""
        if self.any_name or host in self.names:
            return True
        found = _HOST.fullmatch(host)
        if found is None:
            return False
        name = found[1].strip("[]").lower()
        if name in self.names:
            return True
        try:
            ipaddress.ip_address(name)
        except ValueError:
            return False
        return self.any_address

    def admits(self, authorization: str) -> bool:
        """Whether an Authorization header holds the token. Takes as long for a wrong one as for the right one."""
        if self.token_sha256 is None:
            return True
        scheme, _, value = authorization.partition(" ")
        given = value.strip()
        if scheme.lower() == "basic":
            try:
                given = base64.b64decode(given, validate=True).decode("utf-8", "replace").partition(":")[2]
            except (binascii.Error, ValueError):
                given = ""
        elif scheme.lower() != "bearer":
            given = ""
        return hmac.compare_digest(hashlib.sha256(given.encode("utf-8", "replace")).digest(), self.token_sha256)
