"""A head run as drafting runs it, for all starts of all windows at once (EAGLE-3's training-time test).

Step 0 is fed with what was read of the target. Step i takes at position t the head's own state of step i-1 at t-1, so
it is the i-th drafted token after one that the target confirmed at t-i:

    keys seen by step i at t    step 0 at every position up to t-i, then steps 1 ... i at t-i+1 ... t, a diagonal

Tokens lie flat: first those of all windows from where drafting begins, then all that comes before, of which only the
keys and values of step 0 are needed. Attention to step 0 is a product per window, padded to others of about the same
length; the diagonals are sums over flat tokens, shifted by one more position at every step. Both are joined by their
weights. What a shift carries over the border of a window is garbage, and only garbage ever sees it: a valid start
lies i positions or more inside.

Axis suffixes: T flat tokens, A those of them that draft, N windows of a bucket, L their padded length, P its part that
drafts, H query heads, K key/value heads, G query heads of each of these, D head dimension, E hidden size, R width of
what is read, V vocabulary.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence

from asyncrl.drafting.heads import Head
from asyncrl.drafting.windows import Window
from asyncrl.models.layers import computed_rotation, signed_frequencies

HIDDEN = -1e30
"""Score of a key that is not seen; finite, so that a row without keys stays a number."""


class Span(NamedTuple):
    """How many tokens of a window draft, and how many lie before them."""

    drafting: int
    before: int

    @property
    def length(self) -> int:
        return self.drafting + self.before


@dataclass(frozen=True, slots=True)
class Batch:
    """Windows without their last token, whose successor is not known."""

    spans: list[Span]
    positions_T: Tensor
    next_T: Tensor
    """Token t+1, whose embedding is the pair of the feature at t."""
    read_T_R: Tensor
    goal_A_E: Tensor
    """The target's final hidden state at t+1: what the head's state at t stands for."""
    drafts_A: Tensor
    """Tokens t+1 and t+2 were sampled, so a draft of t+2 would have been verified."""
    goes_on_A: Tensor
    """The same, and t is not the first of its window to draft."""


def batch(windows: Sequence[Window], device: torch.device | str = "cpu") -> Batch | None:
    """Neighbours are of about the same length; None where no window has two sampled tokens in a row."""
    marked = [(window, window.sampled_T[1:] & window.sampled_T[:-1]) for window in windows]
    found = sorted(((w, marks) for w, marks in marked if marks.any()), key=lambda pair: len(pair[0]))
    if not found:
        return None
    ordered = [window for window, _ in found]
    befores = [int(marks.int().argmax()) for _, marks in found]
    spans = [Span(len(window) - 1 - before, before) for window, before in zip(ordered, befores, strict=True)]

    def flat(tensors: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
        cuts = list(zip(tensors, befores, strict=True))
        parts = [x[before:-1] for x, before in cuts] + [x[:before] for x, before in cuts]
        return torch.cat(parts).detach().to(device, dtype)

    drafts_A = torch.cat([marks[before:] for (_, marks), before in zip(found, befores, strict=True)])
    starts_A = torch.cat([torch.arange(span.drafting) for span in spans]) == 0
    return Batch(
        spans=spans,
        positions_T=flat([torch.arange(w.start, w.start + len(w)) for w in ordered], torch.int64),
        next_T=flat([window.tokens_T.roll(-1) for window in ordered], torch.int64),
        read_T_R=flat([window.read for window in ordered], torch.float32),
        goal_A_E=torch.cat([w.hidden_T_E[b + 1 :].detach() for w, b in zip(ordered, befores, strict=True)])
        .to(device)
        .float(),
        drafts_A=drafts_A.to(device),
        goes_on_A=(drafts_A & ~starts_A).to(device),
    )


class Step(NamedTuple):
    state_A_E: Tensor
    valid_A: Tensor
    """Where the chain up to here lies among sampled tokens of one window."""


def unrolled(head: Head, given: Batch, embedding_V_E: Tensor, steps: int) -> Iterator[Step]:
    """The head's states, step by step; those of one step feed the next."""
    target, drafting = head.config.target, len(given.drafts_A)
    frequencies_D = signed_frequencies(target.rope, target.head_dim).to(given.next_T.device)
    rotation = computed_rotation(frequencies_D, torch.float32)
    attend = UnrolledAttention(given.spans, given.next_T.device)
    embedded_T_E = F.embedding(given.next_T, embedding_V_E)
    state_A_E = head(head.features(given.read_T_R), embedded_T_E, rotation(given.positions_T), attend)
    valid_A = given.drafts_A
    yield Step(state_A_E, valid_A)
    rotate = rotation(given.positions_T[:drafting])
    for _ in range(1, steps):
        state_A_E = head(state_A_E.roll(1, 0), embedded_T_E[:drafting], rotate, attend)
        valid_A = valid_A.roll(1, 0) & given.goes_on_A
        yield Step(state_A_E, valid_A)


