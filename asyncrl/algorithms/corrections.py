"""Off-policy corrections: which policy the algorithm's ratio is taken against, and what each token weighs.

mu is the policy that sampled (its own processed log-probabilities), pi the trainer's before the update. One optimizer
step is made per batch, so pi is the very policy being differentiated and no second forward is needed.

    rho_t         = pi(t) / mu(t)
    token TIS       w_t = clamp(rho_t, floor, cap)                      IcePop: 0 outside instead
    prefix TIS      w_t = clamp(prod of rho up to t, floor, cap)
    sequence TIS    w_t = clamp(prod rho, floor, cap)                   sequence MIS: 0 outside instead
    rejection       w_t = 0 where a measure of rho, of the token or of its sample, leaves its bounds
    veto            w_t = 0 for a sample with any rho_t < veto
    caution         lr * min(1, sqrt(max_drift / (drift - least))),  drift = mean((log rho)^2), least that of any step
    interpolated    log prox_t = log mu_t + a (log pi_t - log mu_t),  a = (age - 1) / age: the version before pi's

Weights are constants to the gradient and multiply the whole clipped term. Rejection changes no denominator, so what is
kept has the gradient that it has without rejection.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from asyncrl.algorithms.base import Samples
from asyncrl.config.algorithm import CorrectionBase, CustomCorrection, Importance, Reject
from asyncrl.system.user_functions import calling, load_function

LOG_RATIO_BOUND = 20.0
"""exp(20) is beyond any useful weight; the bound keeps one absurd token from making the sums infinite."""

EXPECTED = "f(log_ratio_L, samples: Samples) that returns a tensor with one weight per sampled token"
"""Of a correction of the user's."""


@dataclass(frozen=True, slots=True)
class Corrected:
    log_rho_L: Tensor
    """log pi / mu of each token, bounded; before any truncation."""
    proximal_logp_L: Tensor
    weight_L: Tensor
    """0 where rejected."""
    kept_L: Tensor
    """False where rejected."""
    truncated_L: Tensor
    """True where the weight was beyond floor or cap."""


def log_ratio(logp_L: Tensor, behaviour_logp_L: Tensor) -> Tensor:
    """log pi / mu, detached and bounded."""
    return (logp_L.detach() - behaviour_logp_L).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)


def of_data(logp_L: Tensor) -> Corrected:
    """Of tokens that no policy of the run has sampled: the trainer's own stands in for it, and nothing is weighed."""
    none_L = torch.zeros_like(logp_L, dtype=torch.bool)
    logp_L = logp_L.detach()
    return Corrected(torch.zeros_like(logp_L), logp_L, torch.ones_like(logp_L), ~none_L, none_L)


def custom(settings: CustomCorrection, logp_L: Tensor, behaviour_logp_L: Tensor, samples: Samples) -> Corrected:
    """The user's own weights; the algorithm's ratio is taken against the trainer's policy."""
    log_rho_L = log_ratio(logp_L, behaviour_logp_L)
    own = load_function(settings.function, "correction.function")
    with calling("correction.function", settings.function, EXPECTED):
        weight_L = own(log_rho_L, samples)
        if not isinstance(weight_L, Tensor) or weight_L.shape != log_rho_L.shape:
            raise TypeError(f"returned {weight_L!r:.200}, and not a tensor of shape {tuple(log_rho_L.shape)}")
    truncated_L = torch.zeros_like(weight_L, dtype=torch.bool)
    return Corrected(log_rho_L, logp_L.detach(), weight_L, weight_L != 0, truncated_L)


def importance(settings: Importance, logp_L: Tensor, behaviour_logp_L: Tensor, samples: Samples) -> Corrected:
    """Weights, rejection and the proximal policy, as the settings put them together."""
    log_rho_L = log_ratio(logp_L, behaviour_logp_L)
    proximal_logp_L, log_weight_L = _split(settings, logp_L.detach(), behaviour_logp_L, log_rho_L, samples)
    weight_L, truncated_L = _weights(settings, log_weight_L, samples)
    kept_L = _kept(settings, log_rho_L, samples)
    if settings.outside == "mask":
        kept_L = kept_L & ~truncated_L
    return Corrected(log_rho_L, proximal_logp_L, weight_L * kept_L, kept_L, truncated_L)


