"""A supervised start.

    examples -> admit -> BUFFER -> accumulate -> step -> held-out loss
                  ^                               |
                  +--------- places return -------+

There are no engines: examples are read as places come free, so that they are recorded, resumed and replayed as samples
are.
"""

from asyncrl.supervised.examples import load_examples
from pipelines.blocks import Blocks


class Sft:
    def __init__(self, blocks: Blocks) -> None:
        self._blocks = blocks

    async def run(self) -> None:
        blocks = self._blocks
        examples = load_examples(blocks.run, blocks.model_path)
        held_out = examples.held_out()
        async with blocks.running(blocks.fill(examples.read)):
            for step in blocks.steps:
                if blocks.is_evaluated(step):
                    await blocks.held_out_loss(held_out)
                async for groups in blocks.groups(step):
                    await blocks.accumulate(groups)
                blocks.publish_soon(await blocks.update())
                await blocks.finish(step)
            await blocks.held_out_loss(held_out)
