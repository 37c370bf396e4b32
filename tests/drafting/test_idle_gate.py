"""When the drafter may compute."""

import asyncio
import time
from pathlib import Path

import pytest

from asyncrl.drafting.idle_gate import BusyFlag, IdleGate

PARTS = 5


def work() -> None:
    time.sleep(0.002)


async def play(gate: IdleGate, share: float) -> None:
    """At each part, what was taken before it is at most the share of the time that has passed."""
    for _ in range(PARTS):
        await gate.opened()
        assert gate.seconds_beside <= share * (gate.seconds_beside + gate._waited)
        with gate.computing():
            work()


@pytest.mark.parametrize("share", [0.05, 0.2, 0.5])
def test_beside_the_trainer_it_takes_its_share(tmp_path: Path, share: float) -> None:
    busy = BusyFlag(tmp_path / "busy")
    gate = IdleGate(busy, share)
    with busy.set():
        asyncio.run(asyncio.wait_for(play(gate, share), 60))
    assert gate.seconds == gate.seconds_beside > 0


def test_without_a_share_it_begins_when_the_trainer_waits(tmp_path: Path) -> None:
    busy = BusyFlag(tmp_path / "busy")
    gate = IdleGate(busy, 0.0)

    async def scenario() -> None:
        with busy.set():
            playing = asyncio.ensure_future(play(gate, 0.0))
            await asyncio.sleep(0.1)
            assert gate.seconds == 0
        await asyncio.wait_for(playing, 60)

    asyncio.run(scenario())
    assert gate.seconds > gate.seconds_beside == 0


def test_with_all_of_the_time_it_never_waits(tmp_path: Path) -> None:
    busy = BusyFlag(tmp_path / "busy")
    gate = IdleGate(busy, 1.0)
    with busy.set():
        asyncio.run(play(gate, 1.0))
    assert gate._waited == 0
    assert gate.seconds == gate.seconds_beside > 0
