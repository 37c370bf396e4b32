"""The divergence of a policy from its teacher over buckets: torch's own over all tokens, and never more over fewer."""

from math import log
from typing import Literal, get_args

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional

from asyncrl.algorithms.losses import divergence
from asyncrl.models.head import chunked_logprobs, top_logprobs

Direction = Literal["reverse", "forward"]
DIRECTIONS: tuple[Direction, ...] = get_args(Direction)
PLACES = 3


def _logits(seed: int, size: int, spread: float) -> tuple[Tensor, Tensor]:
    """Of policy and teacher at some places."""
    generator = torch.Generator().manual_seed(seed)
    both = spread * torch.randn(2, PLACES, size, generator=generator, dtype=torch.float64)
    return both[0].requires_grad_(), both[1]


def _over(direction: Direction, logits: Tensor, teacher: Tensor, count: int, temperature: float) -> Tensor:
    """By the head, which is the identity here, over the teacher's `count` likeliest tokens."""
    ids, said = top_logprobs(teacher, temperature=temperature, count=count, vocabulary=teacher.shape[1])
    identity, target = torch.eye(logits.shape[1], dtype=logits.dtype), torch.zeros(len(logits), dtype=torch.int64)
    found = chunked_logprobs(logits, identity, target, temperature=temperature, chunk=2, ids_L_K=ids)
    assert found.top_L_B is not None
    return divergence(direction, found.top_L_B, said)


def _whole(direction: Direction, logits: Tensor, teacher: Tensor, temperature: float) -> Tensor:
    """torch's own is of its second argument from its first."""
    policy, teacher = ((each / temperature).log_softmax(-1) for each in (logits, teacher))
    first, second = (teacher, policy) if direction == "reverse" else (policy, teacher)
    return functional.kl_div(first, second, reduction="none", log_target=True).sum(-1)


cases = st.tuples(st.integers(0, 2**32), st.integers(2, 40), st.floats(0.1, 6.0), st.floats(0.3, 3.0))


@given(cases, st.sampled_from(DIRECTIONS))
def test_over_the_whole_vocabulary_it_is_torchs_own(case: tuple[int, int, float, float], direction: Direction) -> None:
    """Value and gradient."""
    seed, size, spread, temperature = case
    logits, teacher = _logits(seed, size, spread)
    found, expected = (
        _over(direction, logits, teacher, size, temperature),
        _whole(direction, logits, teacher, temperature),
    )
    torch.testing.assert_close(found, expected, atol=1e-9, rtol=1e-9)
    one, other = (torch.autograd.grad(each.sum(), logits)[0] for each in (found, expected))
    torch.testing.assert_close(one, other, atol=1e-9, rtol=1e-9)


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_in_fp32_a_faint_tail_costs_no_digits(direction: Direction) -> None:
    """The policy finds the teacher's tail e^30 times less likely than the teacher does."""
    logits, teacher = _logits(1, 9, 1.0)
    rest = teacher.argsort(-1)[:, :-4]
    logits = logits.detach().scatter(1, rest, -31.0 + 0.1 * rest.double()).requires_grad_()
    gradients = [
        torch.autograd.grad(_over(direction, logits.to(dtype), teacher.to(dtype), 4, 1.0).sum(), logits)[0]
        for dtype in (torch.float32, torch.float64)
    ]
    torch.testing.assert_close(*gradients, atol=1e-6, rtol=1e-5)


@given(cases, st.sampled_from(DIRECTIONS))
def test_over_fewer_tokens_it_is_a_lower_bound(case: tuple[int, int, float, float], direction: Direction) -> None:
    """And never negative: of one token and its tail, of two, and so on to all."""
    seed, size, spread, temperature = case
    logits, teacher = _logits(seed, size, spread)
    with torch.no_grad():
        over = torch.stack([_over(direction, logits, teacher, count, temperature) for count in range(1, size + 1)])
    assert over.min() >= -1e-12
    assert (over[-1] - over).min() >= -1e-9
    if spread / temperature < 4:  # else a tail may be less likely than `FAINT`
        assert over.diff(dim=0).min() >= -1e-9, "each is a lower bound of the next"


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_it_is_zero_and_has_no_gradient_where_both_agree(direction: Direction) -> None:
    logits, _ = _logits(0, 11, 2.0)
    found = _over(direction, logits, logits.detach(), 4, 0.7)
    assert found.abs().max() < 1e-12
    assert torch.autograd.grad(found.sum(), logits)[0].abs().max() < 1e-12


def test_by_hand() -> None:
    """The teacher's likeliest token of three and the tail: 0.5 and 0.5 of the teacher, 0.2 and 0.8 of the policy."""
    policy, teacher = torch.tensor([[0.2, 0.5, 0.3]]).log(), torch.tensor([[0.5, 0.3, 0.2]]).log()
    reverse, forward = (_over(direction, policy, teacher, 1, 1.0).item() for direction in DIRECTIONS)
    assert reverse == pytest.approx(0.2 * log(0.2 / 0.5) + 0.8 * log(0.8 / 0.5), abs=1e-6)
    assert forward == pytest.approx(0.5 * log(0.5 / 0.2) + 0.5 * log(0.5 / 0.8), abs=1e-6)
