"""Ranks that share their batches, or the experts of a model, do what one rank does, whatever their number."""

from pathlib import Path
from typing import Any

import msgspec
import pytest

from asyncrl.config import Rollout, Run, load
from asyncrl.config.trainer import Trainer
from asyncrl.errors import ConfigError
from asyncrl.models.config import read_config
from asyncrl.models.degrees import degree_problems
from asyncrl.training.memory import Batch, training_memory
from pipelines.plan.estimate import _largest_batch
from tests.support import rank_scenarios
from tests.support.rank_processes import Scene, play, play_well
from tests.support.tiny_families import tiny_family
from tests.support.tiny_model import tiny_checkpoint

pytestmark = pytest.mark.timeout(600)
SCENES = (
    rank_scenarios.log_probs,
    rank_scenarios.gradients,
    rank_scenarios.bf16_gradients,
    rank_scenarios.on_data,
    rank_scenarios.distillation,
    rank_scenarios.algorithms,
    rank_scenarios.twenty_steps,
    rank_scenarios.resume,
    rank_scenarios.adapters,
    rank_scenarios.broken_numbers,
    rank_scenarios.publication,
)
EXPERT_SCENES = (
    rank_scenarios.expert_gradients,
    rank_scenarios.expert_steps,
    rank_scenarios.on_data,
    rank_scenarios.expert_adapters,
    rank_scenarios.expert_publication,
    rank_scenarios.changed_tokens,
)


def _play(folder: Path, scenes: tuple[Scene, ...], world: int, context: int = 1, experts: int = 1) -> None:
    play_well(folder, scenes, world, context_parallel=context, expert_parallel=experts)


def test_two_ranks_share_every_batch(tmp_path: Path) -> None:
    _play(rank_scenarios.make_models(tmp_path), (*SCENES, rank_scenarios.balancing), 2, context=2)


def test_two_ranks_share_the_experts(tmp_path: Path) -> None:
    _play(rank_scenarios.make_models(tmp_path), EXPERT_SCENES, 2, experts=2)


@pytest.mark.parametrize(
    ("ranks", "heads", "kv_heads"),
    [
        pytest.param(2, 9, 3, marks=pytest.mark.slow),  # some queries of a rank share a key, others do not
        pytest.param(3, 4, 2, marks=pytest.mark.nightly),
        pytest.param(2, 1, 1, marks=pytest.mark.nightly),  # one rank has no head
    ],
)
def test_heads_need_not_divide(ranks: int, heads: int, kv_heads: int, tmp_path: Path) -> None:
    """Packed samples of several turns, cut anywhere; shared prompts, LoRA, routes that are replayed, layers that are
    computed again."""
    folder = rank_scenarios.make_models(
        tmp_path, num_attention_heads=heads, num_key_value_heads=kv_heads, hidden_size=8 * heads
    )
    scenes = (
        rank_scenarios.log_probs,
        rank_scenarios.gradients,
        rank_scenarios.bf16_gradients,
        rank_scenarios.expert_gradients,
        rank_scenarios.twenty_steps,
        rank_scenarios.adapters,
    )
    _play(folder, scenes, ranks, context=ranks)


@pytest.mark.parametrize(
    ("world", "degrees"),
    [
        pytest.param(2, {}, marks=pytest.mark.slow),
        pytest.param(4, {"replicas": 2}, marks=pytest.mark.nightly),
        pytest.param(4, {"expert_parallel": 2}, marks=pytest.mark.nightly),
    ],
)
def test_the_ranks_of_each_batch_are_chosen_by_its_completions(
    world: int, degrees: dict[str, int], tmp_path: Path
) -> None:
    scenes = (rank_scenarios.degrees_by_length, rank_scenarios.on_data)
    play_well(rank_scenarios.make_models(tmp_path), scenes, world, context_parallel="auto", **degrees)


@pytest.mark.parametrize(
    ("world", "context", "experts"),
    [
        pytest.param(*degrees, marks=pytest.mark.nightly)
        for degrees in ((2, 2, 2), (4, 1, 1), (4, 1, 2), (4, 2, 1), (4, 2, 2), (4, 1, 4), (4, 4, 1), (4, 4, 4))
    ],
)
def test_more_ranks(world: int, context: int, experts: int, tmp_path: Path) -> None:
    """With four that share a batch, each key/value head is on two of them."""
    scenes = [scene for scene in SCENES if context > 1 or scene is not rank_scenarios.log_probs]
    scenes += [rank_scenarios.balancing] if world == context else []
    _play(
        rank_scenarios.make_models(tmp_path),
        (*scenes, *EXPERT_SCENES) if experts > 1 else tuple(scenes),
        world,
        context,
        experts,
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "scene",
    [rank_scenarios.killed_in_forward, rank_scenarios.killed_in_backward, rank_scenarios.killed_in_checkpoint],
)
def test_nobody_waits_for_a_rank_that_was_killed(scene: Scene, tmp_path: Path) -> None:
    degrees: dict[str, Any] = {"context_parallel": 2, "expert_parallel": 2}
    played = play(2, (rank_scenarios.arrival, scene), rank_scenarios.make_models(tmp_path), **degrees)
    assert played[scene.__name__] == ["", "not played"]


