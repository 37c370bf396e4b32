"""The drafter actor: hidden states in, better draft heads out, in the time that training and rollouts leave.

It trains in small updates for as long as it has something to learn from. Every few seconds of training it compares
the head with the one that the engines have, on samples that neither was trained on, and offers it if it is better.
"""

import asyncio
from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path

import msgspec
import torch
from safetensors.torch import load_file, save_file

from asyncrl.config import Run
from asyncrl.drafting.checkpoint import head_tensors, load_head, save_head
from asyncrl.drafting.heads import Head
from asyncrl.drafting.idle_gate import LOOK_SECONDS, BusyFlag, IdleGate
from asyncrl.drafting.learner import Acceptance, DrafterLearner
from asyncrl.drafting.memory import PART_TOKENS
from asyncrl.drafting.store import HiddenStates
from asyncrl.drafting.windows import Window, decode
from asyncrl.engines.adapters import has_adapters
from asyncrl.errors import DrafterError
from asyncrl.models.config import read_config
from asyncrl.models.files import weight_files
from asyncrl.observe.diagnosis.activity import Activity
from asyncrl.observe.diagnosis.snapshot import Situation
from asyncrl.system.storage import storing
from asyncrl.training.device import training_device
from asyncrl.training.distributed.shards import TensorFiles
from asyncrl.types import WeightManifest
from asyncrl.weights.transports.registry import read_published
from asyncrl.weights.transports.shared_memory import SharedMemoryWriter

STATE = "optimizer.state"
"""Beside the head: its optimizer, to go on from. In safetensors, but vLLM takes every file so named for weights."""
JUDGE_TOKENS = 4096
EMBEDDING, OUTPUT = "model.embed_tokens.weight", "lm_head.weight"


class DrafterStatus(msgspec.Struct, frozen=True, kw_only=True):
    """What the drafter has done so far."""

    version: int
    """Heads offered to the engines."""
    updates: int
    seconds: float
    """Spent in training."""
    seconds_beside: float
    """Of these, while the policy's trainer was at work."""
    acceptance: float | None
    """Expected tokens per step of the head that the engines have, on held-out samples; null before it is evaluated."""
    windows: int
    dropped_windows: int
    held_bytes: int
    bytes_per_token: float


