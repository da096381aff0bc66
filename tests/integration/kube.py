"""A real API server: any that a kubeconfig leads to, or one of a test's own; operators, captures and laptops on it."""

import contextlib
import json
import os
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from sftriage.kube.injecting import InjectionSettings
from sftriage.kube.statuses import KnownCapture, capture_status
from sftriage.model.captures import CaptureResult
from sftriage.traces.manifest import Manifest, ReproducedInfo
from sftriage.traces.remote import RemoteStore
from sftriage.traces.store import LocalStore
from tests.integration.processes import DEADLINE_S, ended, wait_until
from tests.unit.conftest import copied, keep
from tests.unit.kube.objects import kubeconfig

ANY = "SFTRIAGE_TEST_KUBECONFIG"
"""The variable that names a kubeconfig of a cluster that may be tried on: definitions and namespaces are made there."""
K8S = Path(__file__).parents[2] / "k8s"
OWN = "SFTRIAGE_TEST_KUBE_BIN"
"""The variable that names a directory with `kube-apiserver` and `etcd`, of which a test starts its own."""
SYSTEM = "sftriage-system"
ACCOUNTS = ("sftriage-operator", "sftriage-webhook", "sftriage-certificates")
"""The service accounts of ours, in the namespace sftriage-system."""


def missing() -> str | None:
    """Why there is no API server to try on, or None."""
    if shutil.which("kubectl") is None:
        return "no kubectl here"
    if os.environ.get(ANY):
        return None
    programs = os.environ.get(OWN)
    if not programs:
        return f"no API server: {ANY} names a kubeconfig, or {OWN} a directory with kube-apiserver and etcd"
    lacking = [name for name in ("etcd", "kube-apiserver") if not (Path(programs) / name).is_file()]
    return f"no {' and no '.join(lacking)} in {OWN}" if lacking else None


class Cluster:
    def __init__(self, kubeconfig: Path) -> None:
        self.kubeconfig = kubeconfig

    def kubectl(self, *arguments: str, text: str = "", check: bool = True) -> subprocess.CompletedProcess[str]:
        command = ["kubectl", "--kubeconfig", str(self.kubeconfig), "--request-timeout=20s", *arguments]
        done = subprocess.run(command, input=text, text=True, capture_output=True, timeout=DEADLINE_S, check=False)
        assert not check or done.returncode == 0, f"{' '.join(arguments)}: {done.stderr}"
        return done

    def create(self, body: Any, namespace: str, *, check: bool = True) -> subprocess.CompletedProcess[str]:
        return self.kubectl("create", "-n", namespace, "-f", "-", text=json.dumps(body), check=check)

    def get(self, *what: str, namespace: str) -> Any:
        return json.loads(self.kubectl("get", *what, "-n", namespace, "-o", "json").stdout)

    def prepare(self, *what: str) -> None:
        """Apply folders and files of ``k8s/``, among them the definitions."""
        self.kubectl("apply", *(word for name in what for word in ("-f", str(K8S / name))))
        self.kubectl("wait", "--for=condition=Established", "crd", "--all", "--timeout=60s")

    def let_age(self, kind: str, namespace: str) -> None:
        """Wait until whatever is created next is younger than all objects of a kind: a server counts in seconds."""

        def aged() -> bool:
            done = self.kubectl("create", "configmap", "clock", "-n", namespace, "-o", "json", "--dry-run=server")
            now = json.loads(done.stdout)["metadata"]["creationTimestamp"]
            items = self.get(kind, namespace=namespace)["items"]
            return all(now > one["metadata"]["creationTimestamp"] for one in items)

        wait_until(aged, 60)

    @contextlib.contextmanager
    def namespace(self) -> Iterator[str]:
        name = f"sftriage-test-{secrets.token_hex(4)}"
        self.kubectl("create", "namespace", name)
        try:
            yield name
        finally:
            self.kubectl("delete", "namespace", name, "--wait=false")

    def as_account(self, folder: Path, account: str = "sftriage-operator", namespace: str = SYSTEM) -> Path:
        config = yaml.safe_load(self.kubectl("config", "view", "--raw", "--minify", "--flatten").stdout)
        config["users"][0]["user"] = {"token": self._token(account, namespace)}
        path = folder / f"kubeconfig-{account}"
        path.write_text(yaml.safe_dump(config))
        path.chmod(0o600)
        return path

    def _token(self, account: str, namespace: str) -> str:
        return self.kubectl("create", "token", "-n", namespace, account).stdout.strip()


