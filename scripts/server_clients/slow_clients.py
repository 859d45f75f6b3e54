#!/usr/bin/env python3
"""Slow clients beside good ones: the good ones must not feel them, and the slow ones are cut.

    python scripts/server_clients/slow_clients.py http://127.0.0.1:8080 --pid PID [--slow 200] [--seconds 15]

Standard library only. 16 good clients are measured without, with and again without sockets that send their headers a
byte a second (and that come back when they are cut).
"""

import asyncio
import time

from http1 import Connection, Report, parser, quantile, server_of


async def good_clients(server, seconds: float, tokens: int, faults: list[str]) -> list[float]:
    """The times of the requests of 16 clients, in milliseconds."""
    end, times = time.monotonic() + seconds, []

    async def client(number: int):
        connection = Connection(server)
        body = {"prompt": f"The sea was calm on day {number}", "max_tokens": tokens, "temperature": 0}
        while time.monotonic() < end:
            started = time.monotonic()
            try:
                response = await asyncio.wait_for(connection.request("POST", "/v1/completions", body), 60)
            except (OSError, asyncio.IncompleteReadError) as error:
                connection.close()
                faults.append(f"{type(error).__name__}: {error}")
                continue
            times.append(1000 * (time.monotonic() - started))
            if response.status != 200:
                faults.append(f"{response.status}: {response.body[:120]!r}")
        connection.close()

    await asyncio.gather(*(client(number) for number in range(16)))
    return times


async def slow_client(server, lives: list[float], open_now: set):
    """Opens, dribbles and opens again, until it is cancelled; how long each connection lived goes to `lives`."""
    while True:
        connection = Connection(server)
        try:
            await connection.open()
        except OSError:
            await asyncio.sleep(0.5)
            continue
        started = time.monotonic()
        open_now.add(connection)
        try:
            await connection.send(server.head("GET", "/v1/models")[:-2] + b"X-Slow: ")
            while not connection.reader.at_eof():
                connection.writer.write(b"a")
                await connection.writer.drain()
                try:
                    await asyncio.wait_for(connection.reader.read(1000), 1)
                except asyncio.TimeoutError:
                    pass
            lives.append(time.monotonic() - started)
        except OSError:
            lives.append(time.monotonic() - started)
        finally:
            open_now.discard(connection)
            connection.close(abruptly=True)


async def main():
    options = parser(__doc__.splitlines()[0])
    options.add_argument("--slow", type=int, default=200, help="slow sockets (200)")
    options.add_argument("--seconds", type=float, default=15, help="of each of the three parts (15)")
    options.add_argument("--tokens", type=int, default=8, help="tokens of a good client's answer (8)")
    options.add_argument("--cut", type=float, default=12, help="seconds after which a slow socket must be gone (12)")
    arguments = options.parse_args()
    server, report, faults = server_of(arguments), Report(), []
    at_start = server.descriptors() if server.pid else None
    await good_clients(server, 2, arguments.tokens, faults)

    without = await good_clients(server, arguments.seconds, arguments.tokens, faults)
    lives, open_now = [], set()
    slow = [asyncio.create_task(slow_client(server, lives, open_now)) for _ in range(arguments.slow)]
    await asyncio.sleep(1)
    report.check(len(open_now) == arguments.slow, f"{len(open_now)} of {arguments.slow} slow sockets are open")
    beside = await good_clients(server, arguments.seconds, arguments.tokens, faults)
    for task in slow:
        task.cancel()
    await asyncio.gather(*slow, return_exceptions=True)
    await asyncio.sleep(1)
    without += await good_clients(server, arguments.seconds, arguments.tokens, faults)

    for fault in faults[:5]:
        report.note(fault)
    report.check(not faults, f"the good clients' {len(without) + len(beside)} requests are all answered")
    before, after = quantile(without, 0.99), quantile(beside, 0.99)
    report.note(f"p50 {quantile(without, 0.5):.1f} ms without, {quantile(beside, 0.5):.1f} ms beside them")
    report.check(after < 2 * before, f"p99 {before:.1f} ms without, {after:.1f} ms beside them: {after / before:.2f} times (under 2)")
    if arguments.seconds > arguments.cut:
        oldest = max(lives, default=float("inf"))
        report.check(len(lives) >= arguments.slow and oldest < arguments.cut, f"{len(lives)} slow sockets were cut, after {min(lives, default=0):.1f} to {oldest:.1f} s (under {arguments.cut:.0f} s)")
    if server.pid:
        await asyncio.sleep(1)
        report.check(server.descriptors() <= at_start, f"descriptors {at_start} -> {server.descriptors()}")
    report.end()


if __name__ == "__main__":
    asyncio.run(main())
