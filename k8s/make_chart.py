"""Makes the Helm chart of the manifests beside it, which stay the one place where each object is written.

``python k8s/make_chart.py`` writes ``k8s/helm/sftriage`` anew. Definitions and dashboards are links there.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from sftriage import __version__
from sftriage.kube.injecting import InjectionSettings

HERE = Path(__file__).parent
CHART = HERE / "helm" / "sftriage"
OWN, CERT_MANAGER = 'eq .Values.certificates "own"', 'eq .Values.certificates "cert-manager"'
NATS = ".Values.nats.enabled"
PARTS = {
    "rbac/operator.yaml": "",
    "rbac/controller.yaml": "",
    "operator/deployment.yaml": "",
    "webhook/rbac.yaml": "",
    "webhook/settings.yaml": "",
    "webhook/deployment.yaml": "",
    "webhook/network.yaml": "",
    "webhook/webhook.yaml": "",
    "certificates/rbac.yaml": OWN,
    "certificates/jobs.yaml": OWN,
    "cert-manager/certificate.yaml": CERT_MANAGER,
    "nats/config.yaml": NATS,
    "nats/statefulset.yaml": NATS,
    "nats/network.yaml": NATS,
    "cert-manager-nats/certificate.yaml": f"and {NATS} ({CERT_MANAGER})",
}
"""What of the manifests is in the chart, and under which condition. The namespace is who installs it to make."""

SIZED = {"operator": "operator/deployment.yaml", "webhook": "webhook/deployment.yaml", "nats": "nats/statefulset.yaml"}
"""Parts whose resources are values, and replicas, where there may be several; and what says what these are."""

_HEADER = "made by k8s/make_chart.py of k8s/{source}: change that, and run it"
_RESOURCES = re.compile(r"^( *)resources:\n\1  requests: .*\n\1  limits: .*\n", re.MULTILINE)
# (one server of NATS has what it keeps to itself)
_REPLICAS = re.compile(r"^  replicas: [2-9]$", re.MULTILINE)
_STORAGE = re.compile(r"\{storage: (.*)\}")
_SETTINGS = re.compile(r"^( *settings\.yaml: \|\n)(?:    .*\n)+", re.MULTILINE)
_SAID = r'\1    {{- toYaml (set .Values.settings "image" .Values.image) | nindent 4 }}\n'
_WEBHOOKS = "  name: sftriage\nwebhooks:\n"
_ANNOTATED = f"""  name: sftriage
  {{{{- if {CERT_MANAGER} }}}}
  annotations: {{cert-manager.io/inject-ca-from: {{{{ .Release.Namespace }}}}/sftriage-webhook}}
  {{{{- end }}}}
webhooks:
"""
_JOB = "kind: Job\nmetadata:\n"
# (a Job cannot be changed: each release has another one, beside what is kept of the release)
_HOOK = f"""{_JOB}  annotations:
    helm.sh/hook: post-install,post-upgrade
    helm.sh/hook-delete-policy: before-hook-creation
"""

_DASHBOARDS = """{{- if .Values.dashboards }}
apiVersion: v1
kind: ConfigMap
metadata:
  name: sftriage-dashboard
  namespace: {{ .Release.Namespace }}
  labels: {grafana_dashboard: "1"}
