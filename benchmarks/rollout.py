"""How fast engines decode on this GPU, by batch size, against each other and against the memory's limit.

    python -m benchmarks.rollout --model DIRECTORY [--engines native vllm] [--batches 1 8 32 128] [--out FILE]
    python -m benchmarks.rollout --shape qwen3-8b          (random weights, made on the spot)

As many readers as the batch is large ask for one answer after the other, to random prompts, so that the text behind a
token is `--context` tokens long on average; answers never stop early. The limit is the time to read the weights and
the keys and values once, at the bandwidth that a copy on the device has here.

Bars, meant for one H200 and an 8B shape: as many tokens per second as vLLM up to batch 32, 0.8 of them beyond.
"""

import argparse
import asyncio
import gc
import json
import shutil
import tempfile
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from time import perf_counter

import msgspec
import numpy as np
import torch

from actors.runtime.spawn import GC_THRESHOLDS
from asyncrl.config.drafter import NoDrafter
from asyncrl.config.engine import NativeEngine, VllmEngine
from asyncrl.engines.base import Engine
from asyncrl.engines.native.build import build_native
from asyncrl.engines.vllm.build import build_vllm
from asyncrl.models.checkpoint import save_model
from asyncrl.models.config import ModelConfig, read_config
from asyncrl.models.decoder import Decoder
from asyncrl.models.layers import signed_frequencies
from asyncrl.models.names import hf_tensors
from asyncrl.simulation.profile import ExpertStep
from asyncrl.types import Request, Sampling
from benchmarks.expand import SHAPES

FIRST_TIMEOUT_S = 120.0
"""For the first tokens: a fresh engine compiles what it has not yet met."""
WANTED, WANTED_BEYOND, UP_TO = 1.0, 0.8, 32
"""Of vLLM's tokens per second, up to this batch size and beyond it."""
SERVED = 0.95
"""Of the answers on their way; the others are between two of them, of hundreds always some."""
COPIED, COPIES = 1 << 31, 8
"""Bytes of a copy that measures the bandwidth, and how many follow each other."""
QWEN3 = {
    "model_type": "qwen3",
    "architectures": ["Qwen3ForCausalLM"],
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "max_position_embeddings": 40960,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "initializer_range": 0.02,
}
"""What a shape leaves open."""


class Figures(msgspec.Struct, frozen=True, kw_only=True):
    """One measurement."""

    engine: str
    batch: int
    tokens_per_second: float
    step_ms: float
    limit_ms: float
    running: float
    """Answers that really ran, on average."""

    @property
    def of_limit(self) -> float:
        return self.limit_ms / self.step_ms


class Readers:
    """So many answers are always on their way, at first of different lengths so that they do not end together."""

    def __init__(self, engine: Engine, batch: int, vocabulary: int, context: int) -> None:
        self._engine, self._vocabulary = engine, vocabulary
        self._prompt = self._answer = context * 2 // 3  # the middle of the answer is `context` behind
        self._numbers = count()
        self._tasks = [asyncio.create_task(self._read(first=(i + 1) / batch)) for i in range(batch)]

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def all_served(self) -> None:
        async with asyncio.timeout(FIRST_TIMEOUT_S):
            while self._engine.stats().running < SERVED * len(self._tasks):
                self._raise_failure()
                await asyncio.sleep(0.01)

    def _raise_failure(self) -> None:
        for task in self._tasks:
            if task.done():
                task.result()

    async def _read(self, first: float) -> None:
        share = first
        while True:
            number = next(self._numbers)
            tokens = np.random.default_rng(number).integers(0, self._vocabulary, self._prompt).tolist()
            sampling = Sampling(max_tokens=max(1, int(share * self._answer)))
            request = Request(id=f"{id(self)}-{number}", tokens=tuple(tokens), sampling=sampling, seed=number)
            async for _ in self._engine.submit(request):
                pass
            share = 1.0


def bandwidth() -> float:
    """Bytes a second, read and written. Several copies at a time: the first one waits for the host."""
    source = torch.empty(COPIED, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    times: list[float] = []
    for _ in range(6):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        for _ in range(COPIES):
            target.copy_(source)
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1e3 / COPIES)
    del source, target
    torch.cuda.empty_cache()
    return 2 * COPIED / float(np.median(times[1:]))


def step_bytes(config: ModelConfig, batch: int, context: int, size: int = 2) -> int:
    """What a step must read: all weights but the embedding, keys and values. Of experts those that a token of the
    batch is sent to, if that is random."""
    hidden, heads, gated = config.hidden_size, config.heads + 2 * config.kv_heads, 3 * config.intermediate_size
    if (experts := config.experts) is not None:
        read = ExpertStep(experts=experts.count, active=experts.active, all_experts=experts.count).at(batch)
        gated = experts.count + round(3 * experts.width * read)  # the router, and the experts
    layer = hidden * (heads * config.head_dim + config.heads * config.head_dim + gated)
    keys = 2 * config.layers * config.kv_heads * config.head_dim * context * batch
    return size * (config.layers * layer + config.vocabulary * hidden + keys)


async def measure(engine: Engine, name: str, batch: int, seconds: float, limit_ms: float) -> Figures:
    before, began = engine.stats(), perf_counter()
    running: list[int] = []
    while perf_counter() - began < seconds:
        await asyncio.sleep(seconds / 50)
        running.append(engine.stats().running)
    after, elapsed = engine.stats(), perf_counter() - began
    rate, mean = (after.generated_tokens - before.generated_tokens) / elapsed, float(np.mean(running))
    return Figures(
        engine=name,
        batch=batch,
        tokens_per_second=rate,
        step_ms=1e3 * mean / rate,
        limit_ms=limit_ms,
        running=mean,
    )


