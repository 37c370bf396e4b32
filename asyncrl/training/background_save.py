"""Saves checkpoints beside training: training waits for a copy in the host's memory, and a thread writes that copy.

One checkpoint is written at a time: the next one, and the end of the run, wait for it. Training waits until all of it
is written, as if there were no thread, where the copy would take more than half of the memory that is left, and with
several ranks, whose files one of them completes.
"""

import asyncio
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from asyncrl.system.processes import available_memory
from asyncrl.training import checkpoint
from asyncrl.training.checkpoint_manifest import TrainingManifest
from asyncrl.training.learner import Learner

SHARE = 0.5
"""Of the memory that is left, which a copy may take."""


class BackgroundSave:
    """Of one trainer. An error of the thread is raised by whoever waits for it next."""

    def __init__(self, directory: Path, *, model_path: Path, keep: int) -> None:
        self._directory, self._model_path, self._keep = directory, model_path, keep
        self._thread = ThreadPoolExecutor(1, "checkpoint")
        self._writing: Future[Path] | None = None

    async def save(self, learner: Learner, manifest: TrainingManifest) -> Path:
        """Returns, when training may go on, where the checkpoint is or will be."""
        await self.written()
        if learner.ranks.world > 1 or checkpoint.snapshot_bytes(learner) > SHARE * available_memory():
            return checkpoint.save(learner, self._directory, manifest, model_path=self._model_path, keep=self._keep)
        copied = checkpoint.snapshot(learner, manifest, copy=True)
        self._writing = self._thread.submit(copied.write, self._directory, self._model_path, self._keep)
        return self._directory / f"step-{manifest.step}"

    async def written(self) -> None:
        """Returns when nothing is being written; the checkpoint is durable then."""
        if (writing := self._writing) is not None:
            await asyncio.shield(asyncio.wrap_future(writing))  # a caller that is cancelled does not stop it

    def close(self) -> None:
        """Waits for the thread; what it failed with, if anything, was for `written` to raise."""
        self._thread.shutdown(wait=True)