class OwnCluster(Cluster):
    """An API server with its etcd, on loopback, of a test's own; nothing runs in it."""

    def __init__(self, programs: Path, *flags: str) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="sftriage-kube-"))
        self._programs, self._tokens = programs, {name: secrets.token_hex(16) for name in ("admin", *ACCOUNTS)}
        self._flags = flags
        self._running: list[subprocess.Popen[bytes]] = []
        self.port, self._client, self._peer = _free_ports(3)
        super().__init__(self.folder / "kubeconfig")
        groups = "system:serviceaccounts,system:serviceaccounts:sftriage-system"
        (self.folder / "tokens.csv").write_text(
            f"{self._tokens['admin']},admin,admin,system:masters\n"
            + "".join(
                f'{self._tokens[name]},system:serviceaccount:sftriage-system:{name},{name},"{groups}"\n'
                for name in ACCOUNTS
            )
        )
        subprocess.run(
            ["openssl", "genrsa", "-out", "sa.key", "2048"], cwd=self.folder, check=True, capture_output=True
        )
        self._write_kubeconfig(self._tokens["admin"])
        try:
            self._start("etcd", *self._etcd())
            self.start()
        except BaseException:
            self.close()
            raise

    @property
    def etcd(self) -> str:
        """The URL of its etcd."""
        return f"http://127.0.0.1:{self._client}"

    def start(self) -> None:
        self._start("kube-apiserver", *self._apiserver())
        wait_until(self._ready, 60)

    def stop(self) -> None:
        self._end(self._running.pop())

    def close(self) -> None:
        while self._running:
            self._end(self._running.pop())
        shutil.rmtree(self.folder)

    def _token(self, account: str, namespace: str) -> str:
        # (those of a namespace that somebody else has are asked for)
        return self._tokens[account] if namespace == SYSTEM else super()._token(account, namespace)

    def _write_kubeconfig(self, token: str) -> None:
        cluster = {"server": f"https://127.0.0.1:{self.port}", "tls-server-name": "kubernetes.default.svc"}
        cluster["certificate-authority"] = f"{self.folder}/certs/apiserver.crt"
        self.kubeconfig.write_text(yaml.safe_dump(kubeconfig(cluster, {"token": token})))
        self.kubeconfig.chmod(0o600)

    def _etcd(self) -> list[str]:
        url, peer = self.etcd, f"http://127.0.0.1:{self._peer}"
        addresses = ["--listen-client-urls", url, "--advertise-client-urls", url, "--listen-peer-urls", peer]
        peers = ["--initial-advertise-peer-urls", peer, "--initial-cluster", f"default={peer}"]
        return ["--data-dir", "etcd", "--unsafe-no-fsync", *addresses, *peers]

    def _apiserver(self) -> list[str]:
        return [
            f"--etcd-servers={self.etcd}",
            *("--bind-address=127.0.0.1", f"--secure-port={self.port}", "--cert-dir=certs"),
            *("--token-auth-file=tokens.csv", "--authorization-mode=RBAC", "--service-cluster-ip-range=10.99.0.0/24"),
            "--service-account-issuer=https://kubernetes.default.svc",
            *("--service-account-key-file=sa.key", "--service-account-signing-key-file=sa.key"),
            *("--disable-admission-plugins=ServiceAccount", "--profiling=false"),
            *self._flags,
        ]

    def _start(self, program: str, *arguments: str) -> None:
        with (self.folder / f"{program}.log").open("ab") as log:
            path = str(self._programs / program)
            process = subprocess.Popen([path, *arguments], cwd=self.folder, stdout=log, stderr=log)
        self._running.append(process)

    def _ready(self) -> bool:
        for process in self._running:
            assert process.poll() is None, self._last_words()
        return self.kubectl("get", "--raw", "/readyz", check=False).stdout == "ok"

    def _last_words(self) -> str:
        return "\n".join(path.read_text()[-2000:] for path in self.folder.glob("*.log"))

    @staticmethod
    def _end(process: subprocess.Popen[bytes]) -> None:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(DEADLINE_S)


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as held:
        sockets = [held.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [one.getsockname()[1] for one in sockets]


@pytest.fixture(scope="session")
def server() -> Iterator[Cluster]:
    """The server of all tests, with the definitions and rights of ``k8s/``, and nothing that runs."""
    if why := missing():
        pytest.skip(why)
    named = os.environ.get(ANY)
    with contextlib.ExitStack() as held:
        own = None if named else held.enter_context(contextlib.closing(OwnCluster(Path(os.environ[OWN]))))
        one = own or Cluster(Path(named or ""))
        one.prepare("crds", "rbac", "webhook/rbac.yaml")
        yield one


@pytest.fixture
def namespace(server: Cluster) -> Iterator[str]:
    with server.namespace() as name:
        yield name


class Operators:
    """One or several, which look after a namespace; with ``settings``, after its jobs, too."""

    def __init__(
        self, server: Cluster, folder: Path, namespace: str, settings: InjectionSettings | None = None
    ) -> None:
        self._folder, self._namespace, self.settings = folder, namespace, settings
        self.environment = {**os.environ, "KUBECONFIG": str(server.as_account(folder))}
        self._held = contextlib.ExitStack()

    def start(self, name: str = "operator", *more: str, everywhere: bool = False) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "sftriage", "operator"]
        command += [] if everywhere else ["--namespace", self._namespace]
        if self.settings is not None:
            settings = self._folder / "settings.yaml"
            settings.write_text(yaml.safe_dump(self.settings.plain()))
            command += ["--settings", str(settings), "--grace-seconds", "1"]
        with (self._folder / name).open("ab") as log:
            process = subprocess.Popen([*command, *more], stdout=log, stderr=log, env=self.environment)
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
        return (self._folder / name).read_text()

    def close(self) -> None:
        self._held.close()


