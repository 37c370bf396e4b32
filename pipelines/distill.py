"""On-policy distillation.

    prompts -> admit -> generate (rollout actors) -+-> reward --+-> BUFFER -> accumulate -> step -> publish -+
                 ^            ^                    +-> teachers +                                            |
                 |            +-------------------- weights, version v -------------------------------------+
                 +------------------------------------ places return ----------------------------------------+

The student samples; teachers say of every sampled token how likely they would have chosen it, as each sample is
finished. What is learned from is how much more likely they found it than the student does; with `distill.top_k`, how
far the student's whole distribution is from the teacher's.
"""

from pipelines.async_grpo import AsyncGrpo


class Distill(AsyncGrpo):
    """The same blocks in the same order; the teachers stand beside the reward, where `teachers` places them."""
