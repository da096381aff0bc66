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
from sftriage.kube.client import DURATION_S, LEASES, NOT_FOUND, AnsweredError, ClusterObjects, path_of
from sftriage.kube.injecting import SIDECARS_SINCE, InjectionSettings, injection, manifest, version_of
from sftriage.kube.jobs import items, job_of, labels_of, mapping, text
from sftriage.kube.objects import GROUP, KINDS, Body, condition, status_of
from sftriage.kube.statuses import PodTrouble, pod_trouble, replica_failure
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
        account: the operator's user; ``renewed_s``: when it last renewed its lease, None if unknown.
        deployments: those of sftriage itself, with ``own_pods``; ``controllers``: those of the namespace's jobs.
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
    renewed_s: float | None = None
    deployments: Sequence[Body] = ()
    own_pods: Sequence[Body] = ()
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
_CONTROLLERS = f"{jobs.OUR_COMPONENT_LABEL}={jobs.CONTROLLER}"
_OPERATORS = "sftriage-operator"
"""Label of the operator's deployment, and name of its service account."""
_PARTS = f"{PART_LABEL} in ({_OPERATORS}, sftriage-webhook)"
_MINE = tuple(f"{right}.{GROUP}" for right in ("list triagereports", "list tracecaptures", "create tracecaptures"))
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

    def read(self, part: str, fetch: Callable[[], Any], none: Any) -> Any:
        """A part; ``none`` if it is missing, and with a note if it cannot be read."""
        try:
            return fetch()
        except AnsweredError as error:
            if error.status != NOT_FOUND:
                self.unread[part] = str(error)
        return none

    def list(self, part: str, path: str, **query: Any) -> list[dict[str, Any]]:
        return list(self.get(part, path, limit=MAX_OBJECTS, **query).get("items") or ())


def gather(objects: ClusterObjects, namespace: str, now_s: float, system: str | None = None) -> Snapshot:
    """A snapshot of a namespace, and of sftriage, which may be installed in any namespace unless ``system`` says which.

    Raises ClusterError if the server cannot be reached.
    """
    reader = _Reader(objects)
    hooks = reader.list("webhooks", path_of("admissionregistration.k8s.io/v1", "mutatingwebhookconfigurations"))
    ours = [config for config in hooks if any(text(hook, "name").endswith(GROUP) for hook in items(config, "webhooks"))]
    clients = [mapping(hook, "clientConfig") for config in ours for hook in items(config, "webhooks")]
    system, account, deployments = _installed(reader, system)
    policies, captures, reports = (
        reader.read(kind.plural, partial(objects.list, kind, namespace), []) for kind in KINDS
    )
    quoted = quote(namespace, safe="")
    lease = reader.get("lease", path_of(LEASES, "leases", system, _OPERATORS))
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
        controllers=reader.list("controllers", path_of("apps/v1", "deployments", quoted), labelSelector=_CONTROLLERS),
        system=system,
        account=account,
        deployments=deployments,
        renewed_s=_seconds(mapping(lease, "spec").get("renewTime")),
        own_pods=reader.list("own_pods", path_of("v1", "pods", system), labelSelector=_PARTS),
        webhooks=ours,
        serving=_serving(reader, clients),
        certificate=_served(reader, clients, deployments),
        may=_may(reader, _MINE, namespace, None),
        operator_may=_may(reader, _OPERATOR, namespace, account),
        stores=_stores(captures),
        unread=reader.unread,
    )


def _installed(reader: _Reader, chosen: str | None) -> tuple[str, str, list[dict[str, Any]]]:
    """The namespace of sftriage, the user of its operator, and its deployments; by default the namespace of `k8s/`."""
    found = reader.list("deployments", path_of("apps/v1", "deployments", chosen), labelSelector=_PARTS)
    if chosen is None and (refused := reader.unread.pop("deployments", None)):
        reader.unread["elsewhere"] = refused
        found = reader.list("deployments", path_of("apps/v1", "deployments", SYSTEM), labelSelector=_PARTS)
    operators = [deployment for deployment in found if labels_of(deployment)[PART_LABEL] == _OPERATORS]
    first = next(iter(operators or found), {})
    system = chosen or text(mapping(first, "metadata"), "namespace") or SYSTEM
    account = text(mapping(first, "spec", "template", "spec"), "serviceAccountName") if operators else ""
    return system, f"system:serviceaccount:{system}:{account or _OPERATORS}", found


