"""Virtual time: a heap of what happens when, and processes that wait in it. Nothing sleeps.

A process is a generator. It yields the seconds that it takes, or a signal that it waits for, so that a loop reads as it
does with `await`.
"""

from collections.abc import Callable, Generator
from heapq import heappop, heappush
from itertools import count
from typing import Any


class Signal:
    """Something has changed; who waits looks again."""

    def __init__(self) -> None:
        self.waiting: list[Process] = []


Process = Generator[float | Signal, None, None]


class Clock:
    def __init__(self) -> None:
        self.now = 0.0
        self._heap: list[tuple[float, int, Callable[[Any], None], Any]] = []
        self._order = count()

    def at(self, time: float, call: Callable[[Any], None], argument: Any) -> None:
        """Events of the same time happen in the order in which they were asked for."""
        heappush(self._heap, (time, next(self._order), call, argument))

    def start(self, process: Process) -> None:
        """Run it up to its first wait."""
        try:
            wait = next(process)
        except StopIteration:
            return
        if isinstance(wait, Signal):
            wait.waiting.append(process)
        else:
            self.at(self.now + wait, self.start, process)

    def notify(self, signal: Signal) -> None:
        waiting, signal.waiting = signal.waiting, []
        for process in waiting:
            self.start(process)

    def run(self, until: Callable[[], bool]) -> bool:
        """Let things happen until `until`; False when nothing is left to happen before."""
        heap = self._heap
        while not until():
            if not heap:
                return False
            self.now, _, call, argument = heappop(heap)
            call(argument)
        return True