class UnrolledAttention:
    """The attention of one unrolled pass, called once for every step, in order. It answers for tokens that draft."""

    def __init__(self, spans: Sequence[Span], device: torch.device) -> None:
        self._buckets = _buckets(spans, device)
        self._drafting = sum(span.drafting for span in spans)
        self._step = 0
        self._first: list[tuple[Tensor, Tensor]] = []
        """Keys and values of step 0, by bucket."""
        self._diagonal: list[tuple[Tensor, Tensor]] = []
        """Those of the later steps, shifted so that each lies where it is seen."""

    def __call__(self, _layer: int, q_T_H_D: Tensor, k_T_K_D: Tensor, v_T_K_D: Tensor) -> Tensor:
        kv_heads, dim = k_T_K_D.shape[1:]
        q_A_K_G_D = q_T_H_D[: self._drafting].unflatten(1, (kv_heads, -1)) * dim**-0.5
        if self._step == 0:
            self._first = [(bucket.gather(k_T_K_D), bucket.gather(v_T_K_D)) for bucket in self._buckets]
        else:
            shifted = [(k.roll(1, 0), v.roll(1, 0)) for k, v in self._diagonal]
            self._diagonal = [*shifted, (k_T_K_D, v_T_K_D)]
        out_A_K_G_D, weight_A_K_G = self._attend_first(q_A_K_G_D)
        if self._diagonal:
            scores = [(q_A_K_G_D * k.unsqueeze(2)).sum(-1) for k, _ in self._diagonal]
            first, *shares = torch.softmax(torch.stack([weight_A_K_G, *scores]), 0).unsqueeze(-1)
            out_A_K_G_D = out_A_K_G_D * first
            for share, (_, v) in zip(shares, self._diagonal, strict=True):
                out_A_K_G_D = out_A_K_G_D + share * v.unsqueeze(2)
        self._step += 1
        return out_A_K_G_D.flatten(1)

    def _attend_first(self, q_A_K_G_D: Tensor) -> tuple[Tensor, Tensor]:
        """What the keys of step 0 give, and the log of their weight together."""
        parts = q_A_K_G_D.split([sum(bucket.drafting) for bucket in self._buckets])
        found = [
            bucket.attend(part, keys, values, self._step)
            for bucket, part, (keys, values) in zip(self._buckets, parts, self._first, strict=True)
        ]
        outs, weights = zip(*found, strict=True)
        return torch.cat(outs), torch.cat(weights)


class _Bucket(NamedTuple):
    """Neighbouring windows of about the same length."""

    drafting: list[int]
    source_N_L: Tensor
    """The flat token at each place of a window; padding lies behind, where nothing looks."""
    ahead_N_P_L: Tensor
    """How far each place lies ahead of each token that drafts."""

    def gather(self, x_T_K_D: Tensor) -> Tensor:
        """As an embedding, whose backward is much faster than that of indexing."""
        return F.embedding(self.source_N_L, x_T_K_D.flatten(1)).unflatten(2, x_T_K_D.shape[1:]).transpose(1, 2)

    def attend(self, q_X_K_G_D: Tensor, k_N_K_L_D: Tensor, v_N_K_L_D: Tensor, step: int) -> tuple[Tensor, Tensor]:
        """Flat output and flat log of the keys' weight, for queries of a step that sees `step` keys less."""
        q_N_P_K_G_D = pad_sequence(list(q_X_K_G_D.split(self.drafting)), batch_first=True)
        q_N_K_G_P_D = q_N_P_K_G_D.permute(0, 2, 3, 1, 4)
        scores_N_K_Y_L = q_N_K_G_P_D.flatten(2, 3) @ k_N_K_L_D.transpose(2, 3)
        unseen = (self.ahead_N_P_L > -step)[:, None, None]
        scores = scores_N_K_Y_L.unflatten(2, q_N_K_G_P_D.shape[2:4]).masked_fill(unseen, HIDDEN)
        weight_N_K_G_P = scores.logsumexp(-1)
        share_N_K_Y_L = (scores - weight_N_K_G_P.unsqueeze(-1)).exp().flatten(2, 3)
        out_N_K_Y_D = share_N_K_Y_L.to(v_N_K_L_D.dtype) @ v_N_K_L_D
        out_N_K_G_P_D = out_N_K_Y_D.unflatten(2, q_N_K_G_P_D.shape[2:4])
        return self._flat(out_N_K_G_P_D), self._flat(weight_N_K_G_P)

    def _flat(self, x_N_K_G_P_X: Tensor) -> Tensor:
        """Split and joined, because the backward of indexing adds up row by row."""
        x_N_P_X = x_N_K_G_P_X.movedim(3, 1)
        sizes = [size for drafting in self.drafting for size in (drafting, x_N_P_X.shape[1] - drafting)]
        return torch.cat(x_N_P_X.flatten(0, 1).split(sizes)[::2])


def _buckets(spans: Sequence[Span], device: torch.device) -> list[_Bucket]:
    """Neighbours whose lengths lie between the same powers of two."""
    groups: list[list[tuple[Span, Tensor]]] = []
    draft, before = 0, sum(span.drafting for span in spans)
    for span in spans:
        source_L = torch.cat([torch.arange(before, before + span.before), torch.arange(draft, draft + span.drafting)])
        draft, before = draft + span.drafting, before + span.before
        if not groups or math.frexp(span.length)[1] != math.frexp(groups[-1][-1][0].length)[1]:
            groups.append([])
        groups[-1].append((span, source_L))
    return [_bucket(group, device) for group in groups]


def _bucket(group: Sequence[tuple[Span, Tensor]], device: torch.device) -> _Bucket:
    drafting = [span.drafting for span, _ in group]
    source_N_L = pad_sequence([source_L for _, source_L in group], batch_first=True)
    before_N = torch.tensor([span.before for span, _ in group])
    place_N_P = before_N[:, None] + torch.arange(max(drafting))
    ahead_N_P_L = torch.arange(source_N_L.shape[1]) - place_N_P[:, :, None]
    return _Bucket(drafting, source_N_L.to(device), ahead_N_P_L.to(device))
