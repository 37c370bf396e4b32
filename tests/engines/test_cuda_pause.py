"""How long nobody sees a token while weights change: answers are cut behind the last tokens of the old version."""

import asyncio
from pathlib import Path

import torch

from asyncrl.config.engine import NativeEngine as Settings
from asyncrl.engines.native.cuda.engine import CudaEngine
from tests.support.driving import ask, collect, publishing, serving, until_generated
from tests.support.tiny_model import tiny_checkpoint

TOKENS = 300


async def observed(engine: CudaEngine, path: Path) -> list[tuple[int, int]]:
    """Tokens and version whenever one of them has changed, as others see them between two turns of the loop."""
    found = list[tuple[int, int]]()

    async def watch() -> None:
        while True:
            stats = engine.stats()
            if not found or found[-1] != (stats.generated_tokens, stats.version):
                found.append((stats.generated_tokens, stats.version))
            await asyncio.sleep(0)

    with publishing(path) as publish:
        async with serving(engine):
            watching = asyncio.create_task(watch())
            running = asyncio.create_task(collect(engine, ask("a", max_tokens=TOKENS)))
            await until_generated(engine, 10)
            await engine.load_weights(publish(1), "keep")
            await running
            watching.cancel()
    return found


def test_tokens_of_the_old_version_do_not_wait_until_answers_are_cut(tmp_path: Path) -> None:
    tiny_checkpoint(tmp_path)
    settings = Settings(max_batch=4, max_length=512)
    found = asyncio.run(observed(CudaEngine(tmp_path, settings, name="watched", device=torch.device("cpu")), tmp_path))
    changed = next(index for index, (_, version) in enumerate(found) if version == 1)
    assert found[changed][0] == found[changed - 1][0]  # seen with the old version first
    assert found[-1] == (TOKENS, 1)
