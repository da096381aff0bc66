"""What a pod says of each of its containers, and its volumes as folders, worked out as a kubelet does it."""

import itertools
import os
import re
import shutil
import subprocess
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_UNITS = {"": 1, "k": 10**3, "M": 10**6, "G": 10**9, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "m": 1e-3}
_REFERENCE = re.compile(r"\$\$|\$\(([A-Za-z_][\w.-]*)\)")

# What a container runtime leaves to root.
CAPABILITIES = (
    *("chown", "dac_override", "fowner", "fsetid", "kill", "setgid", "setuid", "setpcap"),
    *("net_bind_service", "net_raw", "sys_chroot", "mknod", "audit_write", "setfcap"),
)


class NotYet(Exception):  # noqa: N818  # not an error: a kubelet waits too
    """A container cannot be made as things are; a kubelet tries again, for ever. The message says why."""


@dataclass(frozen=True, slots=True)
class Image:
    """What an image says where a container says nothing; its files are those of this machine."""

    entrypoint: tuple[str, ...] = ()
    user: int = 0
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Objects:
    """What is in the cluster, as its API server has it: Secrets and ConfigMaps by name, which a test may change."""

    secrets: dict[str, dict[str, bytes]] = field(default_factory=dict)
    config_maps: dict[str, dict[str, bytes]] = field(default_factory=dict)
    images: dict[str, Image] = field(default_factory=dict)
    claims: dict[str, str] = field(default_factory=dict)
    """Folders by the names of PersistentVolumeClaims."""
    account: dict[str, bytes] | None = None
    """What is mounted of a service account, at its usual place."""
    names: dict[str, str] = field(default_factory=dict)
    """Addresses by name, of Services and pods, as the cluster's DNS has them when a container starts."""
    variables: dict[str, str] = field(default_factory=dict)
    """What every container is told: where Services are."""

    def data(self, kind: str, reference: Mapping[str, Any]) -> dict[str, bytes] | None:
        """What a Secret or ConfigMap holds; None where it is optional and not there."""
        name = reference.get("name") or reference.get("secretName")
        found = (self.secrets if kind == "secret" else self.config_maps).get(str(name))
        if found is None and not reference.get("optional"):
            raise NotYet(f'{kind} "{name}" not found')
        return found


@dataclass(frozen=True, slots=True)
class Place:
    """Where a pod runs."""

    node: str = "node-a"
    address: str = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class Mount:
    """One volume in a container."""

    volume: str
    path: str
    sub_path: str = ""
    read_only: bool = False


@dataclass(frozen=True, slots=True)
class Identity:
    """Whom the processes of a container belong to, and what they may do."""

    uid: int
    gid: int
    groups: tuple[int, ...]
    capabilities: tuple[str, ...]
    no_new_privileges: bool

    def command(self) -> list[str]:
        """What runs a command so."""
        bounding = ",".join(["-all", *(f"+{one}" for one in self.capabilities)])
        groups = f"--groups={','.join(map(str, self.groups))}" if self.groups else "--clear-groups"
        words = [f"--reuid={self.uid}", f"--regid={self.gid}", groups, "--inh-caps=-all", f"--bounding-set={bounding}"]
        return ["setpriv", *words, *(["--no-new-privs"] if self.no_new_privileges else []), "--"]


def quantity(text: object) -> float:
    """A Kubernetes quantity as a number."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([a-zA-Z]*)", str(text))
    assert found is not None, f"not a quantity: {text}"
    assert found[2] in _UNITS, f"not a unit: {text}"
    return float(found[1]) * _UNITS[found[2]]


def expanded(text: str, environment: Mapping[str, str]) -> str:
    """``$(NAME)`` by the variable's value; of one that is not there, and behind ``$$``, it stays as it is."""

    def value(found: re.Match[str]) -> str:
        return "$" if found[1] is None else environment.get(found[1], found[0])

    return _REFERENCE.sub(value, text)


def is_sidecar(container: Mapping[str, Any]) -> bool:
    """Whether an init container goes on beside the others."""
    return container.get("restartPolicy") == "Always"


def downward(pod: Mapping[str, Any], place: Place, path: str) -> str:
    """A field of the pod itself, as the downward API has it."""
    metadata, spec = pod["metadata"], pod["spec"]
    if found := re.fullmatch(r"metadata\.(labels|annotations)\['([^']+)'\]", path):
        return str((metadata.get(found[1]) or {}).get(found[2], ""))
    known = {
        "metadata.name": metadata["name"],
        "metadata.namespace": metadata.get("namespace", "default"),
        "metadata.uid": metadata.get("uid", ""),
        "spec.nodeName": place.node,
        "spec.serviceAccountName": spec.get("serviceAccountName", "default"),
        "status.podIP": place.address,
        "status.podIPs": place.address,
        "status.hostIP": place.address,
    }
    assert path in known, f"no field of the downward API: {path}"
    return str(known[path])


