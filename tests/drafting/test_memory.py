"""What `plan` counts for a drafter, against the tensors of one."""

import msgspec
import pytest

from asyncrl.config.drafter import DrafterTraining, Eagle3Drafter, EagleDrafter, HeadDrafter
from asyncrl.drafting.checkpoint import head_config
from asyncrl.drafting.heads import Head
from asyncrl.drafting.memory import DrafterMemory, drafter_memory, head_parameters
from tests.support.draft_windows import TARGET


@pytest.mark.parametrize("layers", [1, 2, 7, 8])
@pytest.mark.parametrize("drafter", [EagleDrafter(), Eagle3Drafter(), Eagle3Drafter(draft_vocabulary=20)])
def test_a_head_has_as_many_numbers_as_are_counted(drafter: HeadDrafter, layers: int) -> None:
    target = msgspec.structs.replace(TARGET, layers=layers)
    head = Head(head_config(drafter, target))
    assert head_parameters(drafter, target) == sum(parameter.numel() for parameter in head.parameters())


def test_the_memory_of_a_drafter_by_hand() -> None:
    """48 tokens, 32 numbers each; three drafting steps and the policy's own, of 256 + 100 tokens."""
    drafter = EagleDrafter(training=DrafterTraining(unroll=3, window_tokens=100, max_bytes=7000))
    head = head_parameters(drafter, TARGET)
    assert not TARGET.tied_embeddings
    computed = 4 * (5 * head + 2 * 48 * 32 + 2 * 4 * 356 * 48)
    assert drafter_memory(drafter, TARGET) == DrafterMemory(computed, 7000, 4 * head)
