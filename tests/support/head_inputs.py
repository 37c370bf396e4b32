"""What the head of a model computes from, and how large it becomes."""

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


class Largest(TorchDispatchMode):
    """Elements of the largest tensor that any operation makes."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else (out,):
            if isinstance(tensor, Tensor):
                self.elements = max(self.elements, tensor.numel())
        return out


def head_inputs(
    dtype: torch.dtype, tokens: int, vocabulary: int, hidden_size: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Hidden states, the output matrix, targets, and weights of their log-probabilities and entropies."""
    generator = torch.Generator().manual_seed(0)
    hidden, output = (
        torch.randn(rows, hidden_size, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
        for rows in (tokens, vocabulary)
    )
    target = torch.randint(vocabulary, (tokens,), generator=generator)
    weights = torch.randn(2, tokens, generator=generator, dtype=torch.float64)
    return hidden, output, target, weights[0], weights[1]
