"""Runs pods as a kubelet does: each container in namespaces of its own, as its own user; its image is this machine.

Covers init containers, sidecars, volumes, variables, users, groups, capabilities, shared process ids, restarts and the
grace period. Does not cover limits, probes, hooks, seccomp, images, and objects that change once the pod has started.
"""

import contextlib
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.integration.processes import DEADLINE_S, ROOT, wait_until

_SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
PATH = f"{Path(sys.executable).parent}:{_SYSTEM_PATH}"
"""Where an image looks for its programs: `sftriage` and `python` are those of the tests."""
_TICK_S, _RESTART_S = 0.05, 0.2
_SHORTEST_GRACE_S = 2.0
"""A kubelet leaves a container at least this long to end."""
_CAPABILITIES = (
    *("chown", "dac_override", "fowner", "fsetid", "kill", "setgid", "setuid", "setpcap"),
    *("net_bind_service", "net_raw", "sys_chroot", "mknod", "audit_write", "setfcap"),
)
"""What a container runtime leaves to root."""
_ACCOUNT, _ACCOUNT_PATH = "kube-api-access", "/var/run/secrets/kubernetes.io/serviceaccount"
_DEVICES = "null zero full random urandom tty"
_PRIVATE = ("tmp", "run", "var/tmp")
"""What an image has nothing in."""
_PAUSE = """
import signal
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
print("up", flush=True)
while True:
    signal.pause()
"""
"""With shared process ids, it reaps the orphans of all containers."""
_ALONE = """
import ctypes, os, signal, sys
libc = ctypes.CDLL(None, use_errno=True)
if libc.unshare(0x20020000):  # new mounts, new process ids
    raise OSError(ctypes.get_errno(), "unshare")
if not (child := os.fork()):
    libc.prctl(1, signal.SIGKILL)  # it dies with us
    os.execvp(sys.argv[1], sys.argv[1:])
status = os.waitpid(child, 0)[1]
if os.WIFSIGNALED(status):
    if (number := os.WTERMSIG(status)) != signal.SIGKILL:
        signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)
os._exit(os.waitstatus_to_exitcode(status))
"""
"""As `unshare --mount --pid --fork --kill-child`, which ends with 1 where its child was killed (util-linux 2.38)."""


@dataclass(frozen=True, slots=True)
class Image:
    """What an image sets where a container does not; its files are those of this machine."""

    entrypoint: tuple[str, ...] = ()
    user: int = 0
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Objects:
    """What is in the cluster beside the pod, by name."""

    secrets: dict[str, dict[str, bytes]] = field(default_factory=dict)
    config_maps: dict[str, dict[str, bytes]] = field(default_factory=dict)
    images: dict[str, Image] = field(default_factory=dict)
    account: dict[str, bytes] | None = None
    """The files of a service account."""
    names: dict[str, str] = field(default_factory=dict)
    """Addresses by name, of Services and pods, as the cluster's DNS has them."""
    variables: dict[str, str] = field(default_factory=dict)
    """Of every container: where Services are."""

    def data(self, kind: str, reference: Mapping[str, Any]) -> dict[str, bytes]:
        """The contents of a Secret or ConfigMap; nothing if it is optional and missing."""
        name = str(reference.get("name") or reference.get("secretName"))
        found = (self.secrets if kind.startswith("secret") else self.config_maps).get(name)
        assert found is not None or reference.get("optional"), f'{kind} "{name}" not found'
        return found or {}


@dataclass(frozen=True, slots=True)
class Place:
    """Where a pod runs; ``network`` is a network namespace (`ip netns`), by default that of this process."""

    node: str = "node-a"
    address: str = "127.0.0.1"
    network: str | None = None