@pytest.mark.slow
def test_a_checkpoint_goes_on_with_other_degrees(tmp_path: Path) -> None:
    _play(rank_scenarios.make_models(tmp_path), (rank_scenarios.leave_checkpoint,), 2, context=2, experts=2)
    for world, context, experts in ((3, 1, 1), (2, 1, 2), (4, 2, 2)):
        _play(tmp_path, (rank_scenarios.find_checkpoint,), world, context, experts)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (
            {"trainer": {"ranks": 3, "context_parallel": 2}},
            r"trainer\.context_parallel=2 .* does not divide trainer\.ranks=3; set trainer\.ranks=4, or",
        ),
        (
            {
                "trainer": {"ranks": 2, "context_parallel": 2},
                "model": {"type": "checkpoint", "path": "m", "backend": "transformers"},
            },
            r"trainer\.context_parallel=2 needs our own decoder, and model\.backend=transformers",
        ),
        (
            {
                "trainer": {"ranks": 2, "context_parallel": "auto"},
                "drafter": {"type": "eagle", "path": "h", "training": {"source": "trainer"}},
            },
            r"drafter=eagle learns from hidden states .*; set drafter\.training\.source=rollout, or trainer\.context",
        ),
        (
            {
                "trainer": {"ranks": 2, "context_parallel": 2},
                "drafter": {"type": "eagle", "path": "h"},
                "engine": {"type": "vllm"},
            },
            r"drafter=eagle learns from hidden states .*; set engine=native, or trainer\.context_parallel=1",
        ),
    ],
)
def test_what_does_not_go_together_is_refused(settings: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        load(settings)


def test_experts_have_to_divide(tmp_path: Path) -> None:
    tiny_checkpoint(tmp_path)  # four heads, and no experts
    model = read_config(tmp_path)
    assert not list(degree_problems(Trainer(ranks=6, context_parallel=3), model))
    assert list(degree_problems(Trainer(ranks=2, expert_parallel=2), model)) == [
        "trainer.expert_parallel=2 shares experts, and the model has none: set trainer.expert_parallel=1"
    ]
    tiny_checkpoint(tmp_path / "moe", "qwen3_moe")  # eight experts
    model = read_config(tmp_path / "moe")
    assert not list(degree_problems(Trainer(ranks=8, expert_parallel=4), model))
    assert list(degree_problems(Trainer(ranks=6, expert_parallel=2), model)) == [
        "trainer.ranks=6 does not divide the 8 experts of a layer, of which with trainer.expert_parallel=2 each rank "
        "keeps as many: set trainer.ranks to 2 or 4 or 8, or trainer.expert_parallel=1"
    ]


def test_a_model_of_transformers_is_refused(tmp_path: Path) -> None:
    tiny_family(tmp_path, "glm4_moe")
    model = read_config(tmp_path, "transformers")
    assert [
        found.split(" needs")[0] for found in degree_problems(Trainer(context_parallel=2, expert_parallel=2), model)
    ] == [
        "trainer.context_parallel=2",
        "trainer.expert_parallel=2",
    ]


def test_the_memory_of_shared_experts_by_hand(tmp_path: Path) -> None:
    """Two layers with eight experts of 3 x 32 x 32 numbers each."""
    tiny_checkpoint(tmp_path, "qwen3_moe")
    model, experts = read_config(tmp_path), 8 * 3 * 32 * 32

    def held(recomputed: int, **settings: Any) -> tuple[int, int]:
        run = Run(trainer=Trainer(ranks=4, **settings))
        found = training_memory(run, model, Batch(100), recomputed=recomputed)
        return found.weights, found.optimizer

    gathered, gradients = held(2)
    # FSDP has two layers whole; of shared experts only a quarter, and they are computed with as they lie.
    assert held(0, expert_parallel=4) == (gathered - 4 * 2 * experts * 3 // 4, gradients - 4 * 2 * experts * 3 // 4)
    # Half of them, from two ranks; without recomputation until the backward.
    half = gathered - 4 * 2 * experts // 2
    assert held(2, expert_parallel=2) == (half, gradients - 4 * 2 * experts // 2)
    assert held(0, expert_parallel=2)[0] == half + 4 * 2 * experts // 2


def test_the_memory_of_a_shared_batch_by_hand(tmp_path: Path) -> None:
    """Two ranks have twice the budget for a batch, or half of a completion that is longer than it."""
    tiny_checkpoint(tmp_path, num_key_value_heads=1)
    model, rollout = read_config(tmp_path), Rollout(group_size=8, max_tokens=200)

    def batch(**settings: Any) -> Batch:
        return _largest_batch(Run(rollout=rollout, trainer=Trainer(**settings)), 100)

    assert batch(token_budget=500, ranks=2, context_parallel=2) == (500, 4 * 300 / 900, 2)
    assert batch(token_budget=100, ranks=2, context_parallel=2) == (150, 1.0, 2)
    # In fp32 keys and values of 32 numbers are kept, rotated and for attention; the copies of the one head as well.
    # A rank for each 160 tokens of a completion; shorter ones fill a rank's whole budget.
    assert batch(token_budget=160, ranks=6, context_parallel="auto") == (160, 1.0, 2)
    assert batch(token_budget=100, ranks=6, context_parallel="auto") == (100, 1.0, 3)
    assert batch(token_budget=100, ranks=2, context_parallel="auto") == (150, 1.0, 2)
    assert batch(token_budget=500, ranks=2, context_parallel="auto") == (500, 2 * 300 / 500, 1)
    one, two = (training_memory(Run(trainer=Trainer(ranks=2)), model, Batch(100, ranks=n)) for n in (1, 2))
    norm = 4 * (2 * 32 + 32)
    assert two.activations - one.activations == 100 * 2 * (4 * 32 + 4 * 2 * 32 + norm)
    # Of three ranks the last has two of the four heads, and all three count as if they had: six heads, three of keys.
    six = msgspec.structs.replace(model, heads=6, kv_heads=3)
    three = training_memory(Run(trainer=Trainer(ranks=3)), model, Batch(100, ranks=3))
    assert three.activations == training_memory(Run(trainer=Trainer(ranks=3)), six, Batch(100)).activations
