"""Replicas of a trainer do what one rank does: gradients, losses, checkpoints, publications, and stay equal."""

from pathlib import Path
from typing import Any

import pytest

from asyncrl.config import Run, load
from asyncrl.config.trainer import Trainer
from asyncrl.errors import ConfigError
from asyncrl.models.config import read_config
from asyncrl.models.degrees import degree_problems
from asyncrl.training.memory import Batch, parameters, training_memory
from tests.support import rank_scenarios
from tests.support.rank_processes import play_well
from tests.support.tiny_families import tiny_family
from tests.support.tiny_model import tiny_checkpoint

pytestmark = pytest.mark.timeout(600)
SCENES = (
    rank_scenarios.gradients,
    rank_scenarios.bf16_gradients,
    rank_scenarios.on_data,
    rank_scenarios.algorithms,
    rank_scenarios.twenty_steps,
    rank_scenarios.means_of_replicas,
    rank_scenarios.equal_replicas,
    rank_scenarios.resume,
    rank_scenarios.adapters,
    rank_scenarios.broken_numbers,
    rank_scenarios.publication,
)
EXPERT_SCENES = (
    rank_scenarios.expert_gradients,
    rank_scenarios.expert_steps,
    rank_scenarios.equal_replicas,
    rank_scenarios.expert_adapters,
    rank_scenarios.expert_publication,
)


@pytest.mark.slow
def test_two_replicas_of_one_rank(tmp_path: Path) -> None:
    play_well(rank_scenarios.make_models(tmp_path), SCENES, 2, replicas=2)
    assert (tmp_path / "shards-1").read_text() == "1"


@pytest.mark.slow
def test_two_replicas_of_two_ranks(tmp_path: Path) -> None:
    play_well(rank_scenarios.make_models(tmp_path), SCENES, 4, replicas=2)
    assert (tmp_path / "shards-3").read_text() == "2"


@pytest.mark.nightly
def test_two_replicas_of_two_ranks_that_share_the_experts(tmp_path: Path) -> None:
    play_well(rank_scenarios.make_models(tmp_path), EXPERT_SCENES, 4, replicas=2, expert_parallel=2)
    assert (tmp_path / "shards-3").read_text() == "2"


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("world", "degrees"),
    [
        (2, {"replicas": 2, "context_parallel": 2}),  # those who share a batch are of different replicas
        (4, {"replicas": 2, "context_parallel": 2}),
        (4, {"replicas": 4}),
        (3, {"replicas": 3}),
        (4, {"replicas": 2, "context_parallel": 2, "expert_parallel": 2}),
    ],
)
def test_more_replicas(world: int, degrees: dict[str, int], tmp_path: Path) -> None:
    scenes = EXPERT_SCENES if "expert_parallel" in degrees else SCENES
    with_context = (rank_scenarios.log_probs,) if "context_parallel" in degrees else ()
    play_well(rank_scenarios.make_models(tmp_path), (*with_context, *scenes), world, **degrees)


@pytest.mark.parametrize(
    ("world", "degrees"),
    [
        (2, {}),
        pytest.param(4, {"replicas": 2}, marks=pytest.mark.nightly),
        pytest.param(4, {"expert_parallel": 2}, marks=pytest.mark.nightly),
    ],
)
def test_gradients_are_added_up_in_bf16(world: int, degrees: dict[str, int], tmp_path: Path) -> None:
    play_well(
        rank_scenarios.make_models(tmp_path), (rank_scenarios.bf16_reduction,), world, reduce_dtype="bf16", **degrees
    )


@pytest.mark.nightly
def test_a_model_of_transformers_has_replicas_too(tmp_path: Path) -> None:
    tiny_family(tmp_path / rank_scenarios.THROUGH, "glm4_moe")
    tiny_family(tmp_path / rank_scenarios.PADDED, "qwen3_5_text")
    play_well(tmp_path, (rank_scenarios.of_transformers,), 2, replicas=2)


@pytest.mark.nightly
def test_a_checkpoint_goes_on_with_any_replicas(tmp_path: Path) -> None:
    play_well(
        rank_scenarios.make_models(tmp_path), (rank_scenarios.leave_checkpoint,), 4, replicas=2, expert_parallel=2
    )
    play_well(tmp_path, (rank_scenarios.find_checkpoint,), 3)
    for world, degrees in ((2, {"replicas": 2}), (4, {"replicas": 4}), (4, {"replicas": 2, "context_parallel": 2})):
        play_well(tmp_path, (rank_scenarios.find_checkpoint, rank_scenarios.leave_checkpoint), world, **degrees)
    play_well(tmp_path, (rank_scenarios.find_checkpoint,), 2, expert_parallel=2)


def test_replicas_have_to_divide_the_ranks(tmp_path: Path) -> None:
    assert Trainer(ranks=8, replicas=2).ranks_per_replica == 4
    with pytest.raises(
        ConfigError, match=r"trainer\.replicas=2 .* does not divide trainer\.ranks=3; set trainer\.ranks=4"
    ):
        load({"trainer": {"ranks": 3, "replicas": 2}})
    load(
        {
            "trainer": {"ranks": 2, "replicas": 2},
            "model": {"type": "checkpoint", "path": "m", "backend": "transformers"},
        }
    )
    with pytest.raises(
        ConfigError,
        match=r"trainer\.expert_parallel=4 .*, of which trainer\.ranks=4 and trainer\.replicas=2 make 2; set "
        r"trainer\.ranks=8, or trainer\.replicas=1",
    ):
        load({"trainer": {"ranks": 4, "replicas": 2, "expert_parallel": 4}})
    tiny_checkpoint(tmp_path, "qwen3_moe")  # eight experts
    model = read_config(tmp_path)
    assert not list(degree_problems(Trainer(ranks=16, replicas=2, expert_parallel=4), model))
    assert list(degree_problems(Trainer(ranks=12, replicas=2, expert_parallel=2), model)) == [
        "trainer.ranks=12, of 2 replicas, does not divide the 8 experts of a layer, of which with "
        "trainer.expert_parallel=2 each rank keeps as many: set trainer.ranks to 4 or 8 or 16, or "
        "trainer.expert_parallel=1"
    ]


def test_the_memory_of_a_replica_by_hand(tmp_path: Path) -> None:
    """Weights and optimizer are cut over the ranks of a replica; what is whole for a while is the same."""
    tiny_checkpoint(tmp_path)
    model = read_config(tmp_path)

    def held(**settings: Any) -> int:
        found = training_memory(Run(trainer=Trainer(**settings)), model, Batch(100))
        return found.weights + found.optimizer

    assert held(ranks=8, replicas=2) == held(ranks=4)
    count = parameters(model)
    assert held(ranks=4, replicas=2) - held(ranks=4) == 16 * (-(-count // 2) - -(-count // 4))
