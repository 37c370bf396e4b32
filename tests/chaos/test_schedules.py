"""Thousands of seeded schedules of a whole run on a bad network. Any failure names the seed that repeats it."""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

import pytest

from asyncrl.buffer.ledger import Ledger
from asyncrl.types import Slot
from tests.support.chaos_world import World

MEMORY = Path("/dev/shm")


@contextmanager
def scratch() -> Iterator[Path]:
    """Files that never reach a disk, where that is possible."""
    with tempfile.TemporaryDirectory(dir=MEMORY if os.access(MEMORY, os.W_OK) else None) as name:
        yield Path(name)


def run_schedule(seed: int) -> World:
    with scratch() as directory:
        world = World(directory / "run", seed)
        try:
            world.run(events=400, calm_events=6000)
        except AssertionError as error:
            pytest.fail(f"seed {seed}: {error}; repeat with tests.chaos.test_schedules.run_schedule({seed})")
        return world


@pytest.mark.parametrize(
    "seeds",
    [
        pytest.param(range(100), id="few"),
        pytest.param(range(100, 1000), id="more", marks=pytest.mark.slow),
        pytest.param(range(1000, 4000), id="many", marks=pytest.mark.nightly),
    ],
)
@pytest.mark.timeout(1800)
def test_promises_hold_under_every_schedule(seeds: range) -> None:
    worlds = [run_schedule(seed) for seed in seeds]
    assert sum(world.restarts for world in worlds) > 5 * len(worlds), "schedules that hardly restart prove little"


def test_a_schedule_is_a_function_of_its_seed() -> None:
    first, second = run_schedule(11), run_schedule(11)
    assert (first.restarts, first.trained, first.net.now) == (second.restarts, second.trained, second.net.now)


def test_a_buffer_that_forgets_what_it_holds_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """The schedules can fail: with a book that takes a repeated sample for a new one, they name a seed."""
    honest = Ledger.status

    def forgetful(book: Ledger, slot: Slot) -> Literal["stored", "duplicate", "dropped"]:
        answer = honest(book, slot)
        return "stored" if answer == "duplicate" and slot.group in book.waiting else answer

    monkeypatch.setattr(Ledger, "status", forgetful)
    with pytest.raises(pytest.fail.Exception, match=r"seed 0: .* was stored twice; repeat with .*run_schedule\(0\)"):
        run_schedule(0)
