"""An OpenEnv environment in this process and behind a server, in an episode through a real gateway."""

import asyncio
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from asyncrl.harnesses.openenv import play
from asyncrl.user_code.agents import Access, Outcome
from tests.support import needs
from tests.support.gateways import Script, running_gateway

core: Any = pytest.importorskip("openenv.core", reason=needs.package("openenv"))
if core is not None:
    from openenv.core.env_server import Action, Environment, Observation, State, create_fastapi_app


class Guess(Action):
    text: str


class Hint(Observation):
    hint: str


class GuessTheNumber(Environment):
    """A point for the right number, a tenth for a guess that is a number."""

    SUPPORTS_CONCURRENT_SESSIONS = True
    closed = 0

    def __init__(self) -> None:
        super().__init__()
        self._secret = 0

    def reset(self, seed: int | None = None, episode_id: str | None = None, **_: Any) -> Hint:
        self._secret = seed or 0
        return Hint(hint="From 0 to 9?")

    def step(self, action: Guess, timeout_s: float | None = None, **_: Any) -> Hint:
        if not action.text.isdigit():
            return Hint(hint="a number, please", reward=0.0)
        right = int(action.text) == self._secret
        hint = "right" if right else "higher" if int(action.text) < self._secret else "lower"
        return Hint(hint=hint, reward=1.0 if right else 0.1, done=right)

    @property
    def state(self) -> State:
        return State()

    def close(self) -> None:
        GuessTheNumber.closed += 1


def _played(script: Script, agent: Callable[[Access], Any]) -> tuple[Outcome, int]:
    with running_gateway() as gateway:
        outcome = asyncio.run(agent(gateway.open(script)))
        _, episode = gateway.do(gateway.server.end("1-0")).trajectory()
    assert not episode.branches
    return outcome, len(episode.turns)


def test_an_environment_in_this_process() -> None:
    script = Script("three", "3", "7", "unused")
    before = GuessTheNumber.closed

    async def agent(access: Access) -> Outcome:
        made = lambda text: Guess(text=text)  # noqa: E731
        return await play(GuessTheNumber, "Guess.", access, action=made, shown="hint", reset={"seed": 7})

    outcome, turns = _played(script, agent)
    assert outcome.reward == pytest.approx(1.1)
    assert (turns, script.replies) == (3, ["unused"])
    assert GuessTheNumber.closed == before + 1


def test_turns_are_bounded_and_the_last_reward_can_be_all() -> None:
    async def agent(access: Access) -> Outcome:
        made = lambda text: Guess(text=text)  # noqa: E731
        last = lambda rewards: rewards[-1]  # noqa: E731
        return await play(
            GuessTheNumber, "", access, action=made, shown=lambda seen: seen.hint, max_turns=2, score=last
        )

    assert _played(Script("4", "x", "unused"), agent) == (Outcome(reward=0.0), 2)


@contextmanager
def _server() -> Iterator[str]:
    import uvicorn

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    app = create_fastapi_app(GuessTheNumber, Guess, Hint, max_concurrent_envs=4)
    server = uvicorn.Server(uvicorn.Config(app, port=port, log_level="error", ws="websockets-sansio"))
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        while not server.started:
            assert thread.is_alive()
            time.sleep(0.02)
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        thread.join()


def test_a_server_and_what_it_refuses() -> None:
    with _server() as url:

        async def agent(access: Access) -> Outcome:
            return await play(url, "Guess.", access, action="text", shown="hint", reset={"seed": 5})

        assert _played(Script("5"), agent) == (Outcome(reward=1.0), 1)

        async def wrong(access: Access) -> Outcome:
            return await play(url, "Guess.", access, action="text", shown="observation")

        with pytest.raises(KeyError, match=r"no field 'observation'; it has .*hint"):
            _played(Script("5"), wrong)
