"""The output matrix, with logits in fp32 whatever dtype the model computes in.

Rounded to bf16, logits of 16 and more are multiples of 1/8: an error that trainer and engine make differently, and
the largest part of the gap between their log-probabilities.

Logits are the largest tensor of training: tokens by vocabulary, and several of them until the backward is over.
`chunked_logprobs` has those of some tokens at a time and computes them again in the backward, which costs a third
product where there were two.

Engines that sample with top-k or top-p report the distribution that is left, so the policy is that one as well
(`Support`): a token whose logit is below the floor of its position has no probability, unless it is the target.

A distillation compares a policy with its teacher on the teacher's K likeliest tokens and on all others together, the
tail. Both are the whole distributions at the temperature, whatever the support: two that are cut in different places
are infinitely far apart.

Axis suffixes: L tokens, C those of a chunk, V vocabulary, E hidden size, K likeliest tokens, B these and the tail.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from asyncrl.models.compiling import compiled
from asyncrl.models.experts import Routing

OUTSIDE = -1e30
"""Scaled logit of a token that cannot be sampled. Finite: 0 times its log-probability is 0, as the entropy needs it."""
FAINT = -50.0
"""Log-probability of a tail that is less likely, or has no tokens. Finite, so that a tail which only one of two models
has is far away and not infinitely; and 0 times it is 0."""
NUCLEUS_PARTS = 4
"""The search for the floor of top-p holds two more blocks of logits: of so much less than a chunk at a time."""


class Support(NamedTuple):
    """The part of the vocabulary that is sampled from: the `top_k` likeliest tokens (0: all), then the smallest set of
    them that has `top_p` of their probability. Tokens as likely as the last one of these belong to it."""

    top_k: int = 0
    top_p: float = 1.0

    @property
    def whole(self) -> bool:
        return self.top_k == 0 and self.top_p == 1


WHOLE = Support()


class LogitShape(NamedTuple):
    """What a family does with the product of hidden states and output matrix: softcap * tanh(scale * z / softcap)."""

    scale: float = 1.0
    softcap: float = 0.0
    """0: none."""

    def __call__(self, product: Tensor) -> Tensor:
        scaled = product if self.scale == 1 else product * self.scale
        return self.softcap * torch.tanh(scaled / self.softcap) if self.softcap else scaled

    def backward(self, grad: Tensor, logits: Tensor) -> Tensor:
        """From the gradient of the logits to that of the product."""
        scaled = grad if self.scale == 1 else grad * self.scale
        return scaled * (1 - (logits / self.softcap).square()) if self.softcap else scaled


UNSHAPED = LogitShape()


class TokenLogprobs(NamedTuple):
    logp_L: Tensor
    """Of the target tokens."""
    entropy_L: Tensor | None = None
    """Of the distribution that each was drawn from, where it was asked for."""
    outside_L: Tensor | None = None
    """Which targets lie outside the support of this policy; None where that is the whole vocabulary."""
    routing: Routing | None = None
    """Of a mixture of experts, where it is observed."""
    top_L_B: Tensor | None = None
    """Of K tokens at each place and of their tail, where these were named; of the whole distribution."""
    divergence_L: Tensor | None = None
    """Between the policy and its teacher at each place, where it was asked for."""


def fp32_product(a: Tensor, b: Tensor) -> Tensor:
    """a @ b of narrow matrices, added up and returned in fp32."""
    return torch.mm(a, b, out_dtype=torch.float32) if a.is_cuda else torch.mm(a.float(), b.float())


def bf16_logits(hidden_T_E: Tensor, output_V_E: Tensor) -> Tensor:
    """Fp32 logits at the speed of a bf16 product."""
    return _Logits.apply(hidden_T_E.bfloat16(), output_V_E.bfloat16())


def chunked_logprobs(
    hidden_L_E: Tensor,
    output_V_E: Tensor,
    target_L: Tensor,
    *,
    temperature: float,
    chunk: int,
    entropy: bool = False,
    compile: bool = False,
    support: Support = WHOLE,
    shape: LogitShape = UNSHAPED,
    ids_L_K: Tensor | None = None,
) -> TokenLogprobs:
    """From the logits of `chunk` tokens at a time, forward and backward; both matrices must have the same dtype.
    `ids_L_K`: tokens of which, and of whose tail, the log-probabilities are wanted as well."""
    found: tuple[Tensor, ...] = _Chunked.apply(
        hidden_L_E, output_V_E, target_L, temperature, chunk, entropy, compile, support, shape, ids_L_K
    )
    return TokenLogprobs(
        found[0],
        found[1] if entropy else None,
        None if support.whole else found[-1],
        top_L_B=None if ids_L_K is None else found[1 + entropy],
    )


def policy_logits(
    logits_L_V: Tensor, target_L: Tensor, *, temperature: float, support: Support = WHOLE
) -> tuple[Tensor, Tensor | None]:
    """Logits that are there all at once, scaled and restricted to the support, and which targets lie outside it."""
    scaled_L_V = logits_L_V / temperature
    if support.whole:
        return scaled_L_V, None
    raw_L_V, target_L_1 = logits_L_V.detach(), target_L[:, None]
    floor_L_1 = support_floor(raw_L_V, temperature, support)
    outside_L = (raw_L_V.gather(1, target_L_1) < floor_L_1).squeeze(1)
    return scaled_L_V.masked_fill(_beyond(raw_L_V, target_L_1, floor_L_1), OUTSIDE), outside_L


def top_logprobs(logits_C_V: Tensor, *, temperature: float, count: int, vocabulary: int) -> tuple[Tensor, Tensor]:
    """The `count` likeliest of the first `vocabulary` tokens, most likely first; log-probabilities of these and of the
    tail. Tokens that this model does not have are as likely as an empty tail."""
    logp_C_V = (logits_C_V / temperature).log_softmax(-1)
    if (missing := count - logp_C_V.shape[1]) > 0:
        logp_C_V = functional.pad(logp_C_V, (0, missing), value=FAINT)
    top_C_K, ids_C_K = logp_C_V[:, :vocabulary].topk(count)
    return ids_C_K, torch.cat((top_C_K, _tail(logp_C_V, ids_C_K)), 1)


def _tail(logp_C_V: Tensor, ids_C_K: Tensor) -> Tensor:
    """Log-probability of all tokens but those named, added up; the given ones are overwritten."""
    rest_C_V = logp_C_V.scatter_(1, ids_C_K, OUTSIDE).exp_()
    return rest_C_V.sum(-1, keepdim=True).log_().clamp_(min=FAINT)


def support_floor(logits_C_V: Tensor, temperature: float, support: Support, *, compile: bool = False) -> Tensor:
    """The smallest logit, before the temperature, of the tokens that can be sampled. Logits that are not numbers are
    never below it, so that they are seen."""
    if not support.top_k:
        parts = logits_C_V.split(-(-len(logits_C_V) // NUCLEUS_PARTS))
        return torch.cat([_nucleus_floor(part, temperature, support.top_p, compile=compile) for part in parts])
    ordered_C_K = logits_C_V.topk(min(support.top_k, logits_C_V.shape[1])).values
    probs_C_K = (ordered_C_K / temperature).softmax(-1)
    before_C_K = probs_C_K.cumsum(-1) - probs_C_K
    last_C_1 = (before_C_K < support.top_p).sum(-1, keepdim=True).clamp_(min=1) - 1
    return ordered_C_K.gather(1, last_C_1) if support.top_p < 1 else ordered_C_K[:, -1:]


def _nucleus_floor(logits_C_V: Tensor, temperature: float, top_p: float, *, compile: bool) -> Tensor:
    """By bisection instead of sorting, which takes three times the memory of the logits.

    With w the probabilities over the largest of them, a token belongs to the nucleus if the larger w add up to less
    than `top_p` of all. That is so from some w on. Numbers that are not negative have the order of their bits, so as
    many halvings as these have find it exactly.
    """
    above = compiled(_mass_above) if compile else _mass_above
    weight_C_V = (logits_C_V - logits_C_V.amax(-1, keepdim=True)).div_(temperature).exp_()
    wanted_C_1 = top_p * weight_C_V.sum(-1, keepdim=True)
    bits = torch.int64 if weight_C_V.dtype == torch.float64 else torch.int32
    high_C_1 = torch.ones_like(wanted_C_1).view(bits)
    low_C_1 = torch.zeros_like(high_C_1)
    for _ in range(62 if bits == torch.int64 else 30):
        middle_C_1 = (low_C_1 + high_C_1) // 2
        below_C_1 = above(weight_C_V, middle_C_1.view(weight_C_V.dtype)) >= wanted_C_1
        low_C_1 = torch.where(below_C_1, middle_C_1, low_C_1)
        high_C_1 = torch.where(below_C_1, high_C_1, middle_C_1)
    inside_C_V = weight_C_V >= high_C_1.view(weight_C_V.dtype)
    return logits_C_V.where(inside_C_V, torch.inf).amin(-1, keepdim=True)


def _mass_above(weight_C_V: Tensor, bound_C_1: Tensor) -> Tensor:
    return weight_C_V.where(weight_C_V > bound_C_1, 0).sum(-1, keepdim=True)


def _beyond(logits_C_V: Tensor, target_C_1: Tensor, floor_C_1: Tensor) -> Tensor:
    """Tokens without probability. The target was sampled, whatever this policy thinks of it."""
    token_V = torch.arange(logits_C_V.shape[1], device=logits_C_V.device)
    return (logits_C_V < floor_C_1) & (token_V != target_C_1)


class _Logits(torch.autograd.Function):
    """torch has no derivative for a product with a wider result; this one's is that of the plain bf16 product."""

    @staticmethod
    def forward(ctx: Any, hidden_T_E: Tensor, output_V_E: Tensor) -> Tensor:
        ctx.save_for_backward(hidden_T_E, output_V_E)
        return fp32_product(hidden_T_E, output_V_E.t())

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        hidden_T_E, output_V_E = ctx.saved_tensors
        grad_T_V = grads[0].bfloat16()
        return grad_T_V @ output_V_E, grad_T_V.t() @ hidden_T_E