class Caution:
    """Smaller steps where samples are far off-policy.

    A gradient that comes late makes the policy overshoot, the more the further it has moved meanwhile. No weight of a
    token changes that, and Adam divides the size of the gradient out again: only a smaller step helps.

    Engines that round otherwise than the trainer, in FP8 above all, are off by something even with the same weights.
    That is no lateness: the least drift of any step is the most that it can be, and does not count. Nor does any drift
    of a step whose tokens are all of the trainer's own version.
    """

    def __init__(self, settings: CorrectionBase) -> None:
        self._limit = settings.drift_limit
        self.least = math.inf
        """So far; a checkpoint keeps it."""

    def scale(self, drift: float, *, late: bool = True) -> float:
        """What the learning rate of a step is multiplied by; `drift` is the mean (log rho)^2 of its tokens, and `late`
        whether any of them is of an older version."""
        if drift > 0:  # 0 where a step has nothing to learn from
            self.least = min(self.least, drift)
        excess = drift - self.least
        return (self._limit / excess) ** 0.5 if late and self._limit and excess > self._limit else 1.0


def _split(
    settings: Importance, logp_L: Tensor, behaviour_logp_L: Tensor, log_rho_L: Tensor, samples: Samples
) -> tuple[Tensor, Tensor]:
    """The proximal policy, and log prox / mu, which is what the weights have to make up for."""
    match settings.proximal:
        case "trainer":
            return logp_L, log_rho_L
        case "behaviour":
            return behaviour_logp_L, torch.zeros_like(log_rho_L)
        case "interpolated":
            share_L = (samples.age_L - 1).clamp(min=0) / samples.age_L.clamp(min=1)
            share_L = torch.where(samples.age_L == 0, 1.0, share_L)
            return behaviour_logp_L + share_L * (logp_L - behaviour_logp_L), share_L * log_rho_L


def _weights(settings: Importance, log_weight_L: Tensor, samples: Samples) -> tuple[Tensor, Tensor]:
    if settings.weight == "none":
        return torch.ones_like(log_weight_L), torch.zeros_like(log_weight_L, dtype=torch.bool)
    if settings.weight == "prefix":
        log_weight_L = samples.running_sum(log_weight_L)
    if settings.weight == "sequence":
        log_weight_L = samples.spread(samples.sum(log_weight_L))
    weight_L = log_weight_L.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp()
    bounded_L = weight_L.clamp(settings.floor, settings.cap)
    return bounded_L, bounded_L != weight_L


def _kept(settings: Importance, log_rho_L: Tensor, samples: Samples) -> Tensor:
    kept_L = torch.ones_like(log_rho_L, dtype=torch.bool)
    for reject in settings.reject:
        kept_L &= _within(reject, log_rho_L, samples)
    if settings.veto:
        vetoed_S = samples.max((log_rho_L.exp() < settings.veto).float())
        kept_L &= samples.spread(vetoed_S) <= 0
    return kept_L


def _within(reject: Reject, log_rho_L: Tensor, samples: Samples) -> Tensor:
    measure_L = _measure(reject, log_rho_L)
    match reject.over:
        case "token":
            found_L = measure_L
        case "mean":
            found_L = samples.spread(samples.mean(measure_L))
        case "sum":
            found_L = samples.spread(samples.sum(measure_L))
        case "max":
            found_L = samples.spread(samples.max(measure_L))
    if reject.measure == "ratio":  # collected as logarithms: the mean of these is the geometric one
        found_L = found_L.exp()
    return (found_L >= reject.low) & (found_L <= reject.high)


def _measure(reject: Reject, log_rho_L: Tensor) -> Tensor:
    match reject.measure:
        case "ratio":
            return log_rho_L
        case "k2":
            return 0.5 * log_rho_L.square()
        case "k3":
            return (log_rho_L.exp() - 1 - log_rho_L).clamp(min=0)  # rounding may leave a little less than 0
