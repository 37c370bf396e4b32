"""Many tensors to their places by one launch, at the speed at which the memory copies one piece.

A call for each takes the host longer than the device needs, and each ends with a moment in which the memory idles.
"""

from collections.abc import Callable, Sequence

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from asyncrl.engines.native.cuda.kernels.shapes import Move

_WORD = 8
_AT_ONCE = 2 * _WORD
"""Bytes that a thread can move with one instruction, where they lie so."""
_WORDS = 8192
"""That one program moves. It has them all on the way at the same time."""

_WARPS = 16


@triton.jit
def _move(table, BLOCK: tl.constexpr):
    entry = table + 3 * tl.program_id(0).to(tl.int64)
    words = tl.multiple_of(tl.load(entry + 2), 2)
    source = tl.multiple_of(tl.load(entry).to(tl.pointer_type(tl.int64)), 16)
    target = tl.multiple_of(tl.load(entry + 1).to(tl.pointer_type(tl.int64)), 16)
    place = tl.arange(0, BLOCK)
    inside = place < words
    x = tl.load(source + place, mask=inside)
    tl.store(target + place, x, mask=inside)


def mover(moves: Sequence[Move]) -> Callable[[], None]:
    """The few that are not a matter of whole words, as single numbers are, each have a launch of their own."""
    whole, others = [each for each in moves if _is_whole(each)], [each for each in moves if not _is_whole(each)]
    table_X_3 = torch.from_numpy(_table(whole)).to(moves[0].target.device) if whole else None
    if table_X_3 is not None:
        _launch(torch.zeros_like(table_X_3[:1]))  # moves nothing, but now it is compiled

    def run() -> None:
        if table_X_3 is not None:
            _launch(table_X_3)
        for source, target in others:
            target.copy_(source)

    return run


def _launch(table_X_3: Tensor) -> None:
    _move[(table_X_3.shape[0],)](table_X_3, BLOCK=_WORDS, num_warps=_WARPS)


def _is_whole(move: Move) -> bool:
    source, target = move
    alike = (source.dtype, source.device) == (target.dtype, target.device)
    alike = alike and source.is_contiguous() and target.is_contiguous()
    return alike and not any(each % _AT_ONCE for each in (source.data_ptr(), target.data_ptr(), source.nbytes))


def _table(moves: Sequence[Move]) -> np.ndarray[tuple[int, ...], np.dtype[np.int64]]:
    """Where each program reads from and writes to, and how many words."""
    parts: list[np.ndarray[tuple[int, ...], np.dtype[np.int64]]] = []
    for source, target in moves:
        begin_X = np.arange(0, source.nbytes // _WORD, _WORDS)
        words_X = np.minimum(source.nbytes // _WORD - begin_X, _WORDS)
        parts.append(np.stack([source.data_ptr() + _WORD * begin_X, target.data_ptr() + _WORD * begin_X, words_X], 1))
    return np.concatenate(parts)
