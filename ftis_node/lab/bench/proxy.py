"""A bad network between nodes: a TCP proxy that delays everything and cuts connections now and then."""

import asyncio
import random
from contextlib import suppress

CHUNK_BYTES = 1 << 16


class Proxy:
    """Passes on to a port on this machine."""

    def __init__(self, target: int, *, delay: float, cut_every: float, rng: random.Random) -> None:
        """
        Args:
            delay: seconds, each way.
            cut_every: mean life of a connection in seconds (exponential); infinite: it is never cut.
        """
        self.cuts = 0
        self._target = target
        self._delay = delay
        self._cut_every = cut_every
        self._rng = rng
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> int:
        """Listens; returns the port."""
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        return int(self._server.sockets[0].getsockname()[1])

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        try:
            onwards, back = await asyncio.open_connection("127.0.0.1", self._target)
        except OSError:
            writer.close()
            return
        life = self._rng.expovariate(1 / self._cut_every) if self._cut_every < float("inf") else None
        try:
            async with asyncio.timeout(life):
                await asyncio.gather(self._pass_on(reader, back), self._pass_on(onwards, writer))
        except TimeoutError:
            self.cuts += 1
        finally:
            for end in (writer, back):
                end.transport.abort()  # as a network does: without a goodbye

    async def _pass_on(self, source: asyncio.StreamReader, to: asyncio.StreamWriter) -> None:
        """Every chunk comes `delay` later than it would have, however many are under way."""
        under_way: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue()
        loop = asyncio.get_running_loop()

        async def deliver() -> None:
            while True:
                due, data = await under_way.get()
                await asyncio.sleep(due - loop.time())
                if not data:
                    return
                to.write(data)
                await to.drain()

        delivering = asyncio.create_task(deliver())
        try:
            data = b"."
            while data:
                data = b""
                with suppress(OSError):
                    data = await source.read(CHUNK_BYTES)
                under_way.put_nowait((loop.time() + self._delay, data))
            with suppress(OSError):
                await delivering
        finally:
            delivering.cancel()
        to.close()
