"""Windows from finished samples, by one forward of their target."""

from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

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
) -> Window:
    """A sample's window: its last `longest` tokens but the very last, of which no hidden state is ever needed.

    `hidden_T_E` and `taps` have one row for each token but the last; they may have one more.
    """
    sampled = versions != GIVEN
    stop = len(tokens) - 1
    start = max(0, stop - longest)
    here = slice(start, stop)
    return Window(
        slot=slot,
        version=version,
        answer_length=int(sampled.sum()),
        start=start,
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
    for some in _batches(trajectories):
        lengths = [len(trajectory.tokens) for trajectory in some]
        tokens_T = torch.from_numpy(np.concatenate([trajectory.tokens for trajectory in some]).astype(np.int64))
        positions_T = torch.cat([torch.arange(length) for length in lengths])
        taps = Taps(config.taps)
        attend = packed_attention(lengths, device)
        hidden_T_E = model(tokens_T.to(device), positions_T.to(device), attend, taps)
        parts = zip(*(x.split(lengths) for x in (hidden_T_E, *taps.found_T_E)), strict=True)
        for trajectory, (hidden, *tapped) in zip(some, parts, strict=True):
            yield cut(
                slot=trajectory.slot,
                version=version,
                tokens=trajectory.tokens,
                versions=trajectory.versions,
                hidden_T_E=hidden,
                taps=tapped,
                longest=longest,
                dtype=dtype,
            )


def _batches(trajectories: Iterable[Trajectory]) -> Iterator[list[Trajectory]]:
    held: list[Trajectory] = []
    tokens = 0
    for trajectory in trajectories:
        held.append(trajectory)
        tokens += sum(map(len, trajectory.segments))
        if tokens >= BATCH_TOKENS:
            yield held
            held, tokens = [], 0
    if held:
        yield held
