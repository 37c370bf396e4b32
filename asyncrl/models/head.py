"""The output matrix, with logits in fp32 whatever dtype the model computes in.

Rounded to bf16, logits of 16 and more are multiples of 1/8: an error that trainer and engine make differently, and
the largest part of the gap between their log-probabilities.
"""

from typing import Any

import torch
from torch import Tensor


def fp32_product(a: Tensor, b: Tensor) -> Tensor:
    """a @ b of narrow matrices, added up and returned in fp32."""
    return torch.mm(a, b, out_dtype=torch.float32) if a.is_cuda else torch.mm(a.float(), b.float())


def bf16_logits(hidden_T_E: Tensor, output_V_E: Tensor) -> Tensor:
    """Fp32 logits at the speed of a bf16 product."""
    return _Logits.apply(hidden_T_E.bfloat16(), output_V_E.bfloat16())


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
