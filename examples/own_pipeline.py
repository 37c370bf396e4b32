"""A pipeline of your own, from the blocks that ours is made of. This one ends as soon as the model is good enough.

    prompts -> generate -> reward -> BUFFER -> accumulate -> update -> publish -> held-out score -> enough?
                   ^                                                      |
                   +---------------------- weights -----------------------+

asyncrl run experiment=quickstart pipeline=examples/own_pipeline.py:UntilGoodEnough
"""

from pipelines.blocks import Blocks

ENOUGH = 0.6
"""Share of the held-out prompts with a right completion."""
LOOK_EVERY = 5


class UntilGoodEnough:
    def __init__(self, blocks: Blocks) -> None:
        self.blocks = blocks

    async def run(self) -> None:
        blocks = self.blocks
        async with blocks.running(blocks.generate()):
            for step in blocks.steps:
                async for groups in blocks.groups(step):
                    await blocks.accumulate(groups)
                blocks.publish_soon(await blocks.update())
                await blocks.finish(step)
                if (step + 1) % LOOK_EVERY == 0 and await self.is_good_enough():
                    break

    async def is_good_enough(self) -> bool:
        scores = await self.blocks.evaluate()
        return scores is not None and scores.sampled >= ENOUGH
