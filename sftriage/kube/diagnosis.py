"""Why nothing happens in a cluster, and what to do about it.

`gather` reads the cluster with the rights of the user; `diagnose` goes from that `Snapshot` to findings, and is pure.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from functools import partial
from typing import Any, Literal, get_args
from urllib.parse import quote

from sftriage.errors import ClusterError, InputError, StoreError, UsageError
from sftriage.kube import jobs
from sftriage.kube.client import NOT_FOUND, AnsweredError, ClusterObjects, path_of
from sftriage.kube.injecting import SIDECARS_SINCE, InjectionSettings, injection, manifest, version_of
from sftriage.kube.jobs import items, job_of, labels_of, mapping, text
from sftriage.kube.objects import GROUP, KINDS, Body, condition, status_of
from sftriage.traces.remote import RemoteStore, checked_url
from sftriage.words.verdicts import clock, lasted

SYSTEM = "sftriage-system"
"""The namespace that `k8s/` installs sftriage in. A chart is installed anywhere."""
PART_LABEL = "app.kubernetes.io/name"
"""The label of sftriage's own deployments: ``sftriage-operator``, ``sftriage-webhook``."""


@dataclass(frozen=True, slots=True)
class Certificate:
    """The webhook's certificate: when it is valid, and whether a configured CA has signed it."""

    secret: str
    not_before_s: float
    not_after_s: float
    trusted: bool


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The objects of a namespace, and those of sftriage. An unreadable part is empty, with the reason in ``unread``.

    Attributes:
        version: the server's, major and minor; None if unknown.
        about: the namespace's own object.
        system: the namespace that sftriage is installed in; ``unread["elsewhere"]`` is any other that it may be in.
        account: the operator's user.
        deployments: those of sftriage itself; ``controllers``: those of the namespace's jobs.
        serving: ready addresses behind the webhook's service; None if unknown.
        may: rights of the user, by verb and resource; ``operator_may``: rights of the operator.
        stores: by URL of each store that captures name, why it is unreachable from here; "" if reachable.
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
"""Maximum objects read of each kind: what is wrong with all of them is wrong with the first."""
_MAX_STORES = 3
_OPERATORS = "sftriage-operator"
"""Label of the operator's deployment, and name of its service account."""
_MINE = tuple(f"{what}.{GROUP}" for what in ("list triagereports", "list tracecaptures", "create tracecaptures"))
_OPERATOR = (
    *(f"list triagepolicies.{GROUP}", f"patch tracecaptures.{GROUP}", f"update tracecaptures.{GROUP}/status"),
    *("list pods", "create deployments.apps", "create secrets"),
)


class _Reader:
    """Reads parts of a snapshot; notes what cannot be read."""

    def __init__(self, objects: ClusterObjects) -> None:
        self.objects, self.unread = objects, dict[str, str]()

    def get(self, part: str, path: str, **query: Any) -> dict[str, Any]:
        return dict(self.read(part, lambda: self.objects.request("GET", path, **query), {}))

    def read(self, part: str, ask: Callable[[], Any], none: Any) -> Any:
        """A part; ``none`` if it is missing, and with a note if it cannot be read."""
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
        version=version_of(reader.get("version", "/version")),
        about=reader.get("about", path_of("v1", "namespaces", name=quoted)),
        definitions=reader.list("definitions", path_of("apiextensions.k8s.io/v1", "customresourcedefinitions")),
        pods=reader.list("pods", path_of("v1", "pods", quoted)),
        events=reader.list("events", path_of("v1", "events", quoted), fieldSelector="type=Warning"),
        quotas=reader.list("quotas", path_of("v1", "resourcequotas", quoted)),
        policies=policies,
        captures=captures,
        reports=reports,
        controllers=reader.list("controllers", path_of("apps/v1", "deployments", quoted), labelSelector=jobs.JOB_LABEL),
        system=system,
        account=account,
        deployments=deployments,
        webhooks=ours,
        serving=_serving(reader, ours),
        certificate=_served(reader, ours, deployments),
        may=_may(reader, _MINE, namespace, None),
        operator_may=_may(reader, _OPERATOR, namespace, account),
        stores=_stores(captures),
        unread=reader.unread,
    )


