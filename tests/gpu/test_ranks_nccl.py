"""Two ranks over NCCL that share one card do what one does: FSDP2, shared batches, shared experts."""

from pathlib import Path
from typing import Any

import pytest
import torch

from asyncrl.system import shared_gpu
from tests.support import needs, rank_scenarios
from tests.support.rank_processes import Scene, play_well

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]
SCENES = (
    rank_scenarios.gradients,
    rank_scenarios.bf16_gradients,
    rank_scenarios.algorithms,
    rank_scenarios.twenty_steps,
)


def _hindrance() -> str:
    if not torch.cuda.is_available():
        return needs.GPU
    return needs.shared_gpu(shared_gpu.loaded())


@pytest.fixture(autouse=True)
def _several_ranks_on_one_card(monkeypatch: pytest.MonkeyPatch) -> None:
    if hindrance := _hindrance():
        pytest.skip(hindrance)
    monkeypatch.setenv(shared_gpu.VARIABLE, "1")


@pytest.mark.parametrize(
    ("scenes", "degrees"),
    [
        pytest.param(SCENES, {}, id="fsdp"),
        pytest.param(
            (rank_scenarios.log_probs, *SCENES, rank_scenarios.balancing), {"context_parallel": 2}, id="context"
        ),
        pytest.param(
            (rank_scenarios.expert_gradients, rank_scenarios.expert_steps), {"expert_parallel": 2}, id="experts"
        ),
        pytest.param((*SCENES, rank_scenarios.equal_replicas), {"replicas": 2}, id="replicas"),
        pytest.param((rank_scenarios.degrees_by_length,), {"context_parallel": "auto"}, id="auto"),
    ],
)
def test_two_ranks_do_what_one_does(scenes: tuple[Scene, ...], degrees: dict[str, Any], tmp_path: Path) -> None:
    """Gradients in fp32 and bf16, and losses of whole steps."""
    play_well(rank_scenarios.make_models(tmp_path), scenes, 2, device="cuda", **degrees)


def test_heads_need_not_divide(tmp_path: Path) -> None:
    folder = rank_scenarios.make_models(tmp_path, num_attention_heads=9, num_key_value_heads=3, hidden_size=72)
    scenes = (rank_scenarios.log_probs, rank_scenarios.gradients, rank_scenarios.bf16_gradients)
    play_well(folder, scenes, 2, device="cuda", context_parallel=2)
