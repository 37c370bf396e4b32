"""What a step of vLLM takes of the host, where the model is so small that this is what limits.

    python -m benchmarks.vllm_host [--shape qwen3-0.6b] [--requests 256] [--tokens 100]

Tokens of all requests pass through two processes: vLLM's engine process, which schedules, launches and sends, and ours,
which reads. Both are Python, so in each the threads add up. A larger model is decoded at about this rate at most,
however fast the GPU is. The model is the quickstart's; `--shape` expands it, for a GPU. On a CPU vLLM has its model in
a third process, for which the main thread of the engine process waits in a loop.
"""

import argparse
import asyncio
import gc
import os
import tempfile
from collections.abc import Sequence
from multiprocessing import active_children
from pathlib import Path
from time import perf_counter, process_time

import numpy as np
import torch

from actors.runtime.spawn import GC_THRESHOLDS
from asyncrl.config import WarmStart
from asyncrl.config.drafter import NoDrafter
from asyncrl.config.engine import VllmEngine
from asyncrl.config.task import ChainsTask
from asyncrl.engines.vllm.build import build_vllm
from asyncrl.models.config import read_config
from asyncrl.training.warm_start import make_model
from asyncrl.types import Request, Sampling
from benchmarks.expand import SHAPES
from benchmarks.expand import main as expand
from benchmarks.fp8_speed import PREFILL_TIMEOUT_S, SPARE, grown, read

PROMPT = 32
SETTLE = 10
"""Tokens of each answer before the time is taken."""
LOOK_S = 0.05
"""Between two looks at the counters, which take this process's time as well."""
BUSY_MS = 0.05
"""Threads that take less of a step are not told."""
TICKS = os.sysconf("SC_CLK_TCK")


def thread_seconds(pid: int) -> dict[int, float]:
    """What each thread of a process has had of a core."""
    found: dict[int, float] = {}
    for task in Path(f"/proc/{pid}/task").iterdir():
        fields = (task / "stat").read_text().rpartition(")")[2].split()
        found[int(task.name)] = (int(fields[11]) + int(fields[12])) / TICKS
    return found


async def measure(model: Path, arguments: argparse.Namespace) -> None:
    requests, tokens = arguments.requests, arguments.tokens
    sampling = Sampling(max_tokens=tokens + SETTLE + SPARE)
    settings = VllmEngine(max_batch=requests, max_length=PROMPT + sampling.max_tokens + 1, reproducible=False)
    precision = "bf16" if torch.cuda.is_available() else "fp32"
    engine = build_vllm(model, settings, NoDrafter(), name="bench", precision=precision)
    gc.set_threshold(*GC_THRESHOLDS)  # as in an actor
    await engine.start()
    prompts = np.random.default_rng(0).integers(0, read_config(model).vocabulary, (requests, PROMPT)).tolist()
    asked = [Request(id=str(n), tokens=tuple(p), sampling=sampling, seed=n) for n, p in enumerate(prompts)]
    readers = [asyncio.create_task(read(engine, request)) for request in asked]
    await grown(engine, requests * SETTLE, PREFILL_TIMEOUT_S)
    (serving,) = [child.pid for child in active_children() if child.pid is not None]
    before, threads, here, began = engine.stats(), thread_seconds(serving), process_time(), perf_counter()
    async with asyncio.timeout(arguments.timeout):
        while engine.stats().generated_tokens - before.generated_tokens < requests * tokens:  # noqa: ASYNC110
            await asyncio.sleep(LOOK_S)
    after, elapsed, here = engine.stats(), perf_counter() - began, process_time() - here
    steps = after.steps - before.steps
    spent = [1e3 * (seconds - threads.get(name, 0.0)) / steps for name, seconds in thread_seconds(serving).items()]
    told = " + ".join(f"{each:.2f}" for each in sorted(spent, reverse=True) if each > BUSY_MS)
    print(
        f"{requests} requests: {1e3 * elapsed / steps:.2f} ms a step, "
        f"{(after.generated_tokens - before.generated_tokens) / elapsed:,.0f} tokens/s; of a core, in milliseconds a "
        f"step: vLLM's engine process {told} by threads, this one {1e3 * here / steps:.2f}",
        flush=True,
    )
    for reader in readers:
        reader.cancel()
    await asyncio.gather(*readers, return_exceptions=True)
    await engine.close()


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, help="that the model is expanded to")
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=100)
    parser.add_argument("--timeout", type=float, default=120.0, help="seconds for all of them")
    parsed = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        model = make_model(WarmStart(steps=1), ChainsTask(), 0, Path(folder) / "small")
        if parsed.shape is not None:
            expand([str(model), f"{folder}/model", "--shape", parsed.shape, "--same-vocabulary"])
            model = Path(folder) / "model"
        asyncio.run(measure(model, parsed))


if __name__ == "__main__":
    main()
