"""What speculation gives on this machine, by batch size: plain decoding, fixed depths, and the bandit.

    python -m benchmarks.speculation --model BIG --head BIGHEAD [--engine native|vllm] [--tokens 3 5] [--out FILE]
    python -m benchmarks.speculation --shape tiny --engine native          (a made-up model, to see it run)

`benchmarks.expand` makes BIG and BIGHEAD from a small trained pair: the cost is a big model's, acceptance is real.
Answers to the chains task are asked for one after the other by as many readers as the batch is large, at temperature 1.
The engine starts twice: without a drafter, and with one whose depth is set anew for each measurement, so that a fixed
depth and the bandit differ in nothing else. `depth 0` is plain decoding in the engine with the drafter.

Bars, of the bandit and meant for one H200 and an 8B shape: 2.2x plain decoding up to batch 8 and 1.6x at 32, 0.98x at
any other batch, and 0.95x of the best fixed depth.
"""

import argparse
import asyncio
import json
import sys
import tempfile
from collections.abc import Sequence
from itertools import count
from pathlib import Path
from random import Random
from time import perf_counter
from typing import Any, cast

import msgspec
import torch

from asyncrl.config import WarmStart
from asyncrl.config.drafter import Adaptive, DrafterSettings, Eagle3Drafter, EagleDrafter, NoDrafter, Strategy
from asyncrl.config.engine import NativeEngine, VllmEngine
from asyncrl.config.task import ChainsTask
from asyncrl.data.tokenizer import Tokenizer, load_tokenizer
from asyncrl.drafting.checkpoint import fresh_head, save_head
from asyncrl.engines.base import Engine
from asyncrl.engines.native.build import build_native
from asyncrl.engines.vllm.build import build_vllm
from asyncrl.models.checkpoint import load_model
from asyncrl.system.devices import has_gpu
from asyncrl.tasks.chains import Chains
from asyncrl.training.warm_start import make_model
from asyncrl.types import EngineStats, Request, Sampling
from benchmarks.expand import SHAPES, big_config, expand_head, save_expanded

SWITCH_S = 0.5
"""For readers to begin, and for steps of the last depth to end."""
WARM_UP_S = 2.0
"""Before an engine's first measurement: new shapes of steps are compiled and captured as they come."""
FIRST_TIMEOUT_S = 120.0
"""For the first tokens of all answers: a fresh engine compiles what it has not yet met."""
MAX_TOKENS = 100
WANTED = {1: 2.2, 8: 2.2, 32: 1.6}
"""The bandit relative to plain decoding, by batch size."""
NEVER_BELOW, OF_BEST = 0.98, 0.95


class Figures(msgspec.Struct, frozen=True, kw_only=True):
    """One measurement."""

    batch: int
    name: str
    tokens_per_second: float
    running: float
    """Answers that really ran, on average; readers need a moment between two."""
    accepted: float = 1.0
    """Tokens per step of one answer."""
    by_position: tuple[float, ...] = ()


class Readers:
    """So many answers are always on their way."""

    def __init__(self, engine: Engine, tokenizer: Tokenizer, task: ChainsTask, batch: int, temperature: float) -> None:
        self._engine, self._tokenizer = engine, tokenizer
        self._sampling = Sampling(temperature=temperature, max_tokens=MAX_TOKENS, stop=tokenizer.eos_ids)
        self._chains, self._numbers = Chains(task, seed=batch), count()
        self._tasks = [asyncio.create_task(self._read()) for _ in range(batch)]

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def all_served(self) -> None:
        async with asyncio.timeout(FIRST_TIMEOUT_S):
            while self._engine.stats().running < len(self._tasks):  # noqa: ASYNC110  (a counter, not an event)
                await asyncio.sleep(0.01)

    async def _read(self) -> None:
        random = Random(0)
        while True:
            number = next(self._numbers)
            tokens = tuple(self._tokenizer.encode(self._chains.prompt("train", number).text))
            request = Request(id=str(number), tokens=tokens, sampling=self._sampling, seed=random.getrandbits(32))
            async for _ in self._engine.submit(request):
                pass


