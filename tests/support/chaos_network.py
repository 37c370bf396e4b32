"""A clock, and a network that delays, reorders, drops and doubles messages, all from one seed."""

import heapq
import random
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")
PATIENCE = 3.0
"""Seconds until an unanswered call is made again."""


class Network:
    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.now = 0.0
        self.hostile = True
        """False: every message arrives once."""
        self.losses, self.copies = self.rng.choice([0.0, 0.05, 0.25]), self.rng.choice([0.0, 0.05, 0.25])
        self._delay = self.rng.choice([0.01, 0.2, 1.0])
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._sent = 0

    def later(self, seconds: float, what: Callable[[], None]) -> None:
        self._sent += 1
        heapq.heappush(self._queue, (self.now + seconds, self._sent, what))

    def send(self, message: Callable[[], None]) -> None:
        if self.hostile and self.rng.random() < self.losses:
            return
        for _ in range(2 if self.hostile and self.rng.random() < self.copies else 1):
            self.later(self.rng.expovariate(1 / self._delay), message)

    def call(
        self, serve: Callable[[], T], reply: Callable[[T], None], give_up: Callable[[], None] | None = None
    ) -> None:
        """Make a call until it is answered. It may be served several times; the first answer counts. With `give_up`
        it is made once, and who does not hear of it in time learns that."""
        answered = False

        def back(answer: T) -> None:
            nonlocal answered
            if not answered:
                answered = True
                reply(answer)

        def arrive() -> None:
            answer = serve()
            self.send(lambda: back(answer))

        def attempt() -> None:
            if not answered:
                self.send(arrive)
                self.later(PATIENCE, attempt if give_up is None else lose)

        def lose() -> None:
            nonlocal answered
            if not answered and give_up is not None:
                answered = True
                give_up()

        attempt()

    def step(self) -> None:
        self.now, _, happens = heapq.heappop(self._queue)
        happens()
