"""How far the tokens of a step are off-policy. rho = pi / mu of each token, before any truncation.

    ess           (sum rho)^2 / (n sum rho^2)       1 on-policy; the share of the tokens that the step is worth
    ess_used      the same of the weights as used   truncated, and 0 where rejected: a single absurd token does little
    mismatch_kl   mean(log mu - log pi)             k1, of either sign
    mismatch_k3   mean(rho - 1 - log rho)           never negative
    drift         mean((log rho)^2)                 what the correction's `max_drift` bounds
    chi2_token    mean(rho^2) - 1                   chi2_sequence the same with the product over each sample
    ppl_gap       mean over samples of |mean log mu - mean log pi|
    measured_tokens   how many tokens these figures are about; 0 where no sample of a step had an advantage

Of experts, as means over the layers; a load counts the tokens that samples were predicted from:

    expert_load_max   load of the busiest over the mean     1 where all are equally busy
    expert_idle       share of the experts without a token

What a step measures is kept as it comes and worked up once at its end: percentiles do not add up.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import msgspec
import numpy as np
import torch
from torch import Tensor

from asyncrl.algorithms.base import Samples
from asyncrl.algorithms.corrections import LOG_RATIO_BOUND, Corrected
from asyncrl.errors import RankError
from asyncrl.training.distributed.ranks import Ranks
from asyncrl.training.report import OffPolicy, Share
from asyncrl.types import Slot

SHOWN_TOKENS = 4096
"""Of the sample that is most off-policy."""
PERCENTILES = (0.01, 0.5, 0.99)
NOTHING_MEASURED = {
    "rho_mean": 1.0,
    "rho_std": 0.0,
    "rho_min": 1.0,
    "rho_max": 1.0,
    **{f"rho_p{round(100 * p)}": 1.0 for p in PERCENTILES},
    "ess": 1.0,
    "mismatch_kl": 0.0,
    "mismatch_k3": 0.0,
    "mismatch_abs": 0.0,
    "drift": 0.0,
    "chi2_token": 0.0,
    "chi2_sequence": 0.0,
    "ppl_gap": 0.0,
    "truncated_fraction": 0.0,
    "rejected_fraction": 0.0,
    "rejected_samples": 0.0,
    "ess_used": 1.0,
}


@dataclass(frozen=True, slots=True)
class Observed:
    """One packed batch: columns per token and per sample."""

    columns_5_L: Tensor
    """log rho, age, truncated, rejected, weight."""
    columns_3_S: Tensor
    """Sum of log rho, tokens, share of the tokens rejected."""
    precisions: list[str]

    @classmethod
    def of(cls, corrected: Corrected, samples: Samples, precisions: list[str]) -> "Observed":
        log_rho_L, rejected_L = corrected.log_rho_L, (~corrected.kept_L).float()
        truncated_L, weight_L = corrected.truncated_L.float(), corrected.weight_L.float()
        return cls(
            torch.stack([log_rho_L, samples.age_L.float(), truncated_L, rejected_L, weight_L]),
            torch.stack([samples.sum(log_rho_L), samples.lengths.float(), samples.mean(rejected_L)]),
            precisions,
        )


def figures(observed: Sequence[Observed]) -> dict[str, float]:
    """Of the whole step; those of an on-policy one, with `measured_tokens` 0, when nothing was measured."""
    if not observed:
        return {**NOTHING_MEASURED, "measured_tokens": 0.0}
    log_rho_L, _, truncated_L, rejected_L, weight_L = torch.cat([part.columns_5_L for part in observed], dim=1)
    sum_S, length_S, rejected_S = torch.cat([part.columns_3_S for part in observed], dim=1)
    rho_L = log_rho_L.exp()
    squared = rho_L.square().mean()
    mean = rho_L.mean()
    found = torch.stack(
        [
            mean,
            rho_L.std(correction=0),
            rho_L.min(),
            rho_L.max(),
            *_percentiles(rho_L),
            mean**2 / squared,
            -log_rho_L.mean(),
            (rho_L - 1 - log_rho_L).mean(),
            log_rho_L.abs().mean(),
            log_rho_L.square().mean(),
            squared - 1,
            (2 * sum_S).clamp(max=2 * LOG_RATIO_BOUND).exp().mean() - 1,
            (sum_S / length_S).abs().mean(),
            truncated_L.mean(),
            rejected_L.mean(),
            (rejected_S == 1).float().mean(),
            weight_L.mean() ** 2 / weight_L.square().mean().clamp(min=1e-30),
        ]
    )
    return {**dict(zip(NOTHING_MEASURED, found.tolist(), strict=True)), "measured_tokens": float(rho_L.numel())}


def _percentiles(value_L: Tensor) -> list[Tensor]:
    """As torch.quantile has them, which refuses more than 2^24 numbers."""
    sorted_L = value_L.sort().values
    found: list[Tensor] = []
    for share in PERCENTILES:
        place = share * (len(sorted_L) - 1)
        below, above = sorted_L[math.floor(place)], sorted_L[math.ceil(place)]
        found.append(below.lerp(above, place - math.floor(place)))
    return found


def load_figures(load_N_X: Tensor) -> dict[str, float]:
    """Of N layers."""
    load_N_X = load_N_X.float()
    busiest, idle = (load_N_X.amax(1) / load_N_X.mean(1)).mean(), (load_N_X == 0).float().mean()
    return dict(zip(("expert_load_max", "expert_idle"), torch.stack([busiest, idle]).tolist(), strict=True))


def late(observed: Sequence[Observed]) -> bool:
    """Whether any token is of an older version than the trainer's."""
    return any(bool((part.columns_5_L[1] > 0).any()) for part in observed)


