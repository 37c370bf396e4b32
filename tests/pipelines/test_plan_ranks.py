"""What `plan` says of the ranks of a trainer: what they send each other, and what of it leaves a machine. By hand."""

import io
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from asyncrl.config import Run, Trainer
from asyncrl.config.trainer import Lora
from asyncrl.fleet.placement import CPU, GPU, Offer, demands
from asyncrl.models.config import read_config
from pipelines.plan.estimate import model_config
from pipelines.plan.ranks import RankTraffic, over_the_network, rank_traffic, sent
from pipelines.plan.render import show
from tests.support.tiny_model import tiny_checkpoint

ALL = 302_976
"""Parameters of the warm start's model."""
EVERYTHING = "room for 4 of 8 ranks of the trainer: weights and gradients of every batch go between machines"
MACHINES = Offer(nodes=tuple({CPU: 8.0, GPU: 4.0} for _ in range(4)))


def _traffic(**settings: Any) -> RankTraffic:
    run = Run(trainer=Trainer(**settings))
    return rank_traffic(run, model_config(run))


def test_traffic_between_ranks_by_hand() -> None:
    assert _traffic() == RankTraffic(0, 0, 0)
    assert _traffic(ranks=8) == RankTraffic(2 * 4 * ALL * 7 // 8, 4 * ALL * 7 // 8, 0)
    # Each of four ranks has a quarter of the gradient, and a ring of two sends half of it twice.
    assert _traffic(ranks=8, replicas=2) == RankTraffic(2 * 4 * ALL * 3 // 4, 4 * ALL * 3 // 4, 4 * ALL // 4)
    assert _traffic(ranks=4, replicas=4) == RankTraffic(0, 0, 4 * ALL * 2 * 3 // 4)
    assert _traffic(ranks=2, dtype="bf16") == RankTraffic(2 * 2 * ALL // 2, 4 * ALL // 2, 0)
    assert _traffic(ranks=4, replicas=2, reduce_dtype="bf16") == RankTraffic(
        2 * 4 * ALL // 2, 2 * ALL // 2, 2 * ALL // 2
    )


def test_traffic_of_adapters_and_of_shared_experts(tmp_path: Path) -> None:
    adapted = _traffic(ranks=2, replicas=2, lora=Lora(rank=4, targets=("q_proj",)))
    assert adapted.between < _traffic(ranks=2, replicas=2).between // 10, "gradients of adapters alone"
    tiny_checkpoint(tmp_path, "qwen3_moe")
    model, experts = read_config(tmp_path), 2 * 8 * 3 * 32 * 32  # two layers with eight experts

    def weights(**settings: Any) -> int:
        return rank_traffic(Run(trainer=Trainer(**settings)), model).weights

    alone = weights(ranks=4)
    assert weights(ranks=4, expert_parallel=4) == alone - 2 * 4 * experts * 3 // 4, "none are gathered"
    assert weights(ranks=4, expert_parallel=2) == alone - 2 * 4 * experts * 2 // 4, "those of one other rank are"


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"ranks": 4}, ""),
        ({"ranks": 8}, f"{EVERYTHING}; with trainer.replicas=2 weights would stay inside them"),
        ({"ranks": 8, "expert_parallel": 8}, EVERYTHING),
        ({"ranks": 8, "replicas": 2}, "between machines go the gradients of a step, and weights stay inside them"),
    ],
)
def test_what_leaves_a_machine(settings: dict[str, Any], said: str) -> None:
    run = Run(trainer=Trainer(**settings), cluster="auto")
    found = over_the_network(run, demands(run, MACHINES)["trainer"], MACHINES)
    assert found.endswith(said)
    assert bool(found) == bool(said)
    alone = MACHINES._replace(nodes=MACHINES.nodes[:1], attached=False)
    assert over_the_network(run, demands(run, alone)["trainer"], alone) == ""


def test_the_plan_says_it(tmp_path: Path) -> None:
    run = Run(trainer=Trainer(ranks=8, replicas=2), cluster="auto", root=str(tmp_path))
    assert not list(sent(Run(), model_config(run)))
    screen = io.StringIO()
    show(run, Console(file=screen, width=200), MACHINES)
    shown = screen.getvalue()
    assert "│ 2 replicas of 4 " in shown
    assert (
        "trainer: for each batch a rank receives at most 1.82 MB of weights and 909 kB of gradients from the others of "
        "its replica\ntrainer: for each step a rank receives 303 kB of gradients from the other replicas\n"
    ) in shown
    assert "between machines go the gradients of a step, and weights stay inside them" in shown


def test_the_plan_says_who_shares_a_batch(tmp_path: Path) -> None:
    screen = io.StringIO()
    run = Run(trainer=Trainer(ranks=6, context_parallel="auto"), cluster="auto", root=str(tmp_path))
    show(run, Console(file=screen, width=200), MACHINES)
    assert "│ 1 to 6 ranks share a batch " in screen.getvalue()
    tiny_checkpoint(tmp_path)  # four heads
    model = read_config(tmp_path)
    assert not any("heads" in sentence for sentence in sent(Run(trainer=Trainer(ranks=6, context_parallel=2)), model))
    assert list(sent(Run(trainer=Trainer(ranks=6, context_parallel=3)), model))[1:] == [
        "of the 4 attention heads one of 3 ranks that share a batch has 2: the others wait for it"
    ]
