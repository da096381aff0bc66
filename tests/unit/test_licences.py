"""The licences of what `sftriage[all]` installs are known, and are on the page."""

import pytest

from release import licences

ROWS = licences.PAGE.read_text(encoding="utf-8").splitlines()


def test_the_page_has_what_is_installed_and_every_licence_is_allowed():
    assert list(licences.problems()) == []
    missing = [name for name in licences.packages() if not any(row.startswith(f"| {name} |") for row in ROWS)]
    # (older Pythons have packages that replace parts of newer ones)
    assert set(missing) <= {"exceptiongroup", "async-timeout", "backports.asyncio.runner", "iso8601", "tomli"}


@pytest.mark.parametrize(
    ("licence", "allowed"),
    [
        ("MIT", True),
        ("Apache-2.0 OR BSD-3-Clause", True),
        ("BSD License; Apache Software License", True),
        ("Mozilla Public License 2.0 (MPL 2.0)", True),
        ("", False),
        ("UNKNOWN", False),
        ("GPL-3.0", False),
        ("MIT AND AGPL-3.0", False),
        ("GNU Lesser General Public License v3 (LGPLv3)", False),
        ("Proprietary", False),
    ],
)
def test_what_is_unknown_or_copyleft_is_a_problem(monkeypatch, licence, allowed):
    monkeypatch.setattr(licences, "packages", lambda: {"some": ["ui"]})
    monkeypatch.setattr(licences, "licence_of", lambda _: licence)
    assert (list(licences.problems()) == []) == allowed
