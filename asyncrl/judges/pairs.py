"""Completions of a group that are compared with each other: who with whom, and when.

A finished completion is parked, on disk: its engine is done with it, and no kill loses it. It is compared with its
nearest in the ring of the group's samples, half of them before it and half after it, as soon as they are there. Who is
compared with whom depends on the numbers of the samples alone, which say nothing of a completion, and not on when they
finish: early completions are short ones. Each pair is asked about in both orders, so a preference for a place is no
advantage for anybody.

The buffer knows who is still to come. A sample that never comes leaves the ring, and its neighbors become neighbors of
each other; when a group has ended, what is parked of it goes.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Collection, Coroutine, Sequence
from contextlib import suppress
from typing import Any, TypeVar

import msgspec

from asyncrl.drop_reasons import DropReason
from asyncrl.judges.form import Pair, Points
from asyncrl.judges.judge import ModelJudge, Verdict
from asyncrl.judges.store import Parked
from asyncrl.types import Slot
from asyncrl.user_code.protocol import RewardFailure, RewardInput

T = TypeVar("T")
LOOK_S = 0.5
"""Between two looks at who is still to come, of groups that are known; what they lack comes by itself."""
GATHER_S = 0.02
"""New groups of the same moment are asked about together."""
ENDED = RewardFailure(DropReason.GROUP_INCOMPLETE, "its group has ended")
ALONE = RewardFailure(DropReason.GROUP_INCOMPLETE, "no other completion of its group is left to compare it with")

Awaited = Callable[[list[int]], Awaitable[dict[int, tuple[int, ...]] | None]]
"""Which samples of these groups are still to be stored; None while that is not known."""
Deliver = Callable[[Parked, Verdict, float], Awaitable[None]]
"""Takes a completion with its shares of wins, or with the reason why it has none, and the seconds that the judge took
once all were there that it is compared with."""


class Waiting(msgspec.Struct, frozen=True):
    """A parked completion, for whoever asks why nothing happens."""

    slot: Slot
    since: float
    """By the monotonic clock."""


def opponents(sample: int, members: Collection[int], most: int) -> list[int]:
    """With whom it is compared, of the samples that its group has: symmetric, and as many for each."""
    ring = sorted({sample, *members})
    if most >= len(ring) - 1:
        return [each for each in ring if each != sample]
    at = ring.index(sample)
    return sorted(ring[(at + side * step) % len(ring)] for step in range(1, most // 2 + 1) for side in (-1, 1))


def share(outcomes: Sequence[Points]) -> Points:
    """Of wins, by item."""
    return {name: sum(each[name] for each in outcomes) / len(outcomes) for name in outcomes[0]}


class _Group:
    def __init__(self) -> None:
        self.given: dict[int, RewardInput] = {}
        """By sample, what is parked."""
        self.since: dict[int, float] = {}
        self.ready: dict[int, float] = {}
        """Since when all are there that it is compared with."""
        self.awaited: frozenset[int] | None = None
        """Samples that the buffer lacks; None until it has said so."""
        self.pairs: dict[tuple[int, int], asyncio.Task[Verdict]] = {}
        """What the lower of two samples won."""
        self.leaving: set[int] = set()
        """Samples that are delivered, or are on their way."""
        self.on_the_way = 0

    def park(self, sample: int, given: RewardInput) -> None:
        if sample not in self.given:
            self.given[sample], self.since[sample] = given, time.monotonic()


class PairJudge:
    """The comparisons of a run."""

    def __init__(self, judge: ModelJudge, pairs: int, awaited: Awaited, deliver: Deliver) -> None:
        """`pairs`: others that a completion is compared with. Goes on with what an earlier process had parked."""
        self._judge, self._pairs, self._awaited, self._deliver = judge, pairs, awaited, deliver
        self._groups: dict[int, _Group] = {}
        for slot, given in judge.store.parked():
            self._groups.setdefault(slot.group, _Group()).park(slot.sample, given)
        self._news = asyncio.Event()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._broken: Exception | None = None
        self._closed = False
        self._begin(self._watch())

    def check(self) -> None:
        """Raise what has failed where nobody was waiting, such as a write of the buffer."""
        if self._broken is not None:
            raise self._broken

    def park(self, completions: Sequence[Parked]) -> None:
        """Have them compared and delivered. They are on disk when this returns; to repeat it is harmless."""
        self.check()
        if self._closed:
            return
        self._judge.store.park(completions)
        for each in completions:
            number = each.slot.group
            if number not in self._groups:
                self._groups[number] = _Group()
                self._news.set()
            self._groups[number].park(each.slot.sample, each.given)
            self._advance(number)

    def parked(self, groups: Collection[int]) -> list[Slot]:
        """What nobody needs to generate again."""
        self.check()
        known = ((number, self._groups[number]) for number in groups if number in self._groups)
        return [Slot(number, sample) for number, group in known for sample in group.given]

    @property
    def waiting(self) -> list[Waiting]:
        return [
            Waiting(Slot(number, sample), since)
            for number, group in list(self._groups.items())
            for sample, since in list(group.since.items())
            if sample not in group.leaving
        ]

    async def close(self) -> None:
        """What is parked stays on disk. Idempotent."""
        self._closed = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    # -- who is still to come ------------------------------------------------------------------------------------

    async def _watch(self) -> None:
        while True:
            if not self._groups:
                await self._news.wait()
            await asyncio.sleep(GATHER_S)
            self._news.clear()
            numbers = list(self._groups)
            awaited = await self._awaited(numbers)
            if awaited is not None:
                for number in numbers:
                    self._look(number, frozenset(awaited.get(number, ())))
            with suppress(TimeoutError):
                async with asyncio.timeout(LOOK_S):
                    await self._news.wait()

    def _look(self, number: int, awaited: frozenset[int]) -> None:
        group = self._groups[number]
        group.awaited = awaited
        self._advance(number)
        if not awaited and not group.on_the_way:
            del self._groups[number]
            self._judge.store.forget(number)

    # -- comparing -----------------------------------------------------------------------------------------------

    def _advance(self, number: int) -> None:
        """Ask what can be asked now, and deliver what has all its answers."""
        group = self._groups.get(number)
        if self._closed or group is None or group.awaited is None:
            return
        members = group.given.keys() | group.awaited
        for sample in sorted(group.given.keys() - group.leaving):
            verdict = self._verdict(number, group, sample, members) if sample in group.awaited else ENDED
            if verdict is not None:
                group.leaving.add(sample)
                group.on_the_way += 1
                self._begin(self._leave(group, Slot(number, sample), verdict))

    def _verdict(self, number: int, group: _Group, sample: int, members: Collection[int]) -> Verdict | None:
        """None while something is missing."""
        others = opponents(sample, members, self._pairs)
        if not others:
            return ALONE
        here = [other for other in others if other in group.given]
        outcomes = [self._outcome(number, group, sample, other) for other in here]
        failures = [outcome for outcome in outcomes if isinstance(outcome, RewardFailure)]
        if failures:
            return failures[0]
        if len(here) == len(others):
            group.ready.setdefault(sample, time.monotonic())
        known = [outcome for outcome in outcomes if outcome is not None and not isinstance(outcome, RewardFailure)]
        return share(known) if len(known) == len(others) else None

    def _outcome(self, number: int, group: _Group, sample: int, other: int) -> Verdict | None:
        """What `sample` won against the other; None while it is being asked."""
        low, high = sorted((sample, other))
        asking = group.pairs.get((low, high))
        if asking is None:
            asking = self._begin(self._compare(Pair(group.given[low], group.given[high])))
            group.pairs[low, high] = asking
            asking.add_done_callback(lambda _: self._advance(number))
        if not asking.done() or asking.cancelled() or asking.exception() is not None:
            return None
        verdict = asking.result()
        if isinstance(verdict, RewardFailure) or sample == low:
            return verdict
        return {name: 1 - won for name, won in verdict.items()}

    async def _compare(self, pair: Pair) -> Verdict:
        """What the first one won, by item: of two orders, each counts a half."""
        if not self._judge.can_tell(pair, pair.turned):
            return dict.fromkeys(self._judge.items, 0.5)
        there, back = await asyncio.gather(self._judge.verdict(pair), self._judge.verdict(pair.turned))
        for verdict in (there, back):
            if isinstance(verdict, RewardFailure):
                return verdict
        assert not isinstance(there, RewardFailure)
        assert not isinstance(back, RewardFailure)
        stats = self._judge.stats
        stats.compared += 1
        stats.by_place += any(there[name] == back[name] != 0.5 for name in there)
        return {name: (there[name] + 1 - back[name]) / 2 for name in there}

    # -- delivering ----------------------------------------------------------------------------------------------

    async def _leave(self, group: _Group, slot: Slot, verdict: Verdict) -> None:
        if isinstance(verdict, RewardFailure) and verdict.reason != DropReason.GROUP_INCOMPLETE:
            self._judge.failed(verdict)
        now = time.monotonic()
        waited_s = now - group.ready.get(slot.sample, now)
        self._judge.stats.waited_seconds += waited_s
        parked = Parked(slot, group.given[slot.sample], self._judge.store.trajectory(slot))
        await self._deliver(parked, verdict, waited_s)
        group.on_the_way -= 1

    def _begin(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None and isinstance(error, Exception):
            self._broken = self._broken or error
