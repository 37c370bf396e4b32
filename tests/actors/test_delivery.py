"""The way from an engine to the buffer: one call at a time, larger ones when it is slow, and each answer's own fate."""

import asyncio
from typing import Any, cast

import pytest

from actors.rollout.delivery import DeliveryQueue, ProgressReporter
from asyncrl.data.arrow import decode
from asyncrl.fleet.concurrency import gather_seconds
from asyncrl.types import Segment, Slot
from asyncrl.user_code.protocol import RewardFailure, RewardInput
from tests.support.buffer_stores import trajectory

JUDGED = RewardInput(prompt="", completion="", answer="")


class SlowBuffer:
    """Takes its time, and remembers what it was given."""

    def __init__(self) -> None:
        self.calls: list[list[Slot]] = []
        self.noted: list[dict[Slot, tuple[Segment, ...]]] = []
        self.failed: list[Slot] = []
        self._under_way = 0

    async def append(self, payloads: list[bytes]) -> None:
        assert not self._under_way, "two calls at a time"
        self._under_way += 1
        self.calls.append([decode(payload).slot for payload in payloads])
        await asyncio.sleep(0.05)
        self._under_way -= 1
        if Slot(13, 0) in self.calls[-1]:
            raise OSError("no space left")

    async def fail(self, slot: Slot, reason: str, tokens: int) -> None:
        self.failed.append(slot)

    async def note(self, begun: dict[Slot, tuple[Segment, ...]]) -> None:
        self.noted.append(begun)


class Judge:
    async def score(self, inputs: list[RewardInput]) -> list[float | RewardFailure]:
        return [RewardFailure("reward_error", "") if judged.answer == "bad" else 1.0 for judged in inputs]


def outbox(buffer: SlowBuffer) -> DeliveryQueue:
    return DeliveryQueue(cast(Any, buffer), cast(Any, Judge()), lambda slot, stage: None, gather_s=0.001)


def test_one_call_at_a_time_takes_everything_that_was_finished_meanwhile() -> None:
    async def scenario() -> None:
        buffer = SlowBuffer()
        box = outbox(buffer)
        async with asyncio.TaskGroup() as tasks:
            for group in range(12):
                tasks.create_task(box.submit(JUDGED, trajectory(group, 0)))
                await asyncio.sleep(0.005)
        assert [slot.group for call in buffer.calls for slot in call] == list(range(12)), "each once, none forgotten"
        assert len(buffer.calls) < 6

    asyncio.run(scenario())


def test_a_failed_call_is_the_failure_of_those_in_it_alone() -> None:
    async def scenario() -> None:
        buffer = SlowBuffer()
        box = outbox(buffer)
        bad = RewardInput(prompt="", completion="", answer="bad")
        await box.submit(bad, trajectory(2, 0))
        first = asyncio.create_task(box.submit(JUDGED, trajectory(1, 0)))
        await asyncio.sleep(0.02)
        second = asyncio.create_task(box.submit(JUDGED, trajectory(13, 0)))
        await first
        with pytest.raises(OSError, match="no space left"):
            await second
        assert buffer.failed == [Slot(2, 0)]
        await box.submit(JUDGED, trajectory(4, 0))
        assert buffer.calls[-1] == [Slot(4, 0)], "and it goes on"

    asyncio.run(scenario())


def test_the_more_engines_the_longer_their_answers_wait_for_company() -> None:
    assert [gather_seconds(engines) for engines in (1, 5, 64, 4096)] == [0.05, 0.05, 0.64, 1.0]


def test_notes_of_updates_that_follow_each_other_are_one() -> None:
    async def scenario() -> None:
        buffer, begun = SlowBuffer(), {Slot(0, 0): (Segment.sampled((1,), (-1.0,), 0),)}
        notes = ProgressReporter(buffer.note, engines=1)
        for _ in range(20):
            notes.begin(begun)
            await asyncio.sleep(0.01)
        assert buffer.noted == [begun]

    asyncio.run(scenario())
