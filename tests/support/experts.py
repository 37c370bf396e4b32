"""A layer of experts by itself: one of them gets no token."""

import torch
from torch import Tensor

from asyncrl.models.adapters import UNCHANGED, Changes, LowRank
from asyncrl.models.experts import ExpertTensors

EXPERTS, HIDDEN, WIDTH, RANK = 6, 32, 24, 3
EMPTY = 2
"""The expert that nobody chooses."""


def _random(*shape: int, seed: int) -> Tensor:
    """Numbers of bf16, in fp32."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16().float()


def random_leaves(*, adapted: bool) -> dict[str, Tensor]:
    found = {
        "x": _random(13, HIDDEN, seed=0),
        "gate_up": _random(EXPERTS * 2 * WIDTH, HIDDEN, seed=1) / 6,
        "down": _random(EXPERTS * HIDDEN, WIDTH, seed=2) / 5,
    }
    if adapted:
        found |= {
            "gate_up_A": _random(EXPERTS, HIDDEN, RANK, seed=3) / 6,
            "gate_up_B": _random(EXPERTS, RANK, 2 * WIDTH, seed=4) / 2,
            "down_A": _random(EXPERTS, WIDTH, RANK, seed=5) / 5,
            "down_B": _random(EXPERTS, RANK, HIDDEN, seed=6) / 2,
        }
    return found


def answer_and_gradients(leaves: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    """The output, and the gradients of some loss by every leaf; on their device."""
    device = leaves["x"].device
    held = {name: leaf.detach().requires_grad_() for name, leaf in leaves.items()}
    experts = ExpertTensors(
        router_E_X=_random(HIDDEN, EXPERTS, seed=7).to(device),
        gate_up_X_E_F=held["gate_up"].view(EXPERTS, 2 * WIDTH, HIDDEN).transpose(1, 2),
        down_X_F_E=held["down"].view(EXPERTS, HIDDEN, WIDTH).transpose(1, 2),
        active=3,
        renormalized=True,
    )
    changes = UNCHANGED
    if "down_A" in held:
        changes = Changes(
            None, None, LowRank(held["gate_up_A"], held["gate_up_B"]), LowRank(held["down_A"], held["down_B"])
        )

    def route(_: int, scores_T_X: Tensor) -> Tensor:
        others_T_X = scores_T_X.float().index_fill(1, torch.tensor([EMPTY], device=device), 0.0)
        return others_T_X.topk(3, dim=-1).indices

    y_T_E = experts.forward(held["x"], 0, route, changes=changes)
    (y_T_E.float() * _random(13, HIDDEN, seed=8).to(device)).sum().backward()
    return y_T_E.detach().float(), {name: leaf.grad.float() for name, leaf in held.items() if leaf.grad is not None}
