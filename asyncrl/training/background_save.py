"""Saves checkpoints beside training: a thread copies the state to the host's memory, and writes that copy.

Forward and backward of the next step change nothing that is saved, so they go on while it is copied; only the update
waits for the copy (`copied`). On a GPU the copy has a stream of its own and takes none of the card's memory.

One checkpoint is written at a time: the next one, and the end of the run, wait for it. Training waits until all of it
is written, as if there were no thread, where the copy would take more than half of the memory that is left, and with
several ranks, whose files one of them completes.
"""

import asyncio
from collections.abc import Generator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import torch

from asyncrl.system.processes import available_memory
from asyncrl.training import checkpoint
from asyncrl.training.checkpoint_manifest import TrainingManifest
from asyncrl.training.learner import Learner

SHARE = 0.5
"""Of the memory that is left, which a copy may take."""


class BackgroundSave:
    """Of one trainer. An error of the thread is raised by whoever waits for `written` next."""

    def __init__(self, directory: Path, *, model_path: Path, keep: int) -> None:
        self._directory, self._model_path, self._keep = directory, model_path, keep
        self._thread = ThreadPoolExecutor(1, "checkpoint")
        self._copying: Future[None] | None = None
        self._writing: Future[Path] | None = None

    async def save(self, learner: Learner, manifest: TrainingManifest) -> Path:
        """Returns, when training may go on, where the checkpoint is or will be. `copied` comes before the update."""
        await self.written()
        if learner.ranks.world > 1 or checkpoint.snapshot_bytes(learner) > SHARE * available_memory():
            return checkpoint.save(learner, self._directory, manifest, model_path=self._model_path, keep=self._keep)
        manifest = checkpoint.filled(manifest, learner)
        self._copying = Future()
        updated = _work_until_now(learner.device)
        self._writing = self._thread.submit(self._copy_and_write, learner, manifest, updated, self._copying)
        return self._directory / f"step-{manifest.step}"

    def _copy_and_write(
        self, learner: Learner, manifest: TrainingManifest, updated: torch.cuda.Event | None, copying: Future[None]
    ) -> Path:
        try:
            with _own_stream(learner.device, updated):
                copied = checkpoint.snapshot(learner, manifest, copy=True)
        finally:
            copying.set_result(None)
        return copied.write(self._directory, self._model_path, self._keep)

    @property
    def copying(self) -> bool:
        return self._copying is not None and not self._copying.done()

    async def copied(self) -> None:
        """Returns when the weights may change."""
        if (copying := self._copying) is not None:
            await asyncio.shield(asyncio.wrap_future(copying))

    async def written(self) -> None:
        """Returns when nothing is being written; the checkpoint is durable then."""
        if (writing := self._writing) is not None:
            await asyncio.shield(asyncio.wrap_future(writing))  # a caller that is cancelled does not stop it

    def close(self) -> None:
        """Waits for the thread; what it failed with, if anything, was for `written` to raise."""
        self._thread.shutdown(wait=True)


def _work_until_now(device: torch.device) -> torch.cuda.Event | None:
    if device.type != "cuda":
        return None
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(device))
    return event


@contextmanager
def _own_stream(device: torch.device, after: torch.cuda.Event | None) -> Generator[None]:
    """Of the card, if there is one: behind `after`, beside whatever comes later, and done at the end."""
    if after is None:
        yield
        return
    stream = torch.cuda.Stream(device)
    stream.wait_event(after)
    with torch.cuda.stream(stream):
        yield
    stream.synchronize()
