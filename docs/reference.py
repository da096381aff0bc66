"""A hook of mkdocs.yml: adds pages made of the code, and files from outside docs/, to the documentation site."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Mapping
from contextlib import redirect_stdout
from inspect import cleandoc
from itertools import chain
from pathlib import Path
from typing import Any

import msgspec
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

import sftriage
from sftriage.commands.cli import COMMANDS, command_line
from sftriage.model.events import Event
from sftriage.policy.schema import TriagePolicy
from sftriage.sinks.metrics import METRICS
from sftriage.traces.manifest import manifest_schema

ROOT = Path(__file__).parents[1]
OUTSIDE = (
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "SECURITY.md",
    *(f"examples/{path.name}" for path in (ROOT / "examples").glob("*.*")),
)
MODULES = ("sftriage.testing", "sftriage.integrations", "sftriage.integrations.accelerate")
"""Public modules beside `sftriage` itself that import without a framework."""


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add what is not in docs/: the README as the home page, examples, generated pages."""
    pages = {
        "README.md": (ROOT / "README.md").read_text(encoding="utf-8"),
        "reference/cli.md": commands(),
        "reference/metrics.md": metrics(),
        "reference/api.md": api(),
        **schema_pages("policy", "Policy schema", TriagePolicy.model_json_schema(by_alias=True)),
        **schema_pages("manifest", "Manifest schema", manifest_schema()),
        **schema_pages("events", "Journal events", events_schema()),
    }
    for name, text in pages.items():
        files.append(File.generated(config, name, content=text))
    for path in OUTSIDE:
        files.append(File.generated(config, path, abs_src_path=str(ROOT / path)))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """What a code host reads otherwise: links that leave docs/, and blocks in a list, which take four spaces here."""
    prose_and_code = re.split(r"(^```.*?^```)", markdown, flags=re.DOTALL | re.MULTILINE)
    prose_and_code[::2] = [re.sub(r"^ {2,3}(?=\S)", "    ", part, flags=re.MULTILINE) for part in prose_and_code[::2]]
    return re.sub(
        r"\]\((docs/|\.\./(?=README|CHANGELOG|CONTRIBUTING|SECURITY|examples/))", "](", "".join(prose_and_code)
    )


def commands() -> str:
    """The help of every command, as a terminal of 100 columns prints it."""
    page = ["# Command line\n"]
    for words in ((), *(entry.name.split() for entry in COMMANDS)):
        with redirect_stdout(io.StringIO()) as printed:
            command_line()([*words, "--help"], prog_name="sftriage", standalone_mode=False, terminal_width=100)
        page.append(f"## {' '.join(('sftriage', *words))}\n\n```text\n{printed.getvalue().strip()}\n```\n")
    return "\n".join(page)


def metrics() -> str:
    """The metrics, by the event that moves them."""
    page = [
        "# Metrics\n",
        "Each series has the label `job_name` too. [Alerts and dashboards](../metrics.md) use them.\n",
    ]
    for event, declared in METRICS.items():
        page += [f"## {event or 'Of the run itself'}\n", "| metric | type | labels | what it is |", "|---|---|---|---|"]
        for key, what in declared.items():
            kind, name, *labels = re.findall(r"\w+", key)
            name = f"sftriage_{name}" + ("_total" if kind == "counter" else "")
            page.append(_row(f"`{name}`", kind, ", ".join(f"`{label}`" for label in labels), what))
        page.append("")
    return "\n".join(page)


def api() -> str:
    """The public names, with their docstrings."""
    page = ["# Python API\n", "[What is public](../library.md#what-is-public) lists them by purpose.\n"]
    page += ["## sftriage\n"]
    for name in sftriage.__all__:
        if name != "__version__":
            value = getattr(sftriage, name)
            page.append(f"::: {value.__module__}.{value.__qualname__}\n")
    for module in MODULES:
        page.append(f"## {module}\n\n::: {module}\n    options: {{show_root_heading: false}}\n")
    return "\n".join(page)


def events_schema() -> dict[str, Any]:
    """A JSON Schema of a line of the journal."""
    (schema,), components = msgspec.json.schema_components([Event], ref_template="#/$defs/{name}")
    return {"description": "One line of `decisions.jsonl` is one of these.", **schema, "$defs": components}


def schema_pages(name: str, title: str, schema: Mapping[str, Any]) -> dict[str, str]:
    """A JSON Schema as a page with a table for each object, and as a file."""
    page = [f"# {title}\n", f"As a file: [JSON Schema]({name}.schema.json).\n"]
    for one, part in chain([("", schema)], schema["$defs"].items()):
        page += [f"## {one}\n"] if one else []
        page += [" ".join(cleandoc(part["description"]).split()) + "\n"] if "description" in part else []
        fields = part.get("properties", {})
        if fields:
            page += ["| field | type | default | what it is |", "|---|---|---|---|"]
            page += [_field(field, of, field in part.get("required", ())) for field, of in fields.items()]
            page.append("")
        else:
            page.append(_type(part) + "\n")
    return {f"reference/{name}.md": "\n".join(page), f"reference/{name}.schema.json": json.dumps(schema, indent=2)}


def _field(name: str, of: Mapping[str, Any], required: bool) -> str:
    default = "required" if required else f"`{json.dumps(of['default'])}`" if "default" in of else ""
    return _row(f"`{name}`", _type(of), default, of.get("description", ""))


def _type(of: Mapping[str, Any]) -> str:
    """A type in words: `list of [Rule](#rule)`, `integer, 1 to 64`."""
    if "$ref" in of:
        name = of["$ref"].rpartition("/")[2]
        return f"[{name}](#{name.lower()})"
    for union in ("anyOf", "oneOf", "allOf"):
        if union in of:
            return " or ".join(dict.fromkeys(map(_type, of[union])))
    if "enum" in of or "const" in of:
        return ", ".join(f"`{json.dumps(value)}`" for value in of.get("enum", [of.get("const")]))
    match of.get("type"):
        case "array":
            items = of.get("prefixItems") or [of["items"]] if of.get("items") or of.get("prefixItems") else []
            return "list of " + " and ".join(dict.fromkeys(map(_type, items))) if items else "list"
        case "object":
            values = [*of.get("patternProperties", {}).values(), of.get("additionalProperties")]
            return "object" + "".join(f" of {_type(one)}" for one in values if one and one is not True)
        case kind:
            least, most = of.get("minimum", of.get("exclusiveMinimum")), of.get("maximum")
            bounds = (f", at least {least}" if least is not None else "") + (f", at most {most}" if most else "")
            return f"{kind or 'anything'}{bounds}"


def _row(*cells: str) -> str:
    return "| " + " | ".join(" ".join(cell.split()).replace("|", "\\|") for cell in cells) + " |"
