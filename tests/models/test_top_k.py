"""Log-probabilities of a few tokens and of their tail: those of autograd, in chunks and without its memory."""

from math import log

import pytest
import torch
from torch import Tensor

from asyncrl.models.head import FAINT, WHOLE, LogitShape, Support, chunked_logprobs, top_logprobs
from tests.support.head_inputs import Largest, head_inputs

TOKENS, VOCABULARY, HIDDEN = 23, 61, 16
SHAPE = LogitShape(scale=0.5, softcap=3.0)


def _ids(count: int) -> Tensor:
    """Of each place others, in any order."""
    generator = torch.Generator().manual_seed(1)
    return torch.rand(TOKENS, VOCABULARY, generator=generator).argsort(-1)[:, :count]


def _buckets(scaled: Tensor, ids: Tensor) -> Tensor:
    """By autograd."""
    logp = scaled.log_softmax(-1)
    tail = scaled.masked_fill(torch.zeros_like(scaled).scatter(1, ids, 1) > 0, -torch.inf).logsumexp(-1)
    rest = tail - scaled.logsumexp(-1)
    return torch.cat((logp.gather(1, ids), rest[:, None]), 1)


@pytest.mark.parametrize("support", [WHOLE, Support(top_p=0.8), Support(top_k=5)])
@pytest.mark.parametrize(("count", "chunk"), [(1, 7), (9, 7), (9, 1), (9, 1000), (VOCABULARY - 1, 7)])
@pytest.mark.parametrize(("temperature", "entropy"), [(1.0, False), (0.7, True)])
def test_values_and_gradients_are_those_of_autograd(
    count: int, chunk: int, temperature: float, entropy: bool, support: Support
) -> None:
    """Beside those of the target and the entropy, which have the support: these tokens are of the whole vocabulary."""
    hidden, output, target, weight, entropy_weight = head_inputs(torch.float64, TOKENS, VOCABULARY, HIDDEN)
    ids, generator = _ids(count), torch.Generator().manual_seed(2)
    weights = torch.randn(TOKENS, count + 1, generator=generator, dtype=torch.float64)
    settings = {"temperature": temperature, "chunk": chunk, "entropy": entropy, "support": support, "shape": SHAPE}
    found = chunked_logprobs(hidden, output, target, **settings, ids_L_K=ids)  # type: ignore[arg-type]
    alone = chunked_logprobs(hidden, output, target, **settings)  # type: ignore[arg-type]
    expected = _buckets(SHAPE(hidden @ output.t()) / temperature, ids)
    assert found.top_L_B is not None
    torch.testing.assert_close(found.top_L_B, expected, atol=1e-12, rtol=1e-12)
    assert torch.equal(found.logp_L, alone.logp_L)
    own = (found.logp_L * weight).sum() + (found.top_L_B * weights).sum()
    loss = (alone.logp_L * weight).sum() + (expected * weights).sum()
    if found.entropy_L is not None and alone.entropy_L is not None:
        own, loss = own + (found.entropy_L * entropy_weight).sum(), loss + (alone.entropy_L * entropy_weight).sum()
    for one, other in zip(
        torch.autograd.grad(own, (hidden, output)), torch.autograd.grad(loss, (hidden, output)), strict=True
    ):
        torch.testing.assert_close(one, other, atol=1e-10, rtol=1e-10)


def test_a_tail_without_tokens_is_faint_and_has_no_gradient() -> None:
    hidden, output, target, *_ = head_inputs(torch.float32, TOKENS, VOCABULARY, HIDDEN)
    found = chunked_logprobs(hidden, output, target, temperature=1.0, chunk=5, ids_L_K=_ids(VOCABULARY))
    assert found.top_L_B is not None
    assert found.top_L_B[:, -1].tolist() == [FAINT] * TOKENS
    for gradient in torch.autograd.grad(found.top_L_B[:, -1].sum(), (hidden, output)):
        assert not gradient.any()


@pytest.mark.parametrize("ids", [None, _ids(3)])
def test_no_tensor_is_larger_than_a_chunk_or_a_matrix(ids: Tensor | None) -> None:
    hidden, output, target, *_ = head_inputs(torch.float32, TOKENS, VOCABULARY, HIDDEN)
    with Largest() as largest:
        found = chunked_logprobs(hidden, output, target, temperature=1.0, chunk=4, ids_L_K=ids)
        (found.logp_L if found.top_L_B is None else found.top_L_B).sum().backward()
    assert largest.elements == max(4 * VOCABULARY, VOCABULARY * HIDDEN)


def test_the_likeliest_tokens_by_hand() -> None:
    """Of probabilities 0.1, 0.4, 0.2 and 0.3 at the temperature."""
    logits = (0.7 * torch.tensor([[0.1, 0.4, 0.2, 0.3]]).log()) + 5
    ids, logp = top_logprobs(logits, temperature=0.7, count=2, vocabulary=4)
    assert ids.tolist() == [[1, 3]]
    assert logp[0].tolist() == pytest.approx([log(0.4), log(0.3), log(0.3)], abs=1e-6)


def test_tokens_that_only_the_teacher_has_are_in_the_tail() -> None:
    logits = torch.tensor([[0.1, 0.4, 0.2, 0.3]]).log()
    ids, logp = top_logprobs(logits, temperature=1.0, count=3, vocabulary=3)
    assert ids.tolist() == [[1, 2, 0]]
    assert logp[0].tolist() == pytest.approx([log(0.4), log(0.2), log(0.1), log(0.3)], abs=1e-6)


def test_tokens_that_only_the_student_has_are_faint() -> None:
    logits = torch.tensor([[0.2, 0.5, 0.3]]).log()
    ids, logp = top_logprobs(logits, temperature=1.0, count=5, vocabulary=6)
    assert ids[0, :3].tolist() == [1, 2, 0]
    assert sorted(ids[0, 3:].tolist()) == [3, 4]
    assert logp[0].tolist() == pytest.approx([log(0.5), log(0.3), log(0.2), FAINT, FAINT, FAINT], abs=1e-6)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # torch.compile looks at it
@pytest.mark.parametrize("support", [pytest.param(WHOLE, marks=pytest.mark.nightly), Support(top_k=5)])
def test_compiled_it_is_the_same(support: Support) -> None:
    hidden, output, target, *_ = head_inputs(torch.float32, TOKENS, VOCABULARY, HIDDEN)
    gradients: list[tuple[Tensor, ...]] = []
    for compile in (False, True):
        found = chunked_logprobs(
            hidden, output, target, temperature=0.7, chunk=7, support=support, compile=compile, ids_L_K=_ids(9)
        )
        assert found.top_L_B is not None
        total = found.logp_L.sum() + found.top_L_B.square().sum()
        gradients.append(torch.autograd.grad(total, (hidden, output)))
    for plain, compiled in zip(*gradients, strict=True):
        torch.testing.assert_close(compiled, plain, atol=1e-3, rtol=1e-4)
