"""A real Kubernetes of one node on this machine, with images of this checkout; it runs until its test ends it.

Scripts start it (`shared/kube-cluster` beside the repository, or the folder that SFTRIAGE_TEST_CLUSTER names): `build`
makes the programs, `image` the images, `up` a node, `down` ends it. Programs and images are kept between runs. It is
Kubernetes 1.20: `as-newer` gives it indexed Jobs and the sidecar, and `for_old` adapts manifests.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from tests.integration.kube import SYSTEM, Cluster
from tests.integration.processes import ROOT, ended, wait_until

SCRIPTS = Path(os.environ.get("SFTRIAGE_TEST_CLUSTER") or ROOT.parent / "shared" / "kube-cluster")
CACHE = Path(os.environ.get("SFTRIAGE_TEST_CLUSTER_CACHE") or Path.home() / ".cache" / "sftriage-cluster")
PROGRAMS = CACHE / "programs"
IMAGE, TRAINER = "docker.io/library/sftriage:latest", "docker.io/library/trainer:1"
PARTS = ("sftriage-certificates", "sftriage-webhook", "sftriage-operator")
RUNNING = "SFTRIAGE_TEST_CLUSTER_STATE"
"""The variable that names the folder of a cluster that runs already (`up DEST STATE`): tests leave it running."""
_IN_IMAGE = (
    *("Dockerfile", ".dockerignore", "pyproject.toml", "constraints.txt", "hatch_build.py", "release"),
    *("README.md", "LICENSE", "sftriage", "k8s/crds", "policies"),
)
_KEPT = 8
FIRST, LAST = 100, 250
"""The second number of nodes' addresses: each node has a network 10.N.0.0/16."""


def free_number() -> int:
    return next(n for n in range(FIRST + os.getpid() % 50, LAST) if not Path(f"/sys/class/net/kt{n}-m").exists())


def missing() -> str | None:
    """Why no cluster can be started here, or None."""
    if not (SCRIPTS / "up").exists():
        return (
            "no scripts that start a cluster here (SFTRIAGE_TEST_CLUSTER, or shared/kube-cluster beside the repository)"
        )
    if os.geteuid() != 0:
        return "a cluster needs root"
    lacking = [each for each in ("kubectl", "ip", "openssl", "unshare", "nsenter") if shutil.which(each) is None]
    return f"no {', '.join(lacking)} here" if lacking else None


