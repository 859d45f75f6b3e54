#!/usr/bin/env python3
"""Loads a server and checks that every answer is the right one and that nothing is left behind.

    python scripts/server_clients/load.py http://127.0.0.1:8080 --pid PID [-n 20000] [-c 16]

Standard library only. Before the load, each of a set of greedy requests is sent alone: what is answered then must be
answered, byte for byte, under load. 10 % of the requests are dropped at a random moment (in the head, in the body,
before the answer, in the middle of it) and 5 % are malformed and must be refused as they deserve. Memory and
descriptors are read when nothing runs, after each tenth of the requests. Measured is the memory of the process itself,
without pages of files and without snapshots, which a cache bounds: how much of both is there differs by chance. What an
allocator keeps differs too, so the medians of the first three measures and of the last three are compared.
"""

import asyncio
import json
import random
import sys
import time
from collections import Counter
from statistics import median

from http1 import Connection, Report, parser, quantile, server_of

WORDS = "the sea was calm and a small boat went out past the old light house where nobody had lived since".split()
IGNORED = ("id", "created", "timings", "system_fingerprint")  # of an answer: what differs from one to the next


def requests(rng: random.Random) -> list[tuple[str, str, dict | None]]:
    """The set of right requests: method, path, body."""
    made = [("GET", "/v1/models", None), ("GET", "/health", None), ("GET", "/props", None)]
    for i in range(32):
        prompt = " ".join(rng.choice(WORDS) for _ in range(rng.choice([1, 3, 8, 20, 60])))
        limit = rng.choice([1, 2, 4, 8, 16])
        sampling = {"temperature": 0, "max_tokens": limit, "stream": i % 3 == 0}
        if i % 2:
            made.append(("POST", "/v1/completions", {"prompt": prompt, **sampling}))
        else:
            made.append(("POST", "/v1/chat/completions", {"messages": [{"role": "user", "content": prompt}], **sampling}))
    for text in ("a", "The sea.", "über 海 🌊"):
        made.append(("POST", "/tokenize", {"content": text}))
        made.append(("POST", "/v1/embeddings", {"input": text}))
    seeded = {"prompt": "The sea", "max_tokens": 8, "temperature": 1.0, "seed": 7, "n": 2}
    made.append(("POST", "/v1/completions", seeded))
    return made


def essence(body: bytes, headers: dict[str, str]):
    """What must be the same each time. Of a stream: the text of each choice, why it ended and that it ended."""
    if not headers.get("content-type", "").startswith("text/event-stream"):
        value = json.loads(body)
        if isinstance(value, dict):
            value = {name: field for name, field in value.items() if name not in IGNORED}
            usage = value.get("usage") or {}
            usage.pop("prompt_tokens_details", None)  # how much was cached depends on what came before
        return value
    joined, finish, done = {}, {}, False
    for line in body.decode().splitlines():
        if line == "data: [DONE]":
            done = True
        elif line.startswith("data: "):
            for choice in json.loads(line[6:]).get("choices", []):
                piece = choice["delta"].get("content") if "delta" in choice else choice.get("text")
                joined[choice["index"]] = joined.get(choice["index"], "") + (piece or "")
                finish[choice["index"]] = choice.get("finish_reason") or finish.get(choice["index"])
    return joined, finish, done


