"""The elastic pool of a simulated run: the real policy, told what `pipelines.fleet.elastic` tells it, and engines that
take their time to come."""

from collections.abc import Callable

from asyncrl.config import Run
from asyncrl.fleet.elastic import ElasticPolicy, WaitMeter
from asyncrl.simulation.clock import Clock, Process
from asyncrl.simulation.profile import Profile
from asyncrl.simulation.rollouts import Rollouts

LOOKS = 20
"""Times per interval that the engines' load is looked at."""
WELL_USED = 0.5
"""Of its share of all places: from there on an engine counts as used, as in `pipelines.fleet.engine_pool`."""


class SimulatedPool:
    def __init__(self, run: Run, profile: Profile, clock: Clock, rollouts: Rollouts, places: Callable[[], int]) -> None:
        """`places`: how many samples may be admitted and not trained on."""
        self._settings, self._cost, self._clock, self._rollouts = run.elastic, profile.engine, clock, rollouts
        self._places = places
        self._policy = ElasticPolicy(run.elastic, len(rollouts.engines))
        self.waits = WaitMeter(clock.now)
        self.decisions: list[str] = []

    def watch(self) -> Process:
        while self._settings.on:
            for _ in range(LOOKS):
                self.waits.rollout(self._clock.now, self._empty())
                yield self._settings.interval_s / LOOKS
            self._decide()

    def _decide(self) -> None:
        engines = self._rollouts.engines.values()
        queued = sum(len(engine.waiting) for engine in engines) / max(1, sum(engine.running for engine in engines))
        now, size = self._clock.now, len(engines)
        resize = self._policy.observe(now, size, self.waits.read(now, queued))
        if resize is None:
            return
        self.decisions.append(f"{now:.0f} s: {size} -> {resize.wanted} engines, {resize.reason}")
        if resize.wanted < size:
            self._rollouts.leave(size - resize.wanted)
        else:
            self._clock.start(self._grow(resize.wanted - size))

    def _grow(self, engines: int) -> Process:
        yield self._cost.join_seconds
        self._rollouts.join(engines)

    def _empty(self) -> float:
        """The share of the engines' room that is not used because no place is given."""
        engines = self._rollouts.engines.values()
        full = WELL_USED * min(self._cost.max_batch, max(1, self._places() / len(engines)))
        return sum(max(0.0, 1 - engine.load / full) for engine in engines) / len(engines)