async def measure(engine: Engine, seconds: float, batch: int, name: str) -> Figures:
    before, began = engine.stats(), perf_counter()
    running: list[int] = []
    while perf_counter() - began < seconds:
        await asyncio.sleep(seconds / 50)
        running.append(engine.stats().running)
    after, elapsed = engine.stats(), perf_counter() - began
    drafts = after.drafts - before.drafts
    accepted = _accepted(before, after)
    found = Figures(
        batch=batch,
        name=name,
        tokens_per_second=(after.generated_tokens - before.generated_tokens) / elapsed,
        running=sum(running) / len(running),
        accepted=1 + sum(accepted) / drafts if drafts else 1.0,
        by_position=tuple(each / drafts for each in accepted) if drafts else (),
    )
    print(f"{batch:5}  {name:8} {found.tokens_per_second:10,.0f} tokens/s", file=sys.stderr, flush=True)
    return found


def _accepted(before: EngineStats, after: EngineStats) -> list[int]:
    earlier = before.accepted_by_position or (0,) * len(after.accepted_by_position)
    return [new - old for new, old in zip(after.accepted_by_position, earlier, strict=True)]


def _arms(stats: EngineStats, batch: int) -> str:
    """What the bandit has measured in the range of this batch size."""
    first = max((arm.batch for arm in stats.speculation if arm.batch <= batch), default=1)
    here = [arm for arm in stats.speculation if arm.batch == first]
    return "bandit: " + ", ".join(f"depth {a.depth} {a.tokens_per_second:,.0f} in {a.steps} steps" for a in here)


async def session(engine: Any, tokenizer: Tokenizer, arguments: argparse.Namespace, depths: list[int]) -> list[Figures]:
    """All batch sizes in one engine; `depths` are those of a drafter, if there is one."""
    found: list[Figures] = []
    task = ChainsTask(median_size=arguments.size, max_size=max(16, arguments.size), size_spread=0.3)
    await engine.start()
    for batch in arguments.batches:
        readers = Readers(engine, tokenizer, task, batch, arguments.temperature)
        await readers.all_served()
        await asyncio.sleep(SWITCH_S if found else WARM_UP_S)
        if not depths:
            found.append(await measure(engine, arguments.seconds, batch, "plain"))
        for depth in depths:
            await engine.force_depth(depth)
            await asyncio.sleep(SWITCH_S)
            found.append(await measure(engine, arguments.seconds, batch, f"depth {depth}"))
        if depths:
            await engine.force_depth(None)
            await asyncio.sleep(arguments.learn)
            found.append(await measure(engine, arguments.seconds, batch, "bandit"))
            print(f"{batch:5}  {_arms(engine.stats(), batch)}", file=sys.stderr, flush=True)
        await readers.close()
    await engine.close()
    return found


def run(model: Path, drafter: DrafterSettings, arguments: argparse.Namespace, depths: list[int]) -> list[Figures]:
    batch, memory, precision = max(arguments.batches), arguments.memory, arguments.precision
    if arguments.engine == "native":
        native = NativeEngine(max_batch=batch, memory=memory, device="auto", max_length=1024, graph_memory_gib=4.0)
        engine = build_native(model, native, drafter, name="bench", precision=precision)
    else:
        vllm = VllmEngine(max_batch=batch, memory=memory, reproducible=False, eager=arguments.eager)
        engine = build_vllm(model, vllm, drafter, name="bench", precision=precision)
    return asyncio.run(session(engine, load_tokenizer(model), arguments, depths))


def drafter_of(head: Path, depths: Sequence[int]) -> EagleDrafter | Eagle3Drafter:
    """The bandit may choose from all depths, and learn from what was measured with them."""
    adaptive = Adaptive(strategies=tuple(Strategy(depth=depth) for depth in depths))
    (architecture,) = json.loads((head / "config.json").read_text())["architectures"]
    kind = Eagle3Drafter if "Eagle3" in architecture else EagleDrafter
    return kind(path=str(head), tokens=max(depths), adaptive=adaptive)