def _may(reader: _Reader, rights: Iterable[str], namespace: str, user: str | None) -> dict[str, bool]:
    """Rights of a user (default: the caller), by verb and resource, as in ``update resource.group/part``."""
    kind = "SelfSubjectAccessReview" if user is None else "SubjectAccessReview"
    allowed, subject = {}, {}
    if user is not None:
        groups = ["system:serviceaccounts", f"system:serviceaccounts:{user.split(':')[2]}", "system:authenticated"]
        subject = {"user": user, "groups": groups}
    for right in rights:
        verb, _, of = right.partition(" ")
        named, _, sub = of.partition("/")
        resource, _, group = named.partition(".")
        about = {"namespace": namespace, "verb": verb, "group": group, "resource": resource, "subresource": sub}
        spec = {"resourceAttributes": about, **subject}
        body = {"apiVersion": "authorization.k8s.io/v1", "kind": kind, "spec": spec}
        path = path_of("authorization.k8s.io/v1", f"{kind.lower()}s")
        answer = reader.read("may", partial(reader.objects.request, "POST", path, body), None)
        if answer is None:
            return {}
        allowed[right] = bool(mapping(answer, "status").get("allowed"))
    return allowed


def _serving(reader: _Reader, clients: Sequence[Body]) -> int | None:
    service = next(filter(None, (mapping(client, "service") for client in clients)), None)
    if service is None:
        return None
    where = str(service.get("namespace")), str(service.get("name"))
    found = reader.get("serving", path_of("v1", "endpoints", *where))
    if "serving" in reader.unread:
        return None
    return sum(len(list(items(subset, "addresses"))) for subset in items(found, "subsets"))


def _served(reader: _Reader, clients: Sequence[Body], deployments: Sequence[Body]) -> Certificate | None:
    bundles = [str(client["caBundle"]) for client in clients if client.get("caBundle")]
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
                    return certificate(str(name), secret["data"]["tls.crt"], bundles)
                except (ImportError, ValueError) as error:
                    reader.unread["certificate"] = f"{error}"
    return None


def certificate(secret: str, encoded: str, bundles: Iterable[str]) -> Certificate:
    """Check a certificate against the trusted CAs; all are PEM in base64, as in objects. Raises ValueError."""
    from cryptography.exceptions import InvalidSignature
    from cryptography.x509 import load_pem_x509_certificates as loaded

    served, trusted = loaded(base64.b64decode(encoded))[0], False
    for authority in (each for bundle in set(bundles) for each in loaded(base64.b64decode(bundle))):
        try:
            served.verify_directly_issued_by(authority)
            trusted = True
        except (ValueError, TypeError, InvalidSignature):
            trusted = trusted or authority == served
    return Certificate(secret, served.not_valid_before_utc.timestamp(), served.not_valid_after_utc.timestamp(), trusted)


def _stores(captures: Iterable[Body]) -> dict[str, str]:
    places = {text(found, "store"): found for capture in captures if (found := mapping(status_of(capture), "stored"))}
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


def _found(cluster: Snapshot, name: str, /, *, code: str = "", **values: object) -> Finding:
    """A finding of ``findings.yaml``, filled in."""
    texts, part = manifest("findings.yaml")[name], name.partition(".")[0]
    state = next(state for state in STATES if state in texts)
    why = f": {cluster.unread[part]}" if part in cluster.unread else ""
    about = {"namespace": cluster.namespace, "system": cluster.system, "account": cluster.account, "why": why, **values}
    about |= {"label": jobs.INJECT_LABEL, "enabled": jobs.ENABLED}
    return Finding(code or part, state, texts[state].format(**about), texts.get("do", "").format(**about))


def _available(deployment: Body) -> bool:
    return bool(status_of(deployment).get("availableReplicas"))


def _failure(deployment: Body, pods: Iterable[Body]) -> str:
    """Why a deployment does not run, as far as its pods or the lack of them show it."""
    wanted = mapping(deployment, "spec", "selector", "matchLabels").items()
    own = (pod_trouble(pod) for pod in pods if wanted <= labels_of(pod).items())
    trouble = next(filter(None, own), None)
    message = replica_failure(deployment) or ("" if trouble is None else trouble.message)
    return f" ({message})" if message else ""


def _created_s(body: Body) -> float | None:
    return _seconds(body["metadata"].get("creationTimestamp"))


