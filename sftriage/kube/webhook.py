"""The webhook: its answers to reviews, its TLS server, and its certificate if there is no cert-manager."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import datetime
import ipaddress
import json
import logging
import ssl
import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import uvicorn
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from sftriage.errors import ClusterError, InputError, SftriageError
from sftriage.kube.client import JSON_PATCH, MERGE, ClusterObjects, path_of
from sftriage.kube.injecting import Injection, InjectionSettings, Version, injection, read_settings, version_of
from sftriage.kube.jobs import ENABLED, INJECT_LABEL, job_of, labels_of, mapping, text
from sftriage.kube.objects import GROUP, Requester
from sftriage.words.kube import left_alone

if TYPE_CHECKING:
    from cryptography import x509


log = logging.getLogger("sftriage.kube")
Value = TypeVar("Value")


def answer(review: Mapping[str, Any], settings: InjectionSettings, server: Version | None) -> dict[str, Any]:
    """The review of a request, with its answer, which never refuses; ValueError if it is no AdmissionReview of v1."""
    request = mapping(review, "request")
    uid = text(request, "uid")
    if review.get("apiVersion") != "admission.k8s.io/v1" or not uid:
        raise ValueError("not an AdmissionReview of admission.k8s.io/v1")
    try:
        found = _decided(request, settings, server)
    except Exception as error:
        log.exception("could not handle a request; allowed it unchanged")
        found = Injection(warnings=(left_alone("failed", problem=f"{type(error).__name__}: {error}"),))
    response: dict[str, Any] = {"uid": uid, "allowed": True}
    if found.patch:
        response |= {"patchType": "JSONPatch", "patch": base64.b64encode(json.dumps(found.patch).encode()).decode()}
    if found.warnings:
        response["warnings"] = list(found.warnings)
    return {"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "response": response}


def _decided(request: Mapping[str, Any], settings: InjectionSettings, server: Version | None) -> Injection:
    resource, made = mapping(request, "resource"), mapping(request, "object")
    kind = text(resource, "group"), text(resource, "resource")
    if text(request, "subResource"):
        return Injection()
    if kind == (GROUP, "tracecaptures"):
        return _stamped(request)
    if kind != ("", "pods") or text(request, "operation") != "CREATE":
        return Injection()
    label = labels_of(made).get(INJECT_LABEL)
    found = job_of(made, text(request, "namespace"))
    # (in a namespace that is labelled there are other pods than those of jobs)
    if label not in (None, ENABLED) or (label is None and found is None):
        return Injection()
    return injection(made, found, settings, server)


def _stamped(request: Mapping[str, Any]) -> Injection:
    spec, before = mapping(request, "object", "spec"), mapping(request, "oldObject", "spec")
    if not spec:
        return Injection()
    user, stamp = mapping(request, "userInfo"), before.get("requested_by")
    if text(request, "operation") == "CREATE":
        requester = Requester(username=text(user, "username")[:1024] or "unknown", uid=text(user, "uid")[:1024])
        stamp = requester.model_dump()
    if spec.get("requested_by") == stamp:
        return Injection()
    change = {"op": "remove"} if stamp is None else {"op": "add", "value": stamp}
    return Injection(({**change, "path": "/spec/requested_by"},))


MAX_BODY_BYTES = 8 << 20
"""A server limits an object to 3 MiB, and a review contains it twice."""
CERTIFICATE, KEY = "tls.crt", "tls.key"
LOOK_S = 0.5
VERSION_S, UNKNOWN_VERSION_S = 300.0, 5.0
"""How often to read the server's version: once known, and before."""
LEAVE_S = 5


def reloaded(read: Callable[[], Value], *files: Path) -> Callable[[], Value]:
    """Returns a value read from files, and read again when they change. While that fails, the previous value stays.

    Raises InputError if it cannot be read at first.
    """
    stamps, value = _stamps(files), read()

    def current() -> Value:
        nonlocal stamps, value
        if (found := _stamps(files)) not in ((), stamps):
            stamps = found
            try:
                value = read()
                log.info("read the changed %s", files[0])
            except InputError as error:
                log.warning("%s; keeping the previous state", error)
        return value

    return current


def _stamps(files: Iterable[Path]) -> tuple[tuple[int, int, int], ...]:
    with contextlib.suppress(OSError):
        found = [path.stat() for path in files]
        return tuple((stat.st_ino, stat.st_mtime_ns, stat.st_size) for stat in found)
    return ()


def kept_settings(path: Path | None) -> Callable[[], InjectionSettings]:
    """Returns the settings in a file as they are now; without a file, the defaults."""
    return InjectionSettings if path is None else reloaded(partial(read_settings, path), path)


