"""How long requests wait while vLLM takes new weights, and how fast it generates in between.

    python -m benchmarks.vllm_weight_update [--shape qwen3-0.6b] [--requests 64] [--updates 10] [--on-update keep]

The trainer's weights lie on the same GPU (CUDA IPC), or in shared memory where there is none. The pause is the longest
time without a new token of any request around an update, seen by the readers of the answers; `publish` is the
trainer's part, before the engine is asked, and disturbs no request.
"""

import argparse
import asyncio
import statistics
import tempfile
from collections.abc import Iterable
from pathlib import Path
from time import perf_counter

import torch

from asyncrl.drafting.settings import NoDrafter
from asyncrl.engines.base import Engine
from asyncrl.engines.build import build_vllm
from asyncrl.engines.settings import VllmEngine
from asyncrl.models.checkpoint import load_model, random_model, save_model
from asyncrl.models.config import ModelConfig
from asyncrl.models.names import hf_tensors
from asyncrl.types import Request, Sampling
from asyncrl.weights.transport import Writer, make_writer

SHAPES = {
    "qwen3-0.6b": {"vocab_size": 151936, "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28},
    "tiny": {"vocab_size": 512, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2},
}
COMMON = {
    "model_type": "qwen3",
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
}
TOKENS = 8000


def make_checkpoint(shape: str, folder: Path, dtype: torch.dtype) -> None:
    """Random weights: what is loaded has no influence on how long it takes."""
    save_model(random_model(ModelConfig.from_hf(COMMON | SHAPES[shape]), 0, dtype), folder)


class Arrivals:
    """When the number of generated tokens grew, and so when it did not."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._waits: list[tuple[float, float]] = []
        self._task = asyncio.create_task(self._watch())

    def stop(self) -> None:
        self._task.cancel()

    def longest(self, updates: list[tuple[float, float]]) -> tuple[list[float], float]:
        """The longest wait that overlaps each update, and the longest that overlaps none."""
        during = [[wait for wait in self._waits if wait[1] > began and wait[0] < ended] for began, ended in updates]
        others = set(self._waits).difference(*during)
        return [_longest(waits) for waits in during], _longest(others)

    async def _watch(self) -> None:
        seen, at = self._engine.stats().generated_tokens, perf_counter()
        while True:
            generated = self._engine.stats().generated_tokens
            if generated != seen:
                now = perf_counter()
                self._waits.append((at, now))
                seen, at = generated, now
            await asyncio.sleep(0)


def _longest(waits: Iterable[tuple[float, float]]) -> float:
    return max((end - begin for begin, end in waits), default=0.0)


async def answer(engine: Engine, number: int) -> int:
    request = Request(id=str(number), tokens=tuple(range(1, 33)), sampling=Sampling(max_tokens=TOKENS), seed=number)
    return sum([len(delta.segment) async for delta in engine.submit(request)])


async def measure(engine: Engine, writer: Writer, arguments: argparse.Namespace) -> None:
    await engine.start()
    running = [asyncio.create_task(answer(engine, number)) for number in range(arguments.requests)]
    while engine.stats().generated_tokens < 20 * arguments.requests:  # noqa: ASYNC110  (a counter, not an event)
        await asyncio.sleep(0.01)
    arrivals = Arrivals(engine)
    before, began = engine.stats().generated_tokens, perf_counter()
    await asyncio.sleep(2)
    rate = (engine.stats().generated_tokens - before) / (perf_counter() - began)
    updates: list[tuple[float, float]] = []
    publishes: list[float] = []
    for version in range(1, arguments.updates + 1):
        began = perf_counter()
        manifest = writer.publish(version)
        publishes.append(perf_counter() - began)
        await asyncio.sleep(0.3)
        began = perf_counter()
        await engine.load_weights(manifest, arguments.on_update)
        updates.append((began, perf_counter()))
        await asyncio.sleep(0.3)
    arrivals.stop()
    pauses, quiet = arrivals.longest(updates)
    loads = [ended - began for began, ended in updates]
    print(f"{arguments.shape}, {arguments.requests} requests, {arguments.on_update}")
    print(f"between updates: {rate:,.0f} tokens/s")
    print(f"longest wait for a token without an update: {quiet * 1e3:.1f} ms")
    for name, values in (("pause", pauses), ("load_weights", loads), ("publish", publishes)):
        first, rest = values[0], values[1:] or values
        print(
            f"{name:>13}: first {first * 1e3:6.1f} ms, then median {statistics.median(rest) * 1e3:6.1f} ms, "
            f"longest {max(rest) * 1e3:6.1f} ms"
        )
    for task in running:
        task.cancel()
    await asyncio.gather(*running, return_exceptions=True)
    await engine.close()
    writer.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="qwen3-0.6b")
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--updates", type=int, default=10)
    parser.add_argument("--on-update", choices=("keep", "recompute"), default="keep")
    parser.add_argument("--memory", type=float, default=0.4)
    parser.add_argument("--cache-gib", type=float, default=0.0, help="of keys and values, instead of --memory")
    parser.add_argument("--at", type=Path, help="where to make the model: at the same place vLLM starts faster again")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = arguments.at or Path(folder)
        path.mkdir(parents=True, exist_ok=True)
        on_gpu = torch.cuda.is_available()
        dtype = torch.bfloat16 if on_gpu else torch.float32
        make_checkpoint(arguments.shape, path, dtype)
        model, _ = load_model(path, dtype)
        model = model.to("cuda" if on_gpu else "cpu")
        writer = make_writer(lambda: hf_tensors(model), "cuda_ipc" if on_gpu else "shared_memory", prefix="bench")
        settings = VllmEngine(
            max_batch=max(64, arguments.requests),
            max_length=8192,
            memory=arguments.memory,
            gpu_cache_gib=arguments.cache_gib,
        )
        engine = build_vllm(path, settings, NoDrafter(), name="bench", precision="bf16" if on_gpu else "fp32")
        asyncio.run(measure(engine, writer, arguments))


if __name__ == "__main__":
    main()