class Container:
    def __init__(self, spec: Mapping[str, Any], log: Path) -> None:
        self.spec, self.name, self.restarts = spec, str(spec["name"]), 0
        self.sidecar = spec.get("restartPolicy") == "Always"
        self.started_s = float("-inf")
        self._log = log
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def started(self) -> bool:
        return self._process is not None

    @property
    def exit_code(self) -> int | None:
        """Of its last process, 128 and a signal's number if that ended it; None while it runs."""
        code = None if self._process is None else self._process.poll()
        return 128 - code if code is not None and code < 0 else code

    @property
    def running(self) -> bool:
        return self.started and self.exit_code is None

    @property
    def said(self) -> str:
        return self._log.read_text(errors="replace") if self._log.exists() else ""

    def start(self, command: list[str], script: Callable[[int], str]) -> None:
        """Run a shell script by a command; return once the script has written a line to the descriptor that it gets."""
        self.restarts += self.started
        self.started_s = time.monotonic()
        started, ready = os.pipe()
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [*command, "bash", "-c", script(ready)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=[ready],
                env={"PATH": _SYSTEM_PATH},
            )
        os.close(ready)
        with os.fdopen(started) as lines:
            lines.readline()

    def end(self, grace_s: float) -> None:
        deadline = time.monotonic() + grace_s
        self._signal(signal.SIGTERM)
        while self.running and time.monotonic() < deadline:
            time.sleep(0.01)
        self.kill()

    def kill(self) -> None:
        self._signal(signal.SIGKILL)
        if self._process is not None:
            self._process.kill()
            self._process.wait(60)

    def _signal(self, number: int) -> None:
        if self._process is not None:
            with contextlib.suppress(OSError, IndexError):
                os.kill(int(_children(self._process.pid)[0]), number)


