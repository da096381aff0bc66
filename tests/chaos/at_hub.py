"""``at_hub.py URL SECRET lose-consumer|streams``: what is to be done, or seen, at a hub, by whoever may."""

import asyncio
import sys
from pathlib import Path

import nats

from sftriage.fleet.hub import HubAddress, Subjects


async def main() -> None:
    url, secret, what = sys.argv[1:]
    hub = await nats.connect(**HubAddress(url, Path(secret)).options(), max_reconnect_attempts=1, connect_timeout=2)
    js, places = hub.jetstream(timeout=2), Subjects.of("job")
    if what == "lose-consumer":
        await js.delete_consumer(places.stream, places.stream)
    else:
        sys.stdout.write(" ".join(sorted(one.config.name or "" for one in await js.streams_info())))
    await hub.close()


if __name__ == "__main__":
    asyncio.run(main())
