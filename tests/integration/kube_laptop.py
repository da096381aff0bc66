"""Somebody at a laptop, with the command line and a kubeconfig."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.integration.processes import ended


class Laptop:
    """Somebody's own machine, with a kubeconfig."""

    def __init__(self, kubeconfig: Path, home: Path, namespace: str) -> None:
        self.home, self._namespace = home, namespace
        own = {"KUBECONFIG": str(kubeconfig), "COLUMNS": "200", "XDG_CACHE_HOME": str(home / "cache")}
        self.environment = {**os.environ, **own}

    def command(self, *arguments: object) -> list[str]:
        return [sys.executable, "-m", "sftriage", "kube", *map(str, arguments), "-n", self._namespace]

    def __call__(self, *arguments: object, code: int = 0) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            self.command(*arguments),
            env=self.environment,
            cwd=self.home,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == code, done.stderr
        assert "Traceback" not in done.stderr
        return done

    def json(self, *arguments: object, code: int = 0) -> Any:
        return json.loads(self(*arguments, "--json", code=code).stdout)

    @contextlib.contextmanager
    def running(self, *arguments: object) -> Iterator[subprocess.Popen[str]]:
        with (
            subprocess.Popen(
                self.command(*arguments),
                env=self.environment,
                cwd=self.home,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            ) as process,
            ended(process),
        ):
            yield process


@pytest.fixture
def laptop(server, tmp_path, namespace) -> Laptop:
    home = tmp_path / "laptop"
    home.mkdir()
    return Laptop(server.kubeconfig, home, namespace)
