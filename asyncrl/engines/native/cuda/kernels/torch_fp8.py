"""The kernels for FP8 in plain torch."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from asyncrl.engines.native.cuda.kernels.shapes import Codes, Fp8Matrix
from asyncrl.precision.quantizer import SIDE, activation_codes


def quantize(x_T_I: Tensor, codes: Codes, power_of_two: bool) -> None:
    values_T_I, scales_T_B = activation_codes(x_T_I, power_of_two=power_of_two)
    codes.values_T_I.copy_(values_T_I)
    codes.scales_B_T.copy_(scales_T_B.t())


class Quantizing(NamedTuple):
    """What other kernels compute, quantized."""

    plain_rms_norm: Callable[[Tensor, Tensor, float, Tensor], None]
    plain_gated: Callable[[Tensor, Tensor], None]

    def rms_norm(self, x_T_E: Tensor, weight_E: Tensor, eps: float, codes: Codes, power_of_two: bool) -> None:
        normed_T_E = torch.empty_like(x_T_E)
        self.plain_rms_norm(x_T_E, weight_E, eps, normed_T_E)
        quantize(normed_T_E, codes, power_of_two)

    def gated(self, gate_up_T_X: Tensor, codes: Codes, power_of_two: bool) -> None:
        y_T_F = gate_up_T_X.new_empty(codes.values_T_I.shape)
        self.plain_gated(gate_up_T_X, y_T_F)
        quantize(y_T_F, codes, power_of_two)


def fp8_product(
    codes: Codes, matrix: Fp8Matrix, bias_O: Tensor | None, addend_T_O: Tensor | None, out_T_O: Tensor
) -> None:
    inputs = codes.values_T_I.shape[1]
    x_T_I = codes.values_T_I.float() * codes.scales_B_T.t().repeat_interleave(SIDE, 1)[:, :inputs]
    scales_O_I = matrix.scales_X_B[matrix.block_O.long()].repeat_interleave(SIDE, 1)[:, :inputs]
    total_T_O = x_T_I @ (matrix.values_O_I.float() * scales_O_I).t()
    for more in (bias_O, addend_T_O):
        if more is not None:
            total_T_O += more.float()
    out_T_O.copy_(total_T_O)
