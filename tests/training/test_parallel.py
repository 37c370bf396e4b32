"""Ranks that share their batches (context parallelism) do what one rank does, whatever their number; also of files."""

from pathlib import Path

import pytest

from asyncrl.config import load
from asyncrl.config.trainer import Trainer
from asyncrl.errors import ConfigError
from asyncrl.models.config import read_config
from asyncrl.models.degrees import degree_problems
from tests.support import rank_scenarios
from tests.support.rank_processes import Scene, play
from tests.support.tiny_model import tiny_checkpoint

pytestmark = pytest.mark.timeout(600)
SCENES = (
    rank_scenarios.log_probs,
    rank_scenarios.gradients,
    rank_scenarios.bf16_gradients,
    rank_scenarios.algorithms,
    rank_scenarios.twenty_steps,
    rank_scenarios.resume,
    rank_scenarios.adapters,
    rank_scenarios.broken_numbers,
    rank_scenarios.publication,
)


def _models(folder: Path) -> Path:
    tiny_checkpoint(folder / rank_scenarios.TIED, "qwen2")
    tiny_checkpoint(folder / rank_scenarios.UNTIED, "qwen3")
    tiny_checkpoint(folder / rank_scenarios.EXPERTS, "qwen3_moe")
    return folder


def _play(folder: Path, scenes: tuple[Scene, ...], world: int, context: int) -> None:
    assert "".join("".join(found) for found in play(world, scenes, folder, context=context).values()) == ""


def test_two_ranks_share_every_batch(tmp_path: Path) -> None:
    _play(_models(tmp_path), SCENES, 2, context=2)


@pytest.mark.slow
@pytest.mark.parametrize(("world", "context"), [(4, 2), (4, 4)])  # with four each key/value head is on two ranks
def test_more_ranks(world: int, context: int, tmp_path: Path) -> None:
    _play(_models(tmp_path), SCENES, world, context)


@pytest.mark.slow
def test_a_checkpoint_goes_on_with_other_degrees(tmp_path: Path) -> None:
    _play(_models(tmp_path), (rank_scenarios.leave_checkpoint,), 2, context=2)
    for world, context in ((2, 1), (4, 2), (3, 3)):
        _play(tmp_path, (rank_scenarios.find_checkpoint,), world, context)


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
            {"trainer": {"ranks": 2, "context_parallel": 2}, "drafter": {"type": "eagle", "path": "h"}},
            r"drafter=eagle learns from hidden states .*; set drafter\.training\.source=rollout, or trainer\.context",
        ),
    ],
)
def test_what_does_not_go_together_is_refused(settings: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        load(settings)


def test_heads_have_to_divide(tmp_path: Path) -> None:
    tiny_checkpoint(tmp_path)  # four heads
    model = read_config(tmp_path)
    assert not list(degree_problems(Trainer(ranks=8, context_parallel=4), model))
    assert list(degree_problems(Trainer(ranks=6, context_parallel=3), model)) == [
        "trainer.context_parallel=3 does not divide the 4 attention heads of the model, of which each rank computes as "
        "many: with trainer.ranks=6 set it to 1 or 2"
    ]
