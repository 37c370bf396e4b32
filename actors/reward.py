"""The judge of finished answers."""

import asyncio
import sys
from collections.abc import Sequence

import msgspec

from asyncrl.config import Reward
from asyncrl.rewards.base import RewardFailure, RewardInput, RewardResult
from asyncrl.rewards.pool import RewardPool, check_function
from asyncrl.stalls.activity import Activity
from asyncrl.stalls.picture import Situation


class RewardActor:
    """Scores answers with the user's function, in killable processes of its own."""

    def __init__(self, settings: Reward) -> None:
        self._settings = settings
        self._pool = RewardPool(settings)
        self._told: set[str] = set()
        self._activity = Activity()

    async def start(self) -> None:
        """Raise ConfigError if the function cannot be imported here."""
        await asyncio.to_thread(check_function, self._settings)

    async def score(self, inputs: Sequence[RewardInput]) -> list[RewardResult]:
        results = await self._activity.during(f"scoring {len(inputs)} samples", self._pool.score(inputs))
        for result in results:
            if isinstance(result, RewardFailure):
                self._tell(result)
        return results

    def _tell(self, failure: RewardFailure) -> None:
        """Say why at the first sample of each kind that is lost: a run in which all are lost never comes to a step."""
        if failure.reason not in self._told:
            self._told.add(failure.reason)
            print(f"{self._settings.function}: {failure.reason}: {failure.message}", file=sys.stderr, flush=True)

    def situation(self) -> Situation:
        said = self._activity.situation()
        pool = self._pool
        return msgspec.structs.replace(said, judging=pool.judging, queued=pool.queued, dropped=pool.failing)

    async def close(self) -> None:
        await self._pool.close()
