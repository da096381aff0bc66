"""Runs pods as a kubelet does, each container in namespaces of its own under its own user; its image is this machine.

What it does: init containers in order, sidecars beside them (an init container that is restarted always; the next waits
until it runs; they end last, in reverse), volumes, the environment, users, groups and capabilities, shared process ids,
restarts, SIGTERM and the grace period. What it does not: limits of processors, memory and disks, probes and hooks,
profiles of seccomp, images.
"""

import contextlib
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.integration.pod_container import Bound, Made, Process
from tests.integration.pod_spec import (
    ACCOUNT,
    ACCOUNT_PATH,
    Mount,
    NotYet,
    Objects,
    Place,
    Volumes,
    argv,
    environment,
    identity,
    is_sidecar,
    mounts,
    phase,
)
from tests.integration.processes import DEADLINE_S, wait_until

_TICK_S = 0.05
_SHORTEST_GRACE_S = 2.0
"""Of a container whose turn to end comes late, as a kubelet has it."""
_PAUSE = """
import signal
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
print("up", flush=True)
while True:
    signal.pause()
"""
"""With shared process ids, whoever is nobody's child any more is this one's, and is reaped."""


class Deleted(Exception):  # noqa: N818  # not an error: somebody has deleted the pod
    """The pod is to end."""


class Over(Exception):  # noqa: N818  # not an error: the pod has ended by itself
    """The pod cannot go on."""


@dataclass
class Container:
    """One container of a pod that runs: how it stands now."""

    spec: Mapping[str, Any]
    log: Path
    process: Process | None = None
    restarts: int = 0
    waiting: str = "ContainerCreating"
    again_s: float = 0.0
    """When it is begun again, of a monotonic clock."""

    @property
    def name(self) -> str:
        return str(self.spec["name"])

    @property
    def exit_code(self) -> int | None:
        """What its last process ended with; None while it runs, or where there was none."""
        return None if self.process is None else self.process.exit_code

    @property
    def running(self) -> bool:
        return self.process is not None and self.process.exit_code is None

    @property
    def said(self) -> str:
        """What it has said so far, over all restarts."""
        return self.log.read_text(errors="replace") if self.log.exists() else ""


