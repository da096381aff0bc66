"""A cluster as it is at one moment, read through its API server with the rights of whoever asks."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from urllib.parse import quote

from sftriage.errors import ClusterError, InputError, StoreError, UsageError
from sftriage.kube.client import NOT_FOUND, AnsweredError, ClusterObjects, path_of
from sftriage.kube.injecting import version_of
from sftriage.kube.jobs import JOB_LABEL, items, labels_of, mapping, text
from sftriage.kube.objects import GROUP, KINDS, Body, status_of
from sftriage.traces.remote import RemoteStore, checked_url

SYSTEM = "sftriage-system"
"""The namespace that `k8s/` installs sftriage in. A chart is installed anywhere."""
PART_LABEL = "app.kubernetes.io/name"
"""By which sftriage's own deployments are known: ``sftriage-operator``, ``sftriage-webhook``."""


@dataclass(frozen=True, slots=True)
class Certificate:
    """What the webhook serves with: until when it is good, and whether a configured CA has signed it."""

    secret: str
    not_before_s: float
    not_after_s: float
    trusted: bool


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The objects of a namespace, and those of sftriage. A part that cannot be read is empty, and ``unread`` says why.

    Attributes:
        version: the server's, major and minor; None where that is unknown.
        about: the namespace's own object.
        system: the namespace that sftriage is installed in; ``unread["elsewhere"]`` is any other that it may be in.
        account: the user that the operator is.
        deployments: those of sftriage itself; ``controllers``: those of the namespace's jobs.
        serving: ready addresses behind the webhook's service; None where that is unknown.
        may: what the person may do, by verb and resource; ``operator_may``: what the operator may.
        stores: why a store that captures name cannot be reached from here, by URL; "" where it can.
    """

    now_s: float
    namespace: str
    version: tuple[int, int] | None = None
    about: Body = field(default_factory=dict)
    definitions: Sequence[Body] = ()
    pods: Sequence[Body] = ()
    events: Sequence[Body] = ()
    quotas: Sequence[Body] = ()
    policies: Sequence[Body] = ()
    captures: Sequence[Body] = ()
    reports: Sequence[Body] = ()
    controllers: Sequence[Body] = ()
    system: str = SYSTEM
    account: str = f"system:serviceaccount:{SYSTEM}:sftriage-operator"
    deployments: Sequence[Body] = ()
    webhooks: Sequence[Body] = ()
    serving: int | None = None
    certificate: Certificate | None = None
    may: Mapping[str, bool] = field(default_factory=dict)
    operator_may: Mapping[str, bool] = field(default_factory=dict)
    stores: Mapping[str, str] = field(default_factory=dict)
    unread: Mapping[str, str] = field(default_factory=dict)


MAX_OBJECTS = 500
"""So many of each kind are looked at: what is wrong with all of them is wrong with the first."""
_MAX_STORES = 3
_OPERATORS = "sftriage-operator"
"""What an operator's deployment is labelled as, and its service account called."""
_MINE = tuple(f"{what}.{GROUP}" for what in ("list triagereports", "list tracecaptures", "create tracecaptures"))
_OPERATOR = (
    *(f"list triagepolicies.{GROUP}", f"patch tracecaptures.{GROUP}", f"update tracecaptures.{GROUP}/status"),
    *("list pods", "create deployments.apps", "create secrets"),
)


class _Reader:
    """Reads parts of a snapshot; what cannot be read is noted."""

    def __init__(self, objects: ClusterObjects) -> None:
        self.objects, self.unread = objects, dict[str, str]()

    def get(self, part: str, path: str, **query: Any) -> dict[str, Any]:
        return dict(self.read(part, lambda: self.objects.ask("GET", path, **query), {}))

    def read(self, part: str, ask: Callable[[], Any], none: Any) -> Any:
        """A part, or ``none`` and a note; what is not there is ``none`` alone."""
        try:
            return ask()
        except AnsweredError as error:
            if error.status != NOT_FOUND:
                self.unread[part] = str(error)
        return none

    def list(self, part: str, path: str, **query: Any) -> list[dict[str, Any]]:
        return list(self.get(part, path, limit=MAX_OBJECTS, **query).get("items") or ())


def gather(objects: ClusterObjects, namespace: str, now_s: float, system: str | None = None) -> Snapshot:
    """A snapshot of a namespace, and of sftriage, which may be installed in any namespace unless ``system`` says which.

    Raises:
        ClusterError: the server cannot be reached.
    """
    reader = _Reader(objects)
    told = reader.get("version", "/version")
    hooks = reader.list("webhooks", path_of("admissionregistration.k8s.io/v1", "mutatingwebhookconfigurations"))
    ours = [one for one in hooks if any(text(hook, "name").endswith(GROUP) for hook in items(one, "webhooks"))]
    system, account, deployments = _installed(reader, system)
    policies, captures, reports = (
        reader.read(kind.plural, partial(objects.list, kind, namespace), []) for kind in KINDS
    )
    quoted = quote(namespace, safe="")
    return Snapshot(
        now_s=now_s,
        namespace=namespace,
        version=version_of(told),
        about=reader.get("about", path_of("v1", "namespaces", name=quoted)),
        definitions=reader.list("definitions", path_of("apiextensions.k8s.io/v1", "customresourcedefinitions")),
        pods=reader.list("pods", path_of("v1", "pods", quoted)),
        events=reader.list("events", path_of("v1", "events", quoted), fieldSelector="type=Warning"),
        quotas=reader.list("quotas", path_of("v1", "resourcequotas", quoted)),
        policies=policies,
        captures=captures,
        reports=reports,
        controllers=reader.list("controllers", path_of("apps/v1", "deployments", quoted), labelSelector=JOB_LABEL),
        system=system,
        account=account,
        deployments=deployments,
        webhooks=ours,
        serving=_serving(reader, ours),
        certificate=_certificate(reader, ours, deployments),
        may=_may(reader, _MINE, namespace, None),
        operator_may=_may(reader, _OPERATOR, namespace, account),
        stores=_stores(captures),
        unread=reader.unread,
    )


