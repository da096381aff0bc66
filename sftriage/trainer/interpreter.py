"""The time that Python's garbage collector and torch's compiler take from training, as totals in the ring.

Both call back when they begin and end, so this costs nothing while neither works. The agent reads the totals with the
kernel's counters (`sftriage.agent.counting`).
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Mapping
from contextlib import suppress
from time import monotonic_ns
from typing import Any

from sftriage.trainer.layout import COLLECTED, COMPILED
from sftriage.trainer.moments import Log

_COMPILER = "torch._dynamo.callback"


class InterpreterTime:
    """Adds up both times of this process in two live words of the log, until it is closed."""

    def __init__(self, log: Log) -> None:
        self._log = log
        self._total_ns = {COLLECTED: 0, COMPILED: 0}
        self._began_ns = {COLLECTED: 0, COMPILED: 0}
        self._compiler: Any = None
        gc.callbacks.append(self._collects)

    def follow_compiler(self) -> bool:
        """Follow the compiler too, if the job has imported it; whether it is followed now."""
        if self._compiler is None:
            # (an import may be under way in another thread)
            handler = getattr(sys.modules.get(_COMPILER), "callback_handler", None)
            if handler is not None:
                handler.register_start_callback(self._compilation_begins)
                handler.register_end_callback(self._compilation_ends)
                self._compiler = handler
        return self._compiler is not None

    def close(self) -> None:
        """Stop counting. A second call does nothing."""
        with suppress(ValueError):
            gc.callbacks.remove(self._collects)
        if self._compiler is not None:
            # (torch._dynamo.reset() has removed them)
            with suppress(ValueError):
                self._compiler.remove_start_callback(self._compilation_begins)
                self._compiler.remove_end_callback(self._compilation_ends)

    def _collects(self, phase: str, info: Mapping[str, int]) -> None:
        # (collections of the youngest objects are frequent, and take hardly longer than counting them would)
        if info["generation"]:
            self._switch(COLLECTED, phase == "start")

    def _compilation_begins(self, *_: object) -> None:
        self._switch(COMPILED, True)

    def _compilation_ends(self, *_: object) -> None:
        self._switch(COMPILED, False)

    def _switch(self, word: int, begins: bool) -> None:
        if begins:
            self._began_ns[word] = monotonic_ns()
        elif self._began_ns[word]:
            self._total_ns[word] += monotonic_ns() - self._began_ns[word]
            self._began_ns[word] = 0
            with suppress(ValueError):  # (the log was closed meanwhile)
                self._log.set_live(word, self._total_ns[word])