class DrafterActor:
    """Owns a head, its optimizer and the hidden-state buffer."""

    def __init__(self, run: Run, model_path: Path, directory: Path, busy: Path) -> None:
        torch.set_num_threads(run.trainer.threads)
        drafter = run.drafter.head
        assert drafter is not None
        self._settings, self._depth = drafter.training, drafter.tokens
        self._directory = directory
        self._gate = IdleGate(BusyFlag(busy), self._settings.share if self._settings.spot else 1.0)
        config = read_config(model_path)
        policy = TensorFiles(weight_files(model_path))  # of which two matrices are read
        embedding = policy.tensor(EMBEDDING)
        output = embedding if config.tied_embeddings else policy.tensor(OUTPUT)
        head = load_head(drafter.path, config)
        device = training_device(run.trainer.device)
        self._learner = DrafterLearner(head, embedding, output, self._settings, device)
        resumed = (directory / STATE).is_file()
        if resumed:
            self._learner.restore(load_file(directory / STATE))
        self._states = HiddenStates(self._settings.max_bytes, self._settings.held_out, run.seed)
        self._writer = SharedMemoryWriter(lambda: head_tensors(self._learner.published), prefix=f"{run.name}-drafter")
        self._version = 0
        self._judged_at = 0.0
        self._trained_tokens = 0
        self._acceptance: Acceptance | None = None
        self._has_better = resumed  # the head in training is newer than the one that the engines load
        self._training: asyncio.Task[None] | None = None
        self._activity = Activity()

    async def start(self) -> None:
        self._training = asyncio.create_task(self._train(), name="drafter")

    async def collect(self, payload: bytes, dropped: int = 0) -> None:
        """Receive windows of hidden states; `dropped` were lost since the last ones, as the drafter was busy."""
        self._states.add(decode(payload))
        self._states.counters.dropped += dropped

    async def follow(self, manifest: WeightManifest) -> None:
        """A new policy version: draft for its embedding and its output matrix from now on. Adapters change neither."""
        if has_adapters(manifest):
            return
        wanted = {
            name: tensor.clone()
            for name, tensor in read_published(manifest, self._learner.device)
            if name in (EMBEDDING, OUTPUT)
        }
        self._learner.set_target(wanted[EMBEDDING], wanted.get(OUTPUT, wanted[EMBEDDING]))

    async def offer(self) -> WeightManifest | None:
        """A head that is better than the last one offered, if there is one."""
        if not self._has_better:
            return None
        self._has_better = False
        self._version += 1
        return self._writer.publish(self._version)

    async def status(self) -> DrafterStatus:
        """Raises what ended its training: nobody else waits for that."""
        if self._training is not None and self._training.done() and (error := self._training.exception()):
            raise DrafterError(f"it trains no more: {error!r}") from error
        counters = self._states.counters
        return DrafterStatus(
            version=self._version,
            updates=self._learner.updates,
            seconds=self._gate.seconds,
            seconds_beside=self._gate.seconds_beside,
            acceptance=self._acceptance.length if self._acceptance else None,
            windows=counters.received,
            dropped_windows=counters.dropped,
            held_bytes=counters.held_bytes,
            bytes_per_token=counters.bytes_per_token,
        )

    async def save(self) -> None:
        """Write the head and its optimizer, nothing of the target, in a thread: training goes on meanwhile."""
        state = {name: tensor.clone().cpu() for name, tensor in self._learner.state().items()}
        await asyncio.to_thread(write_state, deepcopy(self._learner.published), state, self._directory)

    def situation(self) -> Situation:
        return self._activity.situation()

    async def close(self) -> None:
        if self._training is not None:
            self._training.cancel()
            await asyncio.wait([self._training])
        self._writer.close()

    async def _train(self) -> None:
        while True:
            if not self._may_train():
                await asyncio.sleep(LOOK_SECONDS)
                continue
            await self._update(self._states.batch(self._settings.batch_tokens))
            if self._gate.seconds - self._judged_at >= self._settings.publish_every:
                self._judge()
                self._judged_at = self._gate.seconds

    async def _update(self, windows: list[Window]) -> None:
        """One optimizer step, in small parts: between two of them the drafter yields the machine."""
        self._trained_tokens += sum(map(len, windows))
        parts = list(_parts(windows))
        tokens = 0
        for part in parts:
            await self._gate.opened()
            with self._gate.computing():
                tokens += self._learner.accumulate(part, 1 / len(parts))[1]
        if tokens:
            self._learner.step()
            self._activity.event(f"update {self._learner.updates}")

    def _may_train(self) -> bool:
        """There is something new to learn from."""
        counters = self._states.counters
        enough = counters.held_tokens >= self._settings.batch_tokens
        return enough and self._trained_tokens < self._settings.passes * counters.received_tokens

    def _judge(self) -> None:
        judges = self._states.judges(JUDGE_TOKENS)
        if not judges:
            return
        found = self._learner.compare(judges, self._depth)
        self._acceptance = found.published
        if found.is_better:
            self._acceptance = found.candidate
            self._learner.mark_published()
            self._has_better = True


def _parts(windows: list[Window]) -> Iterator[list[Window]]:
    part: list[Window] = []
    for window in windows:
        part.append(window)
        if sum(map(len, part)) >= PART_TOKENS:
            yield part
            part = []
    if part:
        yield part


def write_state(head: Head, state: dict[str, torch.Tensor], directory: Path) -> None:
    """Each file whole or not at all: a kill in between leaves a head and an optimizer that both can be used."""
    scratch = directory / ".partial"
    with storing(scratch):
        save_head(head, scratch)
        save_file(state, scratch / STATE)
        for path in scratch.iterdir():
            path.replace(directory / path.name)
        scratch.rmdir()
