"""The trajectory buffer as an actor: the store behind awaitable methods, the only place where anyone waits."""

import asyncio
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

import msgspec

from asyncrl.buffer.replay import Sample
from asyncrl.buffer.retention import Pruning
from asyncrl.buffer.store import TrajectoryBuffer
from asyncrl.config import Run
from asyncrl.curriculum.policy import make_curriculum
from asyncrl.drop_reasons import describe, main_cause
from asyncrl.errors import StallError
from asyncrl.fleet.ready_window import ReadyWindow
from asyncrl.observe.diagnosis.activity import Activity
from asyncrl.observe.diagnosis.snapshot import Situation
from asyncrl.types import BufferStatus, Delivery, LedgerCounts, Receipt, Segment, Slot, Ticket

T = TypeVar("T")
BYTES_PER_TOKEN = 12
"""Token id, log-probability and version."""
BEGUN = 256
"""Completions whose progress is kept before the first search for those that have ended."""
OVERHEAD_BYTES = 2048
"""Names, times and the prompt of a small task; the ledger learns from larger samples."""


class _Batch:
    """Samples of several callers that share one write and, at durability `disk`, one sync."""

    def __init__(self) -> None:
        self.samples: list[Sample] = []
        self.receipts: list[Receipt] = []
        self.error: OSError | None = None


