"""One profiler a process: seeing the job's own, and keeping out of its way.

Starting a second Kineto session beside one that is only warming up can end the process, not raise. So the three entry
points that every torch profiler goes through are wrapped, to know of the job's own profiler from its first warm-up step
on. The wrappers pass everything on untouched.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from threading import get_ident
from typing import Any

from sftriage.log import warn


class ProfilerGuard:
    """Tracks the holder of the process's one profiler: none, the job itself, or one of our captures.

    A job's profiler that was prepared and then dropped without being stopped counts as held for good: refusing a
    capture is the safe side.
    """

    def __init__(self) -> None:
        self._installed = False
        self._job_has_profiler = False
        self._on_job_profiler: Callable[[], None] | None = None
        self._our_thread = 0

    def install(self) -> None:
        """Wrap torch's entry points, if torch has been imported. A second call does nothing."""
        module = sys.modules.get("torch.autograd.profiler")
        if self._installed or module is None:
            return
        self._installed = True
        for name, holds in (("_prepare_profiler", True), ("_enable_profiler", True), ("_disable_profiler", False)):
            if hasattr(module, name):
                setattr(module, name, self._wrap(getattr(module, name), holds))

    def busy(self) -> str | None:
        """Why no capture can start now, or None."""
        if self._on_job_profiler is not None:
            return "another capture is under way in this process"
        # (torch itself knows of one on this thread that is recording, and not of one that is warming up)
        autograd = getattr(getattr(sys.modules.get("torch"), "_C", None), "_autograd", None)
        if self._job_has_profiler or getattr(autograd, "_profiler_enabled", bool)():
            return "a profiler is already running in this process"
        return None

    def hold(self, on_job_profiler: Callable[[], None]) -> None:
        """Take the profiler for a capture, which ``on_job_profiler`` stops where the job is about to start its own."""
        self._on_job_profiler = on_job_profiler

    def release(self, on_job_profiler: Callable[[], None]) -> None:
        """Give the profiler back, if this capture holds it."""
        if self._on_job_profiler == on_job_profiler:
            self._on_job_profiler = None

    @contextmanager
    def ours(self) -> Iterator[None]:
        """Calls into torch's profiler from this thread are the capture's own."""
        self._our_thread = get_ident()
        try:
            yield
        finally:
            self._our_thread = 0

    def _wrap(self, original: Callable[..., Any], holds: bool) -> Callable[..., Any]:
        @wraps(original)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            if get_ident() == self._our_thread:
                return original(*args, **kwargs)
            if holds and self._on_job_profiler is not None:
                try:
                    self._on_job_profiler()
                except Exception as error:
                    warn("a capture could not make way for the job's own profiler: %r", error)
            answer = original(*args, **kwargs)
            self._job_has_profiler = holds
            return answer

        return wrapper


GUARD = ProfilerGuard()
"""The process's guard: the profiler is one a process, so its guard is too."""
