"""The policy over the tokens that can be sampled: top-k and top-p as engines have them, never without the target."""

from collections.abc import Callable
from math import log

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from asyncrl.engines.native.sampling import restrict
from asyncrl.models.head import (
    WHOLE,
    Support,
    TokenLogprobs,
    chunked_logprobs,
    policy_logits,
    support_floor,
)
from tests.support.head_inputs import head_inputs

Measure = Callable[[Tensor, Tensor, float, Support], TokenLogprobs]
TOKENS, VOCABULARY, HIDDEN = 23, 61, 16
SUPPORTS = [Support(top_k=2), Support(top_p=0.8), Support(top_k=7, top_p=0.5), Support(top_k=1000), Support(top_p=1e-9)]


def _plain(logits: Tensor, target: Tensor, temperature: float, support: Support) -> TokenLogprobs:
    scaled, outside = policy_logits(logits, target, temperature=temperature, support=support)
    logp = scaled.log_softmax(-1)
    return TokenLogprobs(logp.gather(1, target[:, None]).squeeze(1), -(logp.exp() * logp).sum(-1), outside)


def _chunked(logits: Tensor, target: Tensor, temperature: float, support: Support) -> TokenLogprobs:
    """With the logits as hidden states of a model whose output matrix is the identity."""
    identity = torch.eye(logits.shape[1], dtype=logits.dtype)
    return chunked_logprobs(logits, identity, target, temperature=temperature, chunk=2, entropy=True, support=support)


def _entropy(*probabilities: float) -> float:
    return -sum(p * log(p) for p in probabilities)


@pytest.mark.parametrize("temperature", [1.0, 2.0])
@pytest.mark.parametrize("measure", [_plain, _chunked])
@pytest.mark.parametrize(
    ("support", "target", "probability", "entropy", "outside"),
    [
        (WHOLE, 1, 0.4, _entropy(0.1, 0.4, 0.2, 0.3), None),
        (Support(top_k=2), 1, 4 / 7, _entropy(4 / 7, 3 / 7), False),
        (Support(top_k=2), 3, 3 / 7, _entropy(4 / 7, 3 / 7), False),
        (Support(top_k=2), 0, 1 / 8, _entropy(4 / 8, 3 / 8, 1 / 8), True),
        (Support(top_k=9), 0, 0.1, _entropy(0.1, 0.4, 0.2, 0.3), False),
        (Support(top_p=0.65), 3, 3 / 7, _entropy(4 / 7, 3 / 7), False),
        (Support(top_p=0.75), 2, 2 / 9, _entropy(4 / 9, 3 / 9, 2 / 9), False),
        (Support(top_p=0.75), 0, 0.1, _entropy(0.1, 0.4, 0.2, 0.3), True),
        (Support(top_p=1e-6), 1, 1.0, 0.0, False),
        (Support(top_k=3, top_p=0.5), 1, 4 / 7, _entropy(4 / 7, 3 / 7), False),
        (Support(top_k=3, top_p=0.4), 2, 2 / 6, _entropy(4 / 6, 2 / 6), True),
    ],
)
def test_by_hand(
    temperature: float,
    measure: Measure,
    support: Support,
    target: int,
    probability: float,
    entropy: float,
    outside: bool | None,
) -> None:
    """Of tokens with the probabilities 0.1, 0.4, 0.2 and 0.3 at the temperature. top_k=3 leaves 4/9, 3/9 and 2/9."""
    logits = (temperature * torch.tensor([0.1, 0.4, 0.2, 0.3]).log() + 5).expand(3, 4).contiguous()
    found = measure(logits, torch.full((3,), target), temperature, support)
    assert found.logp_L.tolist() == pytest.approx([log(probability)] * 3, abs=1e-6)
    assert found.entropy_L is not None
    assert found.entropy_L.tolist() == pytest.approx([entropy] * 3, abs=1e-6)
    found_outside = None if found.outside_L is None else found.outside_L.tolist()
    assert found_outside == (None if outside is None else [outside] * 3)


