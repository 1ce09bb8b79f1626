"""A few streams beside a crowd of others, from a program that has nothing else to do: their delays are the gateway's.

A crowd's own program is late to send and to read, which its clients cannot tell from a late gateway. `python -m
bench.probe ADDRESS --key KEY --begin B --seconds S` runs from B (monotonic seconds) on, and prints delays as JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import time

from bench.delays import Delays, stream
from bench.raw_client import RawClient
from common import event_loop

PROMPT = "y" * 200
REQUESTS_PER_S = 20.0  # for the first token
NUM_STREAMS = 10  # for the gaps between tokens
STREAM_TOKENS = 100
STREAM_S = 5.0  # which these take, more or less
CONNECTION = 99  # another one than those of the crowd


async def measure(address: str, key: str, begin: float, seconds: float) -> Delays:
    """New requests at a steady rate, and a few streams that are always open."""
    delays, end = Delays(), begin + seconds
    async with RawClient(address, key, PROMPT, CONNECTION) as client:
        await client.wait_until_served()

        async def keep(number: int) -> None:
            await asyncio.sleep(number * STREAM_S / NUM_STREAMS)  # else they would begin together, again and again
            while time.monotonic() < end:
                await stream(client, STREAM_TOKENS, delays, begin)

        async with asyncio.TaskGroup() as tasks:
            for number in range(NUM_STREAMS):
                tasks.create_task(keep(number))
            for number in itertools.count():
                at = begin + number / REQUESTS_PER_S
                if at >= end:
                    break
                await asyncio.sleep(max(0.0, at - time.monotonic()))
                tasks.create_task(stream(client, 1, delays, begin))
    return delays


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description="Measure delays beside a crowd.")
    parser.add_argument("address", help="host:port of the gateway")
    parser.add_argument("--key", required=True)
    parser.add_argument("--begin", type=float, required=True, help="monotonic seconds")
    parser.add_argument("--seconds", type=float, required=True)
    arguments = parser.parse_args()
    delays = event_loop.run(measure(arguments.address, arguments.key, arguments.begin, arguments.seconds))
    print(json.dumps({"ttft": list(delays.ttft), "gap": list(delays.gap), "num_failed": delays.num_failed}))


if __name__ == "__main__":
    main()
