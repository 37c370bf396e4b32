"""Two ranks over NCCL that share one card do what one does: FSDP2, shared batches, shared experts."""

import ctypes
from pathlib import Path

import pytest
import torch

from asyncrl.weights.transports.nccl import OLDEST_SHARED
from tests.gpu.test_nccl import SHARED_CARD
from tests.support import needs, rank_scenarios
from tests.support.rank_processes import Scene, play
from tests.support.tiny_model import tiny_checkpoint

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
    found = ctypes.c_int()
    ctypes.CDLL("libnccl.so.2").ncclGetVersion(ctypes.byref(found))  # torch tells which it was built with
    return "" if found.value >= OLDEST_SHARED else f"needs NCCL 2.30, not {found.value}: several ranks on one card"


@pytest.fixture(autouse=True)
def _several_ranks_on_one_card(monkeypatch: pytest.MonkeyPatch) -> None:
    if hindrance := _hindrance():
        pytest.skip(hindrance)
    for name, value in SHARED_CARD.items():
        monkeypatch.setenv(name, value)


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
    ],
)
def test_two_ranks_do_what_one_does(scenes: tuple[Scene, ...], degrees: dict[str, int], tmp_path: Path) -> None:
    """Gradients in fp32 and bf16, and losses of whole steps."""
    tiny_checkpoint(tmp_path / rank_scenarios.TIED, "qwen2")
    tiny_checkpoint(tmp_path / rank_scenarios.UNTIED, "qwen3")
    tiny_checkpoint(tmp_path / rank_scenarios.EXPERTS, "qwen3_moe")
    played = play(2, scenes, tmp_path, device="cuda", **degrees)
    assert "".join("".join(found) for found in played.values()) == ""
