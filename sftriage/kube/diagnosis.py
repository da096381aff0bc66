"""Why nothing happens in a cluster, and what to do about it.

`gather` reads the cluster with the rights of the user; `diagnose` goes from that `Snapshot` to findings, and is pure.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from functools import partial
from typing import Any, Literal
from urllib.parse import quote

from sftriage.errors import ClusterError, InputError, StoreError, UsageError
from sftriage.kube.client import NOT_FOUND, AnsweredError, ClusterObjects, path_of
from sftriage.kube.injecting import SIDECARS_SINCE, InjectionSettings, injection, version_of
from sftriage.kube.jobs import (
    ENABLED,
    INJECT_LABEL,
    INJECTED,
    JOB_LABEL,
    STATUS_ANNOTATION,
    annotations_of,
    items,
    job_of,
    labels_of,
    mapping,
    text,
)
from sftriage.kube.objects import GROUP, KINDS, Body, condition, status_of
from sftriage.traces.remote import RemoteStore, checked_url
from sftriage.words.verdicts import clock, lasted

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
        controllers=reader.list("controllers", path_of("apps/v1", "deployments", quoted), labelSelector=JOB_LABEL),
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
                    reader.unread["certificate"] = f"it cannot be read: {error}"
    return None


def certificate(secret: str, encoded: str, bundles: Iterable[str]) -> Certificate:
    """A certificate, held against the trusted CAs; all of them PEM in base64, as objects have them.

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
"""How long what was just made may take until somebody has looked at it."""
MAX_NAMED = 3
"""Of what is wrong alike, so many are named."""


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of a check: its ``code`` for programs, what it ``says``, and what to ``do`` where that is wrong."""

    code: str
    state: Literal["ok", "wrong", "unknown"]
    says: str
    do: str = ""


def _ok(code: str, says: str) -> Finding:
    return Finding(code, "ok", says)


def _wrong(code: str, says: str, do: str) -> Finding:
    return Finding(code, "wrong", says, do)


def _not_seen(seen: Snapshot, part: str, what: str) -> Finding:
    return Finding(part, "unknown", f"you may not look at {what}{_why(seen, part)}")


def _why(seen: Snapshot, part: str) -> str:
    return f": {seen.unread[part]}" if part in seen.unread else ""


def _available(deployment: Body) -> bool:
    return bool(status_of(deployment).get("availableReplicas"))


def _failure(deployment: Body) -> str:
    found = [one for one in items(status_of(deployment), "conditions") if one.get("type") == "ReplicaFailure"]
    return f" ({text(found[0], 'message')})" if found and text(found[0], "message") else ""


def _created_s(body: Body) -> float | None:
    return _seconds(body["metadata"].get("creationTimestamp"))


def _old(seen: Snapshot, body: Body) -> bool:
    """Whether somebody should have reacted to an object by now."""
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
"""A certificate that is over this soon is nearly over: it should have been renewed by now."""
_INSTALL = "kubectl apply -k k8s, or the chart of it"


def _rights(seen: Snapshot) -> Iterator[Finding]:
    lacking = [what for what, may in seen.may.items() if not may]
    if lacking:
        do = f"ask for the rights, in namespace {seen.namespace}, of whoever looks after the cluster"
        yield _wrong("rights", f"you may not {_some(lacking)}", do)
    elif seen.may:
        yield _ok("rights", "you may see reports and captures, and ask for captures")


def _version(seen: Snapshot) -> Iterator[Finding]:
    told = ".".join(map(str, seen.version or ()))
    if seen.version is None:
        yield Finding("version", "unknown", f"the server does not tell its version{_why(seen, 'version')}")
    elif seen.version < SIDECARS_SINCE:
        says = f"Kubernetes {told} has no native sidecars (they came with 1.29): nothing is injected into any pod"
        yield _wrong("version", says, "upgrade the cluster; until then, jobs on many hosts need no operator")
    else:
        yield _ok("version", f"Kubernetes {told} has native sidecars")


def _definitions(seen: Snapshot) -> Iterator[Finding]:
    if "definitions" in seen.unread:
        yield _not_seen(seen, "definitions", "the custom resource definitions")
        return
    there = {one["metadata"]["name"] for one in seen.definitions}
    if missing := [kind.kind for kind in KINDS if kind.crd not in there]:
        yield _wrong("definitions", f"the cluster does not know {_some(missing)}", _INSTALL)
    else:
        yield _ok("definitions", "the custom resource definitions are there")


def _operator(seen: Snapshot) -> Iterator[Finding]:
    yield from _deployment(seen, "operator", "no controller is started for any job, and no policy is looked at")
    if lacking := [what for what, may in seen.operator_may.items() if not may]:
        says = f"the operator ({seen.account}) may not {_some(lacking)}"
        yield _wrong("operator_rights", says, "kubectl apply -f k8s/rbac")


def _webhook(seen: Snapshot) -> Iterator[Finding]:
    if "webhooks" in seen.unread:
        yield _not_seen(seen, "webhooks", "webhook configurations")
    elif not seen.webhooks:
        says = "there is no webhook configuration of sftriage: pods are created as they are"
        yield _wrong("webhook_configuration", says, _INSTALL)
    for one in seen.webhooks:
        name, hooks = one["metadata"]["name"], list(items(one, "webhooks"))
        bare = [text(hook, "name") for hook in hooks if not mapping(hook, "clientConfig").get("caBundle")]
        if not hooks:
            yield _wrong("webhook_configuration", f"webhook configuration {name} has no webhooks", _INSTALL)
        elif bare:
            says = (
                f"webhook configuration {name} has no caBundle ({_some(bare)}): no pod is injected, and nobody says so"
            )
            do = f"look at what fills it in: cert-manager, or the Job in {seen.system} that makes certificates"
            yield _wrong("ca_bundle", says, do)
        else:
            yield _ok("webhook_configuration", f"webhook configuration {name} is there")
    yield from _deployment(seen, "webhook", "pods are created as they are, and nobody says so")
    if seen.serving == 0:
        says = "nobody answers behind the service of the webhook: no pod of it is ready"
        yield _wrong("webhook_service", says, f"kubectl get pods -n {seen.system}")


def _certificate(seen: Snapshot) -> Iterator[Finding]:
    one = seen.certificate
    if one is None:
        if "certificate" in seen.unread:
            yield _not_seen(seen, "certificate", "the webhook's certificate")
        return
    renew = (
        f"kubectl create job renew --from=cronjob/sftriage-certificates -n {seen.system}, unless cert-manager renews it"
    )
    if seen.now_s > one.not_after_s:
        yield _wrong(
            "certificate", f"the webhook's certificate (Secret {one.secret}) ended at {clock(one.not_after_s)}", renew
        )
    elif seen.now_s < one.not_before_s:
        says = f"the webhook's certificate is good from {clock(one.not_before_s)} on: a clock is wrong"
        yield _wrong("certificate", says, "set the clock of this machine, or of who made it")
    elif not one.trusted:
        says = "the webhook's certificate is signed by none whom its configuration trusts (caBundle)"
        yield _wrong("certificate", says, renew)
    elif one.not_after_s - seen.now_s < SOON_S:
        says = f"the webhook's certificate is good for {lasted(one.not_after_s - seen.now_s)} yet"
        yield _wrong("certificate", says, renew)
    else:
        yield _ok("certificate", f"the webhook's certificate is good until {clock(one.not_after_s)}")


def _deployment(seen: Snapshot, part: str, without: str) -> Iterator[Finding]:
    found = [one for one in seen.deployments if labels_of(one).get(PART_LABEL) == f"sftriage-{part}"]
    if not found and "elsewhere" in seen.unread:
        says = f"no {part} can be seen in {seen.system}, and you may not look at other namespaces"
        yield Finding(part, "unknown", says, "--operator-namespace NAME says where it is")
    elif "deployments" in seen.unread:
        yield _not_seen(seen, "deployments", f"the {part}")
    elif not found:
        yield _wrong(part, f"there is no {part}: {without}", _INSTALL)
    places = sorted({one["metadata"]["namespace"] for one in found})
    if len(places) > 1:
        says = f"there is more than one {part}, in {_some(places)}: each does what the other does"
        yield _wrong(part, says, "take away all of them but one")
    for one in found:
        name, namespace = one["metadata"]["name"], one["metadata"]["namespace"]
        if _available(one):
            yield _ok(part, f"the {part} runs, in {namespace}")
        else:
            do = f"kubectl describe deployment {name} -n {namespace}"
            yield _wrong(part, f"the {part} does not run{_failure(one)}: {without}", do)


def diagnose(seen: Snapshot) -> list[Finding]:
    """All that was looked at, in the order in which it has to be right."""
    return [finding for check in _CHECKS for finding in check(seen)]


def _labels(seen: Snapshot) -> Iterator[Finding]:
    if "pods" in seen.unread:
        yield _not_seen(seen, "pods", f"the pods of namespace {seen.namespace}")
        return
    if not seen.about and "about" not in seen.unread:
        yield _wrong("namespace", f"there is no namespace {seen.namespace}", "kubectl get namespaces")
        return
    namespace = labels_of(seen.about).get(INJECT_LABEL)
    label = f"kubectl label namespace {seen.namespace} {INJECT_LABEL}={ENABLED} --overwrite"
    if odd := [pod for pod in seen.pods if labels_of(pod).get(INJECT_LABEL, ENABLED) not in (ENABLED, "disabled")]:
        says = f"{_named(odd)} ha{'s' * (len(odd) == 1) or 've'} the label {INJECT_LABEL} with another value"
        yield _wrong("label_value", says, f"{INJECT_LABEL}: {ENABLED} is what asks for it")
    if namespace not in (None, ENABLED, "disabled"):
        says = f"namespace {seen.namespace} has the label {INJECT_LABEL}={namespace}"
        yield _wrong("label_value", says, label)
    if without := [pod for pod in _training(seen) if not _asks(seen, pod)]:
        says = f"{_named(without)} train{'s' * (len(without) == 1)}, without the label {INJECT_LABEL}={ENABLED}"
        do = f"put it into the job's pod template, or on all of them: {label}; then create the job anew"
        yield _wrong("label", says, do)
    elif not any(_asks(seen, pod) for pod in _training(seen)):
        where = f"namespace {seen.namespace}"
        asks = " (its label asks for sftriage)" if namespace == ENABLED else ""
        yield Finding("label", "unknown", f"no pod of a training job runs in {where}{asks}")


def _injected(seen: Snapshot) -> Iterator[Finding]:
    asking = [pod for pod in _training(seen) if _asks(seen, pod)]
    lacking = [pod for pod in asking if annotations_of(pod).get(STATUS_ANNOTATION) != INJECTED]
    by_reason: dict[tuple[str, str], list[Body]] = {}
    for pod in lacking:
        by_reason.setdefault(_not_injected(seen, pod), []).append(pod)
    for (why, do), pods in by_reason.items():
        yield _wrong("injected", f"{_named(pods)}: labelled, but not injected: {why}", do)
    if asking and not lacking:
        yield _ok("injected", f"all {len(asking)} labelled pods are injected")


_ANEW = "create the pods anew (they are changed at their creation alone)"


def _not_injected(seen: Snapshot, pod: Body) -> tuple[str, str]:
    created = _created_s(pod)
    hooks = [one for one in map(_created_s, seen.webhooks) if one is not None]
    if seen.version is not None and seen.version < SIDECARS_SINCE:
        return "the cluster is too old", "see above"
    if "webhooks" not in seen.unread and not hooks:
        return "there is no webhook", "see above, and then create the pods anew"
    if created is not None and hooks and created < min(hooks):
        return "older than the webhook", _ANEW
    labelled = _labelled_s(pod if labels_of(pod).get(INJECT_LABEL) == ENABLED else seen.about)
    if created is not None and labelled is not None and labelled > created:
        return "older than the label, or its last change", f"{_ANEW}, with the label in their template"
    would = injection(pod, job_of(pod, seen.namespace), InjectionSettings(), seen.version)
    if not would.patch and would.warnings:
        return would.warnings[0].removeprefix("sftriage: not injected: "), "change that, and create the pods anew"
    do = f"kubectl logs -n {seen.system} deployment/sftriage-webhook says what it did; create the pods anew"
    return "the webhook was away when they were created, or the namespace had no room for sidecars", do


def _controllers(seen: Snapshot) -> Iterator[Finding]:
    injected = [one for one in _training(seen) if annotations_of(one).get(STATUS_ANNOTATION) == INJECTED]
    found = (job_of(one, seen.namespace) for one in injected if _old(seen, one))
    jobs = list(dict.fromkeys(filter(None, found)))
    there = {labels_of(one).get(JOB_LABEL): one for one in seen.controllers}
    reported = {labels_of(one).get(JOB_LABEL) for one in seen.reports}
    for job in jobs:
        deployment, of = there.get(job.object_name), f"job {job.job_id}"
        if "controllers" in seen.unread:
            break
        if deployment is None:
            if job.object_name not in reported:
                do = f"kubectl logs -n {seen.system} deployment/sftriage-operator"
                yield _wrong("controller", f"{of} has no controller", do)
        elif not _available(deployment):
            says = f"the controller of {of} does not run{_failure(deployment)}"
            yield _wrong("controller", says, f"kubectl describe deployment {job.object_name} -n {seen.namespace}")
        elif job.object_name not in reported:
            says = f"{of} has no report: its controller has not said anything"
            yield _wrong("report", says, f"kubectl logs -n {seen.namespace} deployment/{job.object_name}")
    if "controllers" in seen.unread and jobs:
        yield _not_seen(seen, "controllers", "the controllers of jobs")


def _objects(seen: Snapshot) -> Iterator[Finding]:
    invalid = [one for one in seen.policies if (found := condition(one, "Accepted")) and found.status == "False"]
    if invalid:
        yield _wrong("policies", f"{_named(invalid)} not valid", f"sftriage kube policy -n {seen.namespace}")
    for code, bodies, noun in (("policies", seen.policies, "policy"), ("captures", seen.captures, "capture")):
        if late := [one for one in bodies if _unanswered(one) and _old(seen, one)]:
            says = f"nobody has looked at {noun} {_named(late)}"
            yield _wrong(code, says, "the operator does, see above")
    asked = [one for one in seen.captures if status_of(one).get("state") == "requested" and not _unanswered(one)]
    if late := [one for one in asked if _old(seen, one)]:
        jobs = _some(sorted({str(mapping(one, "spec").get("job")) for one in late}))
        says = f"nobody carries out {_named(late)}: does job {jobs} run, under this name?"
        yield _wrong("captures", says, f"sftriage kube status -n {seen.namespace}")


def _store(seen: Snapshot) -> Iterator[Finding]:
    stored = [one for one in seen.captures if status_of(one).get("state") == "stored"]
    if kept := [one for one in stored if not mapping(status_of(one), "stored")]:
        says = f"{_named(kept)}: the trace is with the job's controller alone, and goes with it: it has no store"
        yield _wrong(
            "store", says, f"set store in ConfigMap sftriage-injection of {seen.system} (docs/kubernetes.md, Settings)"
        )
    for url, problem in seen.stores.items():
        if not problem:
            yield _ok("store", f"{url} is reached from here")
        elif url.startswith(("file:", "/")):
            do = "sftriage kube get --store URL says how it is reached from here"
            yield Finding("store", "unknown", f"{url} is a directory in the cluster, and not on this machine", do)
        else:
            do = "credentials come from the environment (docs/store.md)"
            yield _wrong("store", f"from here, {url} cannot be reached: {problem}", do)


def _quota(seen: Snapshot) -> Iterator[Finding]:
    for one in seen.quotas:
        hard, used = mapping(one, "status", "hard"), mapping(one, "status", "used")
        if full := [f"{what} ({used.get(what)} of {most})" for what, most in hard.items() if used.get(what) == most]:
            says = f"the quota {one['metadata']['name']} of namespace {seen.namespace} is used up: {_some(full)}"
            yield _wrong("quota", says, "raise it, or end what uses it; a controller and sidecars need a little")
    told: dict[str, str] = {}
    for one in (event for event in seen.events if text(event, "reason") == "FailedCreate"):
        of = mapping(one, "involvedObject")
        told[f"{of.get('kind', '')} {of.get('name', '')}".strip()] = text(one, "message")
    for name, message in list(told.items())[:MAX_NAMED]:
        over = "exceeded quota" in message
        do = "raise the quota, or end what uses it" if over else f"kubectl get events -n {seen.namespace}"
        yield _wrong("quota" if over else "events", f"{name}: {message}", do)


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
    own = labels_of(pod).get(INJECT_LABEL)
    return own == ENABLED or (own is None and labels_of(seen.about).get(INJECT_LABEL) == ENABLED)


def _unanswered(body: Body) -> bool:
    return bool(status_of(body).get("observedGeneration") != body["metadata"].get("generation"))


def _labelled_s(body: Body) -> float | None:
    """When the label of an object was last written, if its server kept that."""
    found = []
    for one in items(mapping(body, "metadata"), "managedFields"):
        labels: Mapping[str, Any] = mapping(one, "fieldsV1", "f:metadata", "f:labels")
        if f"f:{INJECT_LABEL}" in labels and (when := _seconds(one.get("time"))) is not None:
            found.append(when)
    return max(found, default=None)
