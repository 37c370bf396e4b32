"""The judge of finished answers."""

import asyncio
from collections.abc import Sequence

from asyncrl.config import Reward
from asyncrl.rewards.base import RewardInput, RewardResult
from asyncrl.rewards.pool import RewardPool, check_function


class RewardActor:
    """Scores answers with the user's function, in killable processes of its own."""

    def __init__(self, settings: Reward) -> None:
        self._settings = settings
        self._pool = RewardPool(settings)

    async def start(self) -> None:
        """Raise ConfigError if the function cannot be imported here."""
        await asyncio.to_thread(check_function, self._settings)

    async def score(self, inputs: Sequence[RewardInput]) -> list[RewardResult]:
        return await self._pool.score(inputs)

    async def close(self) -> None:
        await self._pool.close()
