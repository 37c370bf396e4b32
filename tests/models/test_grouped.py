"""Experts multiplied by one kernel, in torch's own CPU version of it: values and gradients of the loop over them."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from asyncrl.models import grouped
from asyncrl.models.checkpoint import load_model
from asyncrl.models.execution import Execution
from asyncrl.models.packed import packed_attention
from tests.support.experts import EMPTY, EXPERTS, answer_and_gradients, random_leaves
from tests.support.tiny_model import tiny_checkpoint

pytestmark = pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")


def _always(*_: object) -> bool:
    return True


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if this were a GPU."""
    monkeypatch.setattr(grouped, "has_kernel", _always)


@pytest.mark.parametrize("adapted", [False, True], ids=["plain", "adapters of a rank that is no multiple of 8"])
@pytest.mark.parametrize("autocast", [False, True])
def test_values_and_gradients_are_those_of_the_loop_in_fp32(
    adapted: bool, autocast: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    leaves = random_leaves(adapted=adapted)
    wanted, gradients = answer_and_gradients(leaves)
    monkeypatch.setattr(grouped, "has_kernel", _always)
    held = leaves if autocast else {name: leaf.bfloat16() for name, leaf in leaves.items()}
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        found, of_found = answer_and_gradients(held)
    assert (found - wanted).norm() < 0.01 * wanted.norm()
    assert of_found.keys() == gradients.keys()
    for name, gradient in gradients.items():
        assert (of_found[name] - gradient).norm() < 0.015 * gradient.norm(), name
    assert gradients["gate_up"].any()


def test_an_expert_without_tokens_has_gradients_of_zero_whatever_the_kernel_leaves_there(
    monkeypatch: pytest.MonkeyPatch, kernel: None
) -> None:
    """As on a B200, where the kernel leaves what was in memory."""
    plain = grouped.grouped_mm

    def leaving(a: Tensor, b: Tensor, *, offs: Tensor) -> Tensor:
        found = plain(a, b, offs=offs)
        if found.dim() == 3:
            found[offs.diff(prepend=offs.new_zeros(1)) == 0] = torch.nan
        return found

    monkeypatch.setattr(grouped, "grouped_mm", leaving)
    _, gradients = answer_and_gradients({name: leaf.bfloat16() for name, leaf in random_leaves(adapted=True).items()})
    assert all(gradient.isfinite().all() for gradient in gradients.values())
    of_experts = {name: gradient.view(EXPERTS, -1) for name, gradient in gradients.items() if name != "x"}
    for gradient in of_experts.values():
        assert not gradient[EMPTY].any()
        assert gradient[[x for x in range(EXPERTS) if x != EMPTY]].any(1).all()


def test_recomputed_layers_and_replayed_routes_give_the_same_bits(tmp_path: Path, kernel: None) -> None:
    tiny_checkpoint(tmp_path, "qwen3_moe")
    model, config = load_model(tmp_path, torch.bfloat16)
    assert config.experts is not None
    active, recorded = config.experts.active, dict[int, Tensor]()

    def record(layer: int, scores_T_X: Tensor) -> Tensor:
        return recorded.setdefault(layer, scores_T_X.topk(active).indices)

    lengths = (5, 33, 1, 70)
    tokens_T = torch.randint(0, 48, (sum(lengths),), generator=torch.Generator().manual_seed(0))
    positions_T = torch.cat([torch.arange(length) for length in lengths])
    found: list[tuple[Tensor, list[Tensor]]] = []
    for recomputed, route in ((0, None), (0, record), (2, record), (2, None)):
        model.zero_grad()
        run = Execution(recomputed=recomputed).layer
        hidden_T_E = model(tokens_T, positions_T, packed_attention(lengths), run=run, route=route)
        model.logits(hidden_T_E).float().logsumexp(-1).sum().backward()
        found.append((hidden_T_E.detach(), [p.grad.clone() for p in model.parameters() if p.grad is not None]))
    for hidden_T_E, gradients in found[1:]:
        assert torch.equal(hidden_T_E, found[0][0])
        assert all(map(torch.equal, gradients, found[0][1]))


def test_a_single_row_is_multiplied() -> None:
    """Its transpose has strides that could be either layout."""
    groups = grouped.Groups.of(torch.tensor([[1]]), 3)
    assert groups.ends_X.tolist() == [0, 1, 1]
    x, matrix = torch.ones(1, 8, dtype=torch.bfloat16), torch.ones(3, 8, 16, dtype=torch.bfloat16, requires_grad=True)
    groups.back(groups.product(groups.rows(x), matrix)).sum().backward()
    assert matrix.grad is not None
    assert matrix.grad.sum((1, 2)).tolist() == [0, 128, 0]
