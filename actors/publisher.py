"""Drives one weight version from the trainer to every engine.

A version counts only when each engine has acknowledged its digest and passed its probe. The rules of what happens
otherwise are in asyncrl.weights.epochs; here they meet the actors.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable

import msgspec

from actors.drafter.actor import DrafterActor, DrafterStatus
from actors.rollout.actor import RolloutActor
from actors.trainer.actor import TrainerActor
from asyncrl.errors import ActorError, AsyncRLError, WeightSyncError
from asyncrl.fleet.state import FleetState
from asyncrl.types import SendOrder, WeightAck, WeightManifest
from asyncrl.weights.epochs import Abort, Action, Deliver, Epochs, GiveUp, Send


async def acknowledged(
    manifest: WeightManifest, loading: Iterable[Awaitable[WeightAck]], timeout_s: float
) -> list[WeightAck]:
    try:
        async with asyncio.timeout(timeout_s):
            acks = await asyncio.gather(*loading)
    except TimeoutError:
        raise WeightSyncError(
            f"version {manifest.version} was not acknowledged by every engine within {timeout_s:.0f} s"
        ) from None
    for ack in acks:
        if wrong := disagreement(ack, manifest):
            raise WeightSyncError(wrong)
    return acks


def disagreement(ack: WeightAck, manifest: WeightManifest) -> str:
    """What an engine has acknowledged, if it is not what was published."""
    if (ack.version, ack.digest) == (manifest.version, manifest.digest):
        return ""
    return (
        f"{ack.engine} acknowledged version {ack.version} with digest {ack.digest}, published was version "
        f"{manifest.version} with digest {manifest.digest}"
    )


LOOK_SECONDS = 0.5
"""How often the drafter is asked for a better head."""
AGAIN_SECONDS = 30.0
"""Until a head is offered once more to engines that did not take it: loading one stops an engine for a moment."""
TELL_SECONDS = 60.0
"""Between two sentences about what fails: it may fail with each version."""


class DrafterLink:
    """Between the run and its drafter, in the driver's event loop. The run never waits for it: the drafter may be
    slow, as it has the lowest priority. Nor does it end because of it: completions are the same with an old head, and
    without any. Every engine gets the newest head, also one that failed to take it, came back or joined late."""

    def __init__(self, drafter: DrafterActor, fleet: FleetState[RolloutActor], *, timeout_s: float) -> None:
        self._drafter = drafter
        self._fleet = fleet
        self._timeout_s = timeout_s
        self._following: asyncio.Task[None] | None = None
        self._problems: list[str] = []
        self._told = self._refused = float("-inf")
        self._newest: WeightManifest | None = None
        self._announced = 0
        self._held: dict[tuple[str, int], int] = {}
        """The head that each process of an engine has, by the engine's name and how often it was restarted."""
        self.status: DrafterStatus | None = None
        """As it was when last heard of."""

    def follow(self, manifest: WeightManifest) -> None:
        """Send the drafter a new policy version, unless it is still busy with an earlier one."""
        if self._following is None or self._following.done():
            self._following = asyncio.create_task(self._follow(manifest))

    async def _follow(self, manifest: WeightManifest) -> None:
        try:
            await self._drafter.follow(manifest)
        except ActorError:
            pass  # `serve` hears of a dead drafter too, and says so
        except Exception as error:  # whatever it is: it goes on drafting for an older version
            self._problems.append(f"it cannot follow version {manifest.version}: {_in_a_line(error)}")

    async def serve(
        self, published: Callable[[int], None], lost: Callable[[str], None], failed: Callable[[str], None]
    ) -> None:
        """Bring better heads to the engines, as they come, until cancelled or until the drafter dies, which `lost` is
        told. `failed` is told what else goes wrong, but not again and again."""
        while True:
            died = await self._look()
            if (version := self._complete()) is not None:
                self._announced = version
                published(version)
            if died is not None:
                lost(str(died))
                return
            if self._problems:
                if time.monotonic() - self._told > TELL_SECONDS:
                    self._told = time.monotonic()
                    failed(self._problems[-1])
                self._problems.clear()
            await asyncio.sleep(LOOK_SECONDS)

    async def _look(self) -> ActorError | None:
        """Returns what the drafter died of, if it did."""
        try:
            if (manifest := await self._drafter.offer()) is not None:
                self._newest, self._refused = manifest, float("-inf")
            if self._newest is not None and time.monotonic() - self._refused > AGAIN_SECONDS:
                await self._bring(self._newest)
            self.status = await self._drafter.status()
        except ActorError as error:
            return error
        except Exception as error:  # whatever it is: engines have a head, and go on with it
            self._problems.append(_in_a_line(error))
        return None

    @property
    def _serving(self) -> list[tuple[str, int]]:
        return [(name, self._fleet.restarts[name]) for name in self._fleet.serving]

    def _complete(self) -> int | None:
        """The newest head, if every engine has it now and nobody was told so."""
        version = self._newest.version if self._newest is not None else self._announced
        news = version != self._announced and all(self._held.get(each) == version for each in self._serving)
        return version if news else None

    async def _bring(self, manifest: WeightManifest) -> None:
        """To every engine that serves and does not have it."""
        lacking = [each for each in self._serving if self._held.get(each) != manifest.version]
        found = await asyncio.gather(*(self._load(manifest, name) for name, _ in lacking))
        for each, error in zip(lacking, found, strict=True):
            if error is None:
                self._held[each] = manifest.version
            elif not isinstance(error, ActorError):  # an engine that died is brought back elsewhere
                self._problems.append(f"engines did not take its head: {_in_a_line(error)}")
                self._refused = time.monotonic()

    async def _load(self, manifest: WeightManifest, name: str) -> Exception | None:
        """What went wrong: with whatever head it has, the engine still drafts."""
        try:
            await acknowledged(manifest, [self._fleet.handles[name].load_drafter(manifest)], self._timeout_s)
        except Exception as error:
            return error
        return None

    async def save(self) -> None:
        try:
            await self._drafter.save()
        except ActorError:
            pass  # `serve` hears of a dead drafter too, and says so
        except Exception as error:  # whatever it is: the head that was saved before is still there
            self._problems.append(f"its head was not saved: {_in_a_line(error)}")

    async def close(self) -> None:
        if self._following is not None:
            await asyncio.wait([self._following])
        await self._drafter.close()


