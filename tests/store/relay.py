"""A relay between a store and PostgreSQL that loses answers, goes silent, or is gone."""

import asyncio
import contextlib
from urllib.parse import parse_qs, quote, urlsplit


class Relay:
    """Listens on loopback and passes bytes on. A test says what goes wrong."""

    def __init__(self, dsn: str) -> None:
        parts = urlsplit(dsn)
        query = parse_qs(parts.query)
        self._user = parts.username or "postgres"
        self._password = parts.password or ""
        self._database = parts.path.lstrip("/") or self._user
        self._host = query.get("host", [parts.hostname or "127.0.0.1"])[0]
        self._port = parts.port or int(query.get("port", ["5432"])[0])
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self.port = 0
        self.silent = False
        """Nothing is passed on in either direction; connections stay open."""
        self.lose_answer_about = b""
        """The next request that has these bytes reaches the server; its answer is lost and the connection closed."""
        self.lost = 0
        self.accepted = 0

    @property
    def dsn(self) -> str:
        """The way through the relay."""
        login = quote(self._user) + (f":{quote(self._password)}" if self._password else "")
        return f"postgresql://{login}@127.0.0.1:{self.port}/{self._database}?sslmode=disable"

    async def open(self) -> None:
        """Listen, on the same port as before."""
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]

    async def close(self) -> None:
        """Refuse new connections and cut the old ones."""
        if self._server is not None:
            self._server.close()
            self._server = None
        self.cut()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def cut(self) -> None:
        """Cut all connections."""
        for writer in list(self._writers):
            writer.transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.accepted += 1
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self._writers.add(writer)
        upstream: asyncio.StreamWriter | None = None
        try:
            if self._host.startswith("/"):
                path = f"{self._host}/.s.PGSQL.{self._port}"
                from_server, upstream = await asyncio.open_unix_connection(path)
            else:
                from_server, upstream = await asyncio.open_connection(self._host, self._port)
            losing = asyncio.Event()
            async with asyncio.TaskGroup() as group:
                group.create_task(self._requests(reader, upstream, losing))
                group.create_task(self._answers(from_server, writer, losing))
        except* (OSError, asyncio.CancelledError):
            pass  # a cancelled one too: asyncio.streams reports it as an error
        finally:
            self._writers.discard(writer)
            self._tasks.discard(task)
            writer.transport.abort()
            if upstream is not None:
                upstream.transport.abort()

    async def _requests(
        self, reader: asyncio.StreamReader, upstream: asyncio.StreamWriter, losing: asyncio.Event
    ) -> None:
        while data := await reader.read(65536):
            while self.silent:
                await asyncio.sleep(0.01)
            if self.lose_answer_about and self.lose_answer_about in data:
                self.lose_answer_about = b""
                losing.set()
            upstream.write(data)
            await upstream.drain()
        raise ConnectionError("the client is gone")

    async def _answers(self, server: asyncio.StreamReader, writer: asyncio.StreamWriter, losing: asyncio.Event) -> None:
        while data := await server.read(65536):
            while self.silent:
                await asyncio.sleep(0.01)
            if losing.is_set():
                if data.endswith((b"Z\x00\x00\x00\x05I", b"Z\x00\x00\x00\x05E")):  # the server has committed
                    self.lost += 1
                    raise ConnectionError("lost on purpose")
                continue
            with contextlib.suppress(ConnectionError):
                writer.write(data)
                await writer.drain()
        raise ConnectionError("the server is gone")