class Pod:
    def __init__(self, body: Mapping[str, Any], folder: Path, objects: Objects, place: Place) -> None:
        self.body, self.phase = body, "Pending"
        self._spec, self._folder, self._objects, self._place = body["spec"], folder, objects, place
        self._hostname = str(body["metadata"]["name"][:63])
        self._shared = bool(self._spec.get("shareProcessNamespace"))
        self._grace_s = float(self._spec.get("terminationGracePeriodSeconds", 30))
        self._group = (self._spec.get("securityContext") or {}).get("fsGroup")
        self._volumes = {one["name"]: one for one in self._spec.get("volumes", ())}
        self._init, self._main = (
            [Container(one, folder / f"{one['name']}.log") for one in self._spec.get(kind) or ()]
            for kind in ("initContainers", "containers")
        )
        self.containers = {one.name: one for one in (*self._init, *self._main)}
        self._kept: list[Container] = []
        self._deleted, self._over = threading.Event(), threading.Event()
        folder.mkdir(parents=True)
        self._pause = self._begin_pause()
        self._thread = threading.Thread(target=self._live, name=f"pod {self._hostname}")
        self._thread.start()

    def wait(self, deadline_s: float = DEADLINE_S) -> str:
        assert self._over.wait(deadline_s), f"the pod has not ended\n{self.said}"
        return self.phase

    def until(self, what: Callable[[], object], deadline_s: float = DEADLINE_S) -> object:
        """Wait until something holds, as long as the pod lives."""

        def found() -> object:
            over = self._over.is_set()
            done = what()
            assert done or not over, f"the pod has ended: {self.phase}\n{self.said}"
            return done

        return wait_until(found, deadline_s)

    def delete(self, grace_s: float | None = None) -> None:
        """Delete it as `kubectl delete pod` does, and return once it is gone."""
        if grace_s is not None:
            self._grace_s = grace_s
        self._deleted.set()
        self._thread.join()

    def volume(self, name: str) -> Path:
        volume = self._volumes.get(name, {})
        return Path(volume["hostPath"]["path"]) if "hostPath" in volume else self._folder / "volumes" / name

    @property
    def said(self) -> str:
        return "\n".join(f"--- {one.name}\n{one.said}" for one in self.containers.values())

    def _begin_pause(self) -> subprocess.Popen[str]:
        """Start the process whose network, host name and IPC the containers share."""
        network = self._place.network
        entered = ["nsenter", f"--net=/run/netns/{network}", "--"] if network else []
        alone = ["unshare", "--uts", "--ipc", *(["--pid", "--fork", "--kill-child"] if self._shared else [])]
        begin = 'hostname "$0" && exec "$1" -c "$2"'
        command = [*entered, *alone, "--", "sh", "-c", begin, self._hostname, sys.executable, _PAUSE]
        pause = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True)
        assert pause.stdout is not None
        assert pause.stdout.readline() == "up\n"
        first = [*_children(pause.pid), str(pause.pid)][0]
        entered = ["nsenter", "-t", first, "--uts", "--ipc", "--net"]
        begun = ["--pid", "--", "unshare", "--mount", "--"] if self._shared else ["--", sys.executable, "-c", _ALONE]
        self._entered = [*entered, *begun]
        return pause

    def _live(self) -> None:
        try:
            self._fill()
            if self._begun():
                self.phase = "Running"
                self._keep(until=lambda: all(self._finished(one) for one in self._main))
            self._end()
        finally:
            failed = any(one.exit_code != 0 for one in self._main if one.started or not self._deleted.is_set())
            self.phase = "Failed" if failed else "Succeeded"
            for one in self.containers.values():
                one.kill()
            self._pause.kill()
            self._pause.communicate(timeout=60)
            self._over.set()

    def _begun(self) -> bool:
        for one in self._init:
            self._kept.append(one)
            self._keep(until=lambda one=one: one.running if one.sidecar else self._finished(one))  # type: ignore[misc]
            if self._deleted.is_set() or (one.exit_code and not one.sidecar):
                return False
        self._kept += self._main
        return True

    def _keep(self, *, until: Callable[[], bool]) -> None:
        """Start what does not run and should, until something holds or the pod is deleted."""
        while not (until() or self._deleted.is_set()):
            for one in self._kept:
                if not (one.running or self._finished(one)) and time.monotonic() > one.started_s + _RESTART_S:
                    self._start(one)
            time.sleep(_TICK_S)

    def _finished(self, one: Container) -> bool:
        if one.exit_code is None or one.sidecar:
            return False
        policy = self._spec.get("restartPolicy", "Always")
        if one in self._init and policy == "Always":
            policy = "OnFailure"
        return bool(policy == "Never" or (policy == "OnFailure" and one.exit_code == 0))

    def _end(self) -> None:
        """End the main containers at once, then sidecars, the last one first."""
        deadline = time.monotonic() + self._grace_s
        threads = [threading.Thread(target=one.end, args=(self._grace_s,)) for one in self._kept if not one.sidecar]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for one in reversed(self._kept):
            one.end(max(deadline - time.monotonic(), min(_SHORTEST_GRACE_S, self._grace_s)))

    def _fill(self) -> None:
        if self._objects.account is not None and self._spec.get("automountServiceAccountToken", True):
            self._volumes[_ACCOUNT] = {"name": _ACCOUNT}
        for name, volume in self._volumes.items():
            path = self.volume(name)
            path.mkdir(parents=True, exist_ok=True)
            if "emptyDir" in volume:
                os.chown(path, -1, self._group or 0)
                path.chmod(0o777 if self._group is None else 0o2777)
            for file, (value, mode) in self._files(volume).items():
                (path / file).write_bytes(value)
                (path / file).chmod(mode | (0o440 if self._group is not None else 0))
                os.chown(path / file, -1, self._group or 0)

    def _files(self, volume: Mapping[str, Any]) -> dict[str, tuple[bytes, int]]:
        if volume["name"] == _ACCOUNT:
            return {name: (value, 0o644) for name, value in (self._objects.account or {}).items()}
        for kind in {"secret", "configMap"} & volume.keys():
            about, data = volume[kind], self._objects.data(kind, volume[kind])
            mode = about.get("defaultMode", 0o644)
            items = about.get("items") or [{"key": name, "path": name} for name in data]
            return {one["path"]: (data[one["key"]], one.get("mode", mode)) for one in items if one["key"] in data}
        return {}

    def _start(self, one: Container) -> None:
        variables = {"HOSTNAME": self._hostname, **self._environment(one.spec)}
        image = self._image(one.spec)
        words = [*(one.spec.get("command") or image.entrypoint), *one.spec.get("args", ())]
        uid, privileges = self._identity(one.spec)
        made = {"PATH": PATH, "HOME": "/root" if uid == 0 else "/", **variables}
        argv = [*privileges, "env", "-i", *(f"{name}={value}" for name, value in made.items())]
        argv += [_expanded(word, variables) for word in words]
        stage = self._folder / "containers" / f"{one.name}-{one.restarts + one.started}"
        one.start(self._entered, lambda ready: "\n".join(self._script(one.spec, argv, stage, ready)))

    def _image(self, spec: Mapping[str, Any]) -> Image:
        return self._objects.images.get(spec.get("image", ""), Image())

    def _environment(self, spec: Mapping[str, Any]) -> dict[str, str]:
        """Variables of the image, of ``envFrom``, and the container's own, which refer to those before them."""
        found = {**self._objects.variables, **self._image(spec).environment}
        for source in spec.get("envFrom", ()):
            kind = "secret" if "secretRef" in source else "configMap"
            found |= {name: value.decode() for name, value in self._objects.data(kind, source[f"{kind}Ref"]).items()}
        metadata = self.body["metadata"]
        fields = {
            "metadata.name": metadata["name"],
            "spec.nodeName": self._place.node,
            "status.podIP": self._place.address,
        }
        for one in spec.get("env", ()):
            source = one.get("valueFrom", {})
            if "fieldRef" in source:
                found[one["name"]] = str(fields[source["fieldRef"]["fieldPath"]])
            elif "secretKeyRef" in source:
                reference = source["secretKeyRef"]
                data = self._objects.data("secret", reference)
                assert reference["key"] in data or reference.get("optional"), f"no {reference['key']} in a secret"
                found |= {one["name"]: data[reference["key"]].decode()} if reference["key"] in data else {}
            else:
                found[one["name"]] = _expanded(one.get("value", ""), found)
        return found

    def _identity(self, spec: Mapping[str, Any]) -> tuple[int, list[str]]:
        """The user of a container, and the command that gives a command its user, groups and capabilities."""
        own = spec.get("securityContext") or {}
        context = {**(self._spec.get("securityContext") or {}), **own}
        uid = int(context.get("runAsUser", self._image(spec).user))
        assert uid or not context.get("runAsNonRoot"), "container has runAsNonRoot and image will run as root"
        changed = own.get("capabilities") or {}
        dropped = {name.lower() for name in changed.get("drop", ())}
        kept = [] if "all" in dropped else [name for name in _CAPABILITIES if name not in dropped]
        kept += [name.lower() for name in changed.get("add", ())]
        bounding = ",".join(["-all", *(f"+{name}" for name in kept)])
        groups = "--clear-groups" if self._group is None else f"--groups={self._group}"
        words = [f"--reuid={uid}", f"--regid={context.get('runAsGroup', 0)}", groups, "--inh-caps=-all"]
        words += [f"--bounding-set={bounding}"]
        words += ["--no-new-privs"] if own.get("allowPrivilegeEscalation") is False else []
        return uid, ["setpriv", *words, "--"]

    def _script(self, spec: Mapping[str, Any], argv: list[str], stage: Path, ready: int) -> Iterator[str]:
        """Make the container's root on a copy of this machine that only it writes to, and become its command."""
        root = stage / "root"
        yield "set -e\nmount --make-rprivate /"
        yield f"mkdir -p {stage} && mount -t tmpfs -o mode=755 tmpfs {stage} && mkdir {stage}/upper {stage}/work {root}"
        yield f"mount -t overlay -o lowerdir=/,upperdir={stage}/upper,workdir={stage}/work overlay {root}"
        yield f"cd {root}"
        programs = {ROOT, Path(sys.prefix), Path(sys.base_prefix).resolve()}
        # (an image's programs are for everybody, though on this machine they may lie where only root comes)
        ways = {way for path in programs for way in path.parents if way != Path("/")}
        yield from (f"chmod a+x .{shlex.quote(str(way))}" for way in sorted(ways))
        yield "mount -t proc proc proc && mount --rbind /sys sys && mount -t tmpfs -o mode=755 tmpfs dev"
        yield f"for one in {_DEVICES}; do : > dev/$one; mount --bind /dev/$one dev/$one; done"
        yield "mkdir dev/shm dev/pts && mount -t tmpfs -o mode=1777,size=64m tmpfs dev/shm"
        yield "ln -s /proc/self/fd dev/fd"
        yield "for one in 0:stdin 1:stdout 2:stderr; do ln -s /proc/self/fd/${one%:*} dev/${one#*:}; done"
        yield from (f"mkdir -p {one} && mount -t tmpfs -o mode=1777 tmpfs {one}" for one in _PRIVATE)
        # Programs on another disk, or where an image has nothing.
        hidden, here = tuple(f"/{one}/" for one in _PRIVATE), Path("/").stat().st_dev
        for path in sorted(programs):
            if path.stat().st_dev != here or str(path).startswith(hidden):
                place = f".{shlex.quote(str(path))}"
                yield f"mkdir -p {place} && mount --bind {shlex.quote(str(path))} {place}"
                yield f"mount -o remount,bind,ro {place}"
        names = "".join(f"{address}\t{name}\n" for name, address in self._objects.names.items())
        hosts = f"127.0.0.1\tlocalhost\n{self._place.address}\t{self._hostname}\n{names}"
        yield f"printf %s {shlex.quote(hosts)} > etc/hosts\nhostname > etc/hostname"
        # (links in the image lead to places in it once it is the root)
        yield "pivot_root . mnt\ncd /"
        mounts = sorted(spec.get("volumeMounts", ()), key=lambda one: str(one["mountPath"]))
        if _ACCOUNT in self._volumes:
            mounts += [{"name": _ACCOUNT, "mountPath": _ACCOUNT_PATH, "readOnly": True}]
        for one in mounts:
            source = self.volume(one["name"]) / one.get("subPath", "")
            source.mkdir(parents=True, exist_ok=True)
            place = shlex.quote(one["mountPath"])
            yield f"mkdir -p {place} && mount --bind {shlex.quote(f'/mnt{source}')} {place}"
            yield f"mount -o remount,bind,ro {place}" if one.get("readOnly") else ""
        if (spec.get("securityContext") or {}).get("readOnlyRootFilesystem"):
            taken = {one["mountPath"].strip("/") for one in mounts}
            yield from (f"mount -o remount,ro /{one}" for one in ("", *_PRIVATE) if one not in taken)
        yield f"umount -l /mnt\necho >&{ready}\nexec {ready}>&-\nexec {shlex.join(argv)}"


