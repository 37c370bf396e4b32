"""Asynchronous GRPO.

    prompts -> admit -> generate (rollout actors) -> reward -> BUFFER -> accumulate -> step -> publish -+
                 ^            ^                                          (as groups come)               |
                 |            +----------------------- weights, version v -----------------------------+
                 +------------------------------------ places return ----------------------------------+

Back-pressure: `generate` waits in buffer.admit, which gives a place only where the group can still be trained on
within `max_staleness` versions; `groups` waits in buffer.take for the next complete ones. `max_staleness=0` is the
synchronous loop: a place is given only after the weights that the group will be trained against were published.
"""

from pipelines.blocks import Blocks


class AsyncGrpo:
    def __init__(self, blocks: Blocks) -> None:
        self._blocks = blocks

    async def run(self) -> None:
        blocks = self._blocks
        async with blocks.running(blocks.generate()):
            for step in blocks.steps:
                async for delivery in blocks.groups(step):
                    await blocks.accumulate(delivery)
                blocks.publish_soon(await blocks.update())
                await blocks.finish(step)
