"""What has to be in a NATS server's configuration for a job: an account of its own, and in it what an agent may do.

Accounts of a NATS server share nothing: no subject, no stream, no ``$JS.API``. Permissions alone would not part two
jobs: who may make a stream may have it filled from another one, and a server sends its answers to whichever subject it
is asked to. For the same reason an agent may read nothing here but what the controller has written for it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sftriage.fleet.hub import Places, token

FILE_BYTES = 8 << 30
STREAMS, CONSUMERS = 8, 64
CONTROLLER_FILE, AGENTS_FILE = "controller.nk", "agents.nk"
"""The files of a directory of credentials: the controller's, and one of all agents or `agent_file` of each."""

_ANY_JOB = Places("*")


def agent_file(agent: str) -> str:
    """The file with an agent's credentials."""
    return f"agent-{agent}.nk"


def of_job(places: Places, controller: str, agents: Mapping[str, str]) -> dict[str, Any]:
    """The account of a job, as one of ``accounts`` in a server's configuration.

    Args:
        places: of the job.
        controller: public nkey of its controller, to which the account belongs.
        agents: public nkeys of its agents; that of all of them under ``*``.
    """
    users: list[dict[str, Any]] = [{"nkey": controller}]
    users += [{"nkey": key, "permissions": of_agent(places, agent)} for agent, key in agents.items()]
    room = {"max_memory": 0, "max_file": FILE_BYTES, "max_streams": STREAMS, "max_consumers": CONSUMERS}
    return {places.stream: {"jetstream": room, "users": users}}


def of_namespace(namespace: str, controllers: str, agents: str) -> dict[str, Any]:
    """The account that all jobs of a Kubernetes namespace share, which trust each other; by public nkeys as `of_job`.

    What its jobs may keep has no limit but the server's: each asks for some GiB, of which it uses what it needs.
    """
    room = {"max_memory": 0, "max_file": -1, "max_streams": -1, "max_consumers": -1}
    users = [{"nkey": controllers}, {"nkey": agents, "permissions": of_agent(_ANY_JOB, "*")}]
    return {f"sft_namespace_{token(namespace)}": {"jetstream": room, "users": users}}


def of_agent(places: Places, agent: str) -> dict[str, Any]:
    """What an agent may do: tell, hear what is wanted of it and be asked; send traces."""
    # (a part of a subject is any, or is said)
    want, traces = ("*", "*") if places is _ANY_JOB else (places.want, places.traces)
    kv, objects = ("*", "*") if places is _ANY_JOB else (f"KV_{want}", f"OBJ_{traces}")
    told = [
        places.up(agent),
        f"$JS.API.STREAM.INFO.{kv}",
        f"$JS.API.DIRECT.GET.{kv}.$KV.{want}.{agent}",
        f"$JS.API.STREAM.INFO.{objects}",
        # (of what could not be sent whole)
        f"$JS.API.STREAM.PURGE.{objects}",
        f"$O.{traces}.C.*",
        f"$O.{traces}.M.*",
    ]
    heard = [places.down(agent), places.ask(agent), f"{places.inbox(agent)}.>"]
    return {"publish": {"allow": told}, "subscribe": {"allow": heard}, "allow_responses": True}
