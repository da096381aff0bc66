"""What holds for all tests: in CI, hypothesis tries the same examples every time; elsewhere it goes on looking.

How long an example takes is no property of what is tested: other work on the machine decides it.
"""

import os

from hypothesis import settings

settings.register_profile("ci", derandomize=True, deadline=None)
settings.register_profile("looking", deadline=None)
settings.load_profile("ci" if os.environ.get("CI") else "looking")