def rotating(folder: Path) -> ssl.SSLContext:
    """A context that uses, at each handshake, the newest certificate of a folder; InputError if none is usable."""
    newest = reloaded(partial(_context, folder), folder / CERTIFICATE, folder / KEY)
    first = newest()

    def begin(connection: ssl.SSLObject | ssl.SSLSocket, _name: str | None, _first: ssl.SSLContext) -> None:
        if (context := newest()) is not first:
            connection.context = context

    first.sni_callback = begin
    return first


def _context(folder: Path) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        context.load_cert_chain(folder / CERTIFICATE, folder / KEY)
    except (OSError, ssl.SSLError) as error:
        raise InputError(f"no usable certificate in {folder}: {error}") from error
    return context


def version_of_cluster(objects: ClusterObjects) -> Version | None:
    """The API server's version; None while it does not answer. The request blocks."""
    with contextlib.suppress(ClusterError):
        return version_of(objects.request("GET", "/version"))
    return None


class WebhookServer:
    """Answers reviews; ``read_version`` returns the API server's version, or None, and runs on another thread."""

    def __init__(self, settings: Callable[[], InjectionSettings], read_version: Callable[[], Version | None]) -> None:
        self._settings, self._read_version = settings, read_version
        self._server: Version | None = None
        routes = [Route("/mutate", self._mutate, methods=["POST"]), Route("/healthz", self._healthy)]
        self.app = Starlette(routes=[*routes, Route("/readyz", self._ready)], lifespan=self._life)

    @contextlib.asynccontextmanager
    async def _life(self, _app: Starlette) -> AsyncIterator[None]:
        polling = asyncio.create_task(self._poll_version())
        yield
        polling.cancel()

    async def _poll_version(self) -> None:
        while True:
            found = await run_in_threadpool(self._read_version)
            if found is not None and found != self._server:
                log.info("the cluster runs Kubernetes %d.%d", *found)
            self._server = found or self._server
            await asyncio.sleep(UNKNOWN_VERSION_S if found is None else VERSION_S)

    async def _mutate(self, request: Request) -> Response:
        body = bytearray()
        async for chunk in request.stream():
            body += chunk
            if len(body) > MAX_BODY_BYTES:
                return PlainTextResponse("the review is too large", 413)
        try:
            review = json.loads(body)
            if not isinstance(review, dict):
                raise ValueError("not a JSON object")
            return JSONResponse(await run_in_threadpool(answer, review, self._settings(), self._server))
        except (ValueError, RecursionError) as error:
            return PlainTextResponse(f"{error}", 400)

    async def _healthy(self, _request: Request) -> Response:
        return PlainTextResponse("ok")

    async def _ready(self, _request: Request) -> Response:
        known = self._server is not None
        return PlainTextResponse("ok" if known else "the cluster's version is not known yet", 200 if known else 503)


def wait_for_certificate(folder: Path, patience_s: float) -> None:
    """Wait for a certificate and its key, which may be made after the pod has started; InputError if it is late."""
    end_s, logged = time.monotonic() + patience_s, False
    while not all((folder / name).is_file() for name in (CERTIFICATE, KEY)):
        if time.monotonic() > end_s:
            raise InputError(f"no {CERTIFICATE} and {KEY} in {folder}")
        if not logged:
            logged = True
            log.info("waiting for %s and %s in %s", CERTIFICATE, KEY, folder)
        time.sleep(LOOK_S)


def serve(webhook: WebhookServer, host: str, port: int, folder: Path) -> None:
    """Serve until SIGTERM or Ctrl-C; SftriageError if the certificate cannot be used, or the port is taken."""
    config = uvicorn.Config(
        webhook.app,
        host=host,
        port=port,
        log_level="error",
        access_log=False,
        server_header=False,
        proxy_headers=False,
        ws="none",
        timeout_graceful_shutdown=LEAVE_S,
        limit_concurrency=512,
    )
    context = rotating(folder)
    config.load()
    config.ssl = context
    log.info("listening on %s port %d", host, port)
    try:
        uvicorn.Server(config).run()
    except SystemExit as error:
        if error.code:
            raise SftriageError(f"cannot listen on {host} port {port}") from None


AUTHORITY = "ca.crt"
VALID_DAYS, RENEWED_DAYS = 365, 60
"""How long a certificate is valid, and how many days before its end it is renewed."""
_SLACK = datetime.timedelta(minutes=10)


