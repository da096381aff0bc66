"""What has to be in a NATS server's configuration for a job: an account of its own, and in it what an agent may do.

Accounts of a NATS server share nothing: no subject, no stream, no ``$JS.API``. Permissions alone would not part two
jobs: who may make a stream may have it filled from another one, and a server sends its answers to whichever subject it
is asked to. For the same reason an agent may read nothing here but what the controller has written for it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sftriage.fleet.hub import Places

FILE_BYTES = 8 << 30
STREAMS, CONSUMERS = 8, 64
CONTROLLER_FILE, AGENTS_FILE = "controller.nk", "agents.nk"
"""The files of a directory of credentials: the controller's, and one of all agents or `agent_file` of each."""


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


def of_agent(places: Places, agent: str) -> dict[str, Any]:
    """What an agent may do: tell, hear what is wanted of it and be asked; send traces."""
    want, traces = f"KV_{places.want}", f"OBJ_{places.traces}"
    told = [
        places.up(agent),
        f"$JS.API.STREAM.INFO.{want}",
        f"$JS.API.DIRECT.GET.{want}.$KV.{places.want}.{agent}",
        f"$JS.API.STREAM.INFO.{traces}",
        # (of what could not be sent whole)
        f"$JS.API.STREAM.PURGE.{traces}",
        f"$O.{places.traces}.C.*",
        f"$O.{places.traces}.M.*",
    ]
    heard = [places.down(agent), places.ask(agent), f"{places.inbox(agent)}.>"]
    return {"publish": {"allow": told}, "subscribe": {"allow": heard}, "allow_responses": True}
