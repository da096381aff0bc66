"""Links for whoever sits at this machine: opened in a browser, or said to be opened in another."""

from __future__ import annotations

import os
import socket
import sys
import threading
import webbrowser
from collections.abc import Callable, Mapping
from typing import TypeAlias

Starter: TypeAlias = Callable[[str, int], None]
"""Shows a link, at a port of this machine, to whoever is there, or says that they have to open it."""


def has_browser(environment: Mapping[str, str], platform: str) -> bool:
    """Whether a browser can be shown here: not over SSH, nor in a container."""
    if platform in ("darwin", "win32"):
        return True
    return any(environment.get(name) for name in ("BROWSER", "DISPLAY", "WAYLAND_DISPLAY", "WSL_DISTRO_NAME"))


def bracketed(host: str) -> str:
    """A host as it stands before a port."""
    return f"[{host}]" if ":" in host else host


def tunnel(host: str, port: int, environment: Mapping[str, str]) -> str:
    """How a page that this machine alone can open is opened from another."""
    # (who asked, from which port, and where this machine was found)
    found = environment.get("SSH_CONNECTION", "").split()
    here = found[2] if len(found) == 4 else socket.gethostname()
    return f"from another machine: ssh -L {port}:{bracketed(host)}:{port} {here}, and open the same link there"


def browser_starter(wanted: bool, say: Callable[[str], None]) -> Starter:
    """What opens a link in a browser, if that is ``wanted``."""

    def start(link: str, port: int) -> None:
        if not wanted:
            return
        if not has_browser(os.environ, sys.platform):
            say("no browser can be shown here: open the link in one of yours")
            if os.environ.get("SSH_CONNECTION"):
                say(tunnel("127.0.0.1", port, os.environ))
            return
        # One that runs in the terminal returns when it is left; the file is served meanwhile.
        threading.Thread(target=_start, args=(link, say), name="browser", daemon=True).start()

    return start


def _start(link: str, say: Callable[[str], None]) -> None:
    try:
        started = webbrowser.open(link)
    except webbrowser.Error:
        started = False
    if not started:
        say("no browser could be started: open the link in one of yours")
