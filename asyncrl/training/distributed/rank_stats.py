"""What the ranks tell each other at the end of a step, so that all of them count the same."""

from dataclasses import dataclass

import msgspec
import numpy as np
import torch
from torch import Tensor

from asyncrl.training.diagnostics import Observed
from asyncrl.training.distributed.ranks import Ranks


@dataclass(frozen=True, slots=True)
class RankStats:
    """Of one rank's share, or of all."""

    loss: float
    critic_loss: float
    fault: str
    sums: dict[str, float]
    observed: list[Observed]


class _Message(msgspec.Struct, frozen=True, array_like=True):
    loss: float
    critic_loss: float
    fault: str
    sums: dict[str, float]
    observed: list[tuple[bytes, bytes, list[str]]]


def of_all(ranks: Ranks, mine: RankStats) -> RankStats:
    """Everything added up, the same on every rank."""
    observed = [(_packed(part.columns_5_L), _packed(part.columns_3_S), part.precisions) for part in mine.observed]
    message = _Message(mine.loss, mine.critic_loss, mine.fault, mine.sums, observed)
    told = [msgspec.msgpack.decode(found, type=_Message) for found in ranks.exchange(msgspec.msgpack.encode(message))]
    sums: dict[str, float] = {}
    for name, value in (pair for each in told for pair in each.sums.items()):
        sums[name] = sums.get(name, 0.0) + value
    return RankStats(
        loss=sum(each.loss for each in told),
        critic_loss=sum(each.critic_loss for each in told),
        fault=next((each.fault for each in told if each.fault), ""),
        sums=sums,
        observed=[
            Observed(_unpacked(tokens, 5), _unpacked(samples, 3), precisions)
            for each in told
            for tokens, samples, precisions in each.observed
        ],
    )


def _packed(columns: Tensor) -> bytes:
    return columns.detach().float().cpu().numpy().tobytes()


def _unpacked(data: bytes, rows: int) -> Tensor:
    return torch.from_numpy(np.frombuffer(data, np.float32).reshape(rows, -1).copy())
