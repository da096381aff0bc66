"""``proxy.py PORT HOST:PORT CONTROL``: passes connections on, as slowly as a file says: ``DELAY_S BYTES_PER_S``.

SIGUSR1 breaks all connections, and what is on its way is lost with them.
"""

import asyncio
import contextlib
import signal
import sys
from pathlib import Path

CHUNK_BYTES = 16 << 10
WRITERS: set[asyncio.StreamWriter] = set()


async def passed(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, control: Path) -> None:
    """Pass on what comes from one side, each piece once its delay is over and there is room for it."""
    loop = asyncio.get_running_loop()
    pieces: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(64)

    async def send() -> None:
        while True:
            came_s, piece = await pieces.get()
            delay_s, bytes_per_s = map(float, control.read_text().split())
            await asyncio.sleep(max(0.0, came_s + delay_s - loop.time()))
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(len(piece) / bytes_per_s)

    WRITERS.add(writer)
    sending = asyncio.create_task(send())
    with contextlib.suppress(OSError):
        while piece := await reader.read(CHUNK_BYTES):
            await pieces.put((loop.time(), piece))
    sending.cancel()
    WRITERS.discard(writer)
    writer.close()


def broken() -> None:
    for writer in WRITERS:
        writer.transport.abort()


async def main() -> None:
    port, (host, _, target), control = int(sys.argv[1]), sys.argv[2].rpartition(":"), Path(sys.argv[3])

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            other_reader, other_writer = await asyncio.open_connection(host, int(target))
        except OSError:
            writer.close()
            return
        ways = (passed(reader, other_writer, control), passed(other_reader, writer, control))
        await asyncio.gather(*ways, return_exceptions=True)

    asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, broken)
    server = await asyncio.start_server(connected, "127.0.0.1", port)
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main())
