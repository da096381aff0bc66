"""What the webhook answers: an AdmissionReview in, and one out that always lets the object be made. Pure."""

from __future__ import annotations

import base64
import json
import logging
from collections.abc import Mapping
from typing import Any

from sftriage.kube.injecting import Injection, Version, injection
from sftriage.kube.jobs import ENABLED, INJECT_LABEL, job_of
from sftriage.kube.objects import GROUP, Requester
from sftriage.kube.pods import labels_of, mapping, text
from sftriage.kube.settings import InjectionSettings
from sftriage.words.injection import left_alone

log = logging.getLogger("sftriage.kube")


def answer(review: Mapping[str, Any], settings: InjectionSettings, server: Version | None) -> dict[str, Any]:
    """The review of a request, with its answer. Never one that refuses, whatever is asked.

    Raises:
        ValueError: it is no AdmissionReview of v1.
    """
    request = mapping(review, "request")
    uid = text(request, "uid")
    if review.get("apiVersion") != "admission.k8s.io/v1" or not uid:
        raise ValueError("no AdmissionReview of admission.k8s.io/v1")
    try:
        found = _decided(request, settings, server)
    except Exception as error:
        log.exception("a request is answered with nothing")
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
    asked = labels_of(made).get(INJECT_LABEL)
    found = job_of(made, text(request, "namespace"))
    # (in a namespace that is labelled there are other pods than those of jobs)
    if asked not in (None, ENABLED) or (asked is None and found is None):
        return Injection()
    return injection(made, None if found is None else found.job, settings, server)


def _stamped(request: Mapping[str, Any]) -> Injection:
    """A capture with who asks for it, as the server knows them; one that is changed, with whoever asked for it."""
    spec, before = mapping(request, "object", "spec"), mapping(request, "oldObject", "spec")
    if not spec:
        return Injection()
    user = mapping(request, "userInfo")
    if text(request, "operation") == "CREATE":
        asks = Requester(username=text(user, "username")[:1024] or "unknown", uid=text(user, "uid")[:1024])
        stamp: Any = asks.model_dump()
    else:
        stamp = before.get("requested_by")
    if spec.get("requested_by") == stamp:
        return Injection()
    if stamp is None:
        return Injection(({"op": "remove", "path": "/spec/requested_by"},))
    return Injection(({"op": "add", "path": "/spec/requested_by", "value": stamp},))