async def session(name: str, engine: Engine, config: ModelConfig, arguments: argparse.Namespace) -> list[Figures]:
    found: list[Figures] = []
    gc.set_threshold(*GC_THRESHOLDS)  # as in an actor
    await engine.start()
    for batch in arguments.batches:
        readers = Readers(engine, batch, config.vocabulary, arguments.context)
        await readers.all_served()
        await asyncio.sleep(arguments.settle)
        limit_ms = 1e3 * step_bytes(config, batch, arguments.context) / arguments.bandwidth
        found.append(await measure(engine, name, batch, arguments.seconds, limit_ms))
        await readers.close()
        print(line(found[-1]), flush=True)
    await engine.close()
    return found


def line(figures: Figures) -> str:
    return (
        f"{figures.engine:7} batch {figures.batch:4}: {figures.tokens_per_second:10,.0f} tokens/s, "
        f"{figures.step_ms:6.2f} ms a step, limit {figures.limit_ms:5.2f} ({figures.of_limit:.2f} of it reached), "
        f"{figures.running:.1f} running"
    )


def ratios(found: list[Figures]) -> list[str]:
    rates = {(figures.engine, figures.batch): figures.tokens_per_second for figures in found}
    lines: list[str] = []
    for batch in sorted({figures.batch for figures in found}):
        if ("native", batch) in rates and ("vllm", batch) in rates:
            ratio = rates["native", batch] / rates["vllm", batch]
            wanted = WANTED if batch <= UP_TO else WANTED_BEYOND
            verdict = "held" if ratio >= wanted else "NOT held"
            lines.append(f"batch {batch:4}: native / vLLM = {ratio:.2f}, wanted {wanted:.2f}: {verdict}")
    return lines


def make(name: str, model: Path, arguments: argparse.Namespace) -> Engine:
    batch, memory = max(arguments.batches), arguments.memory
    if name == "native":
        native = NativeEngine(device="cuda", max_batch=batch, memory=memory)
        return build_native(model, native, NoDrafter(), name=name, precision=arguments.precision)
    settings = VllmEngine(max_batch=batch, memory=memory, reproducible=False)
    return build_vllm(model, settings, NoDrafter(), name=name, precision=arguments.precision)


def random_weights(config: ModelConfig, device: str) -> Decoder:
    """In bf16, drawn on the device: a CPU takes minutes for billions."""
    model = Decoder(config, torch.bfloat16).to_empty(device=device).requires_grad_(False)
    model.frequencies_D = signed_frequencies(config.rope, config.head_dim)
    generator = torch.Generator(device).manual_seed(0)
    for name, tensor in hf_tensors(model):
        tensor.fill_(1.0) if "norm" in name else tensor.normal_(0.0, config.initializer_range, generator=generator)
    return model


@contextmanager
def made(config: ModelConfig, device: str = "cuda") -> Generator[Path]:
    """A directory with random weights, in memory where there is room."""
    model = random_weights(config, device)
    size = 2 * sum(tensor.numel() for _, tensor in hf_tensors(model))
    memory = Path("/dev/shm")
    folder = tempfile.mkdtemp(dir=memory if memory.is_dir() and shutil.disk_usage(memory).free > 1.2 * size else None)
    try:
        save_model(model, folder)
        del model
        if device == "cuda":
            torch.cuda.empty_cache()
        yield Path(folder)
    finally:
        shutil.rmtree(folder)


@contextmanager
def made_up(shape: str) -> Generator[Path]:
    """The same of a named shape, with an output matrix of its own."""
    with made(ModelConfig.from_hf(QWEN3 | SHAPES[shape].settings())) as folder:
        yield folder


def run(model: Path, arguments: argparse.Namespace) -> None:
    config, found = read_config(model), list[Figures]()
    arguments.bandwidth = bandwidth()
    print(f"bandwidth of a device copy: {arguments.bandwidth / 1e12:.2f} TB/s", flush=True)
    for name in arguments.engines:
        found += asyncio.run(session(name, make(name, model, arguments), config, arguments))
        if arguments.out is not None:  # after each: the next one takes minutes to start
            arguments.out.write_text(json.dumps(msgspec.to_builtins(found), indent=2))
    print("\n".join(ratios(found)), flush=True)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--shape", choices=SHAPES, help="instead of a model")
    parser.add_argument("--engines", nargs="+", choices=("native", "vllm"), default=["native", "vllm"])
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32, 128])
    parser.add_argument("--seconds", type=float, default=4.0, help="of each measurement")
    parser.add_argument("--settle", type=float, default=4.0, help="seconds before it, in which graphs are captured")
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--memory", type=float, default=0.85)
    parser.add_argument("--precision", choices=("bf16", "fp8", "fp8_full"), default="bf16")
    parser.add_argument("--out", type=Path)
    parsed = parser.parse_args(arguments)
    if (parsed.model is None) == (parsed.shape is None):
        parser.error("give either --model or --shape")
    if not torch.cuda.is_available():
        parser.error("needs a CUDA GPU")
    if parsed.model is not None:
        run(parsed.model, parsed)
        return
    with made_up(parsed.shape) as folder:
        run(folder, parsed)


if __name__ == "__main__":
    main()
