#!/usr/bin/env python3
"""What forks and barriers cost a token on many threads: computed, from steps that were measured on few.

    boostr bench --synthetic mamba2-2.7b --dtype q4_k --steps --json -t 1,2,16,64 > steps.json
    python3 benches/barriers.py steps.json --repeat 1

Of one thread come the times of the steps, of two the cost of a region that does nothing, of 16 and 64 (more threads
than this machine has) only the numbers of tasks, which do not depend on the machine.

A region is simulated as crates/kernels/src/parallel.rs runs it. The thread that begins it hands half of the threads to
another, which takes the time of one hand-over, and both go on like that. A thread computes the tasks of its own share,
then those that nobody has begun. Ends are handed back the same way. Tasks of a step are of equal length, and memory is
as fast for each thread as for one alone: so the share of the barriers is the largest that it can be. `--distance`
makes hand-overs as many times longer as between the two cores that were measured.
"""

import argparse
import heapq
import json


def begins(threads, hand_over):
    """When each thread has heard of the region, and whom it hands its end to."""
    begin, parent = [0.0] * threads, [None] * threads
    ranges = [(0, threads)]
    while ranges:
        first, end = ranges.pop()
        now = begin[first]
        while end - first > 1:
            middle = (first + end + 1) // 2
            begin[middle], parent[middle] = now + hand_over, first
            ranges.append((middle, end))
            end = middle
    return begin, parent


def region(tasks, task_us, threads, hand_over, claim):
    """How long a region takes, and how long its tasks alone keep the busiest thread."""
    active = min(threads, tasks)
    begin, parent = begins(active, hand_over)
    shares = [list(range(i * tasks // threads, (i + 1) * tasks // threads)) for i in range(threads)]
    left = tasks
    queue = [(begin[i], i) for i in range(active)]
    heapq.heapify(queue)
    end, busy = begin[:], [0.0] * active
    while queue and left:
        now, i = heapq.heappop(queue)
        share = next(shares[(i + k) % threads] for k in range(threads) if shares[(i + k) % threads])
        share.pop(0)
        left -= 1
        busy[i] += task_us
        end[i] = now + claim + task_us
        heapq.heappush(queue, (end[i], i))
    for i in sorted(range(1, active), key=lambda i: -begin[i]):
        end[parent[i]] = max(end[parent[i]], end[i] + hand_over)
    return end[0], max(busy)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("steps", help="what `boostr bench --steps --json` printed")
    parser.add_argument("--repeat", type=int, default=1, help="how often the layers that were measured come in the model")
    parser.add_argument("--head", type=int, default=1, help="steps at the end that come once")
    parser.add_argument("--distance", type=float, nargs="+", default=[1, 4])
    parser.add_argument("--hand-over", type=float, help="microseconds; measured if not given")
    parser.add_argument("--steps-only", action="store_true", help="leave out what is between the steps")
    parser.add_argument("--claim", type=float, default=0.05, help="microseconds to take a task")
    args = parser.parse_args()
    with open(args.steps) as file:
        report = json.load(file)
    tokens = {token["threads"]: token for token in report["tokens"]}
    one, hand_over = tokens[1], args.hand_over
    if hand_over is None:
        hand_over = tokens[2]["empty_region_us"] / 2
    times = [step["us"] for step in one["steps"]]
    often = [args.repeat] * (len(times) - args.head) + [1] * args.head
    within = sum(times)
    serial = 0.0 if args.steps_only else args.repeat * (one["token_us"] - within)
    whole = serial + sum(us * n for us, n in zip(times, often))
    print(f"{report['model']}: {whole / 1000:.2f} ms a token on one thread, {serial / 1000:.2f} of them between the steps;")
    print(f"a hand-over takes {hand_over:.2f} us\n")
    print("| threads | hand-over, us | regions | tasks | token, ms | of tasks | of forks and barriers | of steps on one thread | speedup |")
    print("|---|---|---|---|---|---|---|---|---|")
    for threads in sorted(n for n in tokens if n > 2):
        steps = tokens[threads]["steps"]
        assert len(steps) == len(times), f"{threads} threads have {len(steps)} steps, one has {len(times)}"
        for distance in args.distance:
            computing, waiting, alone, regions, tasks = 0.0, 0.0, serial, 0, 0
            for step, us, n in zip(steps, times, often):
                if not step["is_region"]:
                    alone += us * n
                    continue
                took, busy = region(step["tasks"], us / step["tasks"], threads, hand_over * distance, args.claim)
                computing += busy * n
                waiting += (took - busy) * n
                regions += n
                tasks += step["tasks"] * n
            token = computing + waiting + alone
            row = [threads, f"{hand_over * distance:.2f}", regions, tasks] + [
                f"{ms / 1000:.2f}" for ms in (token, computing, waiting, alone)
            ]
            print("| " + " | ".join(map(str, row + [f"{whole / token:.1f}"])) + " |")


if __name__ == "__main__":
    main()
