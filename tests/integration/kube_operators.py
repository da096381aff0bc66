"""`sftriage operator`, as somebody who is the operator's service account and no more."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import yaml

from sftriage.kube.sidecar import InjectionSettings
from tests.integration.kube import Cluster
from tests.integration.processes import ended


class Operators:
    """One or several, which look after a namespace; with ``settings``, after its jobs, too."""

    def __init__(
        self, server: Cluster, folder: Path, namespace: str, settings: InjectionSettings | None = None
    ) -> None:
        self._folder, self._namespace, self.settings = folder, namespace, settings
        self._environment = {**os.environ, "KUBECONFIG": str(server.as_operator(folder))}
        self._held = contextlib.ExitStack()

    def start(self, name: str = "operator", *more: str, everywhere: bool = False) -> subprocess.Popen[bytes]:
        """Start one; it ends with all of them."""
        command = [sys.executable, "-m", "sftriage", "operator"]
        command += [] if everywhere else ["--namespace", self._namespace]
        if self.settings is not None:
            settings = self._folder / "settings.yaml"
            settings.write_text(yaml.safe_dump(self.settings.plain()))
            command += ["--settings", str(settings), "--grace-seconds", "1"]
        with (self._folder / name).open("ab") as log:
            process = subprocess.Popen([*command, *more], stdout=log, stderr=log, env=self._environment)
        self._held.enter_context(ended(process))
        return process

    @contextlib.contextmanager
    def running(self, *more: str) -> Iterator[subprocess.Popen[bytes]]:
        """One that runs until this ends, and has not ended by itself."""
        process = self.start("operator", *more)
        with ended(process):
            yield process
            assert process.poll() is None, self.said()

    def said(self, name: str = "operator") -> str:
        """What one of them has said."""
        return (self._folder / name).read_text()

    def close(self) -> None:
        """End all of them."""
        self._held.close()
