"""The trainer actor: deliveries in, policy versions out."""

import asyncio
import logging
import time
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import msgspec
import torch

from actors.buffer import BufferActor
from actors.drafter.actor import DrafterActor
from actors.drafter.hidden_stream import HiddenStream
from asyncrl.buffer.consumed import ConsumedGroups
from asyncrl.config import Run
from asyncrl.config.precision import gathered_in
from asyncrl.config.weights import published_adapters
from asyncrl.data.arrow import decode
from asyncrl.data.episodes import Played, played
from asyncrl.drafting.checkpoint import read_head_config
from asyncrl.drafting.idle_gate import BusyFlag
from asyncrl.observe.diagnosis.activity import Activity
from asyncrl.observe.diagnosis.snapshot import Situation
from asyncrl.precision.publication import Fp8Publication
from asyncrl.system import shared_gpu
from asyncrl.system.devices import give_way
from asyncrl.system.run_directory import RunDirectory
from asyncrl.training import checkpoint
from asyncrl.training.background_save import BackgroundSave
from asyncrl.training.checkpoint_manifest import TrainingManifest, numbered
from asyncrl.training.device import engines_on_gpu, rank_device
from asyncrl.training.distributed.ranks import Ranks, RankSeat
from asyncrl.training.export import likeliest
from asyncrl.training.guardrails import Guardrails
from asyncrl.training.hidden_capture import HiddenTap
from asyncrl.training.learner import Learner
from asyncrl.training.report import StepReport
from asyncrl.training.step_profile import StepProfile
from asyncrl.types import Delivery, Group, Probe, SendOrder, Trajectory, WeightManifest
from asyncrl.weights import probe
from asyncrl.weights.gather import Follower, Source
from asyncrl.weights.transports.base import Writer
from asyncrl.weights.transports.registry import make_writer

log = logging.getLogger(__name__)


class Accumulated(msgspec.Struct, frozen=True, kw_only=True):
    """What one forward and backward worked on, for metrics."""

    started: float
    seconds: float
    rewards: tuple[float, ...]
    parts: tuple[dict[str, float], ...]
    """Of the rewards that have any."""
    staleness: tuple[int, ...]
    """Age of each sample's oldest token, in versions."""
    lengths: tuple[int, ...]
    """Sampled tokens of each sample."""
    played: Played = Played()
    """Of those of a harness."""
    incomplete_groups: int
    """Groups of which samples had failed."""
    first_wave_finished: float
    """Latest finish time among the samples of the first step's admissions; 0 when there are none."""


