"""``sftriage traces get``: the files of a capture, verified, where one wants them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from sftriage.commands.catalogues import captures_of
from sftriage.commands.options import CatalogueOption, JsonOption, RunOption, StoreOption
from sftriage.commands.output import copying, print_json, results
from sftriage.commands.traces import CaptureArgument
from sftriage.errors import UsageError
from sftriage.traces.manifest import Artefact, Manifest
from sftriage.traces.stores import Store


def get_trace(
    capture_id: CaptureArgument,
    run: RunOption = None,
    store: StoreOption = None,
    catalogue: CatalogueOption = None,
    out: Annotated[
        str, typer.Option(metavar="PATH", help="File or directory to copy to; of several files, a directory.")
    ] = ".",
    artefact: Annotated[
        list[str] | None,
        typer.Option("--artefact", metavar="NAME", help="Which file, rather than the main one; repeatable."),
    ] = None,
    every: Annotated[bool, typer.Option("--all", help="Every file of the capture.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Overwrite a file that is there.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Copy a capture's trace out of the store, verified against its manifest."""
    if every and artefact:
        raise UsageError("--all is every artefact: say it, or --artefact")
    its_store, reference = captures_of(run, store, catalogue).one(capture_id)
    # What is the matter with one of its files is no reason to withhold the others.
    manifest, _ = its_store.look(reference)
    chosen = manifest.artefacts if every else tuple(map(manifest.artefact, dict.fromkeys(artefact or ())))
    chosen = chosen or manifest.artefacts[:1]
    if out.endswith("/") and not Path(out).is_dir():
        raise UsageError(f"{out}: no such directory")
    targets = _targets(manifest, chosen, Path(out))
    if not force:
        for target in targets:
            if target.exists():
                raise UsageError(f"{target} exists already")
    paths = [_fetch(its_store, reference, one, to, force=force) for one, to in zip(chosen, targets, strict=True)]
    files = [
        {"path": str(path), "size_bytes": one.size_bytes, "sha256": one.sha256}
        for one, path in zip(chosen, paths, strict=True)
    ]
    if as_json:
        print_json({**files[0], "files": files})
        return
    for path in paths:
        results().print(str(path), soft_wrap=True, markup=False)


def _targets(manifest: Manifest, chosen: tuple[Artefact, ...], out: Path) -> list[Path]:
    """Where each artefact goes: into a directory, under a name that says which capture it is of."""
    if len(chosen) > 1 and not out.is_dir():
        try:
            out.mkdir()
        except OSError as error:
            raise UsageError(f"{len(chosen)} files go into a directory; {out}: {error.strerror}") from error
    return [out / f"{manifest.capture_id}-{one.name}" if out.is_dir() else out for one in chosen]


def _fetch(store: Store, reference: str, artefact: Artefact, target: Path, *, force: bool) -> Path:
    with copying(artefact.name, artefact.size_bytes) as progress:
        return store.get(reference, artefact.name, target, force=force, progress=progress)
