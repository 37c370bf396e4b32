"""How long requests wait while an engine takes new weights, and how fast it generates in between.

    python -m benchmarks.weight_update [--engine native|vllm] [--precision bf16|fp8|fp8_kv|fp8_full]
        [--shape qwen3-0.6b] [--requests 64] [--updates 20] [--quantization fp8_per_block]

The trainer's weights lie on the same GPU, in another process (CUDA IPC), or in shared memory where there is no GPU. The
pause is the longest time without a new token of any request around an update, seen by the readers of the answers;
`publish` is the trainer's part, before the engine is asked, and disturbs no request. In FP8 that is to quantize, which
vLLM does itself in the pause, and to find the KV scales over what was trained on, and `load_weights` has FP8's checks:
all that a publication of a run has, but for the log-probabilities after fixed prompts.

The bar, on a GPU: no pause is longer than a copy of the weights on the device and one step of decoding, a step as those
around it are, because answers grow and steps with them. Where it is not held, the line on the update in the middle says
what to look at: a pause that begins when the version changes is the copy and the step behind it; one that begins before
is the check of the published bytes, on the device or in Python.
"""

import argparse
import asyncio
import gc
import statistics
import tempfile
from collections.abc import Generator, Iterable
from contextlib import contextmanager
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from time import perf_counter
from typing import NamedTuple

import msgspec
import numpy as np
import torch

from actors.runtime.spawn import GC_THRESHOLDS
from asyncrl.config import Rollout, Run
from asyncrl.config import Trainer as TrainerSettings
from asyncrl.config.drafter import NoDrafter
from asyncrl.config.engine import EngineSettings, NativeEngine, VllmEngine
from asyncrl.config.precision import Precision
from asyncrl.engines.base import Engine
from asyncrl.engines.native.build import build_native
from asyncrl.engines.vllm.build import build_vllm
from asyncrl.models.checkpoint import load_model, random_model, save_model
from asyncrl.models.config import ModelConfig
from asyncrl.models.names import hf_tensors
from asyncrl.precision.publication import Fp8Publication
from asyncrl.types import Request, Sampling, WeightManifest
from asyncrl.weights.gather import OneRank
from asyncrl.weights.transports.registry import make_writer
from benchmarks.rollout import bandwidth, made_up

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
LARGE = "qwen3-8b"
"""Made on the GPU."""
TOKENS = 8000
TRAINED_ON, LENGTH = 64, 128
"""Samples that a trainer finds KV scales on, and their tokens; it takes the last of them."""
START_TIMEOUT_S = 120.0
AROUND_S = 0.2
"""Steps so near to an update tell how long one is there."""


class Span(NamedTuple):
    begin: float
    end: float

    @property
    def seconds(self) -> float:
        return self.end - self.begin


class Trainer:
    """In a process of its own, as in a run: a process cannot map what it shares itself."""

    def __init__(self, path: Path, engine: EngineSettings, precision: Precision) -> None:
        context = get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_publish, args=(path, engine, precision, theirs), daemon=True)
        self._process.start()
        self.bytes = self.publish(0).total_bytes

    def publish(self, version: int) -> WeightManifest:
        self._pipe.send(version)
        if not self._pipe.poll(START_TIMEOUT_S):
            raise TimeoutError(f"the trainer has not published version {version} within {START_TIMEOUT_S:g} s")
        return msgspec.msgpack.decode(self._pipe.recv_bytes(), type=WeightManifest)

    def close(self) -> None:
        self._pipe.send(None)
        self._process.join(10)


def _publish(path: Path, engine: EngineSettings, precision: Precision, pipe: Connection) -> None:
    on_gpu = torch.cuda.is_available()
    device, dtype = ("cuda", "bf16") if on_gpu else ("cpu", "fp32")
    run = Run(rollout=Rollout(precision=precision), engine=engine, trainer=TrainerSettings(dtype=dtype))
    model, config = load_model(path, torch.bfloat16 if on_gpu else torch.float32, device)
    fp8 = Fp8Publication(run, config)
    fp8.see(np.random.default_rng(0).integers(0, 512, (TRAINED_ON, LENGTH), np.int32))
    source = fp8.travelling(OneRank(lambda: hf_tensors(model)))
    writer = make_writer(source, "cuda_ipc" if on_gpu else "shared_memory", prefix="bench")
    while (version := pipe.recv()) is not None:
        in_fp8 = fp8.of(model)
        manifest = msgspec.structs.replace(writer.publish(version), fp8=in_fp8())
        pipe.send_bytes(msgspec.msgpack.encode(manifest))
    writer.close()


