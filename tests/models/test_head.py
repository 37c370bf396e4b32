"""Log-probabilities in chunks: those of the plain path, and their gradients, without its memory."""

import pytest
import torch
from torch import Tensor

from asyncrl.algorithms import losses
from asyncrl.models.head import WHOLE, Support, bf16_logits, chunked_logprobs
from tests.support.head_inputs import Largest, head_inputs

TOKENS, VOCABULARY, HIDDEN = 23, 61, 16


def _inputs(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    return head_inputs(dtype, TOKENS, VOCABULARY, HIDDEN)


def _plain(logits: Tensor, target: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    logits = logits / temperature
    return logits.log_softmax(-1).gather(1, target[:, None]).squeeze(1), losses.entropy(logits)


@pytest.mark.parametrize("chunk", [1, 7, TOKENS, 1000])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("entropy", [True, False])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
def test_values_and_gradients_are_those_of_the_plain_path(
    chunk: int, temperature: float, entropy: bool, dtype: torch.dtype, tolerance: float
) -> None:
    hidden, output, target, weight, entropy_weight = _inputs(dtype)
    expected, expected_entropy = _plain(hidden @ output.t(), target, temperature)
    found = chunked_logprobs(hidden, output, target, temperature=temperature, chunk=chunk, entropy=entropy)
    torch.testing.assert_close(found.logp_L, expected, atol=tolerance, rtol=tolerance)
    loss, chunked = (expected * weight).sum(), (found.logp_L * weight).sum()
    if entropy:
        assert found.entropy_L is not None
        torch.testing.assert_close(found.entropy_L, expected_entropy, atol=tolerance, rtol=tolerance)
        loss, chunked = (
            total + (part * entropy_weight).sum()
            for total, part in ((loss, expected_entropy), (chunked, found.entropy_L))
        )
    for one, other in zip(
        torch.autograd.grad(chunked, (hidden, output)), torch.autograd.grad(loss, (hidden, output)), strict=True
    ):
        torch.testing.assert_close(one, other, atol=4 * tolerance, rtol=4 * tolerance)


def test_narrow_inputs_have_fp32_logits() -> None:
    hidden, output, target, weight, _ = _inputs(torch.bfloat16)
    expected, _ = _plain(bf16_logits(hidden, output), target, 0.9)
    found = chunked_logprobs(hidden, output, target, temperature=0.9, chunk=5)
    assert found.logp_L.dtype == torch.float32
    torch.testing.assert_close(found.logp_L, expected, atol=1e-5, rtol=1e-5)
    one = torch.autograd.grad((found.logp_L * weight).sum(), (hidden, output))
    other = torch.autograd.grad((expected * weight).sum(), (hidden, output))
    for mine, plain in zip(one, other, strict=True):
        assert mine.dtype == torch.bfloat16
        torch.testing.assert_close(mine, plain, atol=0.03, rtol=0.02)


@pytest.mark.parametrize("support", [WHOLE, Support(top_p=0.8), Support(top_k=5, top_p=0.8)])
@pytest.mark.parametrize("entropy", [True, False])
def test_no_tensor_is_larger_than_a_chunk_or_a_matrix(entropy: bool, support: Support) -> None:
    hidden, output, target, _, _ = _inputs(torch.float32)
    with Largest() as largest:
        found = chunked_logprobs(hidden, output, target, temperature=1.0, chunk=4, entropy=entropy, support=support)
        total = found.logp_L.sum()
        if found.entropy_L is not None:
            total = total + found.entropy_L.sum()
        total.backward()
    assert largest.elements == max(4 * VOCABULARY, VOCABULARY * HIDDEN)
    assert largest.elements < TOKENS * VOCABULARY