def _installed(reader: _Reader, chosen: str | None) -> tuple[str, str, list[dict[str, Any]]]:
    """The namespace of sftriage, the user of its operator, and its deployments; by default the namespace of `k8s/`."""
    selector = f"{PART_LABEL} in ({_OPERATORS}, sftriage-webhook)"
    found = reader.list("deployments", path_of("apps/v1", "deployments", chosen), labelSelector=selector)
    if chosen is None and (refused := reader.unread.pop("deployments", None)):
        reader.unread["elsewhere"] = refused
        found = reader.list("deployments", path_of("apps/v1", "deployments", SYSTEM), labelSelector=selector)
    operators = [one for one in found if labels_of(one)[PART_LABEL] == _OPERATORS]
    first = next(iter(operators or found), {})
    system = chosen or text(mapping(first, "metadata"), "namespace") or SYSTEM
    account = text(mapping(first, "spec", "template", "spec"), "serviceAccountName") if operators else ""
    return system, f"system:serviceaccount:{system}:{account or _OPERATORS}", found


def _may(reader: _Reader, whats: Iterable[str], namespace: str, who: str | None) -> dict[str, bool]:
    """Rights of a user (default: the caller), by verb and resource, as in ``update resource.group/part``."""
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
        answer = reader.read("may", partial(reader.objects.request, "POST", path, body), None)
        if answer is None:
            return {}
        found[what] = bool(mapping(answer, "status").get("allowed"))
    return found


def _serving(reader: _Reader, hooks: Sequence[Body]) -> int | None:
    services = (mapping(hook, "clientConfig", "service") for one in hooks for hook in items(one, "webhooks"))
    service = next(filter(None, services), None)
    if service is None:
        return None
    where = str(service.get("namespace")), str(service.get("name"))
    found = reader.get("serving", path_of("v1", "endpoints", *where))
    if "serving" in reader.unread:
        return None
    return sum(len(list(items(subset, "addresses"))) for subset in items(found, "subsets"))


def _served(reader: _Reader, hooks: Sequence[Body], deployments: Sequence[Body]) -> Certificate | None:
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
                    reader.unread["certificate"] = f"{error}"
    return None


def certificate(secret: str, encoded: str, bundles: Iterable[str]) -> Certificate:
    """Check a certificate against the trusted CAs; all of them are PEM in base64, as in objects.

    Raises:
        ValueError: it cannot be read.
    """
    from cryptography.exceptions import InvalidSignature
    from cryptography.x509 import load_pem_x509_certificates as loaded

    served, trusted = loaded(base64.b64decode(encoded))[0], False
    for authority in (one for bundle in set(bundles) for one in loaded(base64.b64decode(bundle))):
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


PATIENCE_S = 60.0
"""Age at which a new object should have been handled."""
MAX_NAMED = 3
"""Maximum objects named in one finding."""


