"""The kernels for FP8: against plain torch, and against what the definition of the numbers gives in fp64."""

import torch
from torch import Tensor

from asyncrl.engines.native.cuda.fp8 import quantized_matrix
from asyncrl.engines.native.cuda.kernels.shapes import Codes, Fp8Matrix, Kernels
from asyncrl.models.names import Part
from asyncrl.precision.quantizer import ACTIVATION_BLOCK, WEIGHT_BLOCK, Quantized, dequantize, quantize
from tests.support.cuda_places import TORCH, Place, both


def _activations(place: Place) -> list[Tensor]:
    sizes = [(3, 4096), (1, 12_288)] if place.large else [(3, 300), (2, 128)]
    found = [place.normal(*size, dtype=dtype) for size in sizes for dtype in (torch.float32, torch.bfloat16)]
    found[0][0] = 0.0
    found[0][1, :5] = torch.tensor([1e30, -1e30, 3.0, 0.0, -0.0])
    return found


def _same(codes: Codes, x_T_I: Tensor, power_of_two: bool) -> None:
    """Bit for bit what the quantizer's definition gives."""
    expected = quantize(x_T_I, ACTIVATION_BLOCK, power_of_two=power_of_two)
    assert torch.equal(codes.scales_B_T.t(), expected.scales_B_B)
    assert torch.equal(codes.values_T_I.view(torch.uint8), expected.values_N_C.view(torch.uint8))


def fp8_quantize(place: Place) -> None:
    for x_T_I in _activations(place):
        for power_of_two in (False, True):

            def run(kernels: Kernels, x: Tensor = x_T_I, power_of_two: bool = power_of_two) -> Codes:
                codes = Codes.of(x)
                kernels.quantize(x, codes, power_of_two)
                return codes

            for codes in both(run):
                _same(codes, x_T_I, power_of_two)


def fp8_behind_norm_and_gating(place: Place) -> None:
    """One rounding of the last bit before FP8 may become a whole step of FP8, so products are compared."""
    for x_T_I in (
        place.normal(5, 4096 if place.large else 200, dtype=dtype) for dtype in (torch.float32, torch.bfloat16)
    ):
        weight_I = place.normal(x_T_I.shape[1], dtype=x_T_I.dtype)

        def norm(kernels: Kernels, x: Tensor = x_T_I, weight: Tensor = weight_I) -> Tensor:
            codes = Codes.of(x)
            kernels.rms_norm_quantized(x, weight, 1e-6, codes, False)
            return _back(codes)

        def gate(kernels: Kernels, x: Tensor = x_T_I) -> Tensor:
            codes = Codes.of(x[:, : x.shape[1] // 2])
            kernels.gated_quantized(x, codes, False)
            return _back(codes)

        for run in (norm, gate):
            found, expected = both(run)
            tolerance = 0.01 if place.large or x_T_I.dtype == torch.float32 else 0.03  # the interpreter cuts bf16 off
            assert float((found - expected).norm() / expected.norm()) < tolerance


def _back(codes: Codes) -> Tensor:
    return dequantize(Quantized(codes.values_T_I, codes.scales_B_T.t(), ACTIVATION_BLOCK))


def _matrix(weight_O_I: Tensor, rows: list[int]) -> Fp8Matrix:
    return quantized_matrix(weight_O_I, [Part(str(i), count) for i, count in enumerate(rows)], power_of_two=False)


def fp8_weights(place: Place) -> None:
    """Sizes that are no multiples of 128, zeros, and what is not finite."""
    from asyncrl.precision.triton_quantizer import quantize_blocks

    for rows, columns in [(4096, 1024), (131, 257)] if place.large else [(131, 130)]:
        weight_O_I = place.normal(rows, columns, dtype=torch.bfloat16)
        weight_O_I[:128, :128] = 0.0
        for power_of_two in (False, True):
            values_O_I, scales_B_B = quantize_blocks(weight_O_I, power_of_two=power_of_two)
            expected = quantize(weight_O_I.cpu(), WEIGHT_BLOCK, power_of_two=power_of_two)
            assert torch.equal(scales_B_B.cpu(), expected.scales_B_B)
            assert torch.equal(values_O_I.cpu().view(torch.uint8), expected.values_N_C.view(torch.uint8))
        weight_O_I[rows - 1, columns - 1] = torch.inf
        assert int(quantize_blocks(weight_O_I, power_of_two=False)[1].isnan().sum()) == 1


def fp8_product(place: Place) -> None:
    """Few and many tokens, inputs that are split or no multiples of 128, projections whose blocks begin anywhere."""
    if place.large:
        shapes = [(tokens, 4096, [4096, 1024, 1024]) for tokens in (1, 7, 16, 64, 130, 256, 1024)]
        shapes += [
            (4, 12_288, [4096]),
            (256, 12_288, [4096]),
            (256, 4096, [12_288, 12_288]),
            (40, 576, [576, 192, 192]),
        ]
    else:
        shapes = [(1, 300, [100, 30]), (17, 1100, [60]), (70, 128, [128, 128])]
    for tokens, inputs, rows in shapes:
        weight_O_I = place.normal(sum(rows), inputs) * 0.02
        weight_O_I[: rows[0]] *= 3.0
        bias_O, addend_T_O = place.normal(sum(rows)), place.normal(tokens, sum(rows)) * 0.1
        matrix, x_T_I = _matrix(weight_O_I, rows), place.normal(tokens, inputs)
        for bias, addend in ((None, None), (bias_O, None), (None, addend_T_O)):

            def run(
                kernels: Kernels,
                x: Tensor = x_T_I,
                matrix: Fp8Matrix = matrix,
                bias: Tensor | None = bias,
                addend: Tensor | None = addend,
            ) -> Tensor:
                codes = Codes.of(x)
                TORCH.quantize(x, codes, False)
                out_T_O = x.new_full((len(x), len(matrix.values_O_I)), 7.0) if addend is None else addend.clone()
                kernels.fp8_product(codes, matrix, bias, None if addend is None else out_T_O, out_T_O)
                return out_T_O

            exact = dequantize(quantize(x_T_I, ACTIVATION_BLOCK)).double() @ _dense(weight_O_I, rows).double().t()
            exact += (0.0 if bias is None else bias.double()) + (0.0 if addend is None else addend.double())
            for found in both(run):  # Hopper adds FP8 products in about 14 bits
                assert float((found.double() - exact).norm() / exact.norm()) < (1e-3 if place.large else 1e-5)


def _dense(weight_O_I: Tensor, rows: list[int]) -> Tensor:
    return torch.cat([dequantize(quantize(part, WEIGHT_BLOCK)) for part in weight_O_I.split(rows)])


def fp8_product_in_bf16(place: Place) -> None:
    tokens, inputs, rows = (256, 4096, [6144]) if place.large else (5, 256, [96])
    matrix, x_T_I = _matrix(place.normal(sum(rows), inputs), rows), place.normal(tokens, inputs, dtype=torch.bfloat16)

    def run(kernels: Kernels) -> Tensor:
        codes, out_T_O = Codes.of(x_T_I), x_T_I.new_zeros(tokens, sum(rows))
        TORCH.quantize(x_T_I, codes, True)
        kernels.fp8_product(codes, matrix, None, None, out_T_O)
        return out_T_O

    found, expected = both(run)
    assert float((found - expected).norm() / expected.norm()) < 5e-3