def shares(observed: Sequence[Observed]) -> tuple[Share, ...]:
    """The same by token age, and by precision where a step has several."""
    if not observed:
        return ()
    log_rho_L, age_L, *_ = torch.cat([part.columns_5_L for part in observed], dim=1)
    found = [_share("age", str(int(age)), log_rho_L[age_L == age]) for age in age_L.unique().tolist()]
    precisions = {name for part in observed for name in part.precisions}
    for name in sorted(precisions):
        parts = [_of_precision(part, name) for part in observed]
        found.append(_share("precision", name, torch.cat(parts) if len(precisions) > 1 else log_rho_L))
    return tuple(found)


class Ratios(NamedTuple):
    """Of one packed batch."""

    log_rho_L: Tensor
    samples: Samples
    slots: Sequence[Slot]


def most_off_policy(batches: Sequence[Ratios]) -> OffPolicy | None:
    """Of a step; computed at its end, where waiting for the GPU costs nothing."""
    if not batches:
        return None
    size_S = torch.cat([batch.samples.mean(batch.log_rho_L.abs()) for batch in batches])
    worst = int(size_S.argmax())
    size = float(size_S[worst])
    for log_rho_L, samples, slots in batches:
        if worst < len(slots):
            ratios = log_rho_L[samples.sample_L == worst][:SHOWN_TOKENS].tolist()
            return OffPolicy(group=slots[worst].group, sample=slots[worst].sample, size=size, log_ratio=tuple(ratios))
        worst -= len(slots)
    raise AssertionError("every sample has a slot")


def _of_precision(part: Observed, name: str) -> Tensor:
    chosen_S = torch.tensor([precision == name for precision in part.precisions], device=part.columns_3_S.device)
    return part.columns_5_L[0][chosen_S.repeat_interleave(part.columns_3_S[1].long())]


def _share(by: str, value: str, log_rho_L: Tensor) -> Share:
    rho_L = log_rho_L.exp()
    mean, squared, kl, k3 = torch.stack(
        [rho_L.mean(), rho_L.square().mean(), -log_rho_L.mean(), (rho_L - 1 - log_rho_L).mean()]
    ).tolist()
    return Share(
        by=by,
        value=value,
        tokens=len(rho_L),
        rho_mean=mean,
        ess=mean**2 / squared,
        mismatch_kl=kl,
        mismatch_k3=k3,
    )


@dataclass(frozen=True, slots=True)
class RankStats:
    """The sums of a step, of one rank's share or of all. Ranks exchange them at its end, so that all count the same."""

    loss: float
    critic_loss: float
    fault: str
    sums: dict[str, float]
    observed: list[Observed]
    off_policy: OffPolicy | None
    expert_load: Tensor | None = None
    """How often each expert was chosen, by layer; None without experts, and where nothing was computed."""
    mismatch: str = ""
    """What a rank received that was not sent."""


class _Message(msgspec.Struct, frozen=True, array_like=True):
    loss: float
    critic_loss: float
    fault: str
    sums: dict[str, float]
    observed: list[tuple[bytes, bytes, list[str]]]
    off_policy: OffPolicy | None
    expert_load: list[list[int]] | None
    mismatch: str


def of_all(ranks: Ranks, mine: RankStats) -> RankStats:
    """Everything added up, the same on every rank. RankError, on every rank, if one received other tokens than were
    sent."""
    observed = [(_packed(part.columns_5_L), _packed(part.columns_3_S), part.precisions) for part in mine.observed]
    load = None if mine.expert_load is None else mine.expert_load.tolist()
    message = _Message(
        mine.loss,
        mine.critic_loss,
        mine.fault,
        mine.sums,
        observed,
        mine.off_policy,
        load,
        mine.mismatch,
    )
    all_ranks = [
        msgspec.msgpack.decode(part, type=_Message) for part in ranks.exchange(msgspec.msgpack.encode(message))
    ]
    if mismatch := next((each.mismatch for each in all_ranks if each.mismatch), ""):
        raise RankError(mismatch)
    sums: dict[str, float] = {}
    for name, value in (pair for each in all_ranks for pair in each.sums.items()):
        sums[name] = sums.get(name, 0.0) + value
    loads = [torch.tensor(each.expert_load) for each in all_ranks if each.expert_load is not None]
    return RankStats(
        loss=sum(each.loss for each in all_ranks),
        critic_loss=sum(each.critic_loss for each in all_ranks),
        fault=next((each.fault for each in all_ranks if each.fault), ""),
        sums=sums,
        observed=[
            Observed(_unpacked(tokens, 5), _unpacked(samples, 3), precisions)
            for each in all_ranks
            for tokens, samples, precisions in each.observed
        ],
        off_policy=max((each.off_policy for each in all_ranks if each.off_policy), key=_size, default=None),
        expert_load=torch.stack(loads).sum(0) if loads else None,
    )


def _size(sample: OffPolicy) -> float:
    """Not a number is beyond every number."""
    return math.inf if math.isnan(sample.size) else sample.size


def _packed(columns: Tensor) -> bytes:
    return columns.detach().float().cpu().numpy().tobytes()


def _unpacked(data: bytes, rows: int) -> Tensor:
    return torch.from_numpy(np.frombuffer(data, np.float32).reshape(rows, -1).copy())