def issued(names: Sequence[str], now: datetime.datetime, days: int = VALID_DAYS) -> dict[str, bytes]:
    """A new certificate for names and addresses, by a new authority: PEM by file, as in the webhook's directory."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

    pem, until = serialization.Encoding.PEM, now + datetime.timedelta(days=days)
    signs, key = ec.generate_private_key(ec.SECP256R1()), ec.generate_private_key(ec.SECP256R1())

    def begun(name: str, public: ec.EllipticCurvePublicKey) -> x509.CertificateBuilder:
        names = name, "sftriage webhook authority"
        subject, by = (x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)]) for name in names)
        made = x509.CertificateBuilder(by, subject, public, x509.random_serial_number())
        return made.not_valid_before(now - _SLACK).not_valid_after(until)

    authority = (
        begun("sftriage webhook authority", signs.public_key())
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(signs.public_key()), critical=False)
        .sign(signs, hashes.SHA256())
    )
    certificate = (
        begun("sftriage webhook", key.public_key())
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(x509.SubjectAlternativeName([_name(name) for name in names]), critical=False)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(signs.public_key()), critical=False)
        .sign(signs, hashes.SHA256())
    )
    private = key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    return {AUTHORITY: authority.public_bytes(pem), CERTIFICATE: certificate.public_bytes(pem), KEY: private}


def _name(name: str) -> x509.GeneralName:
    from cryptography import x509

    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        return x509.DNSName(name)


def service_names(service: str, namespace: str) -> tuple[str, ...]:
    """The DNS names of a service."""
    return f"{service}.{namespace}.svc", f"{service}.{namespace}.svc.cluster.local", f"{service}.{namespace}"


def good_until(files: Mapping[str, bytes], names: Sequence[str]) -> datetime.datetime | None:
    """Until when the certificate in a Secret is valid for these names; None if it is not."""
    from cryptography import x509
    from cryptography.exceptions import InvalidSignature
    from cryptography.hazmat.primitives import serialization

    try:
        certificate = x509.load_pem_x509_certificate(files[CERTIFICATE])
        certificate.verify_directly_issued_by(x509.load_pem_x509_certificate(files[AUTHORITY]))
        key = serialization.load_pem_private_key(files[KEY], None)
        covered = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except (KeyError, ValueError, TypeError, InvalidSignature, x509.ExtensionNotFound):
        return None
    if key.public_key() != certificate.public_key() or not {_name(name) for name in names} <= set(covered):
        return None
    return certificate.not_valid_after_utc


def wanted(
    files: Mapping[str, bytes], trusted: bytes, names: Sequence[str], now: datetime.datetime
) -> tuple[dict[str, bytes] | None, bytes]:
    """The new certificate (None: the one in the Secret is valid), and what each webhook should trust.

    ``files`` are in the Secret now, and ``trusted`` is what the webhooks trust.
    """
    until = good_until(files, names)
    if until is not None and until - now > datetime.timedelta(days=RENEWED_DAYS):
        authority = files[AUTHORITY]
        return None, trusted if authority.strip() in trusted else authority
    made = issued(names, now)
    # (until all webhooks have the new one, some use the old one)
    before = files.get(AUTHORITY, b"") if until is not None else b""
    return made, made[AUTHORITY] + before


def certify(
    objects: ClusterObjects, secret: str, names: Sequence[str], configuration: str, now: datetime.datetime
) -> str:
    """Bring a Secret and a MutatingWebhookConfiguration to `wanted`, and describe what changed.

    Needs rights on these two only; ``secret`` is the path of the Secret, which exists, at first empty. Raises
    ClusterError.
    """
    configured = path_of("admissionregistration.k8s.io/v1", "mutatingwebhookconfigurations", name=configuration)
    data = objects.request("GET", secret).get("data") or {}
    files = {name: base64.b64decode(value) for name, value in data.items()}
    found = objects.request("GET", configured)
    webhooks = found.get("webhooks") or []
    bundles = {webhook["clientConfig"].get("caBundle", "") for webhook in webhooks}
    trusted = base64.b64decode(bundles.pop()) if len(bundles) == 1 else b""
    made, wanted_trust = wanted(files, trusted, names, now)
    # Trust first: with a certificate that is not trusted yet, pods would be created without sftriage.
    if wanted_trust != trusted:
        bundle = base64.b64encode(wanted_trust).decode()
        patch = [
            {"op": "add", "path": f"/webhooks/{index}/clientConfig/caBundle", "value": bundle}
            for index in range(len(webhooks))
        ]
        # (if the list has changed meanwhile, nothing is written, and the caller tries again)
        test = {"op": "test", "path": "/metadata/resourceVersion", "value": found["metadata"]["resourceVersion"]}
        objects.request("PATCH", configured, [test, *patch], as_=JSON_PATCH)
    if made is not None:
        data = {name: base64.b64encode(value).decode() for name, value in made.items()}
        objects.request("PATCH", secret, {"data": data}, as_=MERGE)
        return "wrote a new certificate to the Secret, and its authority to the webhook configuration"
    return "the certificate is valid" + ("" if wanted_trust == trusted else "; its authority is now trusted")