def _expanded(text: str, environment: Mapping[str, str]) -> str:
    """``$(NAME)`` by the variable's value; of an unknown one it stays, and ``$$`` becomes one dollar."""

    def value(found: re.Match[str]) -> str:
        return "$" if found[1] is None else environment.get(found[1], found[0])

    return re.sub(r"\$\$|\$\(([A-Za-z_][\w.-]*)\)", value, text)


def _children(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/task/{pid}/children").read_text().split()


def missing() -> str:
    """Why no container can be made here, or ""."""
    if os.geteuid() != 0:
        return "containers are made by root"
    lacking = [name for name in ("unshare", "nsenter", "setpriv", "pivot_root") if shutil.which(name) is None]
    if lacking:
        return f"no {', no '.join(lacking)} here"
    tried = "mount --make-rprivate / && mount -t tmpfs tmpfs /mnt && cd /mnt && mkdir u w r && "
    tried += "mount -t overlay -o lowerdir=/,upperdir=u,workdir=w overlay r"
    command = ["unshare", "--mount", "--uts", "--ipc", "--pid", "--fork", "sh", "-c", tried]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    return f"no container can be made here: {done.stderr.strip()}" if done.returncode else ""


@contextlib.contextmanager
def running(
    body: Mapping[str, Any], folder: Path, *, objects: Objects | None = None, place: Place | None = None
) -> Iterator[Pod]:
    """Run a pod, as an API server has it after all webhooks, until this ends; ``folder`` must not exist yet."""
    pod = Pod(body, folder, objects or Objects(), place or Place())
    try:
        yield pod
    finally:
        pod.delete(0.0)
