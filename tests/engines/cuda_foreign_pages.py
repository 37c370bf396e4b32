"""Keys and values in pages of vLLM: side by side in a token's row, by heads or by tokens."""

import torch
from torch import Tensor

from asyncrl.engines.native.cuda.kernels.shapes import Heads
from tests.engines.cuda_fp8_pages import SCALES
from tests.support.cuda_places import Place, close

ORDERS = {"HND": (0, 1, 2, 3), "NHD": (0, 2, 1, 3)}
"""How the axes pages, heads, tokens and channels lie in memory; both are their own inverse."""
PAGE = 64
QUERY_SCALE = 0.02


def _cases(place: Place) -> list[tuple[Heads, list[int], torch.dtype]]:
    """Length 0: padding of a captured batch."""
    if not place.large:
        return [
            (Heads(4, 2, 32), [1, 64, 0, 65], torch.float32),
            (Heads(6, 2, 40), [130, 0], torch.float16),
        ]
    return [
        (Heads(32, 8, 128), [1, 63, 64, 65, 0, 700, 2000], torch.bfloat16),
        (Heads(32, 8, 128), [10 * i for i in range(128)], torch.bfloat16),
        (Heads(14, 2, 64), [300, 0], torch.bfloat16),
        (Heads(16, 2, 80), [300, 1], torch.bfloat16),
        (Heads(4, 2, 32), [300, 0], torch.float32),
    ]


def _stored(x_X_K_S_2D: Tensor, order: str) -> Tensor:
    """The same numbers, in memory in that order."""
    return x_X_K_S_2D.permute(ORDERS[order]).contiguous().permute(ORDERS[order])


def _attended(query_N_H_D: Tensor, pages_X_K_S_2D: Tensor, lengths: list[int], table_N_P: Tensor) -> Tensor:
    """In plain torch, row by row."""
    out_N_H_D = torch.zeros(query_N_H_D.shape, device=query_N_H_D.device)
    for row, length in enumerate(lengths):
        if length:
            text_K_T_2D = pages_X_K_S_2D[table_N_P[row].long()].float().transpose(0, 1).flatten(1, 2)[:, :length]
            keys, values = text_K_T_2D.repeat_interleave(query_N_H_D.shape[1] // len(text_K_T_2D), 0).chunk(2, -1)
            score_H_T = torch.einsum("hd,htd->ht", query_N_H_D[row].float(), keys) * 0.1
            out_N_H_D[row] = torch.einsum("ht,htd->hd", score_H_T.softmax(-1), values)
    return out_N_H_D


def _narrowed(x: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """The codes, and the numbers that they stand for."""
    codes = (x.float() / scale).to(torch.float8_e4m3fn)
    return codes, codes.float() * scale


def _without_others(pages_X_K_S_2D: Tensor, lengths: list[int], table_N_P: Tensor) -> Tensor:
    """What lies behind the end of a row is no number, and neither is the page that padding would begin with."""
    held_X_K_S_2D = pages_X_K_S_2D.to(torch.float32, copy=True)
    for row, length in enumerate(lengths):
        held_X_K_S_2D[table_N_P[row, length // PAGE].long(), :, length % PAGE :] = float("nan")
    held_X_K_S_2D[0] = float("nan")
    return held_X_K_S_2D.to(pages_X_K_S_2D.dtype)


def attend_last_of_foreign_pages(place: Place) -> None:
    """Neither pages nor queries in FP8, pages alone, or both, as FlashAttention has it."""
    from asyncrl.engines.native.cuda.kernels.attention import PLAN, Scales, attend_last

    plan = PLAN if place.large else PLAN._replace(programs=8)  # rows in one part, and in two
    of_keys, of_values, of_queries = (torch.tensor(scale, device=place.device) for scale in (*SCALES, QUERY_SCALE))
    for heads, lengths, dtype in _cases(place):
        rows, each = len(lengths), max(lengths) // PAGE + 1
        table_N_P = 1 + torch.randperm(rows * each, generator=torch.Generator().manual_seed(0)).view(rows, each)
        table_N_P = table_N_P.to(place.device, torch.int32)
        # Queries are a part of what a layer computes at once; quantized, they are a tensor of their own.
        query_N_H_D = place.normal(rows + 1, heads.all, heads.dim, dtype=dtype)[:, : heads.queries]
        pages = place.normal(1 + rows * each, heads.keys, PAGE, 2 * heads.dim, dtype=dtype)
        codes, exact = _narrowed(pages, torch.stack([of_keys, of_values]).repeat_interleave(heads.dim))
        narrow_N_H_D, exact_N_H_D = _narrowed(query_N_H_D, of_queries)
        kinds = (
            (None, query_N_H_D, query_N_H_D, pages, pages.float()),
            (Scales(of_keys, of_values), query_N_H_D, query_N_H_D, codes, exact),
            (Scales(of_keys, of_values, of_queries), narrow_N_H_D, exact_N_H_D, codes, exact),
        )
        for scales, given_N_H_D, meant_N_H_D, stored, meant in kinds:
            expected = _attended(meant_N_H_D[:rows], meant, lengths, table_N_P)
            for order in ORDERS:
                held = _stored(_without_others(stored, lengths, table_N_P), order)
                out_N_H_D = query_N_H_D.new_full((rows, heads.queries, heads.dim), 7.0)
                attend_last(given_N_H_D, held, scales, place.integers(lengths), table_N_P, 0.1, out_N_H_D, plan)
                close(out_N_H_D, expected, (1e-2 if dtype == torch.bfloat16 else 3e-3) if scales else None)
                assert not out_N_H_D[torch.tensor(lengths) == 0].any(), "padding gives zeros"