def _old(cluster: Snapshot, body: Body) -> bool:
    """Whether an object should have been handled by now."""
    return (_created_s(body) or cluster.now_s) < cluster.now_s - PATIENCE_S


def _seconds(time: Any) -> float | None:
    try:
        return datetime.fromisoformat(str(time).replace("Z", "+00:00")).timestamp()
    except ValueError:
        return None


def _named(bodies: Sequence[Body]) -> str:
    return _some([str(body["metadata"]["name"]) for body in bodies])


def _some(names: Sequence[str]) -> str:
    more = len(names) - MAX_NAMED
    return ", ".join(names[:MAX_NAMED]) + (f" and {more} more" if more > 0 else "")


LATE_LEASES = 4
"""Lease durations without a renewal, after which an operator counts as hung."""
SOON_S = 7 * 86_400.0
"""A certificate that expires this soon should have been renewed by now."""


def _server(cluster: Snapshot) -> Iterator[Finding]:
    if lacking := [right for right, may in cluster.may.items() if not may]:
        yield _found(cluster, "rights.lacking", names=_some(lacking))
    elif cluster.may:
        yield _found(cluster, "rights.there")
    which = "unknown" if cluster.version is None else "old" if cluster.version < SIDECARS_SINCE else "new"
    yield _found(cluster, f"version.{which}", version=".".join(map(str, cluster.version or ())))
    there = {definition["metadata"]["name"] for definition in cluster.definitions}
    missing = [kind.kind for kind in KINDS if kind.crd not in there]
    which = "unread" if "definitions" in cluster.unread else "missing" if missing else "there"
    yield _found(cluster, f"definitions.{which}", names=_some(missing))


def _operator(cluster: Snapshot) -> Iterator[Finding]:
    yield from _deployment(cluster, "operator", "no job gets a controller, and policies are not checked")
    if lacking := [right for right, may in cluster.operator_may.items() if not may]:
        yield _found(cluster, "operator_rights.lacking", names=_some(lacking))
    if cluster.renewed_s is not None and cluster.now_s > cluster.renewed_s + LATE_LEASES * DURATION_S:
        yield _found(cluster, "lease.late", since=clock(cluster.renewed_s))


def _webhook(cluster: Snapshot) -> Iterator[Finding]:
    if "webhooks" in cluster.unread:
        yield _found(cluster, "webhooks.unread")
    elif not cluster.webhooks:
        yield _found(cluster, "webhook_configuration.missing")
    for configuration in cluster.webhooks:
        hooks = list(items(configuration, "webhooks"))
        bare = [text(hook, "name") for hook in hooks if not mapping(hook, "clientConfig").get("caBundle")]
        which = "ca_bundle.missing" if bare else f"webhook_configuration.{'there' if hooks else 'empty'}"
        yield _found(cluster, which, name=configuration["metadata"]["name"], names=_some(bare))
    yield from _deployment(cluster, "webhook", "no pod is injected, and no error appears")
    if cluster.serving == 0:
        yield _found(cluster, "webhook_service.empty")


def _certificate(cluster: Snapshot) -> Iterator[Finding]:
    served = cluster.certificate
    if served is None:
        if "certificate" in cluster.unread:
            yield _found(cluster, "certificate.unread")
        return
    left_s = served.not_after_s - cluster.now_s
    which = "over" if left_s < 0 else "early" if cluster.now_s < served.not_before_s else "good"
    if which == "good" and not (served.trusted and left_s >= SOON_S):
        which = "soon" if served.trusted else "foreign"
    about = {"end": clock(served.not_after_s), "begin": clock(served.not_before_s), "left": lasted(max(left_s, 0.0))}
    yield _found(cluster, f"certificate.{which}", secret=served.secret, **about)


def _deployment(cluster: Snapshot, part: str, without: str) -> Iterator[Finding]:
    about = {"part": part, "without": without}
    found = [each for each in cluster.deployments if labels_of(each).get(PART_LABEL) == f"sftriage-{part}"]
    if not found and "elsewhere" in cluster.unread:
        yield _found(cluster, "deployments.elsewhere", code=part, **about)
    elif "deployments" in cluster.unread:
        yield _found(cluster, "deployments.unread", **about)
    elif not found:
        yield _found(cluster, "deployments.missing", code=part, **about)
    places = sorted({deployment["metadata"]["namespace"] for deployment in found})
    if len(places) > 1:
        yield _found(cluster, "deployments.several", code=part, names=_some(places), **about)
    for deployment in found:
        metadata = deployment["metadata"]
        about |= {"name": metadata["name"], "where": metadata["namespace"]}
        about["failure"] = _failure(deployment, cluster.own_pods)
        yield _found(cluster, f"deployments.{'runs' if _available(deployment) else 'fails'}", code=part, **about)