def malformed(server, rng: random.Random) -> tuple[bytes, set[int], bool]:
    """Bytes that are wrong, the statuses that may answer them, and whether silence may too."""
    def post(payload: bytes, path="/v1/chat/completions", extra="", kind="application/json"):
        head = server.head("POST", path, None, f"Content-Type: {kind}\r\nContent-Length: {len(payload)}\r\n{extra}")
        return head + payload

    message = '"messages":[{"role":"user","content":"a"}]'
    choices = [
        (post(b"{"), {400}, False),
        (post(b""), {400, 411, 415}, False),
        (post(b"[" * 5000), {400}, False),
        (post(b"\xff\xfe{}"), {400}, False),
        (post(b"{%s}" % b'"messages":[]'), {400}, False),
        (post(('{%s,"temperature":"hot"}' % message).encode()), {400, 422}, False),
        (post(('{%s,"max_tokens":-2}' % message).encode()), {400, 422}, False),
        (post(('{%s,"n":1000000000}' % message).encode()), {400, 422}, False),
        (post(('{%s,"top_p":NaN}' % message).encode()), {400}, False),
        (post(('{%s,"stop":[1]}' % message).encode()), {400, 422}, False),
        (post(('{%s,"model":"nobody"}' % message).encode()), {404}, False),
        (post(('{%s,"session":"../../etc/passwd"}' % message).encode()), {400, 404}, False),
        (post(b'{"messages":[{"role":"wizard","content":"a"}]}'), {400, 422}, False),
        (post(b'{"prompt":{}}', "/v1/completions"), {400, 422}, False),
        (post(b"a=b", kind="application/x-www-form-urlencoded"), {415}, False),
        (post(b"{}", "/v1/nothing"), {404}, False),
        (server.head("PUT", "/v1/models"), {405}, False),
        (server.head("GET", "/%2e%2e/%2e%2e/etc/passwd"), {400, 404}, False),
        (b"GET / HTTP/1.1\r\nHost: evil.example\r\n\r\n", {403, 421}, False),
        (b"complete nonsense\r\n\r\n", {400}, True),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(64), {400}, True),
        (server.head("GET", "/v1/models", None, "X-Long: " + "a" * 100_000 + "\r\n"), {431, 400}, True),
    ]
    return rng.choice(choices)


class Load:
    def __init__(self, server, arguments):
        self.server = server
        self.rng = random.Random(arguments.seed)
        self.requests = requests(self.rng)
        self.expected = {}
        self.limit = arguments.timeout
        self.statuses = Counter()
        self.kinds = Counter()
        self.wrong = []
        self.times = []

    def fault(self, what: str):
        self.wrong.append(what)
        if len(self.wrong) <= 10:
            print(f"      wrong: {what}", file=sys.stderr, flush=True)

    async def alone(self):
        """Each request by itself, twice: the answers that count."""
        connection = Connection(self.server)
        for index, request in enumerate(self.requests):
            for _ in range(2):
                response = await asyncio.wait_for(connection.request(*request), self.limit)
                if response.status != 200:
                    self.fault(f"alone: {request[1]} {request[2]}: {response.status} {response.body[:200]!r}")
                    break
                found = essence(response.body, response.headers)
                if self.expected.setdefault(index, found) != found:
                    self.fault(f"alone, the second answer differs: {request}: {self.expected[index]} / {found}")
        connection.close()
        self.requests = [(index, request) for index, request in enumerate(self.requests) if index in self.expected]

    async def right(self, connection: Connection):
        index, request = self.rng.choice(self.requests)
        started = time.monotonic()
        response = await connection.request(*request)
        self.times.append(time.monotonic() - started)
        self.statuses[response.status] += 1
        if response.status != 200:
            self.fault(f"{request[1]}: {response.status} {response.body[:200]!r}")
        elif (found := essence(response.body, response.headers)) != self.expected[index]:
            self.fault(f"{request}: expected {self.expected[index]}, found {found}")

    async def dropped(self):
        """Begins a request that may be long, and is gone at some moment."""
        connection = Connection(self.server)
        stream = self.rng.random() < 0.5
        prompt = " ".join(self.rng.choice(WORDS) for _ in range(self.rng.choice([5, 400])))
        data = self.server.message("POST", "/v1/completions", {"prompt": prompt, "max_tokens": 200, "stream": stream})
        moment = self.rng.randrange(4)
        if moment == 0:
            data = data[: self.rng.randrange(1, len(data))]
        await connection.send(data)
        if moment == 2:
            await asyncio.sleep(self.rng.random() * 0.05)
        if moment == 3:
            status, headers = await connection.head()
            self.statuses[status] += 1
            if status != 200:
                self.fault(f"a request to be dropped: {status}")
            left = self.rng.randrange(1, 20)
            async for _ in connection.pieces(headers):
                left -= 1
                if left == 0:
                    break
        connection.close(abruptly=self.rng.random() < 0.5)

    async def malformed(self):
        data, allowed, silence = malformed(self.server, self.rng)
        connection = Connection(self.server)
        shown = data.split(b"\r\n\r\n", 1)[-1][:60] or data[:60]
        try:
            await connection.send(data)
            response = await connection.answer()
            self.statuses[response.status] += 1
            if response.status not in allowed:
                self.fault(f"malformed {shown!r}: expected {sorted(allowed)}, found {response.status} {response.body[:120]!r}")
        except (ConnectionError, asyncio.IncompleteReadError):
            if not silence:
                self.fault(f"malformed {shown!r}: closed without an answer")
        finally:
            connection.close()

    async def client(self, share: list[int]):
        connection = Connection(self.server)
        while share[0] > 0:
            share[0] -= 1
            roll = self.rng.random()
            kind, act = (
                ("dropped", self.dropped()) if roll < 0.10 else ("malformed", self.malformed()) if roll < 0.15 else ("right", self.right(connection))
            )
            self.kinds[kind] += 1
            try:
                await asyncio.wait_for(act, self.limit)
            except (OSError, asyncio.IncompleteReadError, ValueError) as error:  # TimeoutError is an OSError
                connection.close()
                self.fault(f"{kind}: {type(error).__name__}: {error}")
        connection.close()

    async def run(self, count: int, clients: int):
        share = [count]
        await asyncio.gather(*(self.client(share) for _ in range(clients)))