State = Literal["ok", "wrong", "unknown"]
STATES: tuple[State, ...] = get_args(State)


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of a check: its ``code`` for programs, what it ``says``, and what to ``do`` if it is wrong."""

    code: str
    state: State
    says: str
    do: str = ""


def _found(seen: Snapshot, name: str, /, *, code: str = "", **given: object) -> Finding:
    """A finding of ``findings.yaml``, filled in."""
    texts, part = manifest("findings.yaml")[name], name.partition(".")[0]
    state = next(one for one in STATES if one in texts)
    why = f": {seen.unread[part]}" if part in seen.unread else ""
    about = {"namespace": seen.namespace, "system": seen.system, "account": seen.account, "why": why, **given}
    about |= {"label": jobs.INJECT_LABEL, "enabled": jobs.ENABLED}
    return Finding(code or part, state, texts[state].format(**about), texts.get("do", "").format(**about))


def _available(deployment: Body) -> bool:
    return bool(status_of(deployment).get("availableReplicas"))


def _failure(deployment: Body) -> str:
    found = [one for one in items(status_of(deployment), "conditions") if one.get("type") == "ReplicaFailure"]
    return f" ({text(found[0], 'message')})" if found and text(found[0], "message") else ""


def _created_s(body: Body) -> float | None:
    return _seconds(body["metadata"].get("creationTimestamp"))


def _old(seen: Snapshot, body: Body) -> bool:
    """Whether an object should have been handled by now."""
    created_s = _created_s(body)
    return created_s is not None and seen.now_s - created_s > PATIENCE_S


def _seconds(time: Any) -> float | None:
    try:
        return datetime.fromisoformat(str(time).replace("Z", "+00:00")).timestamp()
    except ValueError:
        return None


def _named(bodies: Sequence[Body]) -> str:
    return _some([str(one["metadata"]["name"]) for one in bodies])


def _some(names: Sequence[str]) -> str:
    more = len(names) - MAX_NAMED
    return ", ".join(names[:MAX_NAMED]) + (f" and {more} more" if more > 0 else "")


SOON_S = 7 * 86_400.0
"""A certificate that expires this soon should have been renewed by now."""


def _rights(seen: Snapshot) -> Iterator[Finding]:
    if lacking := [what for what, may in seen.may.items() if not may]:
        yield _found(seen, "rights.lacking", names=_some(lacking))
    elif seen.may:
        yield _found(seen, "rights.there")


def _version(seen: Snapshot) -> Iterator[Finding]:
    which = "unknown" if seen.version is None else "old" if seen.version < SIDECARS_SINCE else "new"
    yield _found(seen, f"version.{which}", version=".".join(map(str, seen.version or ())))


def _definitions(seen: Snapshot) -> Iterator[Finding]:
    there = {one["metadata"]["name"] for one in seen.definitions}
    missing = [kind.kind for kind in KINDS if kind.crd not in there]
    which = "unread" if "definitions" in seen.unread else "missing" if missing else "there"
    yield _found(seen, f"definitions.{which}", names=_some(missing))


def _operator(seen: Snapshot) -> Iterator[Finding]:
    yield from _deployment(seen, "operator", "no job gets a controller, and policies are not checked")
    if lacking := [what for what, may in seen.operator_may.items() if not may]:
        yield _found(seen, "operator_rights.lacking", names=_some(lacking))


def _webhook(seen: Snapshot) -> Iterator[Finding]:
    if "webhooks" in seen.unread:
        yield _found(seen, "webhooks.unread")
    elif not seen.webhooks:
        yield _found(seen, "webhook_configuration.missing")
    for one in seen.webhooks:
        hooks = list(items(one, "webhooks"))
        bare = [text(hook, "name") for hook in hooks if not mapping(hook, "clientConfig").get("caBundle")]
        which = "ca_bundle.missing" if bare else f"webhook_configuration.{'there' if hooks else 'empty'}"
        yield _found(seen, which, name=one["metadata"]["name"], names=_some(bare))
    yield from _deployment(seen, "webhook", "no pod is injected, and no error appears")
    if seen.serving == 0:
        yield _found(seen, "webhook_service.empty")


def _certificate(seen: Snapshot) -> Iterator[Finding]:
    one = seen.certificate
    if one is None:
        if "certificate" in seen.unread:
            yield _found(seen, "certificate.unread")
        return
    left_s = one.not_after_s - seen.now_s
    which = "over" if left_s < 0 else "early" if seen.now_s < one.not_before_s else "good"
    if which == "good" and not (one.trusted and left_s >= SOON_S):
        which = "soon" if one.trusted else "foreign"
    about = {"end": clock(one.not_after_s), "begin": clock(one.not_before_s), "left": lasted(max(left_s, 0.0))}
    yield _found(seen, f"certificate.{which}", secret=one.secret, **about)


def _deployment(seen: Snapshot, part: str, without: str) -> Iterator[Finding]:
    about = {"part": part, "without": without}
    found = [one for one in seen.deployments if labels_of(one).get(PART_LABEL) == f"sftriage-{part}"]
    if not found and "elsewhere" in seen.unread:
        yield _found(seen, "deployments.elsewhere", code=part, **about)
    elif "deployments" in seen.unread:
        yield _found(seen, "deployments.unread", **about)
    elif not found:
        yield _found(seen, "deployments.missing", code=part, **about)
    places = sorted({one["metadata"]["namespace"] for one in found})
    if len(places) > 1:
        yield _found(seen, "deployments.several", code=part, names=_some(places), **about)
    for one in found:
        about |= {"name": one["metadata"]["name"], "where": one["metadata"]["namespace"], "failure": _failure(one)}
        yield _found(seen, f"deployments.{'runs' if _available(one) else 'fails'}", code=part, **about)


def diagnose(seen: Snapshot) -> list[Finding]:
    """All findings, in the order in which to fix them."""
    return [finding for check in _CHECKS for finding in check(seen)]


def _labels(seen: Snapshot) -> Iterator[Finding]:
    if "pods" in seen.unread:
        yield _found(seen, "pods.unread")
        return
    if not seen.about and "about" not in seen.unread:
        yield _found(seen, "namespace.missing")
        return
    namespace = labels_of(seen.about).get(jobs.INJECT_LABEL)
    if odd := [
        pod
        for pod in seen.pods
        if labels_of(pod).get(jobs.INJECT_LABEL, jobs.ENABLED) not in (jobs.ENABLED, "disabled")
    ]:
        yield _found(seen, "label_value.pods", names=_named(odd), have="has" if len(odd) == 1 else "have")
    if namespace not in (None, jobs.ENABLED, "disabled"):
        yield _found(seen, "label_value.namespace", value=namespace)
    if without := [pod for pod in _training(seen) if not _asks(seen, pod)]:
        yield _found(seen, "label.missing", names=_named(without), train="trains" if len(without) == 1 else "train")
    elif not any(_asks(seen, pod) for pod in _training(seen)):
        asks = ", which is labelled" if namespace == jobs.ENABLED else ""
        yield _found(seen, "label.none", asks=asks)


def _injected(seen: Snapshot) -> Iterator[Finding]:
    asking = [pod for pod in _training(seen) if _asks(seen, pod)]
    lacking = [pod for pod in asking if not jobs.is_injected(pod)]
    by_reason: dict[tuple[str, str], list[Body]] = {}
    for pod in lacking:
        by_reason.setdefault(_not_injected(seen, pod), []).append(pod)
    for (reason, warning), pods in by_reason.items():
        yield _found(seen, f"injected.{reason}", names=_named(pods), warning=warning)
    if asking and not lacking:
        yield _found(seen, "injected.all", count=len(asking))


def _not_injected(seen: Snapshot, pod: Body) -> tuple[str, str]:
    """Why a pod is not injected: the name of the finding, and the webhook's warning."""
    created = _created_s(pod)
    hooks = [one for one in map(_created_s, seen.webhooks) if one is not None]
    if seen.version is not None and seen.version < SIDECARS_SINCE:
        return "old", ""
    if "webhooks" not in seen.unread and not hooks:
        return "no_webhook", ""
    if created is not None and hooks and created < min(hooks):
        return "before_webhook", ""
    labelled = _labelled_s(pod if labels_of(pod).get(jobs.INJECT_LABEL) == jobs.ENABLED else seen.about)
    if created is not None and labelled is not None and labelled > created:
        return "before_label", ""
    would = injection(pod, job_of(pod, seen.namespace), InjectionSettings(), seen.version)
    if not would.patch and would.warnings:
        return "left_alone", would.warnings[0].removeprefix("sftriage: not injected: ")
    return "away", ""


