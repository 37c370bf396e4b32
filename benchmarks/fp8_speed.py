"""Rollouts in FP8 against bf16, the same engine on this GPU in one run: many short texts, and few long ones.

    python -m benchmarks.fp8_speed [--shape qwen3-8b] [--engines native vllm] [--precisions bf16 fp8_full]
        [--short 256 256] [--long 24 16384] [--tokens 192] [--quantization fp8_per_block] [--out FILE]

`--short` and `--long` are a batch and the length of its prompts. All prompts are computed first; then the time is taken
in which every answer grows by `--tokens`, the same work for both precisions. Prompts are random and share nothing. A
ratio is tokens a second over those in bf16. Random weights of the shape, made on the spot; `--model DIRECTORY` takes
others.
"""

import argparse
import asyncio
import gc
import json
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from time import perf_counter, process_time

import msgspec
import numpy as np
import torch

from actors.runtime.spawn import GC_THRESHOLDS
from asyncrl.config.drafter import NoDrafter
from asyncrl.config.engine import NativeEngine, VllmEngine
from asyncrl.engines.base import Engine
from asyncrl.engines.native.build import build_native
from asyncrl.engines.native.cuda.engine import CudaEngine
from asyncrl.engines.vllm.build import build_vllm
from asyncrl.models.config import read_config
from asyncrl.types import Request, Sampling
from benchmarks.expand import SHAPES
from benchmarks.rollout import made_up

SETTLE = 16
"""Tokens of each answer before the time is taken: steps of a new shape are captured."""
SPARE = 64
PREFILL_TIMEOUT_S = 240.0
BARS = {"short": 1.3, "long": 1.44}
REFERENCE = "bf16"


class Case(msgspec.Struct, frozen=True):
    """So many texts of that length."""

    name: str
    batch: int
    context: int


class Figures(msgspec.Struct, frozen=True, kw_only=True):
    engine: str
    precision: str
    case: str
    batch: int
    context: int
    tokens_per_second: float
    step_ms: float
    host_share: float
    """Of a core, for this process. vLLM's answers pass through it: near 1 it is what limits them."""


async def grown(engine: Engine, tokens: int, deadline_s: float) -> None:
    """Wait until so many tokens have been sampled from now on."""
    goal = engine.stats().generated_tokens + tokens
    async with asyncio.timeout(deadline_s):
        while engine.stats().generated_tokens < goal:  # noqa: ASYNC110  (engines count, and tell nobody)
            await asyncio.sleep(0.001)


def read_tokens(engine: Engine) -> int:
    """Of prompts, those that an earlier case has left in the cache included."""
    stats = engine.stats()
    return stats.prefilled_tokens + stats.cached_tokens


async def read(engine: Engine, request: Request) -> None:
    async for _ in engine.submit(request):
        pass