def _in_a_line(error: Exception) -> str:
    """What Ray brings from another process is a page of traceback with the error in its last line."""
    words = str(error).strip()
    if "\n" in words:
        return words.rpartition("\n")[2]
    return words if isinstance(error, AsyncRLError) else repr(error)


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
        fleet: FleetState[RolloutActor],
        drafter: DrafterLink | None = None,
        *,
        deadline_s: float,
        export_s: float,
        grace_s: float = GRACE_SECONDS,
        required: int | None = None,
    ) -> None:
        """`required` engines must get each version, all of them by default; the others are left behind."""
        self._trainer = trainer
        self._fleet = fleet
        self._drafter = drafter
        required = len(fleet.participants) if required is None else required
        self.died: dict[str, ActorError] = {}
        """What the calls to engines that died during a publication raised, until somebody brings them back."""
        self._epochs = Epochs(fleet, deadline_s, grace_s, required, export_s)

    async def publish(self) -> Published:
        begun = time.perf_counter()
        attempt = _Attempt(self._trainer, self._fleet, self._epochs, self.died)
        try:
            manifest, acks = await attempt.run()
        finally:
            attempt.close()
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
        fleet: FleetState[RolloutActor],
        epochs: Epochs,
        died: dict[str, ActorError],
    ) -> None:
        self._trainer, self._fleet, self._epochs, self._died = trainer, fleet, epochs, died
        self._receivers = fleet.handles  # as they are now: one that dies and leaves meanwhile is still heard of
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
                            f"{which} does not count, version {self._fleet.published_version} does: {reason}; `asyncrl "
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
            call = asyncio.create_task(self._receivers[name].load_weights(manifest))
            self._calls[call] = name, epoch
        return self._epochs.sent(epoch, manifest, now)

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