data:
  sftriage.json: {{ .Files.Get "files/sftriage.json" | toJson }}
{{- end }}
"""


def template(source: str, condition: str) -> str:
    """A manifest as a template of the chart."""
    component, text = source.partition("/")[0], (HERE / source).read_text(encoding="utf-8")
    text = text.replace(_WEBHOOKS, _ANNOTATED).replace(_JOB, _HOOK)
    text = text.replace("sftriage-system", "{{ .Release.Namespace }}")
    text = text.replace("image: sftriage:latest", "image: {{ .Values.image }}")
    text = _SETTINGS.sub(_SAID, text)
    text = _STORAGE.sub("{storage: {{ .Values.nats.storage }}}", text)
    if component in SIZED:
        text = _REPLICAS.sub(f"  replicas: {{{{ .Values.{component}.replicas }}}}", text)
        text = _RESOURCES.sub(
            lambda found: (
                f"{found[1]}resources:\n{found[1]}  {{{{- toYaml .Values.{component}.resources | nindent "
                f"{len(found[1]) + 2} }}}}\n"
            ),
            text,
        )
    text = f"# {_HEADER.format(source=source)}\n{text}"
    return f"{{{{- if {condition} }}}}\n{text}{{{{- end }}}}\n" if condition else text


def sized(source: str) -> dict[str, Any]:
    """Of what runs in a manifest: its replicas, where there may be several, and what its container takes."""
    text = (HERE / source).read_text(encoding="utf-8")
    spec = next(body["spec"] for body in yaml.safe_load_all(text) if "replicas" in body.get("spec", ()))
    storage = _STORAGE.search(text)
    return {
        **({} if spec["replicas"] == 1 else {"replicas": spec["replicas"]}),
        **({} if storage is None else {"enabled": False, "storage": storage[1]}),
        "resources": spec["template"]["spec"]["containers"][0]["resources"],
    }


def values() -> str:
    """The chart's values: what the manifests say, each with what it is for."""
    said = [
        ("Of operator, webhook, controllers and agents; pin it by its digest.", {"image": "sftriage:latest"}),
        (
            "Who makes the webhook's certificate: own (a Job of ours, and every week a CronJob) or cert-manager.",
            {"certificates": "own"},
        ),
        ("What goes into pods: store, store_secret, nats and the rest of docs/kubernetes.md.", {"settings": {}}),
        ("Grafana's dashboard, in a ConfigMap that its sidecar finds.", {"dashboards": False}),
        (
            "One hub for all jobs; the settings nats, nats_secret, nats_ca lead to it.",
            {"nats": sized(SIZED["nats"])},
        ),
        *(("", {one: sized(source)}) for one, source in SIZED.items() if one != "nats"),
    ]
    return "".join(
        (f"# {words}\n" if words else "") + yaml.safe_dump(body, sort_keys=False, width=120) for words, body in said
    )


def schema() -> dict[str, Any]:
    """What values may be; what goes into pods is said by our own model, which is what reads it there."""
    settings = InjectionSettings.model_json_schema()
    defs = settings.pop("$defs")
    for one in ("title", "description"):
        settings.pop(one)
    del settings["properties"]["image"]
    part = {"type": "object", "additionalProperties": False}
    known = {
        "replicas": {"type": "integer", "minimum": 0},
        "resources": {"type": "object"},
        "enabled": {"type": "boolean"},
        "storage": {"type": "string"},
    }
    return {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "type": "object",
        "properties": {
            "image": {"type": "string", "minLength": 1},
            "certificates": {"enum": ["own", "cert-manager"]},
            "settings": settings,
            "dashboards": {"type": "boolean"},
            **{
                one: {**part, "properties": {name: known[name] for name in sized(source)}}
                for one, source in SIZED.items()
            },
        },
        "$defs": defs,
    }


def written() -> Mapping[str, str]:
    """The chart's files by their paths in it, but for what is linked."""
    about = {
        "apiVersion": "v2",
        "name": "sftriage",
        "description": "Slow steps of distributed PyTorch jobs explain themselves",
        "type": "application",
        "version": __version__,
        "appVersion": __version__,
        "kubeVersion": ">=1.29.0-0",
    }
    return {
        "Chart.yaml": yaml.safe_dump(about, sort_keys=False),
        "values.yaml": values(),
        "values.schema.json": json.dumps(schema(), indent=1) + "\n",
        "templates/dashboards.yaml": _DASHBOARDS,
        **{f"templates/{one.replace('/', '-')}": template(one, condition) for one, condition in PARTS.items()},
    }


def main() -> None:
    """Write the chart, and remove what is in it no more."""
    files = written()
    for path in CHART.glob("templates/*"):
        if str(path.relative_to(CHART)) not in files:
            path.unlink()
    for name, text in files.items():
        path = CHART / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
