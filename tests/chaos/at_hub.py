"""A job's hub: ``at_hub.py serve HOST PORT STORE SECRET PID_FILE`` runs it, as `sftriage run` starts it, until it ends.

``at_hub.py lose-consumer|streams URL SECRET`` does something there, or lists its streams.
"""

import asyncio
import sys
import time
from pathlib import Path

import nats

from sftriage.base.files import write_atomically
from sftriage.fleet.hub import HubAddress, Subjects
from sftriage.runtime.hub_server import HubServer


def serve(host: str, port: str, store: str, secret: str, pid_file: str) -> None:
    server = HubServer((host, int(port)), Path(store), Path(secret))
    write_atomically(Path(pid_file), str(server.pid))
    while Path(f"/proc/{server.pid}/exe").exists():
        time.sleep(0.05)
    sys.exit("the hub has ended")


async def act(what: str, url: str, secret: str) -> None:
    hub = await nats.connect(**HubAddress(url, Path(secret)).options(), max_reconnect_attempts=1, connect_timeout=2)
    js, places = hub.jetstream(timeout=2), Subjects.of("job")
    if what == "lose-consumer":
        await js.delete_consumer(places.stream, places.stream)
    else:
        sys.stdout.write(" ".join(sorted(one.config.name or "" for one in await js.streams_info())))
    await hub.close()


if __name__ == "__main__":
    command, *arguments = sys.argv[1:]
    serve(*arguments) if command == "serve" else asyncio.run(act(command, *arguments))