def _inputs(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Every second target is the likeliest token."""
    hidden, output, target, *weights = head_inputs(dtype, TOKENS, VOCABULARY, HIDDEN)
    target[::2] = (hidden.double() @ output.double().t()).argmax(-1)[::2]
    return hidden, output, target, *weights


def _by_sorting(logits: Tensor, target: Tensor, temperature: float, support: Support) -> tuple[Tensor, Tensor]:
    """The engines' own restriction, and the target; autograd does the rest."""
    logits, column = logits / temperature, target[:, None]
    rows = torch.ones(len(logits), 1, dtype=logits.dtype)
    kept = restrict(logits, rows.long() * support.top_k, rows * support.top_p).isfinite().scatter(1, column, value=True)
    inside = logits.masked_fill(~kept, -torch.inf)
    entropy = inside.logsumexp(-1) - (inside.softmax(-1) * logits.masked_fill(~kept, 0)).sum(-1)
    return inside.log_softmax(-1).gather(1, column).squeeze(1), entropy


@pytest.mark.parametrize("support", SUPPORTS)
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize(("entropy", "chunk"), [(True, 7), (False, 7), (True, 1), (True, 1000)])
def test_values_and_gradients_are_those_of_autograd(
    support: Support, temperature: float, entropy: bool, chunk: int
) -> None:
    hidden, output, target, weight, entropy_weight = _inputs(torch.float64)
    logits = hidden @ output.t()
    expected, expected_entropy = _by_sorting(logits, target, temperature, support)
    chunked = chunked_logprobs(
        hidden, output, target, temperature=temperature, chunk=chunk, entropy=entropy, support=support
    )
    for found in (chunked, _plain(logits, target, temperature, support)):
        torch.testing.assert_close(found.logp_L, expected, atol=1e-12, rtol=1e-12)
        loss, own = (expected * weight).sum(), (found.logp_L * weight).sum()
        if entropy:
            assert found.entropy_L is not None
            torch.testing.assert_close(found.entropy_L, expected_entropy, atol=1e-12, rtol=1e-12)
            loss = loss + (expected_entropy * entropy_weight).sum()
            own = own + (found.entropy_L * entropy_weight).sum()
        for one, other in zip(
            torch.autograd.grad(own, (hidden, output), retain_graph=True),
            torch.autograd.grad(loss, (hidden, output), retain_graph=True),
            strict=True,
        ):
            torch.testing.assert_close(one, other, atol=1e-11, rtol=1e-11)


def test_gradients_of_narrow_matrices_are_those_of_wide_ones() -> None:
    hidden, output, target, weight, _ = _inputs(torch.bfloat16)
    wide = [matrix.detach().float().requires_grad_() for matrix in (hidden, output)]
    support = Support(top_p=0.8)
    found = chunked_logprobs(hidden, output, target, temperature=0.9, chunk=5, support=support)
    expected, _ = _by_sorting(wide[0] @ wide[1].t(), target, 0.9, support)
    torch.testing.assert_close(found.logp_L, expected, atol=1e-5, rtol=1e-5)
    one = torch.autograd.grad((found.logp_L * weight).sum(), (hidden, output))
    for mine, plain in zip(one, torch.autograd.grad((expected * weight).sum(), wide), strict=True):
        torch.testing.assert_close(mine.float(), plain, atol=0.03, rtol=0.02)


@pytest.mark.parametrize("measure", [_plain, _chunked])
@pytest.mark.parametrize("support", [WHOLE, *SUPPORTS[:3]])
def test_logits_that_are_not_numbers_are_seen(measure: Measure, support: Support) -> None:
    logits = torch.randn(3, 9, generator=torch.Generator().manual_seed(0))
    logits[1, 4] = torch.nan
    if measure is _plain:
        assert measure(logits, torch.tensor([1, 2, 3]), 1.0, support).logp_L.isnan().tolist() == [False, True, False]
    else:  # the identity spreads it over the row, not over the others
        assert bool(measure(logits, torch.tensor([1, 2, 3]), 1.0, support).logp_L[1].isnan())


rows = st.tuples(st.integers(0, 2**32), st.integers(2, 40), st.floats(0.3, 3.0))
supports = st.builds(Support, st.integers(0, 50), st.one_of(st.just(1.0), st.floats(0.01, 0.99)))


@given(rows, supports)
def test_the_support_is_the_engines(row: tuple[int, int, float], support: Support) -> None:
    seed, size, temperature = row
    logits = 3 * torch.randn(4, size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    ones = torch.ones(4, 1, dtype=torch.float64)
    engines = restrict(logits / temperature, ones.long() * support.top_k, ones * support.top_p).isfinite()
    kept = logits >= support_floor(logits, temperature, support) if not support.whole else torch.ones_like(engines)
    assert torch.equal(kept, engines)


@given(rows, supports)
def test_probabilities_add_up_to_one_and_every_target_has_one(row: tuple[int, int, float], support: Support) -> None:
    """Over the support; a target outside it comes with its own distribution, and is less likely than all of it."""
    seed, size, temperature = row
    logits = 3 * torch.randn(1, size, generator=torch.Generator().manual_seed(seed))
    every = torch.arange(size)
    found = _plain(logits.expand(size, -1), every, temperature, support)
    outside = torch.zeros(size, dtype=torch.bool) if found.outside_L is None else found.outside_L
    assert found.logp_L.isfinite().all()
    assert found.logp_L.max() <= 1e-6
    assert float(found.logp_L[~outside].exp().sum()) == pytest.approx(1, abs=1e-5)
    if outside.any():
        assert found.logp_L[outside].max() <= found.logp_L[~outside].min() + 1e-6
    assert found.entropy_L is not None
    assert float(found.entropy_L.min()) >= -1e-6
    assert float(found.entropy_L.max()) <= log(size) + 1e-5
    torch.testing.assert_close(_chunked(logits.expand(size, -1), every, temperature, support).logp_L, found.logp_L)


@given(rows, st.floats(0.01, 0.99), st.floats(0.01, 0.99))
def test_a_larger_top_p_keeps_what_a_smaller_one_does(row: tuple[int, int, float], one: float, other: float) -> None:
    seed, size, temperature = row
    logits = torch.randn(4, size, generator=torch.Generator().manual_seed(seed))
    small, large = (support_floor(logits, temperature, Support(top_p=p)) for p in sorted((one, other)))
    assert (large <= small).all()


def test_ties_at_the_floor_belong_to_the_support() -> None:
    logits = torch.tensor([[1.0, 0.0, 0.0, -1.0]])
    for support in (Support(top_k=2), Support(top_p=0.6)):
        assert (logits >= support_floor(logits, 1.0, support)).tolist() == [[True, True, True, False]]


def test_the_whole_vocabulary_costs_and_changes_nothing() -> None:
    """Bit for bit what it was, and no search for a floor."""
    hidden, output, target, _, _ = _inputs(torch.float32)
    logits = hidden @ output.t()
    scaled, outside = policy_logits(logits, target, temperature=0.7)
    assert torch.equal(scaled, logits / 0.7)
    assert outside is None
    found = chunked_logprobs(hidden, output, target, temperature=0.7, chunk=TOKENS, entropy=True, support=WHOLE)
    expected = (logits / 0.7).log_softmax(-1)
    assert torch.equal(found.logp_L, expected.gather(1, target[:, None]).squeeze(1))
    assert found.outside_L is None
