"""What a host of a job on many is called."""

import pytest

from sftriage.errors import UsageError
from sftriage.runtime import hosting
from sftriage.runtime.hosting import host_name


def test_an_agent_that_is_started_again_is_the_same_and_another_start_of_its_host_is_not(tmp_path, monkeypatch):
    monkeypatch.setattr(hosting.socket, "gethostname", lambda: "node-a")
    first = host_name({"NODE_RANK": "3"}, tmp_path / "first")
    assert first == host_name({"NODE_RANK": "3"}, tmp_path / "first")
    assert first.startswith("node-a-3-")
    # WHEN the host is started again under the same name, with rings of its own
    assert host_name({"NODE_RANK": "3"}, tmp_path / "second") != first
    assert host_name({}, tmp_path / "first").count("-") == 2


def test_a_directory_that_cannot_be_is_said(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match="cannot be used"):
        host_name({}, tmp_path / "file")
