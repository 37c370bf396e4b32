"""The output matrix, with logits in fp32 whatever dtype the model computes in.

Rounded to bf16, logits of 16 and more are multiples of 1/8: an error that trainer and engine make differently, and
the largest part of the gap between their log-probabilities.

Logits are the largest tensor of training: tokens by vocabulary, and several of them until the backward is over.
`chunked_logprobs` has those of some tokens at a time and computes them again in the backward, which costs a third
product where there were two.

Axis suffixes: L tokens, C those of a chunk, V vocabulary, E hidden size.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from asyncrl.models.compiling import compiled


class TokenLogprobs(NamedTuple):
    logp_L: Tensor
    """Of the target tokens."""
    entropy_L: Tensor | None = None
    """Of the distribution that each was drawn from, where it was asked for."""


def fp32_product(a: Tensor, b: Tensor) -> Tensor:
    """a @ b of narrow matrices, added up and returned in fp32."""
    return torch.mm(a, b, out_dtype=torch.float32) if a.is_cuda else torch.mm(a.float(), b.float())


def bf16_logits(hidden_T_E: Tensor, output_V_E: Tensor) -> Tensor:
    """Fp32 logits at the speed of a bf16 product."""
    return _Logits.apply(hidden_T_E.bfloat16(), output_V_E.bfloat16())


def chunked_logprobs(
    hidden_L_E: Tensor,
    output_V_E: Tensor,
    target_L: Tensor,
    *,
    temperature: float,
    chunk: int,
    entropy: bool = False,
    compile: bool = False,
) -> TokenLogprobs:
    """From the logits of `chunk` tokens at a time, forward and backward; both matrices must have the same dtype."""
    return TokenLogprobs(*_Chunked.apply(hidden_L_E, output_V_E, target_L, temperature, chunk, entropy, compile))


class _Logits(torch.autograd.Function):
    """torch has no derivative for a product with a wider result; this one's is that of the plain bf16 product."""

    @staticmethod
    def forward(ctx: Any, hidden_T_E: Tensor, output_V_E: Tensor) -> Tensor:
        ctx.save_for_backward(hidden_T_E, output_V_E)
        return fp32_product(hidden_T_E, output_V_E.t())

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        hidden_T_E, output_V_E = ctx.saved_tensors
        grad_T_V = grads[0].bfloat16()
        return grad_T_V @ output_V_E, grad_T_V.t() @ hidden_T_E


class _Chunked(torch.autograd.Function):
    """With z the scaled logits, p their softmax and H its entropy:

    d logp / d z_j = [j is the target] - p_j        d H / d z_j = -p_j (log p_j + H)
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden_L_E: Tensor,
        output_V_E: Tensor,
        target_L: Tensor,
        temperature: float,
        chunk: int,
        entropy: bool,
        compile: bool,
    ) -> tuple[Tensor, ...]:
        measure = compiled(_measure) if compile else _measure
        found: list[tuple[Tensor, ...]] = []
        for hidden_C_E, target_C_1 in zip(hidden_L_E.split(chunk), target_L[:, None].split(chunk), strict=True):
            found.append(measure(_product(hidden_C_E, output_V_E.t()), target_C_1, temperature, entropy))
        outputs = tuple(torch.cat(parts) for parts in zip(*found, strict=True))
        ctx.save_for_backward(hidden_L_E, output_V_E, target_L, *outputs[1:])
        ctx.temperature, ctx.chunk, ctx.compile = temperature, chunk, compile
        return outputs

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        hidden_L_E, output_V_E, target_L, *entropy_L = ctx.saved_tensors
        columns_L_1 = [column[:, None] for column in (*grads, *entropy_L)]
        gradient = compiled(_gradient) if ctx.compile else _gradient
        grad_hidden_L_E = torch.empty_like(hidden_L_E)
        grad_output_V_E = output_V_E.new_zeros(output_V_E.shape, dtype=grads[0].dtype)
        for start in range(0, len(target_L), ctx.chunk):
            here = slice(start, start + ctx.chunk)
            columns_C_1 = [column[here] for column in columns_L_1]
            logits_C_V = _product(hidden_L_E[here], output_V_E.t())
            grad_C_V = gradient(logits_C_V, target_L[here, None], ctx.temperature, output_V_E.dtype, *columns_C_1)
            del logits_C_V
            grad_hidden_L_E[here] = grad_C_V @ output_V_E
            grad_output_V_E += _product(grad_C_V.t(), hidden_L_E[here])
            del grad_C_V  # not beside the next one's
        return grad_hidden_L_E, grad_output_V_E.to(output_V_E.dtype), None, None, None, None, None


def _measure(logits_C_V: Tensor, target_C_1: Tensor, temperature: float, entropy: bool) -> tuple[Tensor, ...]:
    """Log-probabilities of the targets and, if asked for, the entropies. The logits may be overwritten."""
    logp_C_V = _scaled(logits_C_V, temperature).log_softmax(-1)
    logp_C = logp_C_V.gather(1, target_C_1).squeeze(1)
    return (logp_C, -logp_C_V.exp().mul_(logp_C_V).sum(-1)) if entropy else (logp_C,)


def _gradient(
    logits_C_V: Tensor,
    target_C_1: Tensor,
    temperature: float,
    dtype: torch.dtype,
    grad_logp_C_1: Tensor,
    *of_entropy_C_1: Tensor,
) -> Tensor:
    """That of the logits, which may be overwritten; `of_entropy_C_1` are the entropy's gradient and the entropy."""
    grad_C_V = _scaled_softmax(_scaled(logits_C_V, temperature), grad_logp_C_1, *of_entropy_C_1).neg_()
    grad_C_V.scatter_add_(1, target_C_1, grad_logp_C_1)
    return _scaled(grad_C_V, temperature).to(dtype)


def _scaled_softmax(
    logits_C_V: Tensor, grad_logp_C_1: Tensor, grad_entropy_C_1: Tensor | None = None, entropy_C_1: Tensor | None = None
) -> Tensor:
    """p_j times all that the two derivatives multiply it by."""
    if grad_entropy_C_1 is None or entropy_C_1 is None:
        return logits_C_V.softmax(-1).mul_(grad_logp_C_1)
    logp_C_V = logits_C_V.log_softmax(-1)
    factor_C_V = torch.addcmul(grad_logp_C_1, grad_entropy_C_1, logp_C_V + entropy_C_1)
    return logp_C_V.exp_().mul_(factor_C_V)


def _scaled(x_C_V: Tensor, temperature: float) -> Tensor:
    return x_C_V if temperature == 1.0 else x_C_V.div_(temperature)


def _product(a: Tensor, b: Tensor) -> Tensor:
    return fp32_product(a, b) if a.dtype == torch.bfloat16 else a @ b
