"""How much each engine has to do, as the driver counts it: samples that were given to it and are not finished."""

from collections import Counter
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager

from asyncrl.config import Run
from asyncrl.flow.concurrency import InFlightLimit, Pressure
from asyncrl.types import EngineStats

WELL_USED = 0.5
"""Of its share of all places: from there on an engine counts as used. Places come back a step at a time, so that
engines which are the bottleneck are between this and full."""


class Load:
    def __init__(self, run: Run) -> None:
        self._run = run
        self._held = Counter[str]()
        self._besides = Counter[str]()
        """Calls that are no training work."""
        self._limits: dict[str, InFlightLimit] = {}

    def with_room(self, names: Iterable[str]) -> tuple[str, ...]:
        """Those that may be given more."""
        return tuple(name for name in names if name not in self._limits or self._held[name] < self._limits[name].limit)

    def give(self, names: Sequence[str], samples: int) -> str:
        """To the one that has the least to do."""
        name = min(names, key=lambda each: self._held[each])
        self._held[name] += samples
        return name

    def take_back(self, name: str, samples: int) -> None:
        self._held[name] -= samples

    @contextmanager
    def also_busy(self, names: Sequence[str]) -> Generator[None, None, None]:
        self._besides.update(names)
        try:
            yield
        finally:
            self._besides.subtract(names)

    def idle(self, name: str) -> bool:
        return not self._held[name] and not self._besides[name]

    def of(self, name: str) -> int:
        return self._held[name]

    def empty(self, names: Sequence[str], places: int) -> float:
        """The share of the engines' room that is not used, 0 to 1, with `places` for samples in all."""
        if not names:
            return 0.0
        full = WELL_USED * min(self._run.engine.max_batch, max(1, places / len(names)))
        return sum(max(0.0, 1 - self._held[name] / full) for name in names) / len(names)

    def observe(self, now: float, stats: Mapping[str, EngineStats]) -> None:
        """Set each engine's limit by what it says of itself."""
        for name, said in stats.items():
            limit = self._limits.setdefault(name, InFlightLimit(self._run.concurrency))
            pressure = Pressure(
                said.running, said.waiting, said.generated_tokens, said.preempted, said.reprefilled_tokens
            )
            limit.observe(now, self._held[name], pressure)

    def forget(self, name: str) -> None:
        self._limits.pop(name, None)