def environment(pod: Mapping[str, Any], container: Mapping[str, Any], place: Place, objects: Objects) -> dict[str, str]:
    """The variables of a container: those of its image, of ``envFrom``, and then its own, which see those before them.

    Raises:
        NotYet: one comes from an object, or a key of it, that is not there.
    """
    found = {**objects.variables, **_image(container, objects).environment}
    for source in container.get("envFrom", ()):
        kind = "secret" if "secretRef" in source else "config map"
        data = objects.data(kind, source.get("secretRef") or source["configMapRef"])
        found |= {name: value.decode() for name, value in (data or {}).items()}
    for one in container.get("env", ()):
        if "valueFrom" not in one:
            found[one["name"]] = expanded(one.get("value", ""), found)
        elif (value := _value(pod, place, objects, one["valueFrom"])) is not None:
            found[one["name"]] = value
    return found


def _value(pod: Mapping[str, Any], place: Place, objects: Objects, source: Mapping[str, Any]) -> str | None:
    if "fieldRef" in source:
        return downward(pod, place, source["fieldRef"]["fieldPath"])
    reference = source["secretKeyRef"]
    data = objects.data("secret", reference)
    if data is not None and reference["key"] in data:
        return data[reference["key"]].decode()
    if not reference.get("optional"):
        raise NotYet(f"couldn't find key {reference['key']} in secret {reference['name']}")
    return None


def identity(pod: Mapping[str, Any], container: Mapping[str, Any], objects: Objects) -> Identity:
    """Whom a container runs as.

    Raises:
        NotYet: it must not be root, and would be.
    """
    of_pod, own = pod["spec"].get("securityContext") or {}, container.get("securityContext") or {}
    context = {**of_pod, **own}
    uid = int(context.get("runAsUser", _image(container, objects).user))
    if context.get("runAsNonRoot") and uid == 0:
        raise NotYet("container has runAsNonRoot and image will run as root")
    groups = [of_pod["fsGroup"]] if "fsGroup" in of_pod else []
    changed = own.get("capabilities") or {}
    dropped = {name.lower() for name in changed.get("drop", ())}
    kept = [] if "all" in dropped else [name for name in CAPABILITIES if name not in dropped]
    return Identity(
        uid=uid,
        gid=int(context.get("runAsGroup", 0)),
        groups=tuple(map(int, groups)),
        capabilities=tuple(kept) + tuple(name.lower() for name in changed.get("add", ())),
        no_new_privileges=own.get("allowPrivilegeEscalation") is False,
    )


def argv(container: Mapping[str, Any], variables: Mapping[str, str], objects: Objects) -> list[str]:
    """What a container runs: its command or its image's, and its arguments."""
    command = container.get("command") or _image(container, objects).entrypoint
    words = [expanded(word, variables) for word in (*command, *container.get("args", ()))]
    if not words:
        raise NotYet("no command specified")
    return words


def mounts(container: Mapping[str, Any]) -> Iterator[Mount]:
    """The volumes of a container, outer paths before those within them."""
    for one in sorted(container.get("volumeMounts", ()), key=lambda one: one["mountPath"]):
        yield Mount(one["name"], one["mountPath"], one.get("subPath", ""), bool(one.get("readOnly")))


def phase(codes: Iterable[int]) -> str:
    """How a pod has ended, by the codes that its main containers ended with."""
    return "Failed" if any(codes) else "Succeeded"


def _image(container: Mapping[str, Any], objects: Objects) -> Image:
    return objects.images.get(container.get("image", ""), Image())


ACCOUNT = "kube-api-access"
ACCOUNT_PATH = "/var/run/secrets/kubernetes.io/serviceaccount"
_Files = dict[str, tuple[bytes, int]]
"""What is in a volume: contents and mode by path."""


class Volumes:
    """The volumes of one pod. What is in memory is mounted where its pause process sees it, and nobody else."""

    def __init__(self, pod: Mapping[str, Any], folder: Path, objects: Objects) -> None:
        self._folder, self._objects = folder, objects
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
        kind = next((one for one in ("secret", "configMap") if one in volume), None)
        if kind is None:
            return None
        about = volume[kind]
        mode = about.get("defaultMode", 0o644)
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