def table(found: list[Figures]) -> str:
    lines = ["batch  decoding   tokens/s  to plain  to best  tokens/step  running  accepted by position"]
    for batch in dict.fromkeys(figures.batch for figures in found):
        here = [figures for figures in found if figures.batch == batch]
        plain = next(figures.tokens_per_second for figures in here if figures.name == "plain")
        best = max(figures.tokens_per_second for figures in here if figures.name != "bandit")
        for figures in here:
            rate = figures.tokens_per_second
            positions = " ".join(f"{share:.2f}" for share in figures.by_position)
            lines.append(
                f"{batch:5}  {figures.name:8} {rate:10,.0f} {rate / plain:8.2f}x {rate / best:7.2f}x "
                f"{figures.accepted:12.2f} {figures.running:8.1f}  {positions}"
            )
    return "\n".join(lines)


def bars(found: list[Figures]) -> str:
    lines: list[str] = []
    for bandit in (figures for figures in found if figures.name == "bandit"):
        batch, rate = bandit.batch, bandit.tokens_per_second
        others = {figures.name: figures.tokens_per_second for figures in found if figures.batch == batch}
        best = max(others[name] for name in others if name not in ("bandit", "plain"))
        for what, ratio, wanted in (
            ("plain decoding", rate / others["plain"], WANTED.get(batch, NEVER_BELOW)),
            ("best fixed depth", rate / best, OF_BEST),
        ):
            verdict = "held" if ratio >= wanted else "NOT held"
            lines.append(f"batch {batch:3}: bandit {ratio:.2f}x {what}, wanted {wanted:.2f}x: {verdict}")
    return "\n".join(lines)


def make_up(shape: str, folder: Path) -> tuple[Path, Path]:
    """A model and a head that have hardly learned anything, in the wanted shape."""
    make_model(WarmStart(steps=20), ChainsTask(), 0, folder / "small")
    model, config = load_model(folder / "small")
    save_expanded(model, SHAPES[shape], folder / "big")
    for file in (folder / "small").glob("*token*"):
        (folder / "big" / file.name).write_bytes(file.read_bytes())
    head = fresh_head(Eagle3Drafter(), config, 0)
    save_head(expand_head(head, big_config(config, SHAPES[shape])), folder / "head")
    return folder / "big", folder / "head"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--head", type=Path)
    parser.add_argument("--engine", choices=("native", "vllm"), default="vllm")
    parser.add_argument("--shape", choices=("tiny",), help="instead of a model")
    parser.add_argument("--tokens", type=int, nargs="+", default=[3, 5])
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32, 128])
    parser.add_argument("--size", type=int, default=12, help="operations of the middle problem")
    parser.add_argument("--seconds", type=float, default=2.5, help="of each measurement")
    parser.add_argument("--learn", type=float, default=2.5, help="seconds that the bandit has before it is measured")
    parser.add_argument("--memory", type=float, default=0.85)
    parser.add_argument(
        "--precision", choices=("fp32", "bf16"), default="bf16" if torch.cuda.is_available() else "fp32"
    )
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--eager", action="store_true")
    parser.add_argument("--out", type=Path)
    parsed = parser.parse_args(arguments)
    if parsed.shape is None and (parsed.model is None or parsed.head is None):
        parser.error("--model and --head are needed, or --shape tiny")
    if parsed.engine == "vllm" and parsed.temperature > 0 and not has_gpu():
        parser.error("on a CPU vLLM 0.29 samples drafted tokens wrongly; use --temperature 0, or --engine native")
    with tempfile.TemporaryDirectory() as folder:
        if parsed.shape is not None:
            parsed.model, parsed.head = make_up(parsed.shape, Path(folder))
        depths = sorted({0, *cast(list[int], parsed.tokens)})
        found = run(parsed.model, NoDrafter(), parsed, [])
        found += run(parsed.model, drafter_of(parsed.head, depths[1:]), parsed, depths)
    print(table(found))
    print(bars(found))
    if parsed.out is not None:
        parsed.out.write_bytes(msgspec.json.encode(found))


if __name__ == "__main__":
    main()
