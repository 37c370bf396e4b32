"""Where kernels are checked, and against what."""

from collections.abc import Callable
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from asyncrl.engines.native.cuda.kernels import torch_kernels
from asyncrl.engines.native.cuda.kernels.shapes import Kernels

T = TypeVar("T")
TORCH = torch_kernels.KERNELS
TOLERANCE = {torch.float32: 2e-5, torch.float64: 1e-4, torch.float16: 5e-3, torch.bfloat16: 2e-2}


class Place(NamedTuple):
    device: torch.device
    large: bool
    """Shapes of a real model, which the interpreter would take hours for."""

    def normal(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(self.device, dtype)

    def integers(self, values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=self.device)


def close(found: Tensor, expected: Tensor, tolerance: float | None = None) -> None:
    torch.cuda.synchronize() if found.is_cuda else None
    tolerance = TOLERANCE[found.dtype] if tolerance is None else tolerance
    torch.testing.assert_close(found.float(), expected.float(), atol=tolerance, rtol=tolerance)


def both(run: Callable[[Kernels], T]) -> tuple[T, T]:
    from asyncrl.engines.native.cuda.kernels import triton_kernels

    return run(triton_kernels.KERNELS), run(TORCH)
