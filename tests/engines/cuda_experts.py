"""The kernels for experts: against plain torch, and what sorting promises."""

from itertools import product

import torch
from torch import Tensor

from asyncrl.engines.native.cuda.fp8 import quantized_matrix
from asyncrl.engines.native.cuda.kernels.shapes import Codes, Fp8Matrix, Kernels, SortedRows
from asyncrl.models.names import Part
from tests.support.cuda_places import TORCH, Place, both, close

CASES = ((1, 5, 2), (3, 4, 4), (40, 6, 2), (300, 3, 2))
"""Tokens, experts, experts of a token: tiles of 16, 32 and more rows, experts with none, and more than one chunk."""


def _cases(place: Place) -> tuple[tuple[int, int, int], ...]:
    return ((1, 128, 8), (32, 128, 8), (256, 128, 8), (2048, 128, 8), (700, 5, 3)) if place.large else CASES


def expert_choice(place: Place) -> None:
    for tokens, experts, active in _cases(place):
        for renormalized in (False, True):
            logits_T_X = place.normal(tokens, experts)

            def run(
                kernels: Kernels, logits: Tensor = logits_T_X, active: int = active, renormalized: bool = renormalized
            ) -> Tensor:
                chosen_T_C = torch.empty(len(logits), active, dtype=torch.int32, device=logits.device)
                weight_T_C = torch.empty(len(logits), active, device=logits.device)
                kernels.choose(logits, renormalized, chosen_T_C, weight_T_C)
                return torch.stack([chosen_T_C.float(), weight_T_C])

            found, expected = both(run)
            assert torch.equal(found[0], expected[0])
            torch.testing.assert_close(found[1], expected[1], rtol=1e-5, atol=1e-6)


def _chosen(place: Place, tokens: int, experts: int, active: int) -> Tensor:
    """The last expert is nobody's, if there is another one for each place."""
    scores_T_X = place.normal(tokens, experts)
    if experts > active:
        scores_T_X[:, -1] = -100.0
    return scores_T_X.topk(active).indices.int()


def _empty(chosen_T_C: Tensor, experts: int, *, fp8: bool) -> SortedRows:
    tokens, active = chosen_T_C.shape
    return SortedRows.empty(tokens, active, experts, chosen_T_C.device, fp8=fp8)


def expert_sorting(place: Place) -> None:
    for (tokens, experts, active), fp8 in product(_cases(place), (False, True)):
        chosen_T_C = _chosen(place, tokens, experts, active)

        def run(kernels: Kernels, chosen: Tensor = chosen_T_C, experts: int = experts, fp8: bool = fp8) -> SortedRows:
            rows = _empty(chosen, experts, fp8=fp8)
            rows.row_P.fill_(-7)
            rows.expert_B.fill_(-7)
            kernels.sort(chosen, experts, rows)
            return rows

        found, expected = both(run)
        assert torch.equal(found.expert_B, expected.expert_B)
        used = int((expected.expert_B >= 0).sum()) * found.tile
        assert torch.equal(found.row_P[:used], expected.row_P[:used])
        real = found.row_P[:used][found.row_P[:used] < found.rows]
        assert torch.equal(real.sort().values, torch.arange(found.rows, device=real.device)), "each row once"
        owner = found.expert_B[: used // found.tile].repeat_interleave(found.tile)[found.row_P[:used] < found.rows]
        assert torch.equal(owner, chosen_T_C.flatten()[real.long()])


def expert_products(place: Place) -> None:
    hidden, width = (2048, 768) if place.large else (200, 72)
    half = torch.bfloat16 if place.large else torch.float16  # of bf16 the interpreter has no products
    for tokens, experts, active in _cases(place):
        for dtype in (torch.float32, half):
            chosen_T_C = _chosen(place, tokens, experts, active)
            x_T_E = place.normal(tokens, hidden, dtype=dtype)
            up_X_E = place.normal(experts * width, hidden, dtype=dtype) / hidden**0.5
            down_X_F = place.normal(experts * hidden, width, dtype=dtype) / width**0.5
            weight_T_C = place.normal(tokens, active).softmax(-1)
            for fp8 in (False, True):
                up, down = (_matrix(each, experts) if fp8 else each for each in (up_X_E, down_X_F))

                def run(
                    kernels: Kernels,
                    x: Tensor = x_T_E,
                    up: Tensor | Fp8Matrix = up,
                    down: Tensor | Fp8Matrix = down,
                    chosen: Tensor = chosen_T_C,
                    weight: Tensor = weight_T_C,
                    experts: int = experts,
                ) -> Tensor:
                    rows = _empty(chosen, experts, fp8=isinstance(up, Fp8Matrix))
                    TORCH.sort(chosen, experts, rows)
                    y_P_F = x.new_zeros(rows.row_P.shape[0], width)
                    kernels.expert_product(_codes(x, up), up, rows, y_P_F, first=True)
                    y_R_E = x.new_full((rows.rows, hidden), float("nan"))
                    kernels.expert_product(_codes(y_P_F, down), down, rows, y_R_E, first=False)
                    out_T_E = x.clone()
                    kernels.add_weighted(y_R_E, weight, out_T_E)
                    return out_T_E

                found, expected = both(run)
                if fp8:  # the last bit of the first product may be a whole step of FP8
                    gap = (found.float() - expected.float()).norm() / expected.float().norm()
                    assert gap < (0.01 if place.large or dtype == torch.float32 else 0.03), float(gap)
                else:
                    close(found, expected)


def _matrix(weight_O_I: Tensor, experts: int) -> Fp8Matrix:
    rows = weight_O_I.shape[0] // experts
    parts = [Part(name=str(number), rows=rows) for number in range(experts)]
    return quantized_matrix(weight_O_I, parts, power_of_two=False)


def _codes(x_T_I: Tensor, matrix: Tensor | Fp8Matrix) -> Tensor | Codes:
    if not isinstance(matrix, Fp8Matrix):
        return x_T_I
    codes = Codes.of(x_T_I)
    TORCH.quantize(x_T_I, codes, False)
    return codes
