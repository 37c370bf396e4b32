"""Waiting: who is woken by what, and what a wait that ends says."""

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import pytest

from actors.buffer import BufferActor
from asyncrl.config import Buffer, Flow, Rollout, Run
from asyncrl.config.algorithm import Grpo
from asyncrl.data.arrow import encode
from asyncrl.errors import StallError, StorageError
from asyncrl.types import Delivery, Slot
from tests.support.buffer_stores import payload, trajectory
from tests.support.full_disk import file_size_limit


class Clock:
    """The wall clock, moved by hand."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def make(directory: Path, clock: Clock | None = None, **changes: Any) -> BufferActor:
    run = Run(
        name="test",
        max_staleness=changes.pop("max_staleness", 1),
        algorithm=changes.pop("algorithm", Grpo()),
        buffer=Buffer(durability=changes.pop("durability", "process")),
        rollout=Rollout(group_size=2, max_tokens=16),
        flow=Flow(groups_per_step=2, groups_per_take=1, max_ready_groups=0, group_timeout_s=10.0),
    )
    return BufferActor(run, directory, clock=clock or Clock(), **changes)


async def fill(buffer: BufferActor, *groups: int) -> None:
    receipts = await buffer.append([payload(group, sample) for group in groups for sample in range(2)])
    assert {receipt.status for receipt in receipts} == {"stored"}


async def settle() -> None:
    """Let every task run until it waits."""
    for _ in range(20):
        await asyncio.sleep(0)


def test_take_wakes_when_a_group_is_complete(tmp_path: Path) -> None:
    async def scenario() -> None:
        buffer = make(tmp_path)
        assert [ticket.group for ticket in await buffer.admit(1.0)] == [0, 1, 2, 3]
        async with asyncio.TaskGroup() as tasks:
            taking = tasks.create_task(buffer.take(min_groups=1, max_groups=2, timeout_s=60))
            await settle()
            await buffer.append([payload(3, 1)])
            await settle()
            assert not taking.done()
            await buffer.append([payload(3, 0)])
        assert taking.result() == Delivery(step=0, groups=(3,))
        assert await buffer.read(taking.result()) == [payload(3, 0), payload(3, 1)]

    asyncio.run(scenario())


def test_admit_wakes_when_stale_groups_are_dropped(tmp_path: Path) -> None:
    """As a run has them that was resumed with a lower bound."""

    async def scenario() -> None:
        buffer = make(tmp_path)
        await buffer.admit(1.0)
        await fill(buffer, 0, 1, 2, 3)
        await buffer.take(2, 2, timeout_s=1)
        await buffer.commit(0)
        await buffer.close()
        resumed = make(tmp_path, max_staleness=0, restore_step=1)
        await resumed.advance(1)
        assert await resumed.reissue() == []
        async with asyncio.TaskGroup() as tasks:
            admitting = tasks.create_task(resumed.admit(timeout_s=60))
            await settle()
            assert not admitting.done()
            taking = tasks.create_task(resumed.take(1, 2, timeout_s=60))
            await settle()
            assert [ticket.group for ticket in admitting.result()] == [4, 5]
            await resumed.append([payload(4, sample, version=1) for sample in range(2)])
        assert taking.result() == Delivery(step=1, groups=(4,), starved=True)
        assert (await resumed.ledger()).dropped == {"stale": 4}

    asyncio.run(scenario())


def test_admit_wakes_when_a_new_version_is_published(tmp_path: Path) -> None:
    async def scenario() -> None:
        buffer = make(tmp_path, max_staleness=0)
        await buffer.admit(1.0)
        await fill(buffer, 0, 1)
        await buffer.take(2, 2, timeout_s=1)
        async with asyncio.TaskGroup() as tasks:
            admitting = tasks.create_task(buffer.admit(timeout_s=60))
            await settle()
            await buffer.commit(0)
            await settle()
            assert not admitting.done()
            await buffer.advance(1)
        assert [(ticket.group, ticket.version) for ticket in admitting.result()] == [(2, 1), (3, 1)]

    asyncio.run(scenario())


def test_admit_returns_without_a_ticket_when_its_time_is_over(tmp_path: Path) -> None:
    async def scenario() -> None:
        buffer = make(tmp_path)
        assert len(await buffer.admit(0.0)) == 4
        assert await buffer.admit(0.0) == []
        assert (await buffer.status()).refusal == "staleness: 4 groups wait to be trained"

    asyncio.run(scenario())


def test_a_stalled_take_names_what_it_waits_for(tmp_path: Path) -> None:
    async def scenario() -> None:
        buffer = make(tmp_path)
        await buffer.admit(1.0)
        await buffer.append([payload(0, 1)])
        await fill(buffer, 2)
        await buffer.take(1, 1, timeout_s=1)
        with pytest.raises(StallError) as error:
            await buffer.take(min_groups=1, max_groups=1, timeout_s=0.0)
        assert str(error.value) == (
            "nothing to train on within 0 s: step 0 has 1 of 2 groups; 0 more are complete and 3 are being generated; "
            "the oldest is group 0, which lacks samples 0; no new group is admitted (staleness: 3 groups wait to be "
            "trained)"
        )

    asyncio.run(scenario())


def test_a_deadline_frees_the_place_of_a_straggler_and_wakes_everyone(tmp_path: Path) -> None:
    async def scenario() -> None:
        clock = Clock()
        buffer = make(tmp_path, clock, max_staleness=0)
        await buffer.admit(1.0)
        await fill(buffer, 1)
        await buffer.take(1, 1, timeout_s=1)
        async with asyncio.TaskGroup() as tasks:
            taking = tasks.create_task(buffer.take(1, 1, timeout_s=60))
            admitting = tasks.create_task(buffer.admit(timeout_s=60))
            await settle()
            clock.now = 11.0
            await buffer.append([payload(1, 0)])  # any call shows the waiters the clock
            [ticket] = await admitting
            assert ticket.group == 2
            await fill(buffer, 2)
        assert taking.result().groups == (2,)
        ledger = await buffer.ledger()
        assert ledger.dropped == {"timeout": 2}
        assert ledger.balanced

    asyncio.run(scenario())


def test_a_waiter_wakes_by_itself_at_the_deadline(tmp_path: Path) -> None:
    async def scenario() -> None:
        clock = Clock()
        buffer = make(tmp_path, clock, max_staleness=0)
        await buffer.admit(1.0)
        clock.now = 9.999
        asyncio.get_running_loop().call_later(0.0, lambda: setattr(clock, "now", 10.0))
        assert [ticket.group for ticket in await buffer.admit(timeout_s=60)] == [2, 3]

    asyncio.run(scenario())


@pytest.mark.parametrize("durability", ["process", "disk"])
def test_concurrent_appends_share_a_write_and_each_gets_its_own_receipts(tmp_path: Path, durability: str) -> None:
    async def scenario() -> None:
        buffer = make(tmp_path, durability=durability)
        await buffer.admit(1.0)
        calls = [[payload(g, 0), payload(g, 1)] for g in range(4)] + [[payload(2, 1)], []]
        receipts = await asyncio.gather(*map(buffer.append, calls), return_exceptions=True)
        assert [[r.status for r in answer] for answer in receipts if isinstance(answer, list)] == [
            ["stored", "stored"]
        ] * 4 + [["duplicate"], []]
        assert [r.slot for r in receipts[1]] == [Slot(1, 0), Slot(1, 1)]  # pyright: ignore

    asyncio.run(scenario())


def test_one_callers_nonsense_does_not_touch_the_others(tmp_path: Path) -> None:
    async def scenario() -> None:
        buffer = make(tmp_path)
        await buffer.admit(1.0)
        good, junk, foreign = await asyncio.gather(
            buffer.append([payload(0, 0)]),
            buffer.append([b"junk"]),
            buffer.append([payload(99, 0)]),
            return_exceptions=True,
        )
        assert isinstance(good, list)
        assert isinstance(junk, ValueError)
        assert isinstance(foreign, ValueError)
        assert (await buffer.ledger()).buffered == 1

    asyncio.run(scenario())


def test_a_full_disk_is_told_to_every_caller_and_then_the_buffer_goes_on(tmp_path: Path) -> None:
    async def scenario() -> None:
        buffer = make(tmp_path)
        await buffer.admit(1.0)
        await buffer.append([payload(0, 0)])
        calls = [[payload(0, 1)], [payload(1, 0)]]
        with file_size_limit(1500):
            errors = await asyncio.gather(*map(buffer.append, calls), return_exceptions=True)
        assert [type(error) for error in errors] == [StorageError, StorageError]
        assert (await buffer.ledger()).buffered == 1
        for call in calls:
            assert [receipt.status for receipt in await buffer.append(call)] == ["stored"]

    asyncio.run(scenario())


def test_a_resumed_run_replays_and_issues_again(tmp_path: Path) -> None:
    async def scenario() -> None:
        buffer = make(tmp_path)
        await buffer.admit(1.0)
        await fill(buffer, 2, 1)
        await buffer.append([payload(0, 1)])
        first = await buffer.take(1, 2, timeout_s=1)
        await buffer.close()
        again = make(tmp_path, restore_step=0)
        assert await again.replaying()
        assert await again.admit(0.0) == []
        repeated = await again.take(2, 2, timeout_s=1)
        assert (repeated.groups, repeated.replayed) == (first.groups, True)
        assert not await again.replaying()
        assert [(ticket.group, ticket.samples) for ticket in await again.reissue()] == [(0, (0,)), (3, (0, 1))]
        await again.append([payload(0, 0)])
        await again.commit(0)
        await again.advance(1)
        assert (await again.take(1, 1, timeout_s=1)).groups == (0,)

    asyncio.run(scenario())


def test_a_wider_bound_wakes_admission(tmp_path: Path) -> None:
    async def scenario() -> None:
        buffer = make(tmp_path)
        await buffer.limit(0, max_ready=0)
        assert [ticket.group for ticket in await buffer.admit(1.0)] == [0, 1]
        async with asyncio.TaskGroup() as tasks:
            admitting = tasks.create_task(buffer.admit(timeout_s=60))
            await settle()
            assert not admitting.done()
            await buffer.limit(1, max_ready=0)
        assert [ticket.group for ticket in admitting.result()] == [2, 3]

    asyncio.run(scenario())


def test_what_is_taken_wakes_admission_where_few_are_kept_ready(tmp_path: Path) -> None:
    """Nothing else would: no group is being generated."""

    async def scenario() -> None:
        buffer = make(tmp_path)
        await buffer.limit(1, max_ready=1)
        assert [ticket.group for ticket in await buffer.admit(1.0)] == [0]
        await fill(buffer, 0)
        async with asyncio.TaskGroup() as tasks:
            admitting = tasks.create_task(buffer.admit(timeout_s=60))
            await settle()
            assert not admitting.done()
            assert (await buffer.take(1, 2, timeout_s=1)).groups == (0,)
        assert [ticket.group for ticket in admitting.result()] == [1]

    asyncio.run(scenario())


def test_a_delivery_says_whether_more_groups_would_have_helped(tmp_path: Path) -> None:
    async def scenario() -> None:
        buffer = make(tmp_path)
        await buffer.limit(1, max_ready=2)

        async def admitted() -> list[int]:
            return [ticket.group for ticket in await buffer.admit(1.0)]

        async def waited(completed: int) -> Delivery:
            async with asyncio.TaskGroup() as tasks:
                taking = tasks.create_task(buffer.take(1, 1, timeout_s=60))
                await settle()
                await fill(buffer, completed)
            return taking.result()

        assert await admitted() == [0, 1]
        assert (await waited(1)).starved
        assert await admitted() == [2]
        await fill(buffer, 2)
        assert not (await buffer.take(1, 1, timeout_s=1)).starved, "it was there"
        await buffer.commit(0)
        await buffer.advance(1)
        assert await admitted() == [3]
        await fill(buffer, 3)
        assert (await buffer.take(1, 1, timeout_s=1)).groups == (3,)
        assert await admitted() == [4]
        await fill(buffer, 4)
        last = await waited(0)
        assert last.groups == (0,), "the last place is the straggler's"
        assert not last.starved

    asyncio.run(scenario())


def test_dynamic_sampling_replaces_a_group_of_equal_rewards_and_a_stall_names_the_drops(tmp_path: Path) -> None:
    def equal(group: int) -> list[bytes]:
        return [encode(msgspec.structs.replace(trajectory(group, sample), reward=0.0)) for sample in range(2)]

    async def scenario() -> None:
        buffer = make(tmp_path, max_staleness=0, algorithm=Grpo(dynamic_sampling=True))
        await buffer.admit(1.0)
        async with asyncio.TaskGroup() as tasks:
            taking = tasks.create_task(buffer.take(1, 2, timeout_s=60))
            admitting = tasks.create_task(buffer.admit(timeout_s=60))
            await settle()
            assert {receipt.status for receipt in await buffer.append(equal(0))} == {"stored"}
            assert [ticket.group for ticket in await admitting] == [2]
            assert not taking.done()
            await fill(buffer, 1)
        assert taking.result().groups == (1,)
        await buffer.append(equal(2))
        with pytest.raises(StallError, match="samples dropped so far: 4 uninformative"):
            await buffer.take(1, 1, timeout_s=0.0)
        assert (await buffer.ledger()).balanced
        assert await buffer.waste() == {"uninformative": 20}

    asyncio.run(scenario())


def test_nothing_changes_after_the_last_sums(tmp_path: Path) -> None:
    """Engines may be about to finish something; `asyncrl check` compares the sums with the journal."""

    async def scenario() -> None:
        clock = Clock()
        buffer = make(tmp_path, clock)
        await buffer.admit(1.0)
        await fill(buffer, 0)
        appending = asyncio.create_task(buffer.append([payload(1, 0)]))
        admitting = asyncio.create_task(buffer.admit(timeout_s=60))
        await asyncio.sleep(0)
        sums = await buffer.close()
        clock.now = 1000.0
        assert [receipt.status for receipt in await appending] == ["dropped"]
        assert (await buffer.fail(Slot(1, 1), "reward_error", 3)).status == "dropped"
        assert await admitting == []
        assert await buffer.close() == sums
        again = make(tmp_path, restore_step=0)
        assert (await again.ledger(), await again.waste()) == sums
        assert sums[0].buffered == 2

    asyncio.run(scenario())