class _Chunked(torch.autograd.Function):
    """With z the scaled logits, p their softmax and H its entropy:

    d logp / d z_j = [j is the target] - p_j        d H / d z_j = -p_j (log p_j + H)

    Outside the support p_j is 0, and with it both; which tokens lie there is no matter of the gradient.

    With p the whole softmax, of a named token v and of a tail with the probability q:

    d log p_v / d z_j = [j is v] - p_j              d log q / d z_j = [j is in the tail] p_j / q - p_j
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden_L_E: Tensor,
        output_V_E: Tensor,
        target_L: Tensor,
        temperature: float,
        chunk: int,
        entropy: bool,
        compile: bool,
        support: Support,
        shape: LogitShape,
        ids_L_K: Tensor | None,
    ) -> tuple[Tensor, ...]:
        measure = compiled(_measure) if compile else _measure
        found: list[tuple[Tensor, ...]] = []
        floors: list[Tensor] = []
        for start in range(0, max(1, len(target_L)), chunk):
            here = slice(start, start + chunk)
            logits_C_V = shape(_product(hidden_L_E[here], output_V_E.t()))
            if not support.whole:
                floors.append(support_floor(logits_C_V, temperature, support, compile=compile))
            floor_C_1, ids_C_K = floors[-1] if floors else None, None if ids_L_K is None else ids_L_K[here]
            found.append(measure(logits_C_V, target_L[here, None], temperature, entropy, floor_C_1, ids_C_K))
            del logits_C_V  # not beside the next ones
        outputs = tuple(torch.cat(parts) for parts in zip(*found, strict=True))
        floor_L_1 = torch.cat(floors) if floors else None
        if floors:
            ctx.mark_non_differentiable(outputs[-1])
        top_L_B = None if ids_L_K is None else outputs[1 + entropy]
        entropy_L = outputs[1 : 1 + entropy]
        ctx.save_for_backward(hidden_L_E, output_V_E, target_L, floor_L_1, ids_L_K, top_L_B, *entropy_L)
        ctx.temperature, ctx.chunk, ctx.compile, ctx.shape = temperature, chunk, compile, shape
        return outputs

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        hidden_L_E, output_V_E, target_L, floor_L_1, ids_L_K, top_L_B, *entropy_L = ctx.saved_tensors
        columns_L_1 = [column[:, None] for column in (*grads[: 1 + len(entropy_L)], *entropy_L)]
        gradient = compiled(_gradient) if ctx.compile else _gradient
        grad_hidden_L_E = torch.empty_like(hidden_L_E)
        grad_output_V_E = output_V_E.new_zeros(output_V_E.shape, dtype=grads[0].dtype)
        for start in range(0, len(target_L), ctx.chunk):
            here = slice(start, start + ctx.chunk)
            columns_C_1 = [column[here] for column in columns_L_1]
            logits_C_V = ctx.shape(_product(hidden_L_E[here], output_V_E.t()))
            floor_C_1 = None if floor_L_1 is None else floor_L_1[here]
            top = None
            if ids_L_K is not None and top_L_B is not None:
                top = ids_L_K[here], top_L_B[here], grads[1 + len(entropy_L)][here]
            kept_C_V = logits_C_V.clone() if ctx.shape.softcap else logits_C_V  # which `gradient` may overwrite
            grad_C_V = gradient(
                logits_C_V, target_L[here, None], ctx.temperature, output_V_E.dtype, floor_C_1, top, *columns_C_1
            )
            grad_C_V = ctx.shape.backward(grad_C_V, kept_C_V).to(output_V_E.dtype)
            del logits_C_V, kept_C_V
            grad_hidden_L_E[here] = grad_C_V @ output_V_E
            grad_output_V_E += _product(grad_C_V.t(), hidden_L_E[here])
            del grad_C_V  # not beside the next one's
        return grad_hidden_L_E, grad_output_V_E.to(output_V_E.dtype), *[None] * 8


def _measure(
    logits_C_V: Tensor,
    target_C_1: Tensor,
    temperature: float,
    entropy: bool,
    floor_C_1: Tensor | None,
    ids_C_K: Tensor | None,
) -> tuple[Tensor, ...]:
    """Log-probabilities of the targets; if asked for, the entropies; with ids, log-probabilities of these and of their
    tail; with a floor, which targets are below it. The logits may be overwritten."""
    outside = () if floor_C_1 is None else ((logits_C_V.gather(1, target_C_1) < floor_C_1).squeeze(1),)
    beyond_C_V = None if floor_C_1 is None else _beyond(logits_C_V, target_C_1, floor_C_1)
    logits_C_V = _scaled(logits_C_V, temperature)
    top = () if ids_C_K is None else (_top(logits_C_V, ids_C_K),)
    logp_C_V = _without(logits_C_V, beyond_C_V).log_softmax(-1)
    logp_C = logp_C_V.gather(1, target_C_1).squeeze(1)
    return (logp_C, *((-logp_C_V.exp().mul_(logp_C_V).sum(-1),) if entropy else ()), *top, *outside)


def _top(scaled_C_V: Tensor, ids_C_K: Tensor) -> Tensor:
    logp_C_V = scaled_C_V.log_softmax(-1)
    top_C_K = logp_C_V.gather(1, ids_C_K)
    return torch.cat((top_C_K, _tail(logp_C_V, ids_C_K)), 1)


def _gradient(
    logits_C_V: Tensor,
    target_C_1: Tensor,
    temperature: float,
    dtype: torch.dtype,
    floor_C_1: Tensor | None,
    top: tuple[Tensor, Tensor, Tensor] | None,
    grad_logp_C_1: Tensor,
    *of_entropy_C_1: Tensor,
) -> Tensor:
    """That of the logits, which may be overwritten; `top` are ids, what was found of them and its gradient, and
    `of_entropy_C_1` the entropy's gradient and the entropy."""
    beyond_C_V = None if floor_C_1 is None else _beyond(logits_C_V, target_C_1, floor_C_1)
    logits_C_V = _scaled(logits_C_V, temperature)
    of_top_C_V = None if top is None else _top_gradient(logits_C_V, *top)
    grad_C_V = _scaled_softmax(_without(logits_C_V, beyond_C_V), grad_logp_C_1, *of_entropy_C_1).neg_()
    grad_C_V.scatter_add_(1, target_C_1, grad_logp_C_1)
    if of_top_C_V is not None:
        grad_C_V += of_top_C_V
    return _scaled(grad_C_V, temperature).to(dtype)