class BufferActor:
    """Every wait has a deadline and says what it waited for. `append` may be retried freely; it is idempotent."""

    IDEMPOTENT = frozenset(
        {"append", "fail", "awaited", "read", "commit", "advance", "limit", "checkpointed", "ledger", "status", "close"}
    )
    """Not `admit` and `take`: after a lost reply, a repeated call would issue or deliver further groups."""

    def __init__(
        self,
        run: Run,
        directory: Path,
        restore_step: int | None = None,
        sizes: Sequence[int | None] = (),
        clock: Callable[[], float] = time.time,
    ) -> None:
        """`restore_step`: optimizer steps in the checkpoint that is resumed from; None begins in an empty directory.
        `sizes`: of the sources of prompts, for a curriculum."""
        token = BYTES_PER_TOKEN + run.distill.token_bytes * bool(run.teachers)
        self._store = TrajectoryBuffer(
            directory,
            run.name,
            run.buffer,
            group_size=run.rollout.group_size,
            groups_per_step=run.flow.groups_per_step,
            max_staleness=run.max_staleness,
            group_timeout_s=run.flow.group_timeout_s,
            total_steps=run.steps,
            restore_step=restore_step,
            sample_bytes=token * run.rollout.max_tokens + OVERHEAD_BYTES,
            max_ready=ReadyWindow(run).groups,
            drop_uninformative=run.algorithm.dynamic_sampling,
            incomplete_min=run.flow.incomplete_min if run.flow.incomplete == "train_rest" else 0,
            curriculum=make_curriculum(run, sizes),
        )
        self._groups_per_step = run.flow.groups_per_step
        self._clock = clock
        self._changed = asyncio.Condition()
        self._batch = _Batch()
        self._activity = Activity()
        self._begun: dict[Slot, tuple[Segment, ...]] = {}
        self._begun_limit = BEGUN
        self._closed = False

    # -- producers -----------------------------------------------------------------------------------------------

    async def admit(self, timeout_s: float) -> list[Ticket]:
        """A ticket for every group that may be generated now: at least one, or none if `timeout_s` has passed."""

        def ready() -> list[Ticket] | None:
            tickets: list[Ticket] = []
            while isinstance(ticket := self._store.admit(self._clock()), Ticket):
                tickets.append(ticket)
            return tickets or None

        return await self._until(ready, timeout_s) or []

    async def append(self, payloads: list[bytes]) -> list[Receipt]:
        """Store trajectories; they are durable at the configured level when this returns."""
        samples = self._store.check(payloads)
        batch = self._batch
        start = len(batch.samples)
        batch.samples += samples
        await asyncio.sleep(0)  # calls that queued up behind the last write join this one
        async with self._changed:
            if batch is self._batch:
                self._write()
                self._changed.notify_all()
                self._activity.event(f"stored {len(batch.samples)} samples")
        if batch.error:
            raise batch.error
        return batch.receipts[start : start + len(samples)]

    async def fail(self, slot: Slot, reason: str, tokens: int = 0) -> Receipt:
        """End a slot, and perhaps its group, for `reason`; `tokens` sampled for it count as waste."""
        return await self._change(
            lambda: Receipt(slot, "dropped") if self._closed else self._store.fail(slot, reason, tokens)
        )

    async def awaited(self, groups: list[int]) -> dict[int, tuple[int, ...]] | None:
        """Which samples of these groups are still to be stored; a group that is not named has all that it can have, or
        has ended. None while a resumed run repeats recorded deliveries."""
        return self._store.awaited(groups)

    async def note(self, begun: dict[Slot, tuple[Segment, ...]]) -> None:
        """Keep what engines have sampled of unfinished completions, for another engine to continue if one dies."""
        self._begun |= begun
        if len(self._begun) > self._begun_limit:  # seldom: this searches all of it, and engines are many
            self._begun = {slot: parts for slot, parts in self._begun.items() if self._store.awaits(slot)}
            self._begun_limit = 2 * len(self._begun) + BEGUN

    async def reassign(self, groups: Collection[int]) -> tuple[list[Ticket], dict[Slot, tuple[Segment, ...]]]:
        """Tickets for what is missing of groups whose engine has died, and what was already sampled of it."""
        tickets = await self._change(lambda: self._store.reissue(self._clock(), groups))
        slots = [Slot(ticket.group, sample) for ticket in tickets for sample in ticket.samples]
        return tickets, {slot: self._begun[slot] for slot in slots if slot in self._begun}

    async def replaying(self) -> bool:
        """Whether a resumed run still repeats recorded deliveries; until it has, no ticket is issued."""
        return self._store.replaying

    async def reissue(self) -> list[Ticket]:
        """Tickets for what was in flight when the last run was killed; call it once the replay is over."""
        return await self._change(lambda: self._store.reissue(self._clock()))

    # -- the trainer ---------------------------------------------------------------------------------------------

    async def take(self, min_groups: int, max_groups: int, timeout_s: float) -> Delivery:
        """Complete groups for the present step; in a replay, the recorded delivery at once."""
        starved = False

        def ready() -> Delivery | None:
            nonlocal starved
            dropped = self._store.ledger().dropped
            delivery = self._store.take(max_groups, min_groups)
            starved |= delivery is None and self._store.lacks_fresh
            if delivery or self._store.ledger().dropped != dropped:  # what was taken, or stale, leaves room for others
                self._changed.notify_all()
            return delivery

        delivery = await self._until(ready, timeout_s)
        if delivery is None:
            raise StallError(f"nothing to train on within {timeout_s:g} s: {self._situation()}")
        return msgspec.structs.replace(delivery, starved=starved)

    async def read(self, delivery: Delivery) -> list[bytes]:
        """The payloads of a delivery, by group and sample."""
        return self._store.read(delivery)

    async def commit(self, step: int) -> None:
        await self._change(lambda: self._store.commit(step))

    async def advance(self, version: int) -> None:
        await self._change(lambda: self._store.advance(version))

    async def limit(self, staleness: int, max_ready: int) -> None:
        """Admit under these bounds from now on; `max_staleness` stays the upper limit."""
        await self._change(lambda: self._store.limit(staleness, max_ready))

    async def checkpointed(self, step: int) -> Pruning:
        """The oldest checkpoint that may be resumed from is after `step` steps: prune what `buffer.keep` does not
        keep."""
        self._store.checkpointed(step)
        return self._store.prune()

    # -- state ---------------------------------------------------------------------------------------------------

    async def ledger(self) -> LedgerCounts:
        return self._store.ledger()

    async def waste(self) -> dict[str, int]:
        return self._store.waste()

    async def status(self) -> BufferStatus:
        return self._store.status()

    def situation(self) -> Situation:
        status = self._store.status()
        return msgspec.structs.replace(
            self._activity.situation(),
            buffer=status,
            completed=status.step * self._groups_per_step + status.taken + status.complete,
            dropped=self._store.ledger().dropped,
        )

    async def close(self) -> tuple[LedgerCounts, dict[str, int]]:
        """The last sums, slots and wasted tokens by reason: nothing is admitted, stored or given up after this. What
        comes later a resumed run generates again."""
        async with self._changed:
            self._closed = True
            self._store.close()
            self._changed.notify_all()
        return self._store.ledger(), self._store.waste()

    # -- helpers -------------------------------------------------------------------------------------------------

    def _write(self) -> None:
        batch, self._batch = self._batch, _Batch()
        if self._closed:
            batch.receipts = [Receipt(sample.slot, "dropped") for sample in batch.samples]
            return
        try:
            batch.receipts = self._store.append_checked(batch.samples)
        except OSError as error:  # raised to each caller of the batch
            batch.error = error

    async def _change(self, call: Callable[[], T]) -> T:
        async with self._changed:
            result = call()
            self._changed.notify_all()
        return result

    async def _until(self, ready: Callable[[], T | None], timeout_s: float) -> T | None:
        """The first result of `ready`, called after every change and deadline, once expired groups are dropped."""
        end = time.monotonic() + timeout_s
        async with self._changed:
            while not self._closed:
                if self._store.expire(self._clock()):
                    self._changed.notify_all()
                if (result := ready()) is not None or (left := end - time.monotonic()) <= 0:
                    return result
                with suppress(TimeoutError):
                    async with asyncio.timeout(min(left, max(0.0, self._store.next_deadline - self._clock()))):
                        await self._changed.wait()
        return None

    def _situation(self) -> str:
        status = self._store.status()
        parts = [
            f"step {status.step} has {status.taken} of {self._groups_per_step} groups",
            f"{status.complete} more are complete and {status.incomplete} are being generated",
        ]
        if status.oldest_group is not None:
            missing = ", ".join(map(str, status.missing))
            parts.append(f"the oldest is group {status.oldest_group}, which lacks samples {missing}")
        if status.refusal:
            parts.append(f"no new group is admitted ({status.refusal})")
        if dropped := self._store.ledger().dropped:
            parts.append("samples dropped so far: " + ", ".join(f"{n} {reason}" for reason, n in dropped.items()))
            if cause := main_cause(dropped):
                parts.append(f"{cause} means that {describe(cause).meaning}")
        return "; ".join(parts)
