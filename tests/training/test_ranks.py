"""Two ranks on CPUs (FSDP2 over gloo) do what one does: gradients, losses, checkpoints, publications, faults."""

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.config import Run, Trainer, load
from asyncrl.errors import ConfigError
from asyncrl.training.batches import Block, block, by_degree, share
from asyncrl.types import Slot
from tests.support import rank_scenarios
from tests.support.rank_processes import play
from tests.support.tiny_families import tiny_family
from tests.support.tiny_model import tiny_checkpoint
from tests.support.training_groups import make_groups

pytestmark = pytest.mark.timeout(300)
SCENES = (
    rank_scenarios.gradients,
    rank_scenarios.bf16_gradients,
    rank_scenarios.on_data,
    rank_scenarios.distillation,
    rank_scenarios.algorithms,
    rank_scenarios.twenty_steps,
    rank_scenarios.resume,
    rank_scenarios.adapters,
    rank_scenarios.of_transformers,
    rank_scenarios.broken_numbers,
    rank_scenarios.publication,
    rank_scenarios.full_disk,
)


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    folder = tmp_path_factory.mktemp("ranks")
    tiny_checkpoint(folder / rank_scenarios.TIED, "qwen2")
    tiny_checkpoint(folder / rank_scenarios.UNTIED, "qwen3")
    tiny_checkpoint(folder / rank_scenarios.EXPERTS, "qwen3_moe")
    tiny_family(folder / rank_scenarios.THROUGH, "glm4_moe")
    tiny_family(folder / rank_scenarios.PADDED, "qwen3_5_text")
    return play(2, SCENES, folder)


@pytest.mark.parametrize("scene", [scene.__name__ for scene in SCENES])
def test_two_ranks(played: dict[str, list[str]], scene: str) -> None:
    assert "".join(played[scene]) == ""


@pytest.mark.slow
def test_three_ranks_with_rows_for_some_of_them_only(tmp_path: Path) -> None:
    tiny_checkpoint(tmp_path / rank_scenarios.TIED, "qwen2")
    tiny_checkpoint(tmp_path / rank_scenarios.UNTIED, "qwen3")  # its norms of queries and keys are two rows
    tiny_checkpoint(tmp_path / rank_scenarios.EXPERTS, "qwen3_moe")
    played = play(3, (rank_scenarios.gradients, rank_scenarios.publication, rank_scenarios.twenty_steps), tmp_path)
    assert "".join("".join(found) for found in played.values()) == ""


@settings(deadline=None)
@given(count=st.integers(0, 6), ranks=st.integers(1, 5), budget=st.integers(20, 400), seed=st.integers(0, 9))
def test_shares_are_whole_balanced_and_equally_many(count: int, ranks: int, budget: int, seed: int) -> None:
    blocks = [block(group, [1.0] * 4) for group in make_groups(count, seed)]
    shares = [share(blocks, budget, rank, ranks) for rank in range(ranks)]
    assert len({len(batches) for batches in shares}) == 1
    busy = [[batch for batch in batches if not batch.idle] for batches in shares]
    slots = [answer.slot for batches in busy for batch in batches for answer in batch.answers]
    assert sorted(slots) == sorted(answer.slot for block in blocks for answer in block.answers)
    longest = max((len(b.prompt) + len(a.tokens) for b in blocks for a in b.answers), default=0)
    for batch in (batch for batches in busy for batch in batches):
        assert len(batch.tokens_T) <= max(budget, longest)
    tokens = [sum(len(batch.tokens_T) for batch in batches) for batches in busy]
    fair = sum(block.num_tokens for block in blocks) / ranks
    assert ranks == 1 or max(tokens) - min(tokens) <= max(fair + 1, longest)


def test_ranks_need_processes_of_their_own() -> None:
    assert Run().trainer.ranks == 1
    with pytest.raises(ConfigError, match=r"trainer\.ranks=2 .* use cluster=local"):
        load({"cluster": "inprocess", "trainer": {"ranks": 2}})


@settings(deadline=None)
@given(ranks=st.sampled_from([1, 2, 3, 4, 6]), budget=st.integers(5, 60), seed=st.integers(0, 9))
def test_as_few_ranks_share_a_batch_as_have_room_for_it(ranks: int, budget: int, seed: int) -> None:
    degrees = Trainer(ranks=ranks, context_parallel="auto").context_degrees
    blocks, slots = [block(group, [1.0] * 4) for group in make_groups(2, seed)], list[Slot]()
    for degree, chosen in by_degree(blocks, budget, degrees).items():
        fewer = max((each for each in degrees if each < degree), default=0)
        assert all(
            Block(each.prompt, [answer]).num_tokens > fewer * budget for each in chosen for answer in each.answers
        )
        for group in range(ranks // degree):
            for batch in share(chosen, degree * budget, group, ranks // degree):
                slots += [answer.slot for answer in batch.answers if not batch.idle]
                assert len(batch.tokens_T) <= degree * budget or (degree == ranks and len(batch.answers) == 1)
    assert sorted(slots) == sorted(answer.slot for block in blocks for answer in block.answers)
