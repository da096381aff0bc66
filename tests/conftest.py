"""What holds for all tests: in CI, hypothesis tries the same examples every time; elsewhere it goes on looking.

How long an example takes is no property of what is tested: other work on the machine decides it.

What was imported for all tests stays until they are through: looking through it for garbage takes longer than many a
test.
"""

import gc
import os

from hypothesis import settings

settings.register_profile("ci", derandomize=True, deadline=None)
settings.register_profile("looking", deadline=None)
settings.load_profile("ci" if os.environ.get("CI") else "looking")

gc.disable()


def pytest_collection_finish():
    gc.freeze()
    gc.set_threshold(*gc.get_threshold()[:2], 100)
    gc.enable()