class TrainerActor:
    """Owns the learner. Fetches payloads from the buffer itself, so that no trajectory passes through the driver."""

    def __init__(
        self,
        run: Run,
        model_path: Path,
        checkpoints: Path,
        buffer: BufferActor,
        drafter: DrafterActor | None = None,
        busy: Path | None = None,
        seat: RankSeat | None = None,
    ) -> None:
        """With a `seat` it is one of several ranks, and waits for the others."""
        give_way()
        torch.set_num_threads(run.trainer.threads)
        self._run = run
        self._checkpoints = checkpoints
        self._buffer = buffer
        self._learner = Learner(model_path, run, None if seat is None else _join(run, seat))
        self._guardrails = Guardrails(run.sentinel, run.rollout.precision, str(checkpoints.parent))
        self._fp8 = Fp8Publication(run, self._learner.model_config)
        self._writer = self._make_writer()
        self._saving = BackgroundSave(checkpoints, model_path=model_path, keep=run.checkpoint.keep)
        self._consumed = ConsumedGroups()
        self._accumulated: list[int] = []
        """Groups of the step under way, which a checkpoint has only once it is taken."""
        self._samples_trained = 0
        self._profile: StepProfile | None = None
        self._busy = BusyFlag(busy) if busy is not None else None
        self._activity = Activity()
        self._stream = None if drafter is None else self._tap_hidden(drafter)

    def _make_writer(self) -> Writer:
        weights = self._run.weights
        if self._learner.ranks.rank > 0:
            return Follower(self._source())
        same_card = self._learner.device.type == "cuda" and engines_on_gpu(self._run)
        best = "cuda_ipc" if same_card else "shared_memory"
        return make_writer(
            self._source(),
            best if weights.transport == "auto" else weights.transport,
            prefix=self._run.name,
            folder=self._checkpoints.parent / "weights",
            deadline_s=weights.deadline_s,
            delta=weights.delta,
        )

    def _tap_hidden(self, drafter: DrafterActor) -> HiddenStream:
        settings = self._run.drafter.head
        assert settings is not None
        taps = read_head_config(Path(settings.path), self._learner.model_config).taps
        self._learner.hidden = HiddenTap(settings.training, taps, self._run.seed)
        return HiddenStream(drafter, settings.training.tokens_per_source)

    def _at_work(self) -> AbstractContextManager[None]:
        """A drafter that trains in idle time pauses meanwhile."""
        return self._busy.set() if self._busy is not None else nullcontext()

    def _send_hidden(self) -> None:
        if self._stream is not None and self._learner.hidden is not None:
            self._stream.send(self._learner.hidden.drain())

    def _source(self) -> Source:
        """The weights in the precision that engines serve, so that both sides digest the same bytes."""
        narrow = gathered_in(self._run, quantizes=self._fp8.quantizes) == "bf16"
        only = bool(published_adapters(self._run))
        inner = self._learner.source(torch.bfloat16 if narrow else torch.float32, adapters_only=only)
        return self._fp8.travelling(inner)

    async def restore(self, path: Path) -> int:
        """Continue from a checkpoint; returns the number of optimizer steps it holds."""
        manifest = checkpoint.restore(self._learner, path)
        self._consumed = ConsumedGroups(manifest.consumed, manifest.earlier)
        self._samples_trained = manifest.samples_trained
        return manifest.step

    async def accumulate(self, delivery: Delivery) -> Accumulated:
        reading = self._buffer.read(delivery)
        payloads = await self._activity.during(f"reading groups for step {delivery.step}", reading, on="buffer")
        groups = _groups(payloads)
        started, begun = time.time(), time.perf_counter()
        await asyncio.sleep(0)
        self._begin_profile()
        with self._at_work(), self._activity.doing(f"forward and backward for step {delivery.step}"):
            self._learner.accumulate(groups)
        self._send_hidden()
        self._accumulated.extend(delivery.groups)
        trajectories = [trajectory for group in groups for trajectory in group.trajectories]
        self._fp8.see(trajectory.tokens for trajectory in trajectories)
        return Accumulated(
            started=started,
            seconds=time.perf_counter() - begun,
            rewards=tuple(t.reward for t in trajectories),
            parts=tuple(t.parts for t in trajectories if t.parts),
            staleness=tuple(self._learner.age(t) for t in trajectories),
            lengths=tuple(t.sampled_tokens for t in trajectories),
            played=played(trajectories),
            incomplete_groups=sum(len(group.trajectories) < self._run.rollout.group_size for group in groups),
            first_wave_finished=self._first_wave_finished(trajectories),
        )

    def _first_wave_finished(self, trajectories: list[Trajectory]) -> float:
        wave = (t.finished for t in trajectories if t.slot.group < self._run.flow.groups_per_step)
        return max(wave, default=0.0)

    async def step(self) -> StepReport:
        if self._saving.copying:
            copied = self._saving.copied()
            await self._activity.during(f"the copy for the checkpoint of step {self._learner.version}", copied)
        with self._at_work(), self._activity.doing(f"the update after version {self._learner.version}"):
            report = self._learner.step(self._guardrails.check)
        self._end_profile()
        self._send_hidden()
        self._consumed.update(self._accumulated)
        self._accumulated = []
        self._samples_trained += report.samples
        return report

    def _begin_profile(self) -> None:
        step = self._learner.version + 1
        if self._profile is None and step == self._run.trainer.profile_step:
            folder = RunDirectory(self._checkpoints.parent).profile
            path = folder / f"step-{step}-rank-{self._learner.ranks.rank}.json.gz"
            self._profile = StepProfile(path, self._learner.device)

    def _end_profile(self) -> None:
        if self._profile is not None:
            path, (travelled, hidden) = self._profile.path, self._profile.end()
            self._profile = None
            share = f", {hidden / travelled:.0%} of it while it computed" if travelled else ""
            log.warning("%s: %.3g s of travel between ranks%s", path, travelled, share)

    async def loss(self, trajectories: list[Trajectory]) -> float:
        """Of the weights as they are, on samples that nothing is learned from: mean of - log pi over their tokens."""
        with self._at_work(), self._activity.doing(f"the loss of {len(trajectories)} held-out samples"):
            return self._learner.loss(trajectories)

    async def export_weights(self, order: SendOrder) -> WeightManifest:
        """Send the current weights to the members of the order, with the probe for them."""
        with self._activity.doing(f"putting version {self._learner.version} out"):
            in_fp8 = None if self._guardrails.fell_back else self._fp8.of(self._learner.model)
            manifest = self._writer.publish(self._learner.version, order)
            manifest = msgspec.structs.replace(manifest, fp8=None if in_fp8 is None else in_fp8())
        if not probe.wanted(self._run):
            return manifest
        prompts = probe.prompts(self._learner.model_config.vocabulary)
        found = likeliest(self._learner.model, self._run.trainer, prompts)
        return msgspec.structs.replace(manifest, probe=Probe(prompts, found, probe.tolerance(self._run)))

    async def save(self) -> Path:
        """Begin to copy the state and to write it; the next update waits for the copy, `saved` for the end."""
        manifest = TrainingManifest(
            step=self._learner.version,
            samples_trained=self._samples_trained,
            consumed=self._consumed.ranges,
            earlier=self._consumed.earlier,
        )
        with self._activity.doing(f"the checkpoint of step {self._learner.version}"):
            return await self._saving.save(self._learner, manifest)

    async def saved(self) -> int:
        """Returns when the last checkpoint is durable, or raises what kept it from being written. The number is the
        step of the oldest that the run may be resumed from: if one is damaged, the one before is used."""
        await self._saving.written()
        kept = numbered(self._checkpoints)
        return kept[0][0] if len(kept) >= min(2, self._run.checkpoint.keep) else 0

    def situation(self) -> Situation:
        return self._activity.situation()

    async def close(self) -> None:
        await asyncio.to_thread(self._saving.close)
        self._writer.close()
        self._learner.ranks.leave()


def _join(run: Run, seat: RankSeat) -> Ranks:
    """Returns when all ranks have joined."""
    from asyncrl.training.distributed.fsdp import FsdpRanks  # takes seconds, which a single rank does not need

    device = rank_device(run.trainer.device, seat.rank)
    if run.shares_gpu and device.type == "cuda":
        shared_gpu.allow()
    return FsdpRanks(seat, device, run.trainer)


def _groups(payloads: list[bytes]) -> list[Group]:
    """Payloads come in group and sample order."""
    members: dict[int, list[Trajectory]] = {}
    for payload in payloads:
        trajectory = decode(payload)
        members.setdefault(trajectory.slot.group, []).append(trajectory)
    return [Group(id=group, trajectories=tuple(found)) for group, found in members.items()]
