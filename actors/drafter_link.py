"""Between the run and its drafter, without ever making the run wait: the drafter may be slow, as it has to give way."""

import asyncio
from collections.abc import Callable, Collection
from contextlib import suppress

from actors.acknowledged import acknowledged
from actors.drafter import DrafterActor, DrafterStatus
from actors.rollout import RolloutActor
from asyncrl.errors import ActorError
from asyncrl.types import WeightManifest

LOOK_SECONDS = 0.5
"""How often the drafter is asked for a better head."""


class DrafterLink:
    """Runs in the driver's event loop. Every engine gets the same heads, in the same order."""

    def __init__(self, drafter: DrafterActor, rollouts: Collection[RolloutActor], *, timeout_s: float) -> None:
        self._drafter = drafter
        self._rollouts = rollouts
        self._timeout_s = timeout_s
        self._following: asyncio.Task[None] | None = None
        self.status: DrafterStatus | None = None
        """As it was when last heard of."""

    def follow(self, manifest: WeightManifest) -> None:
        """Tell the drafter of new weights of the policy, unless it is still busy with earlier ones."""
        if self._following is None or self._following.done():
            self._following = asyncio.create_task(self._follow(manifest))

    async def _follow(self, manifest: WeightManifest) -> None:
        with suppress(ActorError):  # `serve` hears of a dead drafter too, and says so
            await self._drafter.follow(manifest)

    async def serve(self, published: Callable[[int], None], lost: Callable[[str], None]) -> None:
        """Bring better heads to the engines, as they come, until cancelled or until the drafter dies: answers are the
        same without it, so the run goes on."""
        while True:
            try:
                if (manifest := await self._drafter.offer()) is not None:
                    loading = [rollout.load_drafter(manifest) for rollout in self._rollouts]
                    await acknowledged(manifest, loading, self._timeout_s)
                    published(manifest.version)
                self.status = await self._drafter.status()
            except ActorError as error:
                if error.actor == "drafter":
                    lost(str(error))
                    return
            await asyncio.sleep(LOOK_SECONDS)

    async def save(self) -> None:
        with suppress(ActorError):
            await self._drafter.save()

    async def close(self) -> None:
        if self._following is not None:
            await asyncio.wait([self._following])
        await self._drafter.close()