def _installed(reader: _Reader, said: str | None) -> tuple[str, str, list[dict[str, Any]]]:
    """The namespace of sftriage, the user of its operator, and its deployments; by default the namespace of `k8s/`."""
    selector = f"{PART_LABEL} in ({_OPERATORS}, sftriage-webhook)"
    found = reader.list("deployments", path_of("apps/v1", "deployments", said), labelSelector=selector)
    if said is None and (refused := reader.unread.pop("deployments", None)):
        reader.unread["elsewhere"] = refused
        found = reader.list("deployments", path_of("apps/v1", "deployments", SYSTEM), labelSelector=selector)
    operators = [one for one in found if labels_of(one)[PART_LABEL] == _OPERATORS]
    first = next(iter(operators or found), {})
    system = said or text(mapping(first, "metadata"), "namespace") or SYSTEM
    account = text(mapping(first, "spec", "template", "spec"), "serviceAccountName") if operators else ""
    return system, f"system:serviceaccount:{system}:{account or _OPERATORS}", found


def _may(reader: _Reader, whats: Iterable[str], namespace: str, who: str | None) -> dict[str, bool]:
    """The rights of a user, by default one's own: by verb and resource, as in ``update group.resource/part``."""
    kind = "SelfSubjectAccessReview" if who is None else "SubjectAccessReview"
    found, user = {}, {}
    if who is not None:
        groups = ["system:serviceaccounts", f"system:serviceaccounts:{who.split(':')[2]}", "system:authenticated"]
        user = {"user": who, "groups": groups}
    for what in whats:
        verb, _, of = what.partition(" ")
        named, _, sub = of.partition("/")
        resource, _, group = named.partition(".")
        about = {"namespace": namespace, "verb": verb, "group": group, "resource": resource, "subresource": sub}
        spec = {"resourceAttributes": about, **user}
        body = {"apiVersion": "authorization.k8s.io/v1", "kind": kind, "spec": spec}
        path = path_of("authorization.k8s.io/v1", f"{kind.lower()}s")
        answer = reader.read("may", partial(reader.objects.ask, "POST", path, body), None)
        if answer is None:
            return {}
        found[what] = bool(mapping(answer, "status").get("allowed"))
    return found


def _serving(reader: _Reader, hooks: Sequence[Body]) -> int | None:
    services = (mapping(hook, "clientConfig", "service") for one in hooks for hook in items(one, "webhooks"))
    service = next(filter(None, services), None)
    if service is None:
        return None
    path = path_of("v1", "endpoints", str(service.get("namespace")), str(service.get("name")))
    found = reader.get("serving", path)
    if "serving" in reader.unread:
        return None
    return sum(len(list(items(subset, "addresses"))) for subset in items(found, "subsets"))


def _certificate(reader: _Reader, hooks: Sequence[Body], deployments: Sequence[Body]) -> Certificate | None:
    bundles = [mapping(hook, "clientConfig").get("caBundle") for one in hooks for hook in items(one, "webhooks")]
    for deployment in deployments:
        if labels_of(deployment)[PART_LABEL] == _OPERATORS:
            continue
        for volume in items(mapping(deployment, "spec", "template", "spec"), "volumes"):
            name = mapping(volume, "secret").get("secretName")
            if not name:
                continue
            secret = reader.get("certificate", path_of("v1", "secrets", deployment["metadata"]["namespace"], str(name)))
            if "tls.crt" in mapping(secret, "data"):
                try:
                    return certificate(str(name), secret["data"]["tls.crt"], [str(one) for one in bundles if one])
                except (ImportError, ValueError) as error:
                    reader.unread["certificate"] = f"it cannot be read: {error}"
    return None


def certificate(secret: str, encoded: str, bundles: Iterable[str]) -> Certificate:
    """A certificate, held against the trusted CAs; all of them PEM in base64, as objects have them.

    Raises:
        ValueError: it cannot be read.
    """
    from cryptography.exceptions import InvalidSignature
    from cryptography.x509 import load_pem_x509_certificates

    def read(text: str) -> list[Any]:
        try:
            return list(load_pem_x509_certificates(base64.b64decode(text)))
        except binascii.Error as error:
            raise ValueError(str(error)) from None

    served = read(encoded)[0]
    trusted = False
    for authority in (one for bundle in set(bundles) for one in read(bundle)):
        try:
            served.verify_directly_issued_by(authority)
            trusted = True
        except (ValueError, TypeError, InvalidSignature):
            trusted = trusted or authority == served
    return Certificate(secret, served.not_valid_before_utc.timestamp(), served.not_valid_after_utc.timestamp(), trusted)


def _stores(captures: Iterable[Body]) -> dict[str, str]:
    places = {text(found, "store"): found for one in captures if (found := mapping(status_of(one), "stored"))}
    problems = {}
    for url, found in list(places.items())[:_MAX_STORES]:
        try:
            RemoteStore.open(checked_url(url)).names(str(found.get("reference")))
            problems[url] = ""
        except (UsageError, InputError, StoreError, ClusterError) as error:
            problems[url] = str(error)
    return problems
