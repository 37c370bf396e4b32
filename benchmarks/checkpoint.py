"""What a checkpoint costs training, and how soon a run that is stopped has written its last one.

    python -m benchmarks.checkpoint [--shape qwen3-1.7b] [--directory runs] [trainer.NAME=VALUE ...]

Steps of the same random completions, every other one with a checkpoint begun before it. `waited` is how long its update
waited for the copy, `copied` and `written` how long these took in all. The last line is a checkpoint with nothing to
do beside it, as after SIGTERM: until all of it is on the disk. The aims on an H200 are a second of waiting at 1.7B, and
60 seconds at 8B for a stop (`--shape qwen3-8b --repeats 0 trainer.optimizer=adamw_8bit`, which measures nothing else:
there is room for one checkpoint of 49 GB more often than for two).
"""

import argparse
import asyncio
import statistics
import tempfile
from collections.abc import Awaitable, Sequence
from pathlib import Path
from time import perf_counter
from typing import NamedTuple

from asyncrl.models.config import ModelConfig
from asyncrl.training.background_save import BackgroundSave
from asyncrl.training.checkpoint_manifest import TrainingManifest
from asyncrl.training.learner import Learner
from asyncrl.types import Group
from benchmarks import trainer
from benchmarks.rollout import made
from benchmarks.trainer import Setting, make_groups, setting_of, trainer_run

ROW = "asyncrl recomputed"


class Saved(NamedTuple):
    """Seconds of one step with a checkpoint beside it."""

    step: float
    waited: float
    copied: float
    written: float


def step(learner: Learner, groups: Sequence[Group]) -> float:
    began = perf_counter()
    learner.accumulate(groups)
    learner.step()
    return perf_counter() - began


async def step_beside(saving: BackgroundSave, learner: Learner, groups: Sequence[Group]) -> Saved:
    began = perf_counter()
    await saving.save(learner, manifest(learner))
    copied = asyncio.ensure_future(_seconds(saving.copied(), began))
    written = asyncio.ensure_future(_seconds(saving.written(), began))
    await asyncio.to_thread(learner.accumulate, groups)
    ready = perf_counter()
    until_copied = await copied
    waited = perf_counter() - ready
    learner.step()
    taken = perf_counter() - began
    return Saved(taken, waited, until_copied, await written)


async def _seconds(work: Awaitable[None], began: float) -> float:
    await work
    return perf_counter() - began


def manifest(learner: Learner) -> TrainingManifest:
    return TrainingManifest(step=learner.version, samples_trained=0, consumed=())


async def measure(model: Path, setting: Setting, directory: Path) -> None:
    learner, groups = Learner(model, trainer_run(setting, ROW)), make_groups(setting)
    saving = BackgroundSave(directory, model_path=model, keep=1)
    step(learner, groups)  # compiles
    plain, beside = list[float](), list[Saved]()
    for _ in range(setting.repeats):
        plain.append(step(learner, groups))
        beside.append(await step_beside(saving, learner, groups))
    if beside:
        found = Saved(*map(statistics.median, zip(*beside, strict=True)))
        print(f"a step                 {statistics.median(plain):8.2f} s")
        print(f"with a checkpoint      {found.step:8.2f} s, of which it waited {found.waited:.2f} s for the copy")
        print(f"copied after           {found.copied:8.2f} s, written after {found.written:.2f} s", flush=True)
    began = perf_counter()
    path = await saving.save(learner, manifest(learner))
    await saving.written()
    seconds, size = perf_counter() - began, sum(file.stat().st_size for file in path.iterdir())
    print(f"a checkpoint at a stop {seconds:8.2f} s, {size / 1e9:.1f} GB, {size / 1e9 / seconds:.2f} GB/s")
    saving.close()


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--directory", type=Path, help="on the disk that runs write to; default: that of temporary files"
    )
    parser.add_argument("--shape", default="", help="as of benchmarks.trainer, whose other options are taken as well")
    own, rest = parser.parse_known_args(words)
    options = trainer.parse([*(["--shape", own.shape] if own.shape else []), *rest])
    setting = setting_of(options)
    print(trainer.describe([setting], options.shape))
    with (
        made(ModelConfig.from_hf(setting.config), options.device) as model,
        tempfile.TemporaryDirectory(dir=own.directory) as place,
    ):
        asyncio.run(measure(model, setting, Path(place)))


if __name__ == "__main__":
    main()