def script(name: str, *arguments: object) -> str:
    """What one of the scripts prints; once at a time on this machine where it builds."""
    done = subprocess.run([SCRIPTS / name, *map(str, arguments)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{name}: {done.stdout[-3000:]}{done.stderr[-3000:]}"
    return done.stdout


@contextlib.contextmanager
def alone(name: str) -> Iterator[None]:
    CACHE.mkdir(parents=True, exist_ok=True)
    with (CACHE / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def programs() -> Path:
    with alone("programs"):
        script("build", PROGRAMS)
    return PROGRAMS


def images(checkout: Path = ROOT) -> list[Path]:
    """The archives of a checkout's image and of the trainers', made anew if the checkout has changed."""
    git = ["git", "-C", str(checkout)]
    made_of = [[*git, "ls-files", "-s", *_IN_IMAGE], [*git, "diff", "HEAD", "--", *_IN_IMAGE]]
    texts = (subprocess.run(command, capture_output=True, check=True).stdout for command in made_of)
    folder = CACHE / "images"
    ours = folder / f"sftriage-{hashlib.sha256(b''.join(texts)).hexdigest()[:16]}.tar"
    made = [ours, folder / "trainer.tar"]
    if all(each.exists() for each in made):
        return made
    with alone("images"):
        if not ours.exists():
            for old in sorted(folder.glob("sftriage-*.tar"), key=lambda each: each.stat().st_mtime)[:-_KEPT]:
                old.unlink()
            (folder / "sftriage.tar").unlink(missing_ok=True)
            script("image", checkout, folder)
            (folder / "sftriage.tar").rename(ours)
    return made


def tag(archive: Path) -> str:
    """The image of an archive that `images` made, by the checkout's content."""
    return f"{IMAGE.rpartition(':')[0]}:{archive.stem.removeprefix('sftriage-')}"


def for_old(manifests: str) -> str:
    """Manifests for Kubernetes 1.20: without what it does not know; the webhook takes it for 1.29."""
    settings = "        - /settings/settings.yaml\n"
    port, version = "        - --port\n", '        - --server-version\n        - "1.29"\n'
    older = manifests.replace("apiVersion: policy/v1\n", "apiVersion: policy/v1beta1\n")
    return older.replace(settings + port, settings + version + port)


class Node(Cluster):
    """A cluster of one node; `start` one, or take one that runs."""

    def __init__(self, state: Path) -> None:
        super().__init__(state / "kubeconfig")
        self.state = state
        self.name, number = (state / "name").read_text().split()
        self.machine, self.address = f"10.{number}.0.1", f"10.{number}.0.2"
        """Addresses of this machine for the node and its pods, and of the node for this machine."""

    @classmethod
    @contextlib.contextmanager
    def start(cls, state: Path) -> Iterator[Node]:
        number = free_number()
        try:
            script("up", programs(), state, f"kt{number}", number)
            yield cls(state)
        finally:
            script("down", state)

    def load(self, *archives: Path) -> None:
        """Give the node images; a checkout's is `sftriage:latest`, and has a tag of its own beside (`tag`)."""
        for archive in archives:
            if not (loaded := self.state / f"{archive.name}.loaded").exists():
                script("image", "load", self.state, archive)
                loaded.touch()
                if archive.name.startswith("sftriage-"):
                    self.ctr("images", "tag", "--force", IMAGE, tag(archive))
            if archive.name.startswith("sftriage-"):
                self.ctr("images", "tag", "--force", tag(archive), IMAGE)

    def ctr(self, *arguments: str) -> str:
        command = [str(PROGRAMS / "bin" / "ctr"), "-a", str(self.state / "containerd.sock"), "-n", "k8s.io", *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout

    def inside(self, *command: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        """Run a command in the node's namespaces."""
        outer = (self.state / "node.pid").read_text().strip()
        first = subprocess.run(["pgrep", "-P", outer], capture_output=True, text=True, check=True).stdout.split()[0]
        whole = ["nsenter", "--target", first, "--net", "--mount", "--pid", "--", *command]
        return subprocess.run(whole, capture_output=True, text=True, check=check)

    @contextlib.contextmanager
    def as_newer(self, port: int = 9444) -> Iterator[None]:
        """Let pods of namespaces labelled ``as-newer`` have indices and a sidecar (as in 1.29)."""
        command = [sys.executable, SCRIPTS / "as-newer", "--kubeconfig", self.kubeconfig, "--sidecar", "sftriage-agent"]
        command += ["--listen", self.machine, "--port", port, "--ctr", PROGRAMS / "bin" / "ctr"]
        command += ["--socket", self.state / "containerd.sock"]
        log = self.state / "log" / "as-newer.log"
        with log.open("wb") as out, ended(subprocess.Popen([*map(str, command)], stdout=out, stderr=out)):
            wait_until(lambda: "ready" in log.read_text(), 60)
            yield

    def snapshot(self) -> frozenset[str]:
        """Every object of the cluster but events, as kind/namespace/name."""
        kinds = self.kubectl("api-resources", "--verbs=list", "-o", "name").stdout.split()
        wanted = ",".join(each for each in kinds if not each.startswith("events"))
        line = r'{range .items[*]}{.kind}/{.metadata.namespace}/{.metadata.name}{"\n"}{end}'
        return frozenset(self.kubectl("get", wanted, "-A", "-o", f"jsonpath={line}").stdout.split())

    def install(self, manifests: str | None = None, prepare: Callable[[], None] = lambda: None) -> None:
        """`kubectl apply -k k8s/`, and wait until all of it is available, with this image and these settings."""
        text = for_old(self.kubectl("kustomize", str(ROOT / "k8s")).stdout) if manifests is None else manifests
        self.kubectl("create", "namespace", SYSTEM, check=False)
        prepare()
        self.kubectl("apply", "-f", "-", text=text)
        self.available()

    def available(self, *parts: str) -> None:
        """Wait until the parts of sftriage, all by default, run what was last applied."""
        for each in parts or PARTS:
            self.kubectl("rollout", "status", f"deployment/{each}", "-n", SYSTEM, "--timeout=230s")


def main(command: str, state: str = "") -> int:
    """`up STATE`, `down STATE`; and `missing`, which says why no cluster starts here within a minute, if so."""
    if command == "missing":
        why = missing() or (None if (PROGRAMS / ".built").exists() else f"no programs in {PROGRAMS}: make cluster")
        sys.stdout.write(why or "")
        return int(why is not None)
    if command == "up":
        number = free_number()
        sys.stdout.write(f"{script('up', programs(), state, f'kt{number}', number)}export {RUNNING}={state}\n")
    else:
        sys.stdout.write(script("down", state))
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
