"""Rows times the matrix of their group, all groups by one kernel. The host does not wait to learn their sizes.

torch's kernel takes bf16 whose rows are multiples of 16 bytes. torch differentiates it as well, but on some GPUs the
gradient of a group without rows is what was in memory before (pytorch issue 172439). So the backward is ours.

Axis suffixes as in `asyncrl.models.experts`.
"""

from typing import Any, NamedTuple, Self, cast

import torch
from torch import Tensor
from torch.nn import functional as F

from asyncrl.models.adapters import LowRank

ALIGNMENT = 8
"""Numbers in 16 bytes of bf16."""
grouped_mm: Any = getattr(F, "grouped_mm", None) or cast(Any, torch)._grouped_mm  # where older versions have it


def has_kernel(x: Tensor, *widths: int) -> bool:
    """For products of `x` with matrices of these sizes. torch falls back to a loop on CPUs."""
    kind = x.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype
    return x.is_cuda and dtype == torch.bfloat16 and not any(width % ALIGNMENT for width in widths)


class Groups(NamedTuple):
    """Rows in the order of their groups, and where each is."""

    order_R: Tensor
    """The choice, counted over T_C, that each row is."""
    place_T_C: Tensor
    """The row that each choice is."""
    ends_X: Tensor
    """The end of each group, in rows."""

    @classmethod
    def of(cls, chosen_T_C: Tensor, count: int) -> Self:
        group_R, order_R = chosen_T_C.flatten().sort(stable=True)
        place_R = torch.empty_like(order_R).scatter_(0, order_R, torch.arange(len(order_R), device=order_R.device))
        numbers_X = torch.arange(count, device=order_R.device)
        ends_X = torch.searchsorted(group_R, numbers_X, right=True, out_int32=True)
        return cls(order_R, place_R.view_as(chosen_T_C), ends_X)

    def rows(self, x_T_E: Tensor) -> Tensor:
        """Each token once for each of its groups."""
        return _gather(x_T_E, self.order_R // self.place_T_C.shape[1], self.place_T_C)

    def back(self, y_R_E: Tensor) -> Tensor:
        """T_C_E."""
        return _gather(y_R_E, self.place_T_C, self.order_R[:, None])

    def product(self, x_R_E: Tensor, matrix_X_E_F: Tensor) -> Tensor:
        return _product(x_R_E, matrix_X_E_F.to(x_R_E.dtype), self.ends_X)

    def changed_product(self, x_R_E: Tensor, matrix_X_E_F: Tensor, change: LowRank | None) -> Tensor:
        y_R_F = self.product(x_R_E, matrix_X_E_F)
        if change is None:
            return y_R_F
        missing = -change.up_R_X.shape[-2] % ALIGNMENT  # ranks of zeros, which the kernel needs
        down, up = F.pad(change.down_E_R, (0, missing)), F.pad(change.up_R_X, (0, 0, 0, missing))
        return y_R_F + self.product(self.product(x_R_E, down), up)


class _Gather(torch.autograd.Function):
    """`x_N_E[index]`. `sources_N_C` says where each row of x went, so that the backward gathers as well and adds up in
    a fixed order; torch would sort the index for it once more."""

    @staticmethod
    def forward(ctx: Any, x_N_E: Tensor, index: Tensor, sources_N_C: Tensor) -> Tensor:
        ctx.save_for_backward(sources_N_C)
        return x_N_E[index]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (sources_N_C,) = ctx.saved_tensors
        gradient_N_C_E = gradients[0].flatten(0, -2)[sources_N_C]
        return gradient_N_C_E.sum(1) if sources_N_C.shape[1] > 1 else gradient_N_C_E.squeeze(1), None, None


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_R_E: Tensor, matrix_X_E_F: Tensor, ends_X: Tensor) -> Tensor:
        ctx.save_for_backward(x_R_E, matrix_X_E_F, ends_X)
        return grouped_mm(x_R_E, matrix_X_E_F, offs=ends_X)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x_R_E, matrix_X_E_F, ends_X = ctx.saved_tensors
        gradient_R_F = gradients[0].contiguous()
        of_x = of_matrix = None
        if ctx.needs_input_grad[0]:
            of_x = grouped_mm(gradient_R_F, matrix_X_E_F.transpose(1, 2), offs=ends_X)
        if ctx.needs_input_grad[1]:
            of_matrix_X_F_E = grouped_mm(gradient_R_F.t(), x_R_E, offs=ends_X)
            empty_X = ends_X.diff(prepend=ends_X.new_zeros(1)) == 0
            of_matrix = of_matrix_X_F_E.masked_fill_(empty_X[:, None, None], 0).transpose(1, 2)
        return of_x, of_matrix, None


_gather: Any = _Gather.apply
_product: Any = _Product.apply
