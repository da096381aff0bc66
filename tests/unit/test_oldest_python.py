"""Which Python is the oldest: one answer, wherever it is said."""

import re
from pathlib import Path

import pytest

from sftriage.model import captures

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("file", "pattern"),
    [
        ("pyproject.toml", r'requires-python = ">=3\.(\d+)"'),
        ("Makefile", r"sys\.version_info < \(3, (\d+)\)"),
        ("Makefile", r"needs Python 3\.(\d+) or newer"),
        ("README.md", r"Python 3\.(\d+) or newer"),
    ],
)
def test_it_is_the_same_wherever_it_is_said(file, pattern):
    assert re.findall(pattern, (ROOT / file).read_text(encoding="utf-8")) == ["10"]


def test_what_msgspec_is_given_has_no_type_in_quotes_which_it_does_not_read_there():
    assert not isinstance(captures.Parameter, str)
