"""What holds for all tests: hypothesis tries the same examples every time, unless it is told to go on looking (`soak`).

How long an example takes is no property of what is tested: other work on the machine decides it.

What was imported for all tests stays until they are through: looking through it for garbage takes longer than many a
test.
"""

import gc
from collections import Counter

import pytest
from hypothesis import settings

settings.register_profile("same", derandomize=True, deadline=None)
settings.register_profile("looking", deadline=None, max_examples=1000)
settings.load_profile("same")

gc.disable()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Unit tests are dealt out to processes file by file; tests of real jobs one by one, but for those that share."""
    for item in items:
        if item.nodeid.startswith("tests/unit/"):
            item.add_marker(pytest.mark.xdist_group(item.path.stem))


def pytest_collection_finish():
    gc.freeze()
    gc.set_threshold(*gc.get_threshold()[:2], 100)
    gc.enable()


def pytest_terminal_summary(terminalreporter):
    """Every cause for which tests were skipped, once."""
    causes = Counter(report.longrepr[2].removeprefix("Skipped: ") for report in terminalreporter.getreports("skipped"))
    for cause, tests in sorted(causes.items()):
        terminalreporter.write_line(f"SKIPPED [{tests}] {cause}")
