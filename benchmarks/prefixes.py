"""Prompt tokens that are computed, with and without what keeps prefixes: counters of real engines, no clock.

    python -m benchmarks.prefixes

`turns`: conversations of several turns at the CPU engine, whose requests name their conversation or do not.
`documents`: groups whose prompts begin with one of some documents, over two of the engines for GPUs (their kernels in
torch), routed by prefix or to the least full engine. All of one policy version: an update would forget everything.
"""

import argparse
import asyncio
import tempfile
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from asyncrl.config.engine import NativeEngine as Settings
from asyncrl.engines.base import Engine
from asyncrl.engines.native.cpu.engine import NativeEngine
from asyncrl.engines.native.cuda.engine import CudaEngine
from asyncrl.fleet.routing import BLOCK, Router
from asyncrl.types import Request, Sampling

VOCABULARY = 256
DOCUMENT_TOKENS = 512
AT_ONCE = 8
"""Groups at each engine; with few of them the bound leaves no choice."""


def model(directory: Path) -> Path:
    cfg = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        max_position_embeddings=4096,
    )
    torch.manual_seed(0)
    Qwen3ForCausalLM(cfg).save_pretrained(directory)
    return directory


async def read(engine: Engine, name: str, tokens: Iterable[int], length: int, conversation: str = "") -> list[int]:
    sampling = Sampling(max_tokens=length)
    request = Request(id=name, tokens=tuple(tokens), sampling=sampling, seed=0, conversation=conversation)
    return [token async for delta in engine.submit(request) for token in delta.segment.tokens.tolist()]


async def converse(engine: Engine, number: int, turns: int, *, named: bool) -> None:
    random, name = np.random.default_rng(number), f"{number}"
    tokens = random.integers(0, VOCABULARY, 200).tolist()
    for turn in range(turns):
        tokens += await read(engine, f"{name}.{turn}", tokens, 60, name if named else "")
        tokens += random.integers(0, VOCABULARY, 40).tolist()


async def of_turns(path: Path, conversations: int, turns: int, *, named: bool) -> int:
    engine = NativeEngine(path, Settings(), name="cpu")
    await engine.start()
    async with asyncio.TaskGroup() as tasks:
        for number in range(conversations):
            tasks.create_task(converse(engine, number, turns, named=named))
    computed = engine.stats().prefilled_tokens
    await engine.close()
    return computed


async def of_documents(path: Path, groups: int, documents: int, engines: int, *, routed: bool) -> int:
    """All of one version."""
    fleet = {
        f"{number}": CudaEngine(path, Settings(), name="paged", device=torch.device("cpu")) for number in range(engines)
    }
    for engine in fleet.values():
        await engine.start()
    random, router, capacities = np.random.default_rng(0), Router(), dict.fromkeys(fleet, 1.0)
    texts = random.integers(0, VOCABULARY, (documents, DOCUMENT_TOKENS)).tolist()
    busy: list[tuple[str, asyncio.Task[list[int]]]] = []
    for group, document in enumerate(random.integers(0, documents, groups).tolist()):
        if len(busy) == AT_ONCE * engines:
            name, task = busy.pop(0)
            await task
            router.take_back(name, 1)
        text = chr(ord("a") + document) * (2 * BLOCK)
        name = router.give(capacities, 1, text if routed else "")
        tokens = [*texts[document], *random.integers(0, VOCABULARY, 20).tolist()]
        busy.append((name, asyncio.create_task(read(fleet[name], f"{group}", tokens, 10))))
    await asyncio.gather(*(task for _, task in busy))
    computed = sum(engine.stats().prefilled_tokens for engine in fleet.values())
    for engine in fleet.values():
        await engine.close()
    return computed


def show(what: str, without: int, with_it: int) -> None:
    print(
        f"{what}: {without:,} prompt tokens computed without, {with_it:,} with: {without / with_it:.2f}x fewer",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--conversations", type=int, default=8)
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--groups", type=int, default=64)
    parser.add_argument("--documents", type=int, default=16)
    parser.add_argument("--engines", type=int, default=4)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        path = model(Path(directory))
        counts = arguments.conversations, arguments.turns
        turns = [asyncio.run(of_turns(path, *counts, named=named)) for named in (False, True)]
        show(f"{counts[0]} conversations of {counts[1]} turns", *turns)
        counts = arguments.groups, arguments.documents, arguments.engines
        routed = [asyncio.run(of_documents(path, *counts, routed=routed)) for routed in (False, True)]
        show(f"{counts[0]} groups over {counts[1]} documents and {counts[2]} engines, one policy version", *routed)


if __name__ == "__main__":
    main()