@contextmanager
def made(arguments: argparse.Namespace) -> Generator[Path]:
    """Random weights: what is loaded has no influence on how long it takes."""
    dtype = torch.bfloat16 if torch.cuda.is_available() else torch.float32
    with tempfile.TemporaryDirectory() as folder:
        path = arguments.at or Path(folder)
        path.mkdir(parents=True, exist_ok=True)
        save_model(random_model(ModelConfig.from_hf(COMMON | SHAPES[arguments.shape]), 0, dtype), path)
        yield path


class Arrivals:
    """When the number of generated tokens grew, and so when it did not; and when each version came."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._waits: list[Span] = []
        self.versions: dict[int, float] = {}
        self._task = asyncio.create_task(self._watch())

    def stop(self) -> None:
        self._task.cancel()

    def longest(self, updates: list[Span]) -> tuple[list[Span], Span]:
        """The longest wait that overlaps each update, and the longest that overlaps none."""
        during = [[wait for wait in self._waits if wait.end > call.begin and wait.begin < call.end] for call in updates]
        others = set(self._waits).difference(*during)
        return [_longest(waits) for waits in during], _longest(others)

    def steps(self, updates: list[Span]) -> list[float]:
        """How long one was around each update."""
        return [step_around(self._waits, update) for update in updates]

    async def _watch(self) -> None:
        seen, at = self._engine.stats().generated_tokens, perf_counter()
        while True:
            stats, now = self._engine.stats(), perf_counter()
            self.versions.setdefault(stats.version, now)
            if stats.generated_tokens != seen:
                self._waits.append(Span(at, now))
                seen, at = stats.generated_tokens, now
            await asyncio.sleep(0)


def step_around(waits: Iterable[Span], update: Span) -> float:
    before, behind = update.begin - AROUND_S, update.end + AROUND_S
    near = [wait for wait in waits if before < wait.begin and wait.end < behind]
    return statistics.median(wait.seconds for wait in near if wait.end < update.begin or wait.begin > update.end)


def _longest(waits: Iterable[Span]) -> Span:
    return max(waits, key=lambda wait: wait.seconds, default=Span(0.0, 0.0))


async def answer(engine: Engine, number: int) -> int:
    request = Request(id=str(number), tokens=tuple(range(1, 33)), sampling=Sampling(max_tokens=TOKENS), seed=number)
    return sum([len(delta.segment) async for delta in engine.submit(request)])


async def measure(engine: Engine, trainer: Trainer, arguments: argparse.Namespace) -> None:
    await engine.start()
    await engine.load_weights(trainer.publish(0), "keep")  # as a run does before it generates
    running = [asyncio.create_task(answer(engine, number)) for number in range(arguments.requests)]
    while engine.stats().generated_tokens < 20 * arguments.requests:  # noqa: ASYNC110  (a counter, not an event)
        await asyncio.sleep(0.01)
    gc.freeze()  # as in a rollout actor
    gc.set_threshold(*GC_THRESHOLDS)
    arrivals = Arrivals(engine)
    before, began = engine.stats().generated_tokens, perf_counter()
    await asyncio.sleep(2)
    rate = (engine.stats().generated_tokens - before) / (perf_counter() - began)
    updates: list[Span] = []
    publishes: list[float] = []
    for version in range(1, arguments.updates + 1):
        began = perf_counter()
        manifest = await asyncio.to_thread(trainer.publish, version)
        publishes.append(perf_counter() - began)
        await asyncio.sleep(0.3)
        began = perf_counter()
        await engine.load_weights(manifest, arguments.on_update)
        updates.append(Span(began, perf_counter()))
        await asyncio.sleep(0.3)
    arrivals.stop()
    waits, quiet = arrivals.longest(updates)
    pauses, loads = [wait.seconds for wait in waits], [update.seconds for update in updates]
    what = (arguments.engine, arguments.precision, arguments.shape, f"{arguments.requests} requests")
    print(", ".join((*what, arguments.on_update)))
    print(f"between updates: {rate:,.0f} tokens/s")
    print(f"longest wait for a token without an update: {quiet.seconds * 1e3:.1f} ms")
    for name, values in (("pause", pauses), ("load_weights", loads), ("publish", publishes)):
        first, rest = values[0], values[1:] or values
        print(
            f"{name:>13}: first {first * 1e3:6.1f} ms, then median {statistics.median(rest) * 1e3:6.1f} ms, "
            f"longest {max(rest) * 1e3:6.1f} ms"
        )
    middle = pauses.index(statistics.median_low(pauses))
    print(course(updates[middle], waits[middle], arrivals.versions[middle + 1]))
    for task in running:
        task.cancel()
    await asyncio.gather(*running, return_exceptions=True)
    await engine.close()
    if torch.cuda.is_available():
        print(verdict(pauses, arrivals.steps(updates), copy=2 * trainer.bytes / bandwidth()))
    trainer.close()


def course(update: Span, pause: Span, version: float) -> str:
    """When what happened, from the call of `load_weights` on."""
    moments = (pause.begin, pause.end, version, update.end)
    began, ended, changed, returned = ((moment - update.begin) * 1e3 for moment in moments)
    return (
        f"in the middle: no token from {began:.1f} to {ended:.1f} ms after the call, the version changed at "
        f"{changed:.1f}, load_weights returned at {returned:.1f}"
    )


def verdict(pauses: list[float], steps: list[float], copy: float) -> str:
    beyond = [pause - step for pause, step in zip(pauses, steps, strict=True)]
    over, within = statistics.median(beyond), sum(each <= copy for each in beyond)
    step, pause = statistics.median(steps) * 1e3, statistics.median(pauses) * 1e3
    return (
        f"{'held' if within == len(pauses) else 'NOT held'}: median pause {pause:.2f} ms, step {step:.2f} ms; beyond "
        f"its step a pause is {over * 1e3:.2f} ms, a copy of the weights {copy * 1e3:.2f} ms; "
        f"{within} of {len(pauses)} are within: {', '.join(f'{each * 1e3:.1f}' for each in pauses)} ms"
    )


def settings_of(arguments: argparse.Namespace) -> NativeEngine | VllmEngine:
    on_gpu, batch, memory = torch.cuda.is_available(), max(64, arguments.requests), arguments.memory
    if arguments.engine == "native":
        return NativeEngine(max_batch=batch, max_length=8192, memory=memory, device="cuda" if on_gpu else "cpu")
    return VllmEngine(
        max_batch=batch,
        max_length=8192,
        memory=memory,
        gpu_cache_gib=arguments.cache_gib,
        quantization=arguments.quantization,
    )


def make_engine(path: Path, settings: NativeEngine | VllmEngine, precision: Precision) -> Engine:
    build = build_native if isinstance(settings, NativeEngine) else build_vllm
    return build(path, settings, NoDrafter(), name="bench", precision=precision)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", choices=("native", "vllm"), default="native")
    usual = "bf16" if torch.cuda.is_available() else "fp32"
    parser.add_argument("--precision", choices=(usual, "fp8", "fp8_kv", "fp8_full"), default=usual)
    parser.add_argument("--shape", choices=[*SHAPES, LARGE], default="qwen3-0.6b")
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--updates", type=int, default=20)
    parser.add_argument("--on-update", choices=("keep", "recompute"), default="keep")
    parser.add_argument("--memory", type=float, default=0.4)
    parser.add_argument("--cache-gib", type=float, default=0.0, help="of vLLM's keys and values, instead of --memory")
    parser.add_argument("--at", type=Path, help="where to make the model: at the same place vLLM starts faster again")
    parser.add_argument("--quantization", choices=("none", "fp8_per_block"), default="none", help="of vLLM's weights")
    arguments = parser.parse_args()
    settings = settings_of(arguments)
    with made_up(LARGE) if arguments.shape == LARGE else made(arguments) as path:
        engine = make_engine(path, settings, arguments.precision)
        asyncio.run(measure(engine, Trainer(path, settings, arguments.precision), arguments))


if __name__ == "__main__":
    main()
