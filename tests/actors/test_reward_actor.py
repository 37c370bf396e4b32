"""The reward actor is a plain class: it checks its function where it runs, scores and closes."""

import asyncio

import pytest

from actors.reward import RewardActor
from asyncrl.config import Reward
from asyncrl.errors import ConfigError
from asyncrl.user_code.protocol import RewardInput, RewardResult


def test_scores_the_quickstart_task() -> None:
    async def run() -> list[RewardResult]:
        actor = RewardActor(Reward())
        await actor.start()
        results = await actor.score([RewardInput("a3b+2=", text, "a3b+25$") for text in ("a3b+25$", "a3b+24$")])
        await actor.close()
        return results

    assert asyncio.run(run()) == [1.0, 0.0]


def test_refuses_a_function_that_is_not_there() -> None:
    with pytest.raises(ConfigError, match="no function 'typo'"):
        asyncio.run(RewardActor(Reward(function="asyncrl.tasks.chains:typo")).start())
