"""Two ranks over NCCL that share one card do what one does: FSDP2, shared batches, shared experts."""

from pathlib import Path

import pytest
import torch
from torch.cuda import nccl

from tests.gpu.test_nccl import SHARED_CARD
from tests.support import needs, rank_scenarios
from tests.support.rank_processes import Scene, play
from tests.support.tiny_model import tiny_checkpoint

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]
OLDEST = (2, 30)
"""torch's own NCCL, which is not cupy's: from then on several ranks may share one card."""
SCENES = (
    rank_scenarios.gradients,
    rank_scenarios.bf16_gradients,
    rank_scenarios.algorithms,
    rank_scenarios.twenty_steps,
)


def _hindrance() -> str:
    if not torch.cuda.is_available():
        return needs.GPU
    found = nccl.version()
    return "" if found >= OLDEST else f"needs NCCL 2.30, torch has {'.'.join(map(str, found))}: several ranks on a card"


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
        pytest.param((rank_scenarios.log_probs, *SCENES, rank_scenarios.balancing), {"context": 2}, id="context"),
        pytest.param((rank_scenarios.expert_gradients, rank_scenarios.expert_steps), {"experts": 2}, id="experts"),
    ],
)
def test_two_ranks_do_what_one_does(scenes: tuple[Scene, ...], degrees: dict[str, int], tmp_path: Path) -> None:
    """Gradients in fp32 and bf16, and losses of whole steps."""
    tiny_checkpoint(tmp_path / rank_scenarios.TIED, "qwen2")
    tiny_checkpoint(tmp_path / rank_scenarios.UNTIED, "qwen3")
    tiny_checkpoint(tmp_path / rank_scenarios.EXPERTS, "qwen3_moe")
    played = play(2, scenes, tmp_path, device="cuda", **degrees)
    assert "".join("".join(found) for found in played.values()) == ""
