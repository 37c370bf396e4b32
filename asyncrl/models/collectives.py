"""Collectives between ranks that autograd goes through, over gloo and NCCL alike.

Every rank has to make the same calls in the same order, in the forward as in the backward: a layer that is computed
again in the backward makes its calls again, on every rank.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, distributed


class RankGroup:
    """Some of the ranks of a trainer, in their order."""

    def __init__(self, group: Any) -> None:
        """`group` is a process group of torch that this rank belongs to."""
        self._group = group
        self.rank: int = distributed.get_rank(group)
        self.size: int = distributed.get_world_size(group)

    def exchange(self, x_S_X: Tensor, sent: Sequence[int], received: Sequence[int]) -> Tensor:
        """All-to-all: so many rows for each rank, in the order of the ranks, against so many of each."""
        return _exchange(x_S_X, list(sent), list(received), self._group)

    def gather(self, x_M_X: Tensor) -> Tensor:
        """The rows of every rank, as many of each, on all of them. What all make of these has to be the same: the
        gradient of a rank's own rows is then what it has computed, and nothing is added up."""
        return _gather(x_M_X, self._group)

    def total(self, x: Tensor) -> Tensor:
        """The sum over the ranks, with the same condition."""
        return _total(x, self._group)

    def assemble(self, own_M_X: Tensor, dtype: torch.dtype, world: int, reduced_in: torch.dtype) -> Tensor:
        """A weight to compute with in `dtype`, from the rows that each rank keeps. Its gradient is a mean, as FSDP has
        it: what the ranks of this group have computed, added up in fp32, over `world` ranks. It travels in the
        narrower of `dtype` and `reduced_in`."""
        return _assemble(own_M_X, dtype, world, reduced_in, self._group)


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_S_X: Tensor, sent: list[int], received: list[int], group: Any) -> Tensor:
        ctx.sent, ctx.received, ctx.group = sent, received, group
        return _all_to_all(x_S_X, sent, received, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        return _all_to_all(gradients[0], ctx.received, ctx.sent, ctx.group), None, None, None


def _all_to_all(x_S_X: Tensor, sent: list[int], received: list[int], group: Any) -> Tensor:
    found_R_X = x_S_X.new_empty(sum(received), *x_S_X.shape[1:])
    distributed.all_to_all_single(found_R_X, x_S_X.contiguous(), received, sent, group=group)
    return found_R_X


def _all_gather(x_M_X: Tensor, group: Any) -> Tensor:
    size = distributed.get_world_size(group)
    if size == 1:
        return x_M_X
    found = x_M_X.new_empty(size * len(x_M_X), *x_M_X.shape[1:])
    distributed.all_gather(list(found.chunk(size)), x_M_X.contiguous(), group=group)
    return found


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_M_X: Tensor, group: Any) -> Tensor:
        begin = distributed.get_rank(group) * len(x_M_X)
        ctx.own = slice(begin, begin + len(x_M_X))
        return _all_gather(x_M_X, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0][ctx.own], None


class _Total(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        found = x.clone(memory_format=torch.contiguous_format)
        distributed.all_reduce(found, group=group)
        return found

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0], None


class _Assemble(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, own_M_X: Tensor, dtype: torch.dtype, world: int, reduced_in: torch.dtype, group: Any
    ) -> Tensor:
        ctx.kept, ctx.world, ctx.group = own_M_X.dtype, world, group
        ctx.sent_in = min(dtype, reduced_in, key=lambda each: each.itemsize)
        return _all_gather(own_M_X.to(dtype), group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None, None]:
        size = distributed.get_world_size(ctx.group)
        rows = [len(gradients[0]) // size] * size
        found_M_X = gradients[0] if size == 1 else _all_to_all(gradients[0].to(ctx.sent_in), rows, rows, ctx.group)
        total_M_X = found_M_X.unflatten(0, (size, -1)).sum(0, dtype=torch.promote_types(found_M_X.dtype, torch.float32))
        return (total_M_X / ctx.world).to(ctx.kept), None, None, None, None


_exchange: Any = _Exchange.apply
_gather: Any = _Gather.apply
_total: Any = _Total.apply
_assemble: Any = _Assemble.apply