async def quiet(server, before: int):
    """Waits until the server has put away what was dropped and no longer gives memory back; at most 30 s.
    Resident bytes, those of its own without its snapshots, and descriptors."""
    (_, least), since = server.memory(), time.monotonic()
    for _ in range(60):
        await asyncio.sleep(0.5)
        (_, own), now = server.memory(), time.monotonic()
        if own < least * 0.999:
            least, since = own, now
        elif now - since > 12 and server.descriptors() <= before:
            break
    connection = Connection(server)
    metrics = (await connection.request("GET", "/metrics")).body.decode()
    connection.close()
    snapshots = next(line for line in metrics.splitlines() if line.startswith("boostr_snapshot_bytes "))
    await asyncio.sleep(0.1)  # until that connection is put away too
    resident, own = server.memory()
    return resident, own - int(float(snapshots.split()[1])), server.descriptors()


async def main():
    options = parser(__doc__.splitlines()[0])
    options.add_argument("-n", "--requests", type=int, default=20_000)
    options.add_argument("-c", "--clients", type=int, default=16)
    options.add_argument("--seed", type=int, default=1)
    options.add_argument("--timeout", type=float, default=60, help="seconds a request may take (60)")
    options.add_argument("--drift", type=float, default=2.0, help="percent that memory may grow (2)")
    arguments = options.parse_args()
    server, report = server_of(arguments), Report()
    at_start = server.descriptors() if server.pid else None
    load = Load(server, arguments)
    await load.alone()
    report.check(not load.wrong, f"{len(load.requests)} requests alone, each answered twice the same")
    found = len(load.wrong)

    warm = max(arguments.requests // 10, 1)
    await load.run(warm, arguments.clients)
    measured = [await quiet(server, at_start)] if server.pid else []
    seconds, tenth = 0.0, max((arguments.requests - warm) // 9, 1)
    for part in range(9):
        started = time.monotonic()
        await load.run(tenth if part < 8 else arguments.requests - warm - 8 * tenth, arguments.clients)
        seconds += time.monotonic() - started
        if server.pid:
            measured.append(await quiet(server, at_start))
            resident, own, descriptors = measured[-1]
            report.note(f"{warm + (part + 1) * tenth} requests, {seconds:.0f} s: {resident / 1e6:.1f} MB resident, {own / 1e6:.2f} MB its own without snapshots, {descriptors} descriptors")
    report.note(f"{dict(load.kinds)}; statuses {dict(sorted(load.statuses.items()))}; {(arguments.requests - warm) / seconds:.0f} requests/s")
    report.note(f"time of a right request: p50 {1000 * quantile(load.times, 0.5):.0f} ms, p99 {1000 * quantile(load.times, 0.99):.0f} ms")
    report.check(not any(status >= 500 for status in load.statuses), "no 5xx")
    report.check(len(load.wrong) == found, f"every answer as expected ({len(load.wrong) - found} were not)")
    if server.pid:
        resident, _, descriptors = measured[-1]
        first, last = (median(own for _, own, _ in part) for part in (measured[:3], measured[-3:]))
        drift = 100 * (last - first) / resident
        report.check(drift < arguments.drift, f"its own memory {first / 1e6:.2f} MB -> {last / 1e6:.2f} MB: {drift:+.2f} % of what is resident (at most {arguments.drift} %)")
        report.check(descriptors <= at_start, f"descriptors {at_start} -> {descriptors}")
    report.end()


if __name__ == "__main__":
    asyncio.run(main())
