"""What an actor is doing, for probes that arrive while its event loop is busy or hangs.

Written by the actor's event loop, read by another thread of its process: every read copies atomically.
"""

import os
import time
from collections.abc import Awaitable, Generator
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

import msgspec

from asyncrl.observe.diagnosis.snapshot import Doing, SampleAt, Situation, Stage
from asyncrl.system.processes import place
from asyncrl.types import EngineStats, Slot

T = TypeVar("T")
SHOWN = 64
"""Samples named in a situation; the stuck one is among the oldest."""
LOOKS = 3


class Activity:
    """What an actor has begun and not finished, and the last thing that it finished."""

    def __init__(self) -> None:
        self._doing: dict[object, tuple[str, str, float]] = {}
        self._last = ("started", time.monotonic())

    def event(self, what: str) -> None:
        self._last = (what, time.monotonic())

    @contextmanager
    def doing(self, what: str, on: str = "") -> Generator[None, None, None]:
        """`on` names the actor that is waited for."""
        key = object()
        self._doing[key] = what, on, time.monotonic()
        try:
            yield
        finally:
            del self._doing[key]
            self.event(f"done: {what}")

    async def during(self, what: str, work: Awaitable[T], on: str = "") -> T:
        with self.doing(what, on):
            return await work

    def situation(self) -> Situation:
        now = time.monotonic()
        last, at = self._last
        doing = tuple(Doing(what, now - since, on) for what, on, since in list(self._doing.values()))
        return Situation(pid=os.getpid(), place=place(), last_event=last, last_event_s=now - at, doing=doing)


class RolloutActivity(Activity):
    """Also knows where each sample is."""

    def __init__(self) -> None:
        super().__init__()
        self._at: dict[Slot, tuple[Stage, float]] = {}
        self._evaluated = 0

    async def follow(self, slot: Slot, work: Awaitable[T]) -> T:
        """Generate a sample; it is listed here until then."""
        self._at[slot] = "generate", time.monotonic()
        try:
            return await work
        finally:
            self._at.pop(slot, None)
            self.event(f"end of sample {slot.group}/{slot.sample}")

    def stage(self, slot: Slot, stage: Stage) -> None:
        if slot in self._at:  # not if it was given up while others of its batch go on
            self._at[slot] = stage, time.monotonic()

    async def evaluation(self, work: Awaitable[T]) -> T:
        """Complete a held-out prompt."""
        answer = await work
        self._evaluated += 1
        return answer

    def rollout_situation(self, engine: EngineStats) -> Situation:
        now = time.monotonic()
        held = sorted(self._at.copy().items())
        return msgspec.structs.replace(
            self.situation(),
            samples=tuple(SampleAt(s.group, s.sample, stage, now - since) for s, (stage, since) in held[:SHOWN]),
            num_samples=len(held),
            evaluated=self._evaluated,
            running=engine.running,
            waiting=engine.waiting,
            steps=engine.steps,
        )


def look(actor: Any) -> Situation:
    """The probe: reads an actor's situation from another thread than its own."""
    for _ in range(LOOKS):
        with suppress(RuntimeError):  # what it counted was changed meanwhile
            return actor.situation()
    return actor.situation()
