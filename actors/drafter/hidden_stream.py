"""Sends windows of hidden states to the drafter. The sender never waits, whatever the drafter does."""

import asyncio
from collections.abc import Generator, Iterable
from contextlib import contextmanager
from pathlib import Path

from actors.drafter.actor import DrafterActor
from actors.runtime.background import retrieve_exception
from asyncrl.config import Run
from asyncrl.drafting.checkpoint import read_head_config
from asyncrl.drafting.hidden_capture import RolloutTap
from asyncrl.drafting.windows import Window, encode
from asyncrl.models.config import read_config
from asyncrl.system.random_streams import random_stream
from asyncrl.types import Request, Trajectory


class HiddenStream:
    def __init__(self, drafter: DrafterActor, most_tokens: int) -> None:
        """While the drafter receives windows, at most `most_tokens` of others wait; more are dropped, and counted."""
        self._drafter, self._most_tokens = drafter, most_tokens
        self._waiting: list[Window] = []
        self._dropped = 0
        self._sending: asyncio.Task[None] | None = None

    def send(self, windows: Iterable[Window]) -> None:
        for window in windows:
            if self._waiting and sum(map(len, self._waiting)) + len(window) > self._most_tokens:
                self._dropped += 1
            else:
                self._waiting.append(window)
        if self._waiting and (self._sending is None or self._sending.done()):
            self._sending = asyncio.create_task(self._send())
            self._sending.add_done_callback(retrieve_exception)  # the run handles a dead drafter

    async def _send(self) -> None:
        while self._waiting:
            windows, self._waiting = self._waiting, []
            dropped, self._dropped = self._dropped, 0
            await self._drafter.collect(encode(windows), dropped)


class HiddenRollouts:
    """Of some samples of one engine out of `engines`, which share the budget of a step."""

    def __init__(self, run: Run, model_path: Path, name: str, drafter: DrafterActor, engines: int) -> None:
        head = run.drafter.head
        assert head is not None
        training, config = head.training, read_config(model_path)
        layers = read_head_config(Path(head.path), config).taps
        tokens, seed = max(1, training.tokens_per_source // engines), random_stream(run.seed, "hidden", name)
        self.tap = RolloutTap(training, layers, config.hidden_size, tokens=tokens, seed=seed)
        self._stream = HiddenStream(drafter, training.tokens_per_source)

    @contextmanager
    def offered(self, request: Request) -> Generator[None, None, None]:
        """Until the sample is stored, or failed."""
        self.tap.offer(request.id, len(request.tokens) + request.sampling.max_tokens)
        try:
            yield
        finally:
            self.tap.end(request.id, None)

    def send(self, request: str, trajectory: Trajectory) -> None:
        """The sample is finished, and its versions are confirmed."""
        self._stream.send(self.tap.end(request, trajectory))
