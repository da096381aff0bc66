"""What the seams of a process have seen so far, told in a file: for `sftriage doctor`, and until a step is recorded."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING

from sftriage.base.files import write_atomically

if TYPE_CHECKING:
    from sftriage.seams.patches import Seams

_EVERY_S = 0.25
_COMPILER = tuple(os.path.join("torch", part, "") for part in ("_dynamo", "_inductor"))  # noqa: PTH118 (of frames)


def tell(seams: Seams, directory: Path) -> None:
    """Write down what was seen, several times a second, until the directory is gone: a process may end at any time."""

    def begin() -> None:
        # (a fork of a rank that trains is none)
        if not seams.steps.rounds:
            threading.Thread(target=_go_on, args=(seams, directory), name="sftriage-doctor", daemon=True).start()

    begin()
    # A launcher may have imported torch before it forks its ranks.
    os.register_at_fork(after_in_child=begin)


def _go_on(seams: Seams, directory: Path) -> None:
    waiting = threading.Event()
    while directory.is_dir():
        data = sys.modules.get("torch.utils.data")
        worker_of = getattr(data, "get_worker_info", None)
        if worker_of is None or worker_of() is None:
            _write(seams, directory)
        waiting.wait(_EVERY_S)


def _write(seams: Seams, directory: Path) -> None:
    torch = sys.modules["torch"]
    kineto = getattr(torch.autograd, "kineto_available", None)
    # (it may be half imported just now)
    by_hand = getattr(sys.modules.get("sftriage.recorder.monitor"), "made_by_hand", None)
    document = {
        "pid": os.getpid(),
        "rank": os.environ.get("RANK", ""),
        "torch": str(torch.__version__),
        "fired": seams.fired | seams.steps.entered,
        "failed": dict(seams.failed),
        "rounds": seams.steps.rounds,
        "models": list(seams.trained),
        "collectives": {f"{name} in {stage}": n for (name, stage), n in dict(seams.exchanges.seen).items()},
        "by_hand": bool(by_hand is not None and by_hand()),
        "kineto": bool(kineto is not None and kineto()),
        "compiling": _compiles(),
    }
    with contextlib.suppress(OSError):
        write_atomically(directory / f"{os.getpid()}.json", json.dumps(document), synced=False)


def _compiles() -> bool:
    """Whether the main thread is in torch's compiler."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    while frame is not None:
        if any(part in frame.f_code.co_filename for part in _COMPILER):
            return True
        frame = frame.f_back
    return False
