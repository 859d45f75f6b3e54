"""A small HTTP/1.1 client on asyncio streams, for the load tests here: raw enough to break rules on purpose.

Standard library only. Bodies come by Content-Length, chunked or until the end of the connection.
"""

import asyncio
import json
import os
import resource
import time
from argparse import ArgumentParser
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit


@dataclass
class Response:
    status: int
    headers: dict[str, str]  # names in lower case
    body: bytes

    def json(self):
        return json.loads(self.body)


@dataclass
class Server:
    """Where requests go, and the process that answers them."""

    host: str
    port: int
    key: str | None
    pid: int | None

    def head(self, method: str, path: str, length: int | None = None, extra: str = "") -> bytes:
        lines = [f"{method} {path} HTTP/1.1", f"Host: {self.host}:{self.port}"]
        if self.key:
            lines.append(f"Authorization: Bearer {self.key}")
        if length is not None:
            lines += ["Content-Type: application/json", f"Content-Length: {length}"]
        return ("\r\n".join(lines) + "\r\n" + extra + "\r\n").encode()

    def message(self, method: str, path: str, body=None) -> bytes:
        if body is None:
            return self.head(method, path)
        payload = json.dumps(body).encode()
        return self.head(method, path, len(payload)) + payload

    def memory(self) -> tuple[int, int]:
        """Resident bytes of the server's process, and those of them that are its own: no pages of files, which the
        system maps and drops as it likes."""
        lines = Path(f"/proc/{self.pid}/status").read_text().splitlines()
        kilobytes = {line.split(":")[0]: int(line.split()[1]) for line in lines if line.startswith("Rss")}
        own = kilobytes["RssAnon"] + kilobytes["RssShmem"]
        return (own + kilobytes["RssFile"]) * 1024, own * 1024

    def descriptors(self) -> int:
        return len(os.listdir(f"/proc/{self.pid}/fd"))


class Connection:
    """One connection that is opened when needed and kept while the server keeps it."""

    def __init__(self, server: Server):
        self.server = server
        self.reader = self.writer = None

    async def open(self):
        if self.writer is None:
            self.reader, self.writer = await asyncio.open_connection(self.server.host, self.server.port)

    async def send(self, data: bytes):
        await self.open()
        self.writer.write(data)
        await self.writer.drain()

    async def head(self) -> tuple[int, dict[str, str]]:
        status = await self.reader.readline()
        if not status:
            raise ConnectionResetError("closed before an answer")
        headers = {}
        while (line := await self.reader.readline()) not in (b"\r\n", b""):
            name, _, value = line.decode("latin-1").partition(":")
            headers[name.strip().lower()] = value.strip()
        return int(status.split()[1]), headers

    async def pieces(self, headers: dict[str, str]):
        """The body in the pieces in which it was sent."""
        if headers.get("transfer-encoding") == "chunked":
            while size := int((await self.reader.readline()).split(b";")[0], 16):
                yield await self.reader.readexactly(size)
                await self.reader.readexactly(2)
            await self.reader.readline()
        elif "content-length" in headers:
            yield await self.reader.readexactly(int(headers["content-length"]))
        else:
            yield await self.reader.read()
            self.close()

    async def answer(self) -> Response:
        status, headers = await self.head()
        body = b"".join([piece async for piece in self.pieces(headers)])
        if headers.get("connection", "").lower() == "close":
            self.close()
        return Response(status, headers, body)

    async def request(self, method: str, path: str, body=None) -> Response:
        """Sends and reads; once more where a kept connection turns out to be closed."""
        kept = self.writer is not None
        try:
            await self.send(self.server.message(method, path, body))
            return await self.answer()
        except (ConnectionError, asyncio.IncompleteReadError):
            self.close()
            if not kept:
                raise
        await self.send(self.server.message(method, path, body))
        return await self.answer()

    def close(self, abruptly: bool = False):
        if self.writer is not None:
            if abruptly:
                self.writer.transport.abort()
            else:
                self.writer.close()
        self.reader = self.writer = None


def parser(description: str) -> ArgumentParser:
    made = ArgumentParser(description=description)
    made.add_argument("url", help="the server, as http://127.0.0.1:8080")
    made.add_argument("--pid", type=int, help="the server's process, for memory and descriptors")
    made.add_argument("--key", help="its API key")
    return made


def server_of(arguments) -> Server:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, max(soft, 8192)), hard))
    url = urlsplit(arguments.url)
    return Server(url.hostname, url.port or 80, arguments.key, arguments.pid)


def quantile(values: list[float], share: float) -> float:
    """The value below which `share` of the values lie; NaN of none."""
    ordered = sorted(values)
    return ordered[min(int(share * len(ordered)), len(ordered) - 1)] if ordered else float("nan")


class Report:
    """One line a check; what failed decides the exit status."""

    def __init__(self):
        self.failed = 0
        self.started = time.monotonic()

    def check(self, holds: bool, what: str):
        self.failed += not holds
        print(f"{'ok   ' if holds else 'FAIL '} {what}", flush=True)

    def note(self, what: str):
        print(f"      {what}", flush=True)

    def end(self):
        seconds = time.monotonic() - self.started
        print(f"{self.failed} failed in {seconds:.0f} s" if self.failed else f"all passed in {seconds:.0f} s")
        raise SystemExit(1 if self.failed else 0)