CAPTURE_ID = "w100-149-r2-slow-rank-1"


def made(kind: str, name: str, spec: Any, **metadata: Any) -> dict[str, Any]:
    return {"apiVersion": "sftriage.dev/v1alpha1", "kind": kind, "metadata": {"name": name, **metadata}, "spec": spec}


def definition_of_any(api_version: str, kind: str) -> dict[str, Any]:
    """The definition of a kind of another project: any object is one."""
    group, _, version = api_version.partition("/")
    names = {"kind": kind, "plural": f"{kind.lower()}s", "singular": kind.lower()}
    schema = {"openAPIV3Schema": {"type": "object", "x-kubernetes-preserve-unknown-fields": True}}
    served = {"name": version, "served": True, "storage": True, "schema": schema}
    about = {"apiVersion": "apiextensions.k8s.io/v1", "kind": "CustomResourceDefinition"}
    spec = {"group": group, "scope": "Namespaced", "names": names, "versions": [served]}
    return {**about, "metadata": {"name": f"{names['plural']}.{group}"}, "spec": spec}


def put_status(server: Cluster, namespace: str, plural: str, name: str, status: Any) -> None:
    """Write a status as the operator does, by its subresource; again where somebody else writes meanwhile."""
    path = f"/apis/sftriage.dev/v1alpha1/namespaces/{namespace}/{plural}/{name}/status"

    def written() -> bool:
        body = {**server.get(plural, name, namespace=namespace), "status": status}
        done = server.kubectl("replace", "--raw", path, "-f", "-", text=json.dumps(body), check=False)
        assert done.returncode == 0 or "the object has been modified" in done.stderr, done.stderr
        return done.returncode == 0

    wait_until(written, 60)


def stored_trace(folder: Path, url: str) -> tuple[RemoteStore, Manifest]:
    found = ReproducedInfo(answer="yes", steps=5, steps_with=5, over_s=0.02, expected_s=0.02)
    manifest = keep(folder / "run", CAPTURE_ID, reproduced=found)
    store = RemoteStore.open(url, job=manifest.job, run=manifest.run)
    return RemoteStore.open(url), copied(LocalStore(folder / "run"), store, manifest)


@pytest.fixture
def stored(tmp_path: Path) -> tuple[RemoteStore, Manifest]:
    """A store with one trace, and its manifest."""
    (tmp_path / "traces").mkdir()
    return stored_trace(tmp_path, str(tmp_path / "traces"))


def captured(server: Cluster, namespace: str, store: RemoteStore, manifest: Manifest, place: str = "") -> str:
    why = {"policy": "default", "rule": "slow-rank", "stage": "data", "first_step": 100, "last_step": 149}
    body = made("TraceCapture", "c", {"job": "resnet", "rank": 2, "reason": "slow", "trigger": why})
    server.create(body, namespace)
    result = CaptureResult(CAPTURE_ID, 2, "stored", first_step=160, last_step=164)
    seen = KnownCapture(result, manifest, place or store.place, f"resnet/run-1/{CAPTURE_ID}")
    status = {**capture_status(body, seen, 0.0).plain(), "observedGeneration": 1}
    put_status(server, namespace, "tracecaptures", "c", status)
    return "c"


class Laptop:
    def __init__(self, kubeconfig: Path, home: Path, namespace: str) -> None:
        self.home, self._namespace = home, namespace
        own = {"KUBECONFIG": str(kubeconfig), "COLUMNS": "200", "XDG_CACHE_HOME": str(home / "cache")}
        self.environment = {**os.environ, **own}

    def command(self, *arguments: object) -> list[str]:
        name, *others = map(str, arguments)
        command = ["traces", name, "--cluster"] if name in ("list", "get", "open") else ["kube", name]
        return [sys.executable, "-m", "sftriage", *command, *others, "-n", self._namespace]

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
