"""Tokens per second of the native engine against transformers' `generate`, on the quickstart's model.

    OMP_NUM_THREADS=1 python -m benchmarks.engine_vs_transformers [--repeats 5]

Every request has its own answer length, drawn long-tailed. The engine gets them as `max_tokens`; transformers decodes
one padded batch until its longest row is done, as it does with an end-of-sequence token. Only useful tokens count.
Both sample at temperature 1 with a cache, in one process with one thread.

Two loads: `batch` is as many requests as rows, all at once; `stream` is four times as many, which transformers takes
one batch after the other, while the engine gives the place of a finished row to the next request.
"""

import argparse
import asyncio
import statistics
import tempfile
from pathlib import Path
from time import perf_counter

import numpy as np
import torch
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedModel
from transformers.utils import logging

from asyncrl.config import WarmStart
from asyncrl.config.engine import NativeEngine as Settings
from asyncrl.config.task import ChainsTask
from asyncrl.engines.native.cpu.engine import NativeEngine
from asyncrl.training.warm_start import make_model
from asyncrl.types import Request, Sampling

PROMPT_TOKENS = 12
MEDIAN_TOKENS, MAX_TOKENS = 15, 67
STREAM = 4
VOCABULARY = 32


def uneven_lengths(count: int) -> list[int]:
    """Quantiles of a log-normal distribution, as long-tailed as the quickstart: every run has the same lengths."""
    normal = statistics.NormalDist(0.0, 0.75)
    drawn = [round(MEDIAN_TOKENS * np.exp(normal.inv_cdf((i + 0.5) / count))) for i in range(count)]
    drawn[-1] = MAX_TOKENS
    return np.random.default_rng(0).permutation(np.minimum(drawn, MAX_TOKENS)).tolist()


def prompts(rows: int) -> torch.Tensor:
    return torch.randint(0, VOCABULARY, (rows, PROMPT_TOKENS), generator=torch.Generator().manual_seed(0))


async def ours(engine: NativeEngine, lengths: list[int]) -> float:
    """Seconds until every request has its answer."""
    requests = [
        Request(id=str(row), tokens=tuple(tokens), sampling=Sampling(max_tokens=length), seed=row)
        for row, (tokens, length) in enumerate(zip(prompts(len(lengths)).tolist(), lengths, strict=True))
    ]

    async def answer(request: Request) -> int:
        return sum([len(delta.segment) async for delta in engine.submit(request)])

    began = perf_counter()
    counts = await asyncio.gather(*map(answer, requests))
    seconds = perf_counter() - began
    assert counts == lengths
    return seconds


def theirs(model: PreTrainedModel, lengths: list[int], rows: int) -> float:
    """Seconds until the longest row of each padded batch is done."""
    began = perf_counter()
    for first in range(0, len(lengths), rows):
        longest = max(lengths[first : first + rows])
        config = GenerationConfig(do_sample=True, max_new_tokens=longest, top_k=0, pad_token_id=0)
        mask = torch.ones(rows, PROMPT_TOKENS)
        output = model.generate(prompts(rows), attention_mask=mask, generation_config=config)
        assert output.shape == (rows, PROMPT_TOKENS + longest)
    return perf_counter() - began


async def compare(path: Path, repeats: int) -> None:
    reference = AutoModelForCausalLM.from_pretrained(path)
    reference.generation_config = GenerationConfig()  # the checkpoint's own would end rows at an end token
    print(f"{'rows':>5} {'load':>7} {'requests':>9} {'asyncrl tok/s':>14} {'transformers':>13} {'ratio':>6}")
    for rows in (1, 4, 16, 64, 128):
        engine = NativeEngine(path, Settings(max_batch=rows), name="bench")
        await engine.start()
        for load, requests in (("batch", rows), ("stream", STREAM * rows)):
            lengths = uneven_lengths(requests)
            # Alternating, so that both see the same load of the machine; the first pair warms up.
            pairs = [(await ours(engine, lengths), theirs(reference, lengths, rows)) for _ in range(repeats + 1)][1:]
            mine, other = (sum(lengths) / statistics.median(side) for side in zip(*pairs, strict=True))
            print(f"{rows:>5} {load:>7} {requests:>9} {mine:>14,.0f} {other:>13,.0f} {mine / other:>6.2f}", flush=True)
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
