"""What holds for all tests: in CI, hypothesis tries the same examples every time; elsewhere it goes on looking."""

import os

from hypothesis import settings

settings.register_profile("ci", derandomize=True)
if os.environ.get("CI"):
    settings.load_profile("ci")
