"""Tokens per second of the native engine against transformers' `generate`, on the quickstart's model.

    python -m benchmarks.engine_vs_transformers [--repeats 5]

Every request has its own answer length, drawn long-tailed. The engine gets them as `max_tokens`; transformers decodes
one padded batch until its longest row is done, as it does with an end-of-sequence token. Only useful tokens count.
Both sample at temperature 1 with a cache, in one process with one thread. Tokens per second are of wall time; the last
column compares CPU time, which says the same on an idle machine and is steadier on a busy one.
"""

import argparse
import asyncio
import statistics
import tempfile
from pathlib import Path
from time import perf_counter, process_time
from typing import NamedTuple

import numpy as np
import torch
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedModel
from transformers.utils import logging

from asyncrl.config import ChainsTask, WarmStart
from asyncrl.config import NativeEngine as Settings
from asyncrl.engines.native.engine import NativeEngine
from asyncrl.training.warm_start import make_model
from asyncrl.types import Request, Sampling

PROMPT_TOKENS = 12
MEDIAN_TOKENS, MAX_TOKENS = 15, 67
VOCABULARY = 32


def uneven_lengths(rows: int) -> list[int]:
    """Quantiles of a log-normal distribution, as long-tailed as the quickstart: every run has the same lengths."""
    normal = statistics.NormalDist(0.0, 0.75)
    drawn = [round(MEDIAN_TOKENS * np.exp(normal.inv_cdf((row + 0.5) / rows))) for row in range(rows)]
    drawn[-1] = MAX_TOKENS
    return [min(length, MAX_TOKENS) for length in drawn]


def prompts(rows: int) -> torch.Tensor:
    return torch.randint(0, VOCABULARY, (rows, PROMPT_TOKENS), generator=torch.Generator().manual_seed(0))


class Seconds(NamedTuple):
    wall: float
    cpu: float


def clocks() -> Seconds:
    return Seconds(perf_counter(), process_time())


def since(began: Seconds) -> Seconds:
    now = clocks()
    return Seconds(now.wall - began.wall, now.cpu - began.cpu)


async def ours(engine: NativeEngine, rows: int) -> Seconds:
    """Time until every request has its answer."""
    lengths = uneven_lengths(rows)
    requests = [
        Request(id=str(row), tokens=tuple(tokens), sampling=Sampling(max_tokens=length), seed=row)
        for row, (tokens, length) in enumerate(zip(prompts(rows).tolist(), lengths, strict=True))
    ]

    async def answer(request: Request) -> int:
        return sum([len(delta.segment) async for delta in engine.submit(request)])

    began = clocks()
    counts = await asyncio.gather(*map(answer, requests))
    seconds = since(began)
    assert counts == lengths
    return seconds


def theirs(model: PreTrainedModel, rows: int) -> Seconds:
    """Time until the longest row of the padded batch is done."""
    longest = max(uneven_lengths(rows))
    config = GenerationConfig(do_sample=True, max_new_tokens=longest, top_k=0, pad_token_id=0)
    began = clocks()
    output = model.generate(prompts(rows), attention_mask=torch.ones(rows, PROMPT_TOKENS), generation_config=config)
    seconds = since(began)
    assert output.shape == (rows, PROMPT_TOKENS + longest)
    return seconds


async def compare(path: Path, repeats: int) -> None:
    reference = AutoModelForCausalLM.from_pretrained(path)
    engine = NativeEngine(path, Settings(max_batch=128), name="bench")
    await engine.start()
    print(
        f"{'rows':>5} {'answer tokens':>14} {'asyncrl tok/s':>14} {'transformers':>14} {'ratio':>6} {'CPU ratio':>10}"
    )
    for rows in (1, 4, 16, 64, 128):
        # Alternating, so that both see the same load of the machine; the first pair warms up.
        pairs = [(await ours(engine, rows), theirs(reference, rows)) for _ in range(repeats + 1)][1:]
        mine, other = (Seconds(*map(statistics.median, zip(*side, strict=True))) for side in zip(*pairs, strict=True))
        lengths = uneven_lengths(rows)
        span = f"{lengths[0]}..{statistics.median(lengths):.0f}..{lengths[-1]}"
        speeds = f"{sum(lengths) / mine.wall:>14,.0f} {sum(lengths) / other.wall:>14,.0f}"
        print(f"{rows:>5} {span:>14} {speeds} {other.wall / mine.wall:>6.2f} {other.cpu / mine.cpu:>10.2f}")
    await engine.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    repeats = parser.parse_args().repeats
    torch.set_num_threads(1)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as folder:
        model = make_model(WarmStart(steps=1), ChainsTask(), 0, folder)
        asyncio.run(compare(model, repeats))


if __name__ == "__main__":
    main()
