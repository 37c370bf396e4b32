"""Keys and values in FP8 pages."""

import torch
from torch import Tensor

from asyncrl.engines.native.cuda.kernels.shapes import Kernels, Kv
from asyncrl.precision.quantizer import saturated
from tests.support.cuda_cases import Case, cases
from tests.support.cuda_places import Place, both, close

SCALES = [0.03125, 0.015625]


def _kv(place: Place, pages_2_X_K_S_D: Tensor) -> Kv:
    """Values lie by channels."""
    keys, values = pages_2_X_K_S_D.to(torch.float8_e4m3fn).view(torch.uint8)
    pages = torch.stack([keys, values.transpose(2, 3).contiguous().view_as(keys)]).view(torch.float8_e4m3fn)
    return Kv(pages, torch.tensor(SCALES, device=place.device))


def fp8_rotate_and_store(place: Place) -> None:
    """What is stored in FP8 is what would be stored otherwise, rounded; numbers beyond the range are cut off."""
    for case in cases(place):
        turns_2_L_C = place.normal(2, max(case.starts) + case.width, case.heads.dim // 2)
        norm_2_D = 6 * place.normal(2, case.heads.dim, dtype=case.dtype) if case.norm else None

        def run(
            kernels: Kernels,
            case: Case = case,
            turns: Tensor = turns_2_L_C,
            norm: Tensor | None = norm_2_D,
        ) -> tuple[tuple[Tensor, Tensor], Tensor]:
            queries = case.queries(place)
            qkv, zeros = case.qkv(place), torch.zeros_like(case.kv(place, queries))
            kv = _kv(place, zeros)
            kernels.rotate_and_store(qkv, turns, norm, 1e-6, kv, case.heads, queries)
            kernels.rotate_and_store(case.qkv(place), turns, norm, 1e-6, Kv(zeros), case.heads, queries)
            return kv.parts, zeros

        for parts, plain in both(run):
            for held, exact, scale in zip(parts, plain, SCALES, strict=True):
                expected = saturated(exact.float(), scale)
                assert torch.equal(held.float() * scale, expected)
                assert expected.abs().max() > 0


def fp8_attend(place: Place) -> None:
    for case in cases(place):
        queries = case.queries(place)
        qkv, pages = case.qkv(place), case.kv(place, queries)
        kv = _kv(place, (pages.float().transpose(0, -1) / torch.tensor(SCALES, device=place.device)).transpose(0, -1))

        def run(kernels: Kernels, case: Case = case, qkv: Tensor = qkv, kv: Kv = kv) -> Tensor:
            out_T_X = qkv.new_full((qkv.shape[0], case.heads.queries * case.heads.dim), 7.0)
            kernels.attend(qkv, kv, case.heads, case.queries(place), out_T_X)
            return out_T_X

        found, expected = both(run)
        close(found, expected, 1e-2 if case.dtype == torch.bfloat16 else 3e-3)


def fp8_attend_ignores_what_lies_behind_the_end(place: Place) -> None:
    from asyncrl.engines.native.cuda.kernels import triton_kernels

    case = cases(place)[0]
    queries = case.queries(place)
    qkv, pages = case.qkv(place), case.kv(place, queries)
    outs: list[Tensor] = []
    for garbage in (0.0, float("nan")):
        last, row = int(queries.table_N_P[0, case.starts[-1] // case.page]), case.starts[-1] % case.page
        pages[:, last, :, row + 1 :] = garbage
        out_T_X = qkv.new_zeros(len(qkv), case.heads.queries * case.heads.dim)
        triton_kernels.KERNELS.attend(qkv, _kv(place, pages), case.heads, queries, out_T_X)
        outs.append(out_T_X)
    assert torch.equal(outs[0], outs[1])
