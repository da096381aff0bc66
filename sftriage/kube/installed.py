"""Whether sftriage itself is installed in a cluster as it should be: from a snapshot to findings. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from sftriage.kube.findings import Finding, available, not_seen, said, some, why
from sftriage.kube.injecting import SIDECARS_SINCE
from sftriage.kube.objects import KINDS
from sftriage.kube.pods import items, labels_of, mapping, text
from sftriage.kube.snapshot import PART_LABEL, Snapshot
from sftriage.words.amounts import clock, lasted

SOON_S = 7 * 86_400.0
"""A certificate that is over this soon is nearly over: it should have been renewed by now."""
_INSTALL = "kubectl apply -k k8s, or the chart of it"


def _rights(seen: Snapshot) -> Iterator[Finding]:
    lacking = [what for what, may in seen.may.items() if not may]
    if lacking:
        do = f"ask for the rights, in namespace {seen.namespace}, of whoever looks after the cluster"
        yield Finding("rights", "wrong", f"you may not {some(lacking)}", do)
    elif seen.may:
        yield Finding("rights", "ok", "you may see reports and captures, and ask for captures")


def _version(seen: Snapshot) -> Iterator[Finding]:
    if seen.version is None:
        yield Finding("version", "unknown", f"the server does not tell its version{why(seen, 'version')}")
        return
    told = ".".join(map(str, seen.version))
    if seen.version < SIDECARS_SINCE:
        says = f"Kubernetes {told} has no native sidecars (they came with 1.29): nothing is injected into any pod"
        yield Finding("version", "wrong", says, "upgrade the cluster; until then, jobs on many hosts need no operator")
    else:
        yield Finding("version", "ok", f"Kubernetes {told} has native sidecars")


def _definitions(seen: Snapshot) -> Iterator[Finding]:
    if "definitions" in seen.unread:
        yield not_seen(seen, "definitions", "the custom resource definitions")
        return
    there = {one["metadata"]["name"]: one for one in seen.definitions}
    missing = [kind.kind for kind in KINDS if kind.crd not in there]
    if missing:
        yield Finding("definitions", "wrong", f"the cluster does not know {some(missing)}", _INSTALL)
    else:
        yield Finding("definitions", "ok", "the custom resource definitions are there")


def _operator(seen: Snapshot) -> Iterator[Finding]:
    yield from _deployment(seen, "operator", "no controller is started for any job, and no policy is looked at")
    lacking = [what for what, may in seen.operator_may.items() if not may]
    if lacking:
        says = f"the operator ({seen.account}) may not {some(lacking)}"
        yield Finding("operator_rights", "wrong", says, "kubectl apply -f k8s/rbac")


def _webhook(seen: Snapshot) -> Iterator[Finding]:
    if "webhooks" in seen.unread:
        yield not_seen(seen, "webhooks", "webhook configurations")
    elif not seen.webhooks:
        says = "there is no webhook configuration of sftriage: pods are created as they are"
        yield Finding("webhook_configuration", "wrong", says, _INSTALL)
    for one in seen.webhooks:
        name, hooks = one["metadata"]["name"], list(items(one, "webhooks"))
        bare = [text(hook, "name") for hook in hooks if not mapping(hook, "clientConfig").get("caBundle")]
        if not hooks:
            yield Finding("webhook_configuration", "wrong", f"webhook configuration {name} has no webhooks", _INSTALL)
        elif bare:
            says = (
                f"webhook configuration {name} has no caBundle ({some(bare)}): no pod is injected, and nobody says so"
            )
            do = f"look at what fills it in: cert-manager, or the Job in {seen.system} that makes certificates"
            yield Finding("ca_bundle", "wrong", says, do)
        else:
            yield Finding("webhook_configuration", "ok", f"webhook configuration {name} is there")
    yield from _deployment(seen, "webhook", "pods are created as they are, and nobody says so")
    if seen.serving == 0:
        says = "nobody answers behind the service of the webhook: no pod of it is ready"
        yield Finding("webhook_service", "wrong", says, f"kubectl get pods -n {seen.system}")


def _certificate(seen: Snapshot) -> Iterator[Finding]:
    one = seen.certificate
    if one is None:
        if "certificate" in seen.unread:
            yield not_seen(seen, "certificate", "the webhook's certificate")
        return
    renew = (
        f"kubectl create job renew --from=cronjob/sftriage-certificates -n {seen.system}, unless cert-manager renews it"
    )
    if seen.now_s > one.not_after_s:
        yield Finding(
            "certificate",
            "wrong",
            f"the webhook's certificate (Secret {one.secret}) ended at {clock(one.not_after_s)}",
            renew,
        )
    elif seen.now_s < one.not_before_s:
        says = f"the webhook's certificate is good from {clock(one.not_before_s)} on: a clock is wrong"
        yield Finding("certificate", "wrong", says, "set the clock of this machine, or of who made it")
    elif not one.trusted:
        says = "the webhook's certificate is signed by none whom its configuration trusts (caBundle)"
        yield Finding("certificate", "wrong", says, renew)
    elif one.not_after_s - seen.now_s < SOON_S:
        says = f"the webhook's certificate is good for {lasted(one.not_after_s - seen.now_s)} yet"
        yield Finding("certificate", "wrong", says, renew)
    else:
        yield Finding("certificate", "ok", f"the webhook's certificate is good until {clock(one.not_after_s)}")


def _deployment(seen: Snapshot, part: str, without: str) -> Iterator[Finding]:
    """Whether a part of sftriage itself runs, and what comes of it where it does not."""
    found = [one for one in seen.deployments if labels_of(one).get(PART_LABEL) == f"sftriage-{part}"]
    if not found and "elsewhere" in seen.unread:
        says = f"no {part} can be seen in {seen.system}, and you may not look at other namespaces"
        yield Finding(part, "unknown", says, "--operator-namespace NAME says where it is")
    elif "deployments" in seen.unread:
        yield not_seen(seen, "deployments", f"the {part}")
    elif not found:
        yield Finding(part, "wrong", f"there is no {part}: {without}", _INSTALL)
    places = sorted({one["metadata"]["namespace"] for one in found})
    if len(places) > 1:
        says = f"there is more than one {part}, in {some(places)}: each does what the other does"
        yield Finding(part, "wrong", says, "take away all of them but one")
    for one in found:
        name, namespace = one["metadata"]["name"], one["metadata"]["namespace"]
        if available(one):
            yield Finding(part, "ok", f"the {part} runs, in {namespace}")
        else:
            do = f"kubectl describe deployment {name} -n {namespace}"
            yield Finding(part, "wrong", f"the {part} does not run{said(one)}: {without}", do)


CHECKS: Sequence[Callable[[Snapshot], Iterator[Finding]]] = (
    _rights,
    _version,
    _definitions,
    _operator,
    _webhook,
    _certificate,
)
"""In the order in which they have to be right."""