def _labels(cluster: Snapshot) -> Iterator[Finding]:
    if "pods" in cluster.unread:
        yield _found(cluster, "pods.unread")
        return
    if not cluster.about and "about" not in cluster.unread:
        yield _found(cluster, "namespace.missing")
        return
    namespace = labels_of(cluster.about).get(jobs.INJECT_LABEL)
    known = None, jobs.ENABLED, "disabled"
    if odd := [pod for pod in cluster.pods if labels_of(pod).get(jobs.INJECT_LABEL) not in known]:
        yield _found(cluster, "label_value.pods", names=_named(odd), have="has" if len(odd) == 1 else "have")
    if namespace not in known:
        yield _found(cluster, "label_value.namespace", value=namespace)
    if without := [pod for pod in _training(cluster) if not _opted_in(cluster, pod)]:
        yield _found(cluster, "label.missing", names=_named(without), train="trains" if len(without) == 1 else "train")
    elif not _training(cluster):
        labelled = ", which is labelled" if namespace == jobs.ENABLED else ""
        yield _found(cluster, "label.none", labelled=labelled)


def _injected(cluster: Snapshot) -> Iterator[Finding]:
    labelled = [pod for pod in _training(cluster) if _opted_in(cluster, pod)]
    lacking = [pod for pod in labelled if not jobs.is_injected(pod)]
    by_reason: dict[tuple[str, str], list[Body]] = {}
    for pod in lacking:
        by_reason.setdefault(_not_injected(cluster, pod), []).append(pod)
    for (reason, warning), pods in by_reason.items():
        yield _found(cluster, f"injected.{reason}", names=_named(pods), warning=warning)
    if labelled and not lacking:
        yield _found(cluster, "injected.all", count=len(labelled))


def _not_injected(cluster: Snapshot, pod: Body) -> tuple[str, str]:
    """Why a pod is not injected: the name of the finding, and the webhook's warning."""
    created = _created_s(pod)
    hooks = [created_s for created_s in map(_created_s, cluster.webhooks) if created_s is not None]
    if cluster.version is not None and cluster.version < SIDECARS_SINCE:
        return "old", ""
    if "webhooks" not in cluster.unread and not hooks:
        return "no_webhook", ""
    if created is not None and hooks and created < min(hooks):
        return "before_webhook", ""
    labelled = _labelled_s(pod if labels_of(pod).get(jobs.INJECT_LABEL) == jobs.ENABLED else cluster.about)
    if created is not None and labelled is not None and labelled > created:
        return "before_label", ""
    would = injection(pod, job_of(pod, cluster.namespace), InjectionSettings(), cluster.version)
    if not would.patch and would.warnings:
        return "left_alone", would.warnings[0].removeprefix("sftriage: not injected: ")
    return "away", ""


def _controllers(cluster: Snapshot) -> Iterator[Finding]:
    injected = [pod for pod in _training(cluster) if jobs.is_injected(pod)]
    found = (job_of(pod, cluster.namespace) for pod in injected if _old(cluster, pod))
    trained = list(dict.fromkeys(filter(None, found)))
    if "controllers" in cluster.unread:
        if trained:
            yield _found(cluster, "controllers.unread")
        return
    deployment = next(iter(cluster.controllers), None)
    reported = {labels_of(report).get(jobs.JOB_LABEL) for report in cluster.reports}
    for job in trained:
        about = {"job": job.job_id, "name": "" if deployment is None else text(deployment["metadata"], "name")}
        if deployment is not None and not _available(deployment):
            yield _found(cluster, "controller.fails", failure=_failure(deployment, cluster.pods), **about)
        elif job.object_name not in reported:
            yield _found(cluster, f"{'controller' if deployment is None else 'report'}.missing", **about)


