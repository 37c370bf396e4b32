"""Windows from finished samples, by one forward of their target. Of a tree each path is read by itself, and gives what
the paths before it lack: tokens of a window follow one another."""

from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from asyncrl.data.episodes import Path, tree
from asyncrl.drafting.heads import HeadConfig
from asyncrl.drafting.windows import Window
from asyncrl.models.decoder import Decoder
from asyncrl.models.packed import packed_attention
from asyncrl.models.policy import Taps
from asyncrl.types import GIVEN, Ints, Slot, Trajectory

BATCH_TOKENS = 4096


def cut(
    *,
    slot: Slot,
    version: int,
    tokens: Ints,
    versions: Ints,
    hidden_T_E: Tensor,
    taps: Sequence[Tensor],
    longest: int,
    dtype: torch.dtype,
    before: int = 0,
    answer_length: int,
) -> Window:
    """A sample's window: its last `longest` tokens but the very last, of which no hidden state is ever needed.

    `hidden_T_E` and `taps` have one row for each token but the last; they may have one more. So many tokens of the
    sample were `before` these.
    """
    sampled = versions != GIVEN
    stop = len(tokens) - 1
    start = max(0, stop - longest)
    here = slice(start, stop)
    return Window(
        slot=slot,
        version=version,
        answer_length=answer_length,
        start=before + start,
        tokens_T=torch.from_numpy(tokens[here].astype(np.int32)),
        sampled_T=torch.from_numpy(sampled[start + 1 : stop + 1].copy()),
        hidden_T_E=hidden_T_E[here].detach().to("cpu", dtype, copy=True),
        taps_T_R=torch.cat([tap[here] for tap in taps], -1).detach().to("cpu", dtype) if taps else None,
    )


@torch.no_grad()
def read_windows(
    model: Decoder,
    config: HeadConfig,
    trajectories: Iterable[Trajectory],
    *,
    version: int = 0,
    longest: int,
    dtype: torch.dtype = torch.float32,
) -> Iterator[Window]:
    """One window for each trajectory, its hidden states those of `model`."""
    device = model.norm.device
    for some in _batches(map(_paths, trajectories)):
        lengths = [len(path.places) for _, path in some]
        tokens = [trajectory.tokens[path.places] for trajectory, path in some]
        tokens_T = torch.from_numpy(np.concatenate(tokens).astype(np.int64))
        positions_T = torch.cat([torch.arange(length) for length in lengths])
        taps = Taps(config.taps)
        attend = packed_attention(lengths, device)
        hidden_T_E = model(tokens_T.to(device), positions_T.to(device), attend, taps)
        parts = zip(*(x.split(lengths) for x in (hidden_T_E, *taps.found_T_E)), strict=True)
        for (trajectory, (places, shared)), (hidden, *tapped) in zip(some, parts, strict=True):
            own = places[shared:]
            if len(own) > 1:
                yield cut(
                    slot=trajectory.slot,
                    version=version,
                    tokens=trajectory.tokens[own],
                    versions=trajectory.versions[own],
                    hidden_T_E=hidden[shared:],
                    taps=[tap[shared:] for tap in tapped],
                    longest=longest,
                    dtype=dtype,
                    before=shared,
                    answer_length=trajectory.sampled_tokens,
                )


def _paths(trajectory: Trajectory) -> list[tuple[Trajectory, Path]]:
    return [(trajectory, path) for path in tree(sum(map(len, trajectory.segments)), trajectory.branches).paths]


def _batches(read: Iterable[list[tuple[Trajectory, Path]]]) -> Iterator[list[tuple[Trajectory, Path]]]:
    held: list[tuple[Trajectory, Path]] = []
    tokens = 0
    for paths in read:
        held += paths
        tokens += sum(len(path.places) for _, path in paths)
        if tokens >= BATCH_TOKENS:
            yield held
            held, tokens = [], 0
    if held:
        yield held