async def timed(engine: Engine, case: Case, tokens: int, vocabulary: int) -> tuple[float, float]:
    """Tokens a second, and the share of a core that this process took."""
    random = np.random.default_rng(case.context)
    sampling = Sampling(max_tokens=tokens + SETTLE + SPARE)
    prompts = random.integers(0, vocabulary, (case.batch, case.context)).tolist()
    before = read_tokens(engine)
    readers = [
        asyncio.create_task(read(engine, Request(id=f"{case.name}-{n}", tokens=tuple(p), sampling=sampling, seed=n)))
        for n, p in enumerate(prompts)
    ]
    try:
        async with asyncio.timeout(PREFILL_TIMEOUT_S):
            while read_tokens(engine) - before < case.batch * (case.context - 1):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        await grown(engine, case.batch * SETTLE // 2, PREFILL_TIMEOUT_S)
        began, busy, first = perf_counter(), process_time(), engine.stats().generated_tokens
        await grown(engine, case.batch * tokens, PREFILL_TIMEOUT_S)
        elapsed, busy = perf_counter() - began, process_time() - busy
        rate = (engine.stats().generated_tokens - first) / elapsed
    finally:
        for reader in readers:
            reader.cancel()
        await asyncio.gather(*readers, return_exceptions=True)
    return rate, busy / elapsed


def make(name: str, model: Path, precision: str, cases: Sequence[Case], arguments: argparse.Namespace) -> Engine:
    batch = max(case.batch for case in cases)
    length = max(case.context for case in cases) + arguments.tokens + SETTLE + 2 * SPARE
    memory, chunk = arguments.memory, arguments.prefill_chunk
    if name == "native":
        settings = NativeEngine(
            max_batch=batch, max_length=length, memory=memory, prefill_chunk=chunk, device="cuda", graph_memory_gib=4.0
        )
        return build_native(model, settings, NoDrafter(), name=name, precision=precision)
    settings = VllmEngine(
        max_batch=batch,
        max_length=length,
        memory=memory,
        gpu_cache_gib=arguments.cache_gib,
        attention="auto" if precision == REFERENCE else arguments.attention,
        quantization="none" if precision == REFERENCE else arguments.quantization,
        prefill_chunk=max(chunk, 8192),
        reproducible=False,
    )
    return build_vllm(model, settings, NoDrafter(), name=name, precision=precision)


async def session(name: str, model: Path, precision: str, arguments: argparse.Namespace) -> list[Figures]:
    cases, found = cases_of(arguments), list[Figures]()
    engine = make(name, model, precision, cases, arguments)
    gc.set_threshold(*GC_THRESHOLDS)  # as in an actor
    began = perf_counter()
    await engine.start()
    room = f", room for {engine.kv_tokens:,} tokens" if isinstance(engine, CudaEngine) else ""
    print(f"{name} in {precision}: started in {perf_counter() - began:.0f} s{room}", flush=True)
    for case in cases:
        rate, host_share = await timed(engine, case, arguments.tokens, read_config(model).vocabulary)
        step_ms = 1e3 * case.batch / rate
        found.append(
            Figures(
                engine=name,
                precision=precision,
                case=case.name,
                batch=case.batch,
                context=case.context,
                tokens_per_second=rate,
                step_ms=step_ms,
                host_share=host_share,
            )
        )
        print(
            f"{name} in {precision}, {case.name}: batch {case.batch} behind {case.context} tokens: "
            f"{rate:,.0f} tokens/s, {step_ms:.2f} ms a step, {host_share:.2f} of a core here",
            flush=True,
        )
    await engine.close()
    return found


def cases_of(arguments: argparse.Namespace) -> list[Case]:
    given = {"short": arguments.short, "long": arguments.long}
    return [Case(name, *pair) for name, pair in given.items() if pair[0]]


def ratios(found: Sequence[Figures]) -> list[str]:
    rates = {(each.engine, each.case, each.precision): each.tokens_per_second for each in found}
    lines: list[str] = []
    for (engine, case, precision), rate in rates.items():
        plain = rates.get((engine, case, REFERENCE))
        if precision == REFERENCE or plain is None:
            continue
        ratio, bar = rate / plain, BARS[case]
        told = f" (bar {bar}: {'held' if ratio >= bar else 'NOT held'})" if precision == "fp8_full" else ""
        lines.append(f"{engine}, {case}: {precision} / {REFERENCE} = {ratio:.2f}{told}")
    return lines


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--shape", choices=SHAPES, default="qwen3-8b", help="where no model is given")
    parser.add_argument("--engines", nargs="+", choices=("native", "vllm"), default=["native", "vllm"])
    parser.add_argument("--precisions", nargs="+", default=["bf16", "fp8_full"])
    parser.add_argument("--short", type=int, nargs=2, default=(256, 256), metavar=("BATCH", "TOKENS"))
    parser.add_argument("--long", type=int, nargs=2, default=(24, 16384), metavar=("BATCH", "TOKENS"))
    parser.add_argument("--tokens", type=int, default=192)
    parser.add_argument("--memory", type=float, default=0.85)
    parser.add_argument("--cache-gib", type=float, default=0.0, help="of vLLM's keys and values, instead of --memory")
    parser.add_argument("--attention", default="auto", help="of vLLM in FP8, as engine.attention; bf16: vLLM's own")
    parser.add_argument("--quantization", default="none", help="of vLLM in FP8, as engine.quantization; none: fp8")
    parser.add_argument("--prefill-chunk", type=int, default=4096)
    parser.add_argument("--out", type=Path)
    parsed = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        parser.error("needs a CUDA GPU")
    found: list[Figures] = []
    with made_up(parsed.shape) if parsed.model is None else nullcontext(parsed.model) as model:
        for name in parsed.engines:
            for precision in parsed.precisions:
                found += asyncio.run(session(name, model, precision, parsed))
                if parsed.out is not None:
                    parsed.out.write_text(json.dumps(msgspec.to_builtins(found), indent=2))
    print("\n".join(ratios(found)), flush=True)


if __name__ == "__main__":
    main()
