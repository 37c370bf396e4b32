"""Drives one weight version from the trainer to every engine.

A version counts only when each engine has acknowledged its digest and passed its probe. The rules of what happens
otherwise are in asyncrl.weights.epochs; here they meet the actors.
"""

import asyncio
import time
from collections.abc import Mapping

import msgspec

from actors.acknowledged import disagreement
from actors.drafter_link import DrafterLink
from actors.rollout import RolloutActor
from actors.trainer import TrainerActor
from asyncrl.errors import ActorError, AsyncRLError, WeightSyncError
from asyncrl.types import SendOrder, WeightAck, WeightManifest
from asyncrl.weights.epochs import Abort, Action, Deliver, Epochs, GiveUp, Send

GRACE_SECONDS = 10.0
"""After a failed attempt, for engines to say that they are out of it."""


class Published(msgspec.Struct, frozen=True, kw_only=True):
    """One completed publication."""

    version: int
    seconds: float
    bytes: int
    digest: str
    reprefilled_tokens: int
    attempts: int = 1
    probe_gap: float | None = None
    """The largest of all engines; none without a probe."""


class Publisher:
    """Control only: the bytes go from the trainer's memory to the engines' without passing here."""

    def __init__(
        self,
        trainer: TrainerActor,
        rollouts: Mapping[str, RolloutActor],
        drafter: DrafterLink | None = None,
        *,
        deadline_s: float,
        export_s: float,
        grace_s: float = GRACE_SECONDS,
        required: int | None = None,
    ) -> None:
        """`required` engines must get each version, all of them by default; the others are left behind."""
        self._trainer = trainer
        self._rollouts = rollouts
        self._drafter = drafter
        required = len(rollouts) if required is None else required
        self.died: dict[str, ActorError] = {}
        """Engines that died during a publication, until somebody takes note of it."""
        self.current: WeightManifest | None = None
        """Of the version that counts; none before the first was published."""
        self._epochs = Epochs(tuple(rollouts), deadline_s, grace_s, required, export_s)

    def join(self, name: str) -> None:
        """An engine that came back, or is new, takes part from the next version on; not while one is under way."""
        self._epochs.join(name)

    def leave(self, name: str) -> None:
        """An engine takes part no longer; not while a version is under way."""
        self._epochs.leave(name)

    @property
    def living(self) -> dict[str, RolloutActor]:
        """The engines that take part, by name: all but those that died or hung."""
        return {name: self._rollouts[name] for name in self._epochs.members}

    async def publish(self) -> Published:
        begun = time.perf_counter()
        attempt = _Attempt(self._trainer, self._rollouts, self._epochs, self.died)
        try:
            manifest, acks = await attempt.run()
        finally:
            attempt.close()
        self.current = manifest
        if self._drafter is not None:
            self._drafter.follow(manifest)
        gaps = [ack.probe_gap for ack in acks if ack.probe_gap is not None]
        sent = manifest.delta or manifest
        return Published(
            version=manifest.version,
            seconds=time.perf_counter() - begun,
            bytes=sent.total_bytes,
            digest=manifest.digest,
            reprefilled_tokens=sum(ack.reprefilled_tokens for ack in acks),
            attempts=attempt.count,
            probe_gap=max(gaps, default=None),
        )


class _Attempt:
    """One version on its way: turns what the actors answer into events, and actions into calls."""

    def __init__(
        self,
        trainer: TrainerActor,
        rollouts: Mapping[str, RolloutActor],
        epochs: Epochs,
        died: dict[str, ActorError],
    ) -> None:
        self._trainer, self._rollouts, self._epochs, self._died = trainer, rollouts, epochs, died
        self._calls: dict[asyncio.Task[WeightAck], tuple[str, int]] = {}
        self._exporting: asyncio.Task[WeightManifest] | None = None
        self._manifest: WeightManifest | None = None
        self._acks: dict[str, WeightAck] = {}
        self.count = 0

    async def run(self) -> tuple[WeightManifest, list[WeightAck]]:
        actions = self._epochs.begin(time.monotonic())
        while True:
            for action in actions:
                match action:
                    case Send(order):
                        self._begin(order)
                    case Abort():
                        pass  # engines and trainer notice by themselves, within the deadline of their own waits
                    case Deliver():
                        assert self._manifest is not None
                        return self._manifest, list(self._acks.values())
                    case GiveUp(version, reason):
                        which = "the new version" if version is None else f"version {version}"
                        raise WeightSyncError(
                            f"{which} does not count, version {max(self._epochs.version, 0)} does: {reason}; `asyncrl "
                            "resume` continues from the last checkpoint"
                        )
            actions = await self._next()

    def _begin(self, order: SendOrder) -> None:
        self.count += 1
        self._acks.clear()
        self._exporting = asyncio.create_task(self._trainer.export_weights(order))

    async def _next(self) -> list[Action]:
        """Wait for whatever comes first."""
        waiting = {*self._calls, *([self._exporting] if self._exporting is not None else [])}
        timeout = max(0.0, self._epochs.wake - time.monotonic())
        done, _ = await asyncio.wait(waiting, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
        now = time.monotonic()
        if self._exporting is not None and self._exporting in done:
            return self._exported(self._exporting, now)
        for call in self._calls:
            if call in done:
                return self._answered(call, *self._calls.pop(call), now)
        return self._epochs.tick(now)

    def _exported(self, exporting: asyncio.Task[WeightManifest], now: float) -> list[Action]:
        self._exporting = None
        epoch = self._epochs.epoch
        error = exporting.exception()
        if isinstance(error, WeightSyncError):
            return self._epochs.failed(epoch, str(error), now)
        manifest = self._manifest = exporting.result()
        for name in self._epochs.members:
            call = asyncio.create_task(self._rollouts[name].load_weights(manifest))
            self._calls[call] = name, epoch
        return self._epochs.sent(epoch, manifest.version, now)

    def _answered(self, call: asyncio.Task[WeightAck], name: str, epoch: int, now: float) -> list[Action]:
        error = call.exception()
        if isinstance(error, ActorError):
            self._died[name] = error
            return self._epochs.lost(name, epoch, str(error), now)
        if isinstance(error, AsyncRLError):
            return self._epochs.refused(name, epoch, str(error), now)
        ack = call.result()
        assert self._manifest is not None
        if wrong := disagreement(ack, self._manifest):
            return self._epochs.refused(name, epoch, wrong, now)
        self._acks[name] = ack
        return self._epochs.acknowledged(name, epoch, now)

    def close(self) -> None:
        """Wait for nobody: who has not answered by now may never do."""
        for task in (*self._calls, self._exporting):
            if task is not None:
                task.cancel()
