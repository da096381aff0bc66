"""``sftriage hub``: what the owner of a NATS server is asked for."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Annotated, Any

import typer
from pydantic import TypeAdapter, ValidationError

from sftriage.commands.output import say, write
from sftriage.errors import UsageError
from sftriage.policy.fields import Name
from sftriage.words.amounts import place


def account(
    job_id: Annotated[
        str | None, typer.Option("--job-id", metavar="ID", help="The job's, as its hosts are given it.")
    ] = None,
    host: Annotated[
        list[str] | None,
        typer.Option(
            "--host",
            metavar="NAME",
            help="A host of the job, by the name of its agent: hostname, and with SLURM or $NODE_RANK a dash and its "
            "number. Repeatable: each then has a key of its own.",
            show_default="one key for all agents",
        ),
    ] = None,
    namespace: Annotated[
        list[str] | None,
        typer.Option(
            "--namespace",
            metavar="NAME",
            help="A namespace of a Kubernetes cluster instead, whose jobs share one account. Repeatable: the keys of "
            "each are in a directory of its name.",
        ),
    ] = None,
    creds: Annotated[
        Path | None,
        typer.Option(
            "--creds",
            metavar="DIR",
            help="Where the job's keys are made, for their owner alone; keys that are there are used again.",
            show_default="one under sftriage-runs",
        ),
    ] = None,
) -> None:
    """Make the keys of a job on a NATS server of your own, and print its account for that server's configuration.

    What is printed goes into `accounts { }` there. It is no secret: it names public keys, and what each may do.
    """
    from sftriage.fleet.hub import Places, token
    from sftriage.fleet.permissions import AGENTS_FILE, CONTROLLER_FILE, agent_file, of_job
    from sftriage.runs.directory import DEFAULT_ROOT

    if namespace and (job_id or host):
        raise UsageError("--namespace is of all jobs there are in it: no --job-id and no --host goes with it")
    if namespace:
        _of_namespaces(namespace, creds or Path(DEFAULT_ROOT) / "namespaces.keys")
        return
    if not job_id:
        raise UsageError("--job-id is missing: a name for this job alone, as its hosts are given it")
    places = Places.of(job_id)
    directory = creds or Path(DEFAULT_ROOT) / f"{places.run}.keys"
    agents = {token(name): agent_file(token(name)) for name in host or ()} or {"*": AGENTS_FILE}
    keys = {agent: _public_key(directory / file) for agent, file in agents.items()}
    write(json.dumps(of_job(places, _public_key(directory / CONTROLLER_FILE), keys), indent=2))
    say(f"the keys are in {place(directory)}; the job is started with --nats URL --creds {place(directory)}")


def _of_namespaces(names: list[str], directory: Path) -> None:
    from sftriage.fleet.permissions import AGENTS_FILE, CONTROLLER_FILE, of_namespace

    made: dict[str, Any] = {}
    for name in names:
        try:
            TypeAdapter(Name).validate_python(name)
        except ValidationError:
            raise UsageError(f"--namespace {name}: no cluster has a namespace of that name") from None
        made |= of_namespace(name, *(_public_key(directory / name / file) for file in (CONTROLLER_FILE, AGENTS_FILE)))
    write(json.dumps(made, indent=2))
    say(f"the keys are in {place(directory)}, and belong into a Secret of their namespace each")


def _public_key(path: Path) -> str:
    """The public part of the nkey in a file, which is made where there is none."""
    try:
        import nkeys
    except ModuleNotFoundError as error:
        raise UsageError("an account's keys take: pip install 'sftriage[nats]'") from error
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not path.exists():
            with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
                file.write(nkeys.encode_seed(os.urandom(32), nkeys.PREFIX_BYTE_USER) + b"\n")
        key: bytes = nkeys.from_seed(bytearray(path.read_bytes().strip())).public_key
    except OSError as error:
        raise UsageError(f"{path} cannot be used: {error.strerror}") from error
    except (ValueError, nkeys.NkeysError) as error:
        raise UsageError(f"{path} holds no key") from error
    return key.decode()