class Pod:
    """A pod that runs, or has run; a thread of its own looks after it."""

    def __init__(
        self, body: Mapping[str, Any], folder: Path, objects: Objects, place: Place, network: str | None, pause_s: float
    ) -> None:
        self.body, self.phase, self.reason = body, "Pending", ""
        self._spec, self._folder, self._objects, self._place = body["spec"], folder, objects, place
        self._backoff_s, self._network = pause_s, network
        self._hostname = str(body["metadata"]["name"][:63])
        self._shared = bool(self._spec.get("shareProcessNamespace"))
        self._grace_s = float(self._spec.get("terminationGracePeriodSeconds", 30))
        self._volumes = Volumes(body, folder / "volumes", objects)
        self._init, self._main = (
            [Container(one, folder / f"{one['name']}.log") for one in self._spec.get(kind) or ()]
            for kind in ("initContainers", "containers")
        )
        self.containers = {one.name: one for one in (*self._init, *self._main)}
        self._sidecars: list[Container] = []
        self._wanted: list[Container] = []
        self._deleted, self._over = threading.Event(), threading.Event()
        folder.mkdir(parents=True)
        self._pause = self._begin_pause()
        self._thread = threading.Thread(target=self._live, name=f"pod {body['metadata']['name']}")
        self._thread.start()

    def wait(self, deadline_s: float = DEADLINE_S) -> str:
        """Wait until it has ended; how."""
        assert self._over.wait(deadline_s), f"the pod has not ended: {self.waiting}"
        return self.phase

    def until(self, what: Callable[[], object], deadline_s: float = DEADLINE_S) -> object:
        """Wait until something is so, as long as the pod lives."""

        def found() -> object:
            over = self._over.is_set()
            done = what()
            assert done or not over, f"the pod has ended: {self.phase} {self.reason}\n{self.said}"
            return done

        return wait_until(found, deadline_s)

    def delete(self, grace_s: float | None = None) -> None:
        """Delete it as `kubectl delete pod` does, and return once it is gone."""
        if grace_s is not None:
            self._grace_s = grace_s
        self._deleted.set()
        self._thread.join()

    def run(self, container: str, *command: str) -> subprocess.CompletedProcess[str]:
        """Run a command in a container that runs, as `kubectl exec` does."""
        process = self.containers[container].process
        assert process is not None, f"{container} does not run"
        return process.run(command)

    def volume(self, name: str) -> Path:
        """A volume, as it is seen from outside as long as the pod is there."""
        return Path(f"/proc/{self._pause_pid}/root/{self._volumes.path(name)}")

    @property
    def waiting(self) -> dict[str, str]:
        """Why containers do not run."""
        return {one.name: one.waiting for one in self.containers.values() if one.waiting}

    @property
    def said(self) -> str:
        """What all of its containers have said."""
        return "\n".join(f"--- {one.name}\n{one.said}" for one in self.containers.values())

    def _begin_pause(self) -> subprocess.Popen[str]:
        """The process whose network, name and IPC the containers share, and which sees the volumes in memory."""
        entered = ["nsenter", f"--net=/run/netns/{self._network}", "--"] if self._network else []
        alone = ["unshare", "--mount", "--uts", "--ipc", *(["--pid", "--fork", "--kill-child"] if self._shared else [])]
        begin = 'mount --make-rprivate / && hostname "$0" && exec "$1" -c "$2"'
        command = [*entered, *alone, "--", "sh", "-c", begin, self._hostname, sys.executable, _PAUSE]
        pause = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True)
        assert pause.stdout is not None
        assert pause.stdout.readline() == "up\n"
        children = Path(f"/proc/{pause.pid}/task/{pause.pid}/children").read_text().split()
        self._pause_pid = int(children[0]) if children else pause.pid
        return pause

    def _live(self) -> None:
        try:
            try:
                self._begin()
                while not all(self._finished(one) for one in self._main):
                    self._tick()
                ended = phase(one.exit_code or 0 for one in self._main)
            except (Deleted, Over) as why:
                ended, self.reason = "Failed", str(why)
            self._end()
            if self._deleted.is_set():
                ended = phase(one.exit_code or 0 for one in self._main)
            self.phase = ended
        except Exception as error:
            self.phase, self.reason = "Failed", repr(error)
            raise
        finally:
            for one in self.containers.values():
                if one.process is not None:
                    one.process.kill()
            self._pause.kill()
            self._pause.wait(60)
            if self._pause.stdout is not None:
                self._pause.stdout.close()
            self._over.set()

    def _begin(self) -> None:
        """Volumes, init containers in order, and then the others all at once."""
        self._volumes.make(self._pause_pid)
        for one in self._init:
            self._wanted = [*self._sidecars, one]
            if is_sidecar(one.spec):
                self._sidecars.append(one)
            while not (one.running if is_sidecar(one.spec) else self._finished(one)):
                self._tick()
            if one.exit_code and not is_sidecar(one.spec):
                raise Over(f"Init:Error: {one.name}")
        self._wanted = [*self._sidecars, *self._main]
        self.phase = "Running"

    def _tick(self) -> None:
        """Look after all that is to run now, once."""
        if self._deleted.is_set():
            raise Deleted("deleted")
        problem = ""
        try:
            self._volumes.project()
        except NotYet as why:
            problem = str(why)
        for one in self._wanted:
            self._keep(one, problem)
        time.sleep(_TICK_S)

    def _keep(self, one: Container, problem: str) -> None:
        """Start what does not run and is to; a kubelet tries again for ever where it cannot be."""
        if one.running or self._finished(one) or time.monotonic() < one.again_s:
            return
        try:
            if problem:
                raise NotYet(problem)
            self._start(one)
        except NotYet as why:
            one.waiting = str(why)

    def _start(self, one: Container) -> None:
        variables = environment(self.body, one.spec, self._place, self._objects)
        hosts = "".join(f"{address}\t{name}\n" for name, address in self._objects.names.items())
        variables.setdefault("HOSTNAME", self._hostname)
        context = one.spec.get("securityContext") or {}
        made = Made(
            argv=argv(one.spec, variables, self._objects),
            environment=variables,
            identity=identity(self.body, one.spec, self._objects),
            bound=[self._bound(mount) for mount in self._mounts(one.spec)],
            hosts=f"127.0.0.1\tlocalhost\n{self._place.address}\t{self._hostname}\n{hosts}",
            working_directory=one.spec.get("workingDir", "/"),
            read_only_root=bool(context.get("readOnlyRootFilesystem")),
        )
        if one.process is not None:
            one.process.kill()
            one.restarts += 1
        folder = self._folder / "containers" / f"{one.name}-{one.restarts}"
        one.process, one.waiting = Process(made, self._pause_pid, folder, one.log, shared=self._shared), ""
        one.again_s = time.monotonic() + self._backoff_s * 2 ** min(one.restarts, 5)

    def _mounts(self, spec: Mapping[str, Any]) -> list[Mount]:
        account = self._objects.account is not None and self._spec.get("automountServiceAccountToken", True)
        return [*mounts(spec), *([Mount(ACCOUNT, ACCOUNT_PATH, read_only=True)] if account else [])]

    def _bound(self, mount: Mount) -> Bound:
        source = self._volumes.path(mount.volume)
        if mount.sub_path:
            source /= mount.sub_path
            if not source.exists():
                source.mkdir(parents=True)
        return Bound(source, mount.path, mount.read_only)

    def _finished(self, one: Container) -> bool:
        """Whether a container has ended for good."""
        if one.exit_code is None or is_sidecar(one.spec):
            return False
        policy = self._spec.get("restartPolicy", "Always")
        if one in self._init and policy == "Always":
            policy = "OnFailure"
        return bool(policy == "Never" or (policy == "OnFailure" and one.exit_code == 0))

    def _end(self) -> None:
        """The main containers at once, then sidecars, the last one first; whoever uses up the time is killed."""
        deadline = time.monotonic() + self._grace_s
        others = [one for one in self._init if not is_sidecar(one.spec)]
        threads = [
            threading.Thread(target=_ended, args=(one, self._grace_s)) for one in (*self._main, *others) if one.running
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for one in reversed(self._sidecars):
            _ended(one, max(deadline - time.monotonic(), min(_SHORTEST_GRACE_S, self._grace_s)))


def _ended(one: Container, grace_s: float) -> None:
    """End one container: SIGTERM, and when its time is over, SIGKILL."""
    process, deadline = one.process, time.monotonic() + grace_s
    if process is None or process.exit_code is not None:
        return
    process.signal(signal.SIGTERM)
    while process.exit_code is None and time.monotonic() < deadline:
        time.sleep(0.01)
    process.kill()


@contextlib.contextmanager
def running(
    body: Mapping[str, Any],
    folder: Path,
    *,
    objects: Objects | None = None,
    place: Place | None = None,
    network: str | None = None,
    backoff_s: float = 0.1,
) -> Iterator[Pod]:
    """Run a pod; it is gone when this ends.

    Args:
        body: as an API server has it, with all that a webhook added.
        folder: a folder that is not there yet: the pod's volumes and what its containers say.
        objects: what is in the cluster beside it.
        place: its node, and its address.
        network: the network namespace (`ip netns`) that it is in; without one, that of this process.
        backoff_s: the first pause before a container is begun again, which doubles; a kubelet takes ten seconds.
    """
    pod = Pod(body, folder, objects or Objects(), place or Place(), network, backoff_s)
    try:
        yield pod
    finally:
        pod.delete(0.0)
