"""cuBLAS's product of FP8 matrices with scales by blocks, for as many tokens as it takes to be the faster one.

From how many tokens on that is, is measured for each shape when an engine starts; where this torch or this GPU has no
such product, Triton's is used throughout.
"""

import logging
from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from asyncrl.engines.native.cuda.kernels.shapes import Codes, Fp8Matrix

log = logging.getLogger(__name__)
_TOKENS = (64, 128, 256, 512, 2048)
_RUNS = 10
_NEVER = 1 << 40
_RECIPES = [4], [5]
"""Scales of 1 x 128 and of 128 x 128, as torch numbers them (`torch.nn.functional.ScalingType`)."""
_from: dict[tuple[int, int], int] = {}
"""Tokens by outputs and inputs."""
Product = Callable[[Codes, Fp8Matrix, Tensor], object]


def takes(codes: Codes, matrix: Fp8Matrix) -> bool:
    tokens = codes.values_T_I.shape[0]
    return tokens % 16 == 0 and tokens >= _from.get(_shape(matrix), _NEVER)


def multiply(codes: Codes, matrix: Fp8Matrix, out_T_O: Tensor) -> bool:
    """Into bf16. False: it has no such product, here or for this shape, and is not asked again."""
    try:
        torch.ops.aten._scaled_mm_v2.out(
            codes.values_T_I,
            matrix.values_O_I.t(),
            *([codes.scales_B_T.t()], _RECIPES[0], []),
            *([matrix.scales_X_B.t()], _RECIPES[1], []),
            None,
            torch.bfloat16,
            out=out_T_O,
        )
    except (AttributeError, RuntimeError) as error:
        log.info("cuBLAS has no FP8 product with scales by blocks for this: %s", str(error).splitlines()[0])
        _from[_shape(matrix)] = _NEVER
        return False
    return True


def prefer_where_faster(matrices: Iterable[Fp8Matrix], other: Product) -> None:
    """Measure against another product, once for each shape."""
    for matrix in matrices:
        if _shape(matrix) in _from or not matrix.regular or matrix.scales_X_B.shape[1] % 4:
            continue
        found = _NEVER
        for tokens in reversed(_TOKENS):
            if not _faster(matrix, tokens, other):
                break
            found = tokens
        _from[_shape(matrix)] = found
        log.info(
            "FP8 products of %d x %d: cuBLAS from %s tokens on", *_shape(matrix), found if found < _NEVER else "no"
        )


def _faster(matrix: Fp8Matrix, tokens: int, other: Product) -> bool:
    outputs, inputs = _shape(matrix)
    codes = Codes.empty(tokens, inputs, matrix.values_O_I.device)
    codes.values_T_I.copy_(torch.ones_like(codes.values_T_I, dtype=torch.bfloat16))
    codes.scales_B_T.uniform_(0.5, 1.5)
    ours, theirs = (codes.scales_B_T.new_empty(tokens, outputs, dtype=torch.bfloat16) for _ in range(2))
    other(codes, matrix, ours)
    if not multiply(codes, matrix, theirs):
        return False
    gap = float((ours.float() - theirs.float()).norm() / ours.float().norm().clamp(min=1e-30))
    if not gap < 0.01:
        log.warning("cuBLAS's FP8 product is off by %.2g and is not used", gap)
        return False
    return _seconds(multiply, codes, matrix, theirs) < _seconds(other, codes, matrix, ours)


def _seconds(product: Product, codes: Codes, matrix: Fp8Matrix, out_T_O: Tensor) -> float:
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    product(codes, matrix, out_T_O)
    begin.record()
    for _ in range(_RUNS):
        product(codes, matrix, out_T_O)
    end.record()
    end.synchronize()
    return begin.elapsed_time(end)


def _shape(matrix: Fp8Matrix) -> tuple[int, int]:
    outputs, inputs = matrix.values_O_I.shape
    return outputs, inputs
