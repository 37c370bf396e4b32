"""What the gateway adds to a call: milliseconds around an engine that answers at once.

    python -m benchmarks.gateway [--episodes 20] [--turns 20]

Each call continues a conversation with a tool in Qwen3's format: a message of 200 characters, a reply of 100 tokens.
One line for each way to call: the episode's own method without HTTP, a bare HTTP client, OpenAI's client. The server is
a process of its own, as in a run. `CPU` is what that process spends on a call; it hardly depends on who else is busy,
and `wall` does. The aim is 3 ms a call.
"""

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
from openai import OpenAI

from asyncrl.chat import ChatFormat
from asyncrl.data.tokenizer import load_tokenizer
from asyncrl.gateway import GatewayServer, SampledTokens
from asyncrl.gateway.call import Call
from asyncrl.types import Request, Sampling, Segment
from tests.support.chat_families import FAMILIES

TOOL: Any = {
    "type": "function",
    "function": {"name": "find", "parameters": {"type": "object", "properties": {"key": {"type": "string"}}}},
}
SAMPLING = Sampling(max_tokens=1 << 20)
QUESTION = "How many are there if one half is taken away? " * 5


def chat_format(directory: Path) -> ChatFormat:
    return ChatFormat(load_tokenizer(FAMILIES["qwen3-training"].save(directory)))


class Instant:
    """An engine that answers at once."""

    def __init__(self, chat: ChatFormat) -> None:
        ids = chat.encode([{"role": "user", "content": "There are seven, and then three. " * 20}])[:99]
        ids.append(chat.encode([{"role": "user", "content": ""}])[-1])
        self._sampled = SampledTokens((Segment.sampled(ids, np.full(100, -0.5), 1),), "stop")

    async def __call__(self, request: Request) -> SampledTokens:
        return self._sampled


async def in_process(episodes: int, turns: int) -> tuple[list[float], float]:
    with tempfile.TemporaryDirectory() as folder:
        chat = chat_format(Path(folder))
        server = GatewayServer(chat)
        await server.start()
        taken, sampler, cpu_began = list[float](), Instant(chat), time.process_time()
        for number in range(episodes):
            server.open(f"{number}", sampler, SAMPLING, number)
            episode, messages = server.episode(f"{number}"), list[dict[str, Any]]()
            for _ in range(turns):
                messages.append({"role": "user", "content": QUESTION})
                began = time.perf_counter()
                answers = await episode.answer(Call(messages=messages, tools=(TOOL,)))
                taken.append(time.perf_counter() - began)
                messages.append(answers.choices[0].reply.message())
            _check((await server.end(f"{number}")).trajectory()[1].branches)
        cpu_s = time.process_time() - cpu_began
        await server.close()
    return taken, cpu_s


def _check(branches: Sequence[Any]) -> None:
    if branches:
        raise SystemExit(f"the conversation has branches, so other work was measured: {branches[:3]}")


async def serve(episodes: int) -> None:
    """In the process of the server: access to as many episodes, then its CPU seconds for each line that comes."""
    with tempfile.TemporaryDirectory() as folder:
        chat = chat_format(Path(folder))
        server = GatewayServer(chat)
        await server.start()
        opened = [server.open(f"{n}", Instant(chat), SAMPLING, n) for n in range(episodes)]
        print(json.dumps([(access.url, access.key) for access in opened]), flush=True)
        while await asyncio.to_thread(sys.stdin.readline):
            print(time.process_time(), flush=True)
        for number in range(episodes):
            _check((await server.end(f"{number}")).trajectory()[1].branches)
        await server.close()


Client = Callable[[str, str], Callable[[list[Any]], Any]]
"""From URL and key to a function that makes a call and gives the reply's message."""


def bare(url: str, key: str) -> Callable[[list[Any]], Any]:
    client = httpx2.Client(headers={"authorization": f"Bearer {key}"})

    def call(messages: list[Any]) -> Any:
        found = client.post(f"{url}/chat/completions", json={"messages": messages, "tools": [TOOL]})
        return found.json()["choices"][0]["message"]

    return call


def official(url: str, key: str) -> Callable[[list[Any]], Any]:
    client = OpenAI(base_url=url, api_key=key)
    return lambda messages: (
        client.chat.completions.create(model="policy", messages=messages, tools=[TOOL]).choices[0].message
    )


def over_http(episodes: int, turns: int, client: Client) -> tuple[list[float], float]:
    words = [sys.executable, "-m", "benchmarks.gateway", "--serve", "--episodes", str(episodes)]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdin is not None
        assert server.stdout is not None

        def cpu_s() -> float:
            assert server.stdin is not None
            assert server.stdout is not None
            server.stdin.write("\n")
            server.stdin.flush()
            return float(server.stdout.readline())

        taken, cpu_began = list[float](), 0.0
        for number, access in enumerate(json.loads(server.stdout.readline())):
            call, messages = client(*access), list[Any]()
            for turn in range(turns):
                messages.append({"role": "user", "content": QUESTION})
                began = time.perf_counter()
                messages.append(call(messages))
                taken.append(time.perf_counter() - began)
                if not number and not turn:  # the first call of a process opens a connection and imports
                    taken.clear()
                    cpu_began = cpu_s()
        cpu = cpu_s() - cpu_began
        server.stdin.close()
    if server.returncode:
        raise SystemExit(server.returncode)
    return taken, cpu


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--episodes", type=int, default=20)
    parser.add_argument("--turns", type=int, default=20)
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.serve:
        asyncio.run(serve(options.episodes))
        return
    print(f"{options.episodes} episodes of {options.turns} turns, load", os.getloadavg())
    ways: list[tuple[str, Callable[[], tuple[list[float], float]]]] = [
        ("in process", lambda: asyncio.run(in_process(options.episodes, options.turns))),
        ("HTTP", lambda: over_http(options.episodes, options.turns, bare)),
        ("openai", lambda: over_http(options.episodes, options.turns, official)),
    ]
    for name, measure in ways:
        taken, cpu_s = measure()
        cuts = statistics.quantiles(taken, n=100)
        print(
            f"{name:10}  CPU {1000 * cpu_s / len(taken):.2f} ms a call, "
            f"wall p50 {1000 * cuts[49]:.2f} ms, p99 {1000 * cuts[98]:.2f} ms"
        )


if __name__ == "__main__":
    main()
