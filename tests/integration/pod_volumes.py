"""A pod's volumes as folders: empty ones, what objects and the downward API say, and claims."""

from __future__ import annotations

import itertools
import os
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.integration.pod_spec import NotYet, Objects, Place, downward, quantity

ACCOUNT = "kube-api-access"
ACCOUNT_PATH = "/var/run/secrets/kubernetes.io/serviceaccount"
_Files = dict[str, tuple[bytes, int]]
"""What is in a volume: contents and mode by path."""


class Volumes:
    """The volumes of one pod. What is in memory is mounted where its pause process sees it, and nobody else."""

    def __init__(self, pod: Mapping[str, Any], folder: Path, objects: Objects, place: Place) -> None:
        self._pod, self._folder, self._objects, self._place = pod, folder, objects, place
        self._group = (pod["spec"].get("securityContext") or {}).get("fsGroup")
        self._volumes = {one["name"]: one for one in pod["spec"].get("volumes", ())}
        if objects.account is not None and pod["spec"].get("automountServiceAccountToken", True):
            self._volumes[ACCOUNT] = {"name": ACCOUNT}
        self._written: dict[str, _Files] = {}
        self._numbers = itertools.count()

    def path(self, name: str) -> Path:
        """Where a volume is, as the pause process sees it."""
        volume = self._volumes[name]
        if "hostPath" in volume:
            return Path(volume["hostPath"]["path"])
        if "persistentVolumeClaim" in volume:
            return Path(self._objects.claims[volume["persistentVolumeClaim"]["claimName"]])
        return self._folder / name

    def make(self, pause: int) -> None:
        """Make what is empty, for the pod of this pause process."""
        for name, volume in self._volumes.items():
            if "emptyDir" not in volume:
                continue
            path, about = self.path(name), volume["emptyDir"] or {}
            path.mkdir(parents=True)
            mode = 0o777 if self._group is None else 0o2777
            if about.get("medium") == "Memory":
                size = f"size={int(quantity(about['sizeLimit']))}," if "sizeLimit" in about else ""
                options = f"{size}mode={mode:o},gid={self._group or 0}"
                command = ["nsenter", "-t", str(pause), "--mount", "mount", "-t", "tmpfs", "-o", options, "tmpfs"]
                subprocess.run([*command, str(path)], check=True, capture_output=True)
            else:
                os.chown(path, -1, self._group or 0)
                path.chmod(mode)

    def too_large(self) -> str:
        """Which volume on disk holds more than it may, or "": a kubelet evicts such a pod."""
        for name, volume in self._volumes.items():
            about = volume.get("emptyDir") or {}
            if "sizeLimit" in about and about.get("medium") != "Memory":
                done = subprocess.run(["du", "-sb", self.path(name)], capture_output=True, text=True, check=False)
                if int(done.stdout.split()[0]) > quantity(about["sizeLimit"]):
                    return f'Usage of EmptyDir volume "{name}" exceeds the limit "{about["sizeLimit"]}".'
        return ""

    def project(self) -> None:
        """Write what objects say as they are now; what has changed is exchanged at once, as a kubelet does it.

        Raises:
            NotYet: an object is not there that has to be.
        """
        for name, volume in self._volumes.items():
            files = self._files(volume)
            if files is not None and files != self._written.get(name):
                self._exchange(self.path(name), files)
                self._written[name] = files

    def _files(self, volume: Mapping[str, Any]) -> _Files | None:
        if volume["name"] == ACCOUNT:
            return {name: (value, 0o644) for name, value in (self._objects.account or {}).items()}
        if "projected" in volume:
            about = volume["projected"]
            found: _Files = {}
            for source in about.get("sources", ()):
                found |= self._source(source, about.get("defaultMode", 0o644))
            return found
        for kind in ("secret", "configMap", "downwardAPI"):
            if kind in volume:
                return self._source({kind: volume[kind]}, volume[kind].get("defaultMode", 0o644))
        return None

    def _source(self, source: Mapping[str, Any], mode: int) -> _Files:
        ((kind, about),) = source.items()
        if kind == "downwardAPI":
            return {
                one["path"]: (
                    downward(self._pod, self._place, one["fieldRef"]["fieldPath"]).encode(),
                    one.get("mode", mode),
                )
                for one in about.get("items", ())
            }
        if kind == "serviceAccountToken":
            return {about["path"]: ((self._objects.account or {}).get("token", b""), 0o600)}
        data = self._objects.data("secret" if kind == "secret" else "config map", about)
        if data is None:
            return {}
        if "items" not in about:
            return {name: (value, mode) for name, value in data.items()}
        missing = [one["key"] for one in about["items"] if one["key"] not in data]
        if missing and not about.get("optional"):
            raise NotYet(f"references non-existent {kind} key: {missing[0]}")
        return {one["path"]: (data[one["key"]], one.get("mode", mode)) for one in about["items"] if one["key"] in data}

    def _exchange(self, path: Path, files: _Files) -> None:
        """All files at once, or none: they lie behind a link that is exchanged."""
        path.mkdir(parents=True, exist_ok=True)
        fresh = path / f"..{next(self._numbers):06}"
        for name, (value, mode) in files.items():
            file = fresh / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(value)
            # (a group of the pod's own may read whatever is in it)
            file.chmod(mode | (0o440 if self._group is not None else 0))
            os.chown(file, -1, self._group or 0)
        fresh.mkdir(exist_ok=True)
        data, before = path / "..data", None
        if data.is_symlink():
            before = path / data.readlink()
        link = path / "..data_tmp"
        link.symlink_to(fresh.name)
        link.rename(data)
        wanted = {name.partition("/")[0] for name in files}
        for name in wanted:
            if not (path / name).is_symlink():
                (path / name).symlink_to(f"..data/{name}")
        for old in path.iterdir():
            if not old.name.startswith("..") and old.name not in wanted:
                old.unlink()
        if before is not None:
            shutil.rmtree(before)
