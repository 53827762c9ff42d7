"""A TCP proxy that breaks its connections where it is told."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from urllib.parse import urlsplit


class CuttingProxy:
    """Stands in front of a server. Each connection lives until the server has sent as many bytes as
    `allowance` says; None = for as long as both sides want."""

    def __init__(self, upstream: str, allowance: Callable[[], int | None] = lambda: None) -> None:
        self._upstream = urlsplit(upstream)
        self._allowance = allowance
        self._open: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self.connections = 0
        self.cuts = 0

    async def start(self) -> str:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        return f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    def kill(self) -> None:
        """Breaks connections and refuses new ones, as if the machine behind it ended."""
        self._server.close()
        for writer in self._open:
            writer.transport.abort()

    async def stop(self) -> None:
        self.kill()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        allowance = self._allowance()
        up_reader, up_writer = await asyncio.open_connection(self._upstream.hostname, self._upstream.port)
        self._open |= {writer, up_writer}
        for coroutine in (
            self._pump(reader, up_writer, writer, None),
            self._pump(up_reader, writer, up_writer, allowance),
        ):
            task = asyncio.create_task(coroutine)
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _pump(
        self,
        source: asyncio.StreamReader,
        sink: asyncio.StreamWriter,
        other: asyncio.StreamWriter,
        allowance: int | None,
    ) -> None:
        """From one side to the other; ends both when either ends."""
        try:
            while data := await source.read(4096):
                if allowance is not None and len(data) >= allowance:
                    self.cuts += 1
                    sink.write(data[:allowance])
                    await sink.drain()
                    return
                allowance = None if allowance is None else allowance - len(data)
                sink.write(data)
                await sink.drain()
        except OSError:
            pass
        finally:
            for writer in (sink, other):
                self._open.discard(writer)
                writer.close()