def _pods(cluster: Snapshot) -> Iterator[Finding]:
    """Pods of sftriage and of watched jobs that do not run as they should, those with the same reason together."""
    watched = [pod for pod in cluster.pods if {jobs.JOB_LABEL, jobs.COMPONENT_LABEL} & labels_of(pod).keys()]
    by_reason: dict[tuple[str, str], list[PodTrouble]] = {}
    for trouble in filter(None, map(pod_trouble, (*cluster.own_pods, *watched))):
        by_reason.setdefault((trouble.reason, trouble.container), []).append(trouble)
    for several in by_reason.values():
        first, names = several[0], _some([trouble.pod for trouble in several])
        about = {"names": names, "message": first.message, "do": first.what_to_do}
        yield _found(cluster, f"pod.{'container' if first.container else 'whole'}", container=first.container, **about)


def _objects(cluster: Snapshot) -> Iterator[Finding]:
    accepted = [(policy, condition(policy, "Accepted")) for policy in cluster.policies]
    invalid = [policy for policy, found in accepted if found is not None and found.status == "False"]
    if invalid:
        yield _found(cluster, "policies.invalid", names=_named(invalid))
    for code, bodies in (("policies", cluster.policies), ("captures", cluster.captures)):
        if late := [body for body in bodies if _unanswered(body) and _old(cluster, body)]:
            yield _found(cluster, f"{code}.late", names=_named(late))
    requested = [each for each in cluster.captures if status_of(each).get("state") == "requested"]
    if late := [each for each in requested if not _unanswered(each) and _old(cluster, each)]:
        named = sorted({str(mapping(capture, "spec").get("job")) for capture in late})
        yield _found(cluster, "captures.idle", names=_named(late), jobs=_some(named))


def _store(cluster: Snapshot) -> Iterator[Finding]:
    stored = [capture for capture in cluster.captures if status_of(capture).get("state") == "stored"]
    if kept := [capture for capture in stored if not mapping(status_of(capture), "stored")]:
        yield _found(cluster, "store.none", names=_named(kept))
    for url, problem in cluster.stores.items():
        which = "reached" if not problem else "directory" if url.startswith(("file:", "/")) else "unreachable"
        yield _found(cluster, f"store.{which}", url=url, problem=problem)


def _quota(cluster: Snapshot) -> Iterator[Finding]:
    for quota in cluster.quotas:
        hard, used = mapping(quota, "status", "hard"), mapping(quota, "status", "used")
        if full := [f"{name} ({used.get(name)} of {most})" for name, most in hard.items() if used.get(name) == most]:
            yield _found(cluster, "quota.full", name=quota["metadata"]["name"], names=_some(full))
    refusals: dict[str, str] = {}
    for event in (each for each in cluster.events if text(each, "reason") == "FailedCreate"):
        of = mapping(event, "involvedObject")
        refusals[f"{of.get('kind', '')} {of.get('name', '')}".strip()] = text(event, "message")
    for name, message in list(refusals.items())[:MAX_NAMED]:
        over = "exceeded quota" in message
        yield _found(cluster, "quota.refuses" if over else "events.refused", name=name, message=message)


def diagnose(cluster: Snapshot) -> list[Finding]:
    """All findings, in the order in which to fix them."""
    of_parts = (_server, _pods, _operator, _webhook, _certificate)
    checks = (*of_parts, *(_labels, _injected, _controllers), *(_objects, _quota, _store))
    return [finding for check in checks for finding in check(cluster)]


def _training(cluster: Snapshot) -> list[Body]:
    going = [pod for pod in cluster.pods if status_of(pod).get("phase") not in ("Succeeded", "Failed")]
    return [pod for pod in going if job_of(pod, cluster.namespace) is not None]


def _opted_in(cluster: Snapshot, pod: Body) -> bool:
    own = labels_of(pod).get(jobs.INJECT_LABEL)
    return own == jobs.ENABLED or (own is None and labels_of(cluster.about).get(jobs.INJECT_LABEL) == jobs.ENABLED)


def _unanswered(body: Body) -> bool:
    return bool(status_of(body).get("observedGeneration") != body["metadata"].get("generation"))


def _labelled_s(body: Body) -> float | None:
    """When the label of an object was last written, if the server kept that."""
    fields, label = items(mapping(body, "metadata"), "managedFields"), f"f:{jobs.INJECT_LABEL}"
    written = (each for each in fields if label in mapping(each, "fieldsV1", "f:metadata", "f:labels"))
    return max((when for each in written if (when := _seconds(each.get("time"))) is not None), default=None)
