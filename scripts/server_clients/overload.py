#!/usr/bin/env python3
"""Offers a server ten times the requests that it can answer: it must refuse the rest at once, and only so.

    python scripts/server_clients/overload.py http://127.0.0.1:8080 --pid PID [--seconds 15]

Standard library only. Capacity is measured first, by 16 clients that each wait for their answer. Then requests arrive
by the clock, each on a connection of its own, whether or not others were answered. Allowed are 200 with a whole
answer, and 429 or 503 with Retry-After.
"""

import asyncio
import random
import time
from collections import Counter

from http1 import Connection, Report, parser, quantile, server_of

RATE_LIMIT = 1500  # arrivals a second that this client can make in good time


async def main():
    options = parser(__doc__.splitlines()[0])
    options.add_argument("--seconds", type=float, default=15, help="how long to overload (15)")
    options.add_argument("--times", type=float, default=10, help="times its capacity (10)")
    options.add_argument("--tokens", type=int, default=64, help="tokens of an answer (64)")
    options.add_argument("--p99-ms", type=float, default=50, help="the longest that 99 %% of refusals may take (50)")
    arguments = options.parse_args()
    server, report = server_of(arguments), Report()
    rng = random.Random(1)
    statuses, faults, refusal_times = Counter(), [], []
    answered = [0]

    def body():
        prompt = f"{rng.random()} the sea was calm"  # nothing to reuse
        return {"prompt": prompt, "max_tokens": arguments.tokens, "temperature": 1.0, "seed": rng.randrange(2**31)}

    async def one(connection: Connection):
        await connection.open()
        started = time.monotonic()
        await connection.send(server.message("POST", "/v1/completions", body()))
        response = await connection.answer()
        statuses[response.status] += 1
        if response.status == 200:
            choice, made = response.json()["choices"][0], response.json()["usage"]["completion_tokens"]
            answered[0] += made
            if choice["finish_reason"] != "stop" and (choice["finish_reason"], made) != ("length", arguments.tokens):
                faults.append(f"an answer that is not whole: {choice}, {made} tokens")
        elif response.status in (429, 503):
            refusal_times.append(1000 * (time.monotonic() - started))
            if "retry-after" not in response.headers or not response.json()["error"]["message"]:
                faults.append(f"{response.status} without Retry-After or message: {response.headers} {response.body[:100]!r}")
        else:
            faults.append(f"{response.status}: {response.body[:200]!r}")

    async def alone():
        connection = Connection(server)
        try:
            await asyncio.wait_for(one(connection), 120)
        except (OSError, asyncio.IncompleteReadError, ValueError) as error:
            faults.append(f"{type(error).__name__}: {error}")
        connection.close()

    async def closed_loop(seconds: float):
        async def client():
            connection = Connection(server)
            while time.monotonic() < end:
                await one(connection)
            connection.close()

        started = time.monotonic()
        end = started + seconds
        await asyncio.gather(*(client() for _ in range(16)))
        return time.monotonic() - started

    at_start = server.descriptors() if server.pid else None
    await closed_loop(1)
    statuses.clear()
    answered[0] = 0
    seconds = await closed_loop(5)
    capacity, tokens_before = statuses[200] / seconds, answered[0] / seconds
    report.check(set(statuses) == {200} and not faults, f"16 clients are all answered: {capacity:.0f} requests/s, {tokens_before:.0f} tokens/s")

    rate = min(arguments.times * capacity, RATE_LIMIT)
    if rate < arguments.times * capacity:
        report.note(f"this client makes {rate:.0f} requests/s: {rate / capacity:.1f} times the capacity; ask for more --tokens")
    statuses.clear()
    faults.clear()
    refusal_times.clear()
    answered[0] = 0
    tasks, late = [], 0.0
    started = time.monotonic()
    due = started
    while due < started + arguments.seconds:
        await asyncio.sleep(max(due - time.monotonic(), 0))
        late = max(late, time.monotonic() - due)
        tasks.append(asyncio.create_task(alone()))
        due += rng.expovariate(rate)
    during = answered[0] / (time.monotonic() - started)
    await asyncio.gather(*tasks)
    report.note(f"{len(tasks)} requests in {arguments.seconds:.0f} s ({rate:.0f}/s, at most {1000 * late:.0f} ms late): {dict(sorted(statuses.items()))}")
    report.note(f"tokens/s of the accepted: {during:.0f}, {during / tokens_before:.2f} of what they were (this client takes its part of the machine)")
    for fault in faults[:5]:
        report.note(fault)
    report.check(not faults and set(statuses) <= {200, 429, 503}, f"only 200, 429 and 503, each as it should be ({len(faults)} were not)")
    report.check(statuses[200] > 0 and statuses[429] + statuses[503] > 0, "some are accepted and some refused")
    p99 = quantile(refusal_times, 0.99)
    report.check(p99 < arguments.p99_ms, f"a refusal takes p50 {quantile(refusal_times, 0.5):.1f} ms, p99 {p99:.1f} ms (under {arguments.p99_ms:.0f} ms)")
    await asyncio.sleep(1)
    health = Connection(server)
    report.check((await health.request("GET", "/health")).status == 200, "afterwards it is healthy")
    await one(health)
    report.check(not faults, "and answers")
    health.close()
    await asyncio.sleep(0.5)
    if server.pid:
        report.check(server.descriptors() <= at_start, f"descriptors {at_start} -> {server.descriptors()}")
    report.end()


if __name__ == "__main__":
    asyncio.run(main())
