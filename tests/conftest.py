"""Settings of all tests: hypothesis tries the same examples every time, except in `soak`, and without deadlines.

The garbage collector skips what was imported, which takes longer than many tests. Compiled files are kept, whatever the
environment says: tests start thousands of processes, and each would spend a third of a second on compiling.
"""

import gc
import os
import sys
from collections import Counter
from functools import cache

import pytest
from hypothesis import settings

from tests.needs import NO_GPU

settings.register_profile("same", derandomize=True, deadline=None, max_examples=50)
settings.register_profile("looking", deadline=None, max_examples=1000)
settings.load_profile("same")

sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

gc.disable()

JOBS_OF_THEIR_OWN = (
    *("auto_seams", "departures", "full_disk", "hangs", "in_nobodys_way", "killed", "killed_nsys", "local"),
    *(
        "mitigate_links",
        "mitigate_loop",
        "nsys",
        "nsys_armed",
        "remote_store",
        "run",
        "site",
        "stall_times",
        "torchrun",
    ),
)
"""Files of integration tests each of which has a job of its own: these go one by one to whichever process is free."""
OF_THE_DEMO = ("demo", "mcp", "reduce_real", "ui")  # (they look at one run of it)


def shared_by(nodeid: str) -> str:
    """What a test shares with others, which run in one process: its file, as a rule."""
    file = nodeid.partition("::")[0]
    name = file.removeprefix("tests/integration/test_").removesuffix(".py")
    return nodeid if name in JOBS_OF_THEIR_OWN else "demo" if name in OF_THE_DEMO else file


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    from xdist.scheduler import LoadScopeScheduling

    class Scheduling(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return shared_by(nodeid)

    return Scheduling(config, log)


def pytest_runtest_setup(item):
    if item.get_closest_marker("gpu") is not None and not _gpu():
        pytest.skip(NO_GPU)


@cache
def _gpu() -> bool:
    try:
        import torch
    except ImportError:
        return False
    return torch.cuda.is_available()


def pytest_collection_finish():
    gc.freeze()
    gc.set_threshold(10_000, 10, 100)
    gc.enable()


def pytest_terminal_summary(terminalreporter):
    causes = Counter(report.longrepr[2].removeprefix("Skipped: ") for report in terminalreporter.getreports("skipped"))
    for cause, tests in sorted(causes.items()):
        terminalreporter.write_line(f"SKIPPED [{tests}] {cause}")
