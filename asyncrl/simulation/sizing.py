"""Which part of a cluster should generate: the same run with other splits of its GPUs, each simulated whole."""

import gc
import os
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context

import msgspec

from asyncrl.config import Run
from asyncrl.errors import ConfigError
from asyncrl.simulation.loop import simulate
from asyncrl.simulation.outcome import Outcome
from asyncrl.simulation.profile import Profile, Sharing
from asyncrl.simulation.ranks import problem

PARTS = 6
"""The first look is at the trainer's share in sixths."""
REFINEMENTS = 1
"""Then at the middles between the best and its neighbours, so often."""
MOST_SAMPLES = 100_000
"""That one simulation should consist of."""
FEWEST_STEPS = 3
ALONE = 256
"""GPUs up to which starting further processes takes longer than it saves."""


class Sizing(msgspec.Struct, frozen=True, kw_only=True):
    """Splits of one cluster, and the best of them."""

    simulated: bool = True
    gpus: int
    profile: str
    """Where its numbers are from."""
    best: int
    """Place of the split with the most samples per second."""
    splits: tuple[Outcome, ...]
    """By the number of engines."""


def shortened(run: Run, wanted: int | None) -> Run:
    """`run` with as many steps as are worth simulating."""
    most = max(FEWEST_STEPS, MOST_SAMPLES // run.samples_per_step - warm_up(run))
    return msgspec.structs.replace(run, steps=min(run.steps, most) if wanted is None else wanted)


def warm_up(run: Run) -> int:
    """Steps until the buffer is as full as it gets."""
    return run.max_staleness + 1


def size(run: Run, profile: Profile, gpus: int) -> Sizing:
    """Look for the best split of `gpus` between engines and trainer."""
    most = (gpus - 1) // profile.engine.gpus
    if most < 1:
        raise ConfigError(
            f"--gpus {gpus} cannot be split: an engine takes profile.engine.gpus={profile.engine.gpus}, and the "
            "trainer needs at least one"
        )
    found: dict[int, Outcome] = {}
    possible = [engines for engines in range(1, most + 1) if not problem(profile, gpus - engines * profile.engine.gpus)]
    if not possible:
        raise ConfigError(f"--gpus {gpus} cannot be split: {problem(profile, gpus - profile.engine.gpus)}")
    looks = {min(most, max(1, round(gpus * part / PARTS / profile.engine.gpus))) for part in range(1, PARTS)}
    for _ in range(1 + REFINEMENTS):
        looks = {min(possible, key=lambda engines: abs(engines - look)) for look in looks}
        found |= _simulate(run, profile, gpus, sorted(looks.difference(found)))
        looks = set(_middles(sorted(found), _best(found)))
    engines = sorted(found)
    outcomes = tuple(found[number] for number in engines)
    return Sizing(gpus=gpus, profile=profile.source, best=engines.index(_best(found)), splits=outcomes)


def _best(found: dict[int, Outcome]) -> int:
    """The most samples per second; of equals the one with the fewest engines."""
    return max(sorted(found), key=lambda engines: round(found[engines].rates.samples_per_second, 9))


def _middles(engines: Sequence[int], best: int) -> Iterable[int]:
    place = engines.index(best)
    for other in engines[max(0, place - 1) : place + 2]:
        yield (best + other) // 2


def _simulate(run: Run, profile: Profile, gpus: int, engines: Sequence[int]) -> dict[int, Outcome]:
    one = partial(_split, run, profile, gpus)
    workers = min(os.cpu_count() or 1, len(engines))
    if gpus <= ALONE or workers < 2:
        return dict(zip(engines, map(one, engines), strict=True))
    # A simulation makes no cycles, and looking for them among a million live objects takes a tenth of its time.
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn"), initializer=gc.disable) as pool:
        return dict(zip(engines, pool.map(one, engines), strict=True))


def _split(run: Run, profile: Profile, gpus: int, engines: int) -> Outcome:
    """One split. The pool does not change in it: the question is what size it should have. Everybody has GPUs of
    their own, so nobody is slowed by another."""
    profile = msgspec.structs.replace(profile, sharing=Sharing())
    fixed = msgspec.structs.replace(run, elastic=msgspec.structs.replace(run.elastic, max=0))
    trainer_gpus = gpus - engines * profile.engine.gpus
    return simulate(fixed, profile, engines=engines, trainer_gpus=trainer_gpus, warm_up=warm_up(run))
