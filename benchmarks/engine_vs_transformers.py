"""Tokens per second of the native engine against transformers' `generate`, on the quickstart-shaped model.

    python -m benchmarks.engine_vs_transformers [--repeats 5]

Every request has its own answer length, drawn long-tailed. The engine gets them as `max_tokens`; transformers decodes
one padded batch until its longest row is done, as it does with an end-of-sequence token. Only useful tokens count.
Both sample at temperature 1 with a cache, in one process with one thread.
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

from asyncrl.config import NativeEngine as Settings
from asyncrl.engines.native.engine import NativeEngine
from asyncrl.models.checkpoint import random_model, save_model
from asyncrl.models.config import ModelConfig
from asyncrl.types import Request, Sampling

QUICKSTART = {
    "model_type": "qwen3",
    "vocab_size": 48,
    "hidden_size": 96,
    "intermediate_size": 256,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 24,
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
}
PROMPT_TOKENS = 12
MEDIAN_TOKENS, MAX_TOKENS = 19, 100


def uneven_lengths(rows: int) -> list[int]:
    """Quantiles of a log-normal distribution, so that every run has the same lengths: median 19, longest 100."""
    normal = statistics.NormalDist(0.0, 0.75)
    drawn = [round(MEDIAN_TOKENS * np.exp(normal.inv_cdf((row + 0.5) / rows))) for row in range(rows)]
    drawn[-1] = MAX_TOKENS
    return [min(length, MAX_TOKENS) for length in drawn]


def prompts(rows: int) -> torch.Tensor:
    return torch.randint(0, 48, (rows, PROMPT_TOKENS), generator=torch.Generator().manual_seed(0))


async def ours(path: Path, rows: int, repeats: int) -> float:
    engine = NativeEngine(path, Settings(max_batch=rows), name="bench")
    await engine.start()
    requests = [
        Request(id=str(row), tokens=tuple(tokens), sampling=Sampling(max_tokens=length), seed=row)
        for row, (tokens, length) in enumerate(zip(prompts(rows).tolist(), uneven_lengths(rows), strict=True))
    ]

    async def answer(request: Request) -> int:
        return sum([len(delta.segment) async for delta in engine.submit(request)])

    seconds: list[float] = []
    for _ in range(repeats + 1):
        began = perf_counter()
        counts = await asyncio.gather(*map(answer, requests))
        seconds.append(perf_counter() - began)
        assert counts == uneven_lengths(rows)
    await engine.close()
    return sum(uneven_lengths(rows)) / statistics.median(seconds[1:])


def theirs(model: PreTrainedModel, rows: int, repeats: int) -> float:
    longest = max(uneven_lengths(rows))
    config = GenerationConfig(do_sample=True, max_new_tokens=longest, top_k=0, pad_token_id=0)
    seconds: list[float] = []
    for _ in range(repeats + 1):
        began = perf_counter()
        output = model.generate(prompts(rows), attention_mask=torch.ones(rows, PROMPT_TOKENS), generation_config=config)
        seconds.append(perf_counter() - began)
        assert output.shape == (rows, PROMPT_TOKENS + longest)
    return sum(uneven_lengths(rows)) / statistics.median(seconds[1:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    repeats = parser.parse_args().repeats
    torch.set_num_threads(1)
    logging.set_verbosity_error()
    with tempfile.TemporaryDirectory() as folder:
        save_model(random_model(ModelConfig.from_hf(QUICKSTART), 0), folder)
        reference = AutoModelForCausalLM.from_pretrained(folder)
        print(f"{'rows':>5} {'lengths':>16} {'asyncrl tok/s':>14} {'transformers tok/s':>19} {'ratio':>6}")
        for rows in (1, 8, 64):
            lengths = uneven_lengths(rows)
            mine, other = asyncio.run(ours(Path(folder), rows, repeats)), theirs(reference, rows, repeats)
            span = f"{lengths[0]}..{statistics.median(lengths):.0f}..{lengths[-1]}"
            print(f"{rows:>5} {span:>16} {mine:>14,.0f} {other:>19,.0f} {mine / other:>6.2f}")


if __name__ == "__main__":
    main()
