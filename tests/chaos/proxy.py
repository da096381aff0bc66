"""``proxy.py PORT HOST:PORT CONTROL``: passes connections on, as slowly as a file says: ``DELAY_S BYTES_PER_S``.

SIGUSR1 breaks all connections, and what is on its way is lost with them.
"""

import asyncio
import contextlib
import signal
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

CHUNK_BYTES = 16 << 10


class Proxy:
    """Passes connections on, unless ``let_in`` is false, and what comes back, unless ``silent`` is true."""

    silent, let_in = False, True

    def __init__(self, host: str, port: int, pace: Callable[[], Iterable[float]] = lambda: (0.0, 1e9)) -> None:
        self._to, self._pace = (host, port), pace
        self._writers: set[asyncio.StreamWriter] = set()

    async def connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            if not self.let_in:
                raise ConnectionRefusedError
            other_reader, other_writer = await asyncio.open_connection(*self._to)
        except OSError:
            writer.close()
            return
        ways = (self._pass(reader, other_writer), self._pass(other_reader, writer, back=True))
        await asyncio.gather(*ways, return_exceptions=True)

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, back: bool = False) -> None:
        """Pass on what comes from one side, each piece once its delay is over and there is room for it."""
        loop = asyncio.get_running_loop()
        pieces: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(64)

        async def send() -> None:
            while True:
                came_s, piece = await pieces.get()
                delay_s, bytes_per_s = self._pace()
                await asyncio.sleep(max(0.0, came_s + delay_s - loop.time()))
                writer.write(piece)
                await writer.drain()
                await asyncio.sleep(len(piece) / bytes_per_s)

        self._writers.add(writer)
        sending = asyncio.create_task(send())
        with contextlib.suppress(OSError):
            while piece := await reader.read(CHUNK_BYTES):
                if not (back and self.silent):
                    await pieces.put((loop.time(), piece))
        sending.cancel()
        self._writers.discard(writer)
        writer.close()

    def break_all(self) -> None:
        for writer in self._writers:
            writer.transport.abort()


async def main() -> None:
    port, (host, _, target), control = int(sys.argv[1]), sys.argv[2].rpartition(":"), Path(sys.argv[3])
    proxy = Proxy(host, int(target), lambda: map(float, control.read_text().split()))
    asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, proxy.break_all)
    server = await asyncio.start_server(proxy.connected, "127.0.0.1", port)
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main())