def _controllers(seen: Snapshot) -> Iterator[Finding]:
    injected = [one for one in _training(seen) if jobs.is_injected(one)]
    found = (job_of(one, seen.namespace) for one in injected if _old(seen, one))
    trained = list(dict.fromkeys(filter(None, found)))
    if "controllers" in seen.unread:
        if trained:
            yield _found(seen, "controllers.unread")
        return
    there = {labels_of(one).get(jobs.JOB_LABEL): one for one in seen.controllers}
    reported = {labels_of(one).get(jobs.JOB_LABEL) for one in seen.reports}
    for job in trained:
        deployment, about = there.get(job.object_name), {"job": job.job_id, "name": job.object_name}
        if deployment is not None and not _available(deployment):
            yield _found(seen, "controller.fails", failure=_failure(deployment), **about)
        elif job.object_name not in reported:
            yield _found(seen, f"{'controller' if deployment is None else 'report'}.missing", **about)


def _objects(seen: Snapshot) -> Iterator[Finding]:
    invalid = [one for one in seen.policies if (found := condition(one, "Accepted")) and found.status == "False"]
    if invalid:
        yield _found(seen, "policies.invalid", names=_named(invalid))
    for code, bodies in (("policies", seen.policies), ("captures", seen.captures)):
        if late := [one for one in bodies if _unanswered(one) and _old(seen, one)]:
            yield _found(seen, f"{code}.late", names=_named(late))
    asked = [one for one in seen.captures if status_of(one).get("state") == "requested" and not _unanswered(one)]
    if late := [one for one in asked if _old(seen, one)]:
        named = sorted({str(mapping(capture, "spec").get("job")) for capture in late})
        yield _found(seen, "captures.idle", names=_named(late), jobs=_some(named))


