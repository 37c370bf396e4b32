"""The gang's order of calls, and whom it names: ranks that live on this event loop."""

import asyncio
from pathlib import Path
from typing import Any, cast

import pytest

from actors.trainer import group
from actors.trainer.group import TrainerGroup, ranks_of
from asyncrl.errors import ActorError, CheckpointError


class Rank:
    """Takes its time for each call, and fails where it is told to."""

    def __init__(self, number: int, log: list[str], fails: BaseException | None = None) -> None:
        self._number, self._log, self._fails = number, log, fails

    async def save(self) -> Path:
        return await self._do("save")

    async def step(self) -> Path:
        return await self._do("step")

    async def _do(self, what: str) -> Path:
        self._log.append(f"{what} begins")
        for _ in range(1 + 3 * self._number):
            await asyncio.sleep(0)
        if self._fails is not None:
            raise self._fails
        self._log.append(f"{what} ends")
        return Path(f"of-rank-{self._number}")


class Stuck(Rank):
    """Waits for another rank that will not come."""

    async def _do(self, what: str) -> Path:
        await asyncio.get_running_loop().create_future()
        raise AssertionError


def _gang(*ranks: Rank) -> TrainerGroup:
    return TrainerGroup(cast(Any, ranks), cast(Any, None))


def test_no_call_begins_before_every_rank_has_ended_the_one_before() -> None:
    log: list[str] = []

    async def scene() -> None:
        gang = _gang(Rank(0, log), Rank(1, log))
        given_up = asyncio.create_task(gang.step())
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        given_up.cancel()  # the ranks go on with it
        assert await gang.save() == Path("of-rank-0")

    asyncio.run(scene())
    assert log == [f"{what} {when}" for what in ("step", "save") for when in ("begins", "begins", "ends", "ends")]


def test_the_rank_that_died_is_named_and_not_the_one_that_saw_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group, "NOTICE_S", 0.2)
    saw = RuntimeError("connection closed by peer")
    died = ActorError("actor trainer-1 died during step")

    async def scene() -> None:
        gang = _gang(Rank(0, [], saw), Rank(1, [], died))
        with pytest.raises(ActorError, match="trainer-1 died"):
            await gang.step()
        with pytest.raises(ActorError, match="fallen apart: actor trainer-1 died"):
            await gang.save()

    asyncio.run(scene())


def test_a_rank_that_fails_while_others_wait_for_it_ends_the_gang(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group, "NOTICE_S", 0.2)

    async def scene() -> None:
        gang = _gang(Rank(0, [], RuntimeError("out of memory")), Stuck(1, []))
        with pytest.raises(RuntimeError, match="out of memory"):
            await gang.step()
        with pytest.raises(ActorError, match="fallen apart: out of memory"):
            await gang.step()

    asyncio.run(scene())


def test_a_failure_that_all_ranks_share_leaves_the_gang_as_it_was() -> None:
    async def scene() -> None:
        full = CheckpointError("rank 1 cannot write")
        gang = _gang(Rank(0, [], full), Rank(1, [], full))
        for _ in range(2):
            with pytest.raises(CheckpointError, match="rank 1 cannot write"):
                await gang.save()

    asyncio.run(scene())


def test_ranks_have_names() -> None:
    first, second = Rank(0, []), Rank(1, [])
    assert ranks_of(_gang(first, second)) == {"trainer": first, "trainer-1": second}
    assert ranks_of(first) == {"trainer": first}
