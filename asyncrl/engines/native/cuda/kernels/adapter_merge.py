"""Base weights plus adapters, written to where they are served from: all matrices of a projection by one launch.

Each number of the base is read once and each merged one written once, so this takes as long as a copy of the weights.
FP8 is made of the merged numbers on the way, block by block, as `asyncrl.precision.quantizer` defines it.

Axis suffixes: M matrices of all layers and experts, O outputs, I inputs, R rank, X some of the matrices.
"""

from collections.abc import Callable, Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from asyncrl.engines.native.cuda.kernels.shapes import Merge
from asyncrl.precision.triton_quantizer import block_scale, e4m3
from asyncrl.weights.flat import Flat

_SIDE = 128
"""Of a program's block: it is one of FP8's."""
_RANKS = 16, 64
"""Fewest and most of the rank that are multiplied at once: tensor cores take 16, and registers hold no more than 64."""
_VECTOR, _WARPS = 16, 8
"""Bytes that a thread writes with one instruction, where addresses are multiples of it; warps of a program."""


@triton.jit
def _merge(
    base,
    down,
    up,
    table,
    outputs,
    inputs,
    RANK: tl.constexpr,
    AT_ONCE: tl.constexpr,
    SIDE: tl.constexpr,
    ALIGNED: tl.constexpr,
    FP8: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
):
    entry = table + 4 * tl.program_id(2)
    number = tl.load(entry)
    row = (tl.program_id(1) * SIDE + tl.arange(0, SIDE)).to(tl.int64)[:, None]
    column = tl.program_id(0) * SIDE + tl.arange(0, SIDE)[None, :]
    place, inside = row * inputs + column, (row < outputs) & (column < inputs)
    base_O_I = tl.load(base + number * outputs * inputs + place, mask=inside, other=0.0)
    change_O_I = tl.zeros([SIDE, SIDE], tl.float32)
    for first in tl.static_range(0, RANK, AT_ONCE):
        across, below = first + tl.arange(0, AT_ONCE)[None, :], first + tl.arange(0, AT_ONCE)[:, None]
        up_O_R = tl.load(
            up + (number * outputs + row) * RANK + across, mask=(row < outputs) & (across < RANK), other=0.0
        )
        down_place = (number * RANK + below) * inputs + column
        down_R_I = tl.load(down + down_place, mask=(below < RANK) & (column < inputs), other=0.0)
        up_O_R, down_R_I = up_O_R.to(base.dtype.element_ty), down_R_I.to(base.dtype.element_ty)
        change_O_I = tl.dot(up_O_R, down_R_I, change_O_I, input_precision="ieee")
    merged_O_I = (base_O_I.to(tl.float32) + change_O_I).to(base.dtype.element_ty)
    if FP8:
        value = merged_O_I.to(tl.float32)
        finite = tl.min(tl.min((tl.abs(value) < float("inf")).to(tl.int32), 1), 0)
        largest = tl.max(tl.max(tl.abs(value), 1), 0) + tl.zeros([SIDE, 1], tl.float32)
        scale = block_scale(largest, POWER_OF_TWO)
        target = tl.multiple_of(tl.load(entry + 1).to(tl.pointer_type(tl.float8e4nv)), ALIGNED)
        tl.store(target + place, e4m3(tl.div_rn(value, tl.broadcast_to(scale, value.shape))), mask=inside)
        told = tl.where(finite == 1, tl.max(tl.max(scale, 1), 0), float("nan"))
        scales = tl.load(entry + 2).to(tl.pointer_type(tl.float32))
        tl.store(scales + tl.program_id(1) * tl.num_programs(0) + tl.program_id(0), told)
    else:
        target = tl.multiple_of(tl.load(entry + 1).to(tl.pointer_type(base.dtype.element_ty)), ALIGNED)
        tl.store(target + place, merged_O_I, mask=inside)


def merger(merges: Sequence[Merge]) -> Callable[[Flat], None]:
    tables = _tables(merges)
    for merge, table_X_4 in zip(merges, tables, strict=True):
        nothing = torch.zeros(_RANKS[0], device=table_X_4.device)
        _launch(merge, table_X_4[:0], nothing, nothing)  # of no matrices, but now it is compiled

    def run(flat: Flat) -> None:
        for merge, table_X_4 in zip(merges, tables, strict=True):
            _launch(merge, table_X_4, flat.tensor(merge.down), flat.tensor(merge.up))

    return run


def _launch(merge: Merge, table_X_4: Tensor, down_M_R_I: Tensor, up_M_O_R: Tensor) -> None:
    _, outputs, inputs = merge.base_M_O_I.shape
    rank, (fewest, most) = merge.down.shape[-2], _RANKS
    _merge[(triton.cdiv(inputs, _SIDE), triton.cdiv(outputs, _SIDE), len(table_X_4))](
        merge.base_M_O_I,
        down_M_R_I,
        up_M_O_R,
        table_X_4,
        outputs,
        inputs,
        RANK=rank,
        AT_ONCE=min(most, max(fewest, triton.next_power_of_2(rank))),
        SIDE=_SIDE,
        ALIGNED=_VECTOR if all(each.data_ptr() % _VECTOR == 0 for each in merge.targets) else 1,
        FP8=bool(merge.scales),
        POWER_OF_TWO=merge.power_of_two,
        num_warps=_WARPS,
        num_stages=1,
    )


def _tables(merges: Sequence[Merge]) -> Sequence[Tensor]:
    """Of each merge, by matrices: the number of the matrix, where its values and where its scales are written to, and
    nothing, because Triton compiles anew for an address that is no multiple of 16. The host waits once for all."""
    if not merges:
        return ()
    rows: list[tuple[int, int, int, int]] = []
    for merge in merges:
        assert all(each.is_contiguous() for each in (merge.base_M_O_I, *merge.targets, *merge.scales))
        places = zip(merge.numbers, merge.targets, merge.scales or merge.targets, strict=True)
        rows += [(number, target.data_ptr(), scales.data_ptr(), 0) for number, target, scales in places]
    table_X_4 = torch.tensor(rows, dtype=torch.int64).to(merges[0].base_M_O_I.device)
    return table_X_4.split([len(merge.numbers) for merge in merges])