def _store(seen: Snapshot) -> Iterator[Finding]:
    stored = [one for one in seen.captures if status_of(one).get("state") == "stored"]
    if kept := [one for one in stored if not mapping(status_of(one), "stored")]:
        yield _found(seen, "store.none", names=_named(kept))
    for url, problem in seen.stores.items():
        which = "reached" if not problem else "directory" if url.startswith(("file:", "/")) else "unreachable"
        yield _found(seen, f"store.{which}", url=url, problem=problem)


def _quota(seen: Snapshot) -> Iterator[Finding]:
    for one in seen.quotas:
        hard, used = mapping(one, "status", "hard"), mapping(one, "status", "used")
        if full := [f"{what} ({used.get(what)} of {most})" for what, most in hard.items() if used.get(what) == most]:
            yield _found(seen, "quota.full", name=one["metadata"]["name"], names=_some(full))
    refusals: dict[str, str] = {}
    for one in (event for event in seen.events if text(event, "reason") == "FailedCreate"):
        of = mapping(one, "involvedObject")
        refusals[f"{of.get('kind', '')} {of.get('name', '')}".strip()] = text(one, "message")
    for name, message in list(refusals.items())[:MAX_NAMED]:
        over = "exceeded quota" in message
        yield _found(seen, "quota.refuses" if over else "events.refused", name=name, message=message)


_CHECKS: Sequence[Callable[[Snapshot], Iterator[Finding]]] = (
    _rights,
    _version,
    _definitions,
    _operator,
    _webhook,
    _certificate,
    _labels,
    _injected,
    _controllers,
    _objects,
    _quota,
    _store,
)


def _training(seen: Snapshot) -> list[Body]:
    going = [one for one in seen.pods if status_of(one).get("phase") not in ("Succeeded", "Failed")]
    return [one for one in going if job_of(one, seen.namespace) is not None]


def _asks(seen: Snapshot, pod: Body) -> bool:
    own = labels_of(pod).get(jobs.INJECT_LABEL)
    return own == jobs.ENABLED or (own is None and labels_of(seen.about).get(jobs.INJECT_LABEL) == jobs.ENABLED)


def _unanswered(body: Body) -> bool:
    return bool(status_of(body).get("observedGeneration") != body["metadata"].get("generation"))


def _labelled_s(body: Body) -> float | None:
    """When the label of an object was last written, if the server kept that."""
    found = []
    for one in items(mapping(body, "metadata"), "managedFields"):
        labels: Mapping[str, Any] = mapping(one, "fieldsV1", "f:metadata", "f:labels")
        if f"f:{jobs.INJECT_LABEL}" in labels and (when := _seconds(one.get("time"))) is not None:
            found.append(when)
    return max(found, default=None)