def _top_gradient(scaled_C_V: Tensor, ids_C_K: Tensor, top_C_B: Tensor, grad_C_B: Tensor) -> Tensor:
    grad_C_K, tail_C_1 = grad_C_B[:, :-1], top_C_B[:, -1:]
    grad_tail_C_1 = grad_C_B[:, -1:].where(tail_C_1 > FAINT, 0)  # below it the tail is a constant
    share_C_1 = grad_tail_C_1 * (-tail_C_1).exp()  # large where the tail is faint, so none of it meets the ids
    total_C_1 = grad_C_K.sum(-1, keepdim=True) + grad_tail_C_1
    found_C_V = scaled_C_V.softmax(-1)
    of_ids_C_K = grad_C_K - found_C_V.gather(1, ids_C_K) * total_C_1
    return found_C_V.mul_(share_C_1 - total_C_1).scatter_(1, ids_C_K, of_ids_C_K)


def _scaled_softmax(
    logits_C_V: Tensor, grad_logp_C_1: Tensor, grad_entropy_C_1: Tensor | None = None, entropy_C_1: Tensor | None = None
) -> Tensor:
    """p_j times all that the two derivatives multiply it by."""
    if grad_entropy_C_1 is None or entropy_C_1 is None:
        return logits_C_V.softmax(-1).mul_(grad_logp_C_1)
    logp_C_V = logits_C_V.log_softmax(-1)
    factor_C_V = torch.addcmul(grad_logp_C_1, grad_entropy_C_1, logp_C_V + entropy_C_1)
    return logp_C_V.exp_().mul_(factor_C_V)


def _without(scaled_C_V: Tensor, beyond_C_V: Tensor | None) -> Tensor:
    """Those have no probability; in place."""
    return scaled_C_V if beyond_C_V is None else scaled_C_V.masked_fill_(beyond_C_V, OUTSIDE)


def _scaled(x_C_V: Tensor, temperature: float) -> Tensor:
    return x_C_V if temperature == 1.0 else x_C_V.div_(temperature)


def _product(a: Tensor, b: Tensor) -> Tensor:
    return fp32_product(a, b) if a.dtype == torch.bfloat16 else a @ b
