"""Keeps a head in line with its target: windows in, a better head out.

The target's distribution is p = softmax(final hidden state @ output matrix), and q is the head's. Every drafting step
i that the head is unrolled adds to the loss, weighted by decay^i:

    cross-entropy    - sum_v p(v) log q(v), over the tokens that the head can draft
    EAGLE also       hidden_weight * SmoothL1(state, the target's next final hidden state)

A drafted token is accepted with the chance alpha = sum_v min(p, q), and the j-th only if all before it were, so a
draft of k tokens yields 1 + sum_i prod_{j<=i} alpha_j tokens. That is what heads are compared by.

Axis suffixes as in asyncrl.drafting.unroll; L tokens that a draft could have been verified at, U draftable tokens.
"""

from collections.abc import Sequence
from copy import deepcopy

import msgspec
import torch
from torch import Tensor
from torch.nn import functional as F

from asyncrl.config.drafter import DrafterTraining
from asyncrl.drafting.heads import Head
from asyncrl.drafting.unroll import Batch, batch, unrolled
from asyncrl.drafting.windows import Window

BETAS = (0.9, 0.95)
GRAD_CLIP = 1.0
RAMP = 20
"""Updates over which the learning rate rises."""


class Update(msgspec.Struct, frozen=True, kw_only=True):
    """Figures of one optimiser step."""

    loss: float
    grad_norm: float
    tokens: int
    """Those that a draft could have been verified at."""


class Acceptance(msgspec.Struct, frozen=True, kw_only=True):
    """How much of its drafts the target is expected to accept."""

    length: float
    """Tokens per step of the target, its own one included."""
    rates: tuple[float, ...]
    """Chance that the draft's token at each position is accepted, with all before it."""
    tokens: int
    """Starts of drafts that were looked at."""


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """Two heads on the same windows with the same target."""

    candidate: Acceptance
    published: Acceptance

    @property
    def is_better(self) -> bool:
        return self.candidate.length > self.published.length


class DrafterLearner:
    """A head in fp32 with AdamW, a copy of what was published last, and the target's two matrices."""

    def __init__(
        self,
        head: Head,
        embedding_V_E: Tensor,
        output_V_E: Tensor,
        settings: DrafterTraining,
        device: torch.device | str = "cpu",
    ) -> None:
        self.device = torch.device(device)
        self.head = head.float().to(self.device)
        self.updates = 0
        self._settings = settings
        self.published = deepcopy(self.head).requires_grad_(False)
        self._optimizer = torch.optim.AdamW(
            self.head.parameters(), lr=settings.lr, betas=BETAS, weight_decay=0.0, fused=True
        )
        self.set_target(embedding_V_E, output_V_E)

    def set_target(self, embedding_V_E: Tensor, output_V_E: Tensor) -> None:
        """Call when the policy has moved; no gradient ever reaches these."""
        self._embedding_V_E = embedding_V_E.detach().to(self.device, torch.float32)
        self._output_V_E = output_V_E.detach().to(self.device, torch.float32)

    def update(self, windows: Sequence[Window]) -> Update:
        """One optimiser step over these windows together; none, if no draft could have been verified in them."""
        loss, tokens = self.accumulate(windows)
        return Update(loss=loss, grad_norm=self.step() if tokens else 0.0, tokens=tokens)

    def accumulate(self, windows: Sequence[Window], share: float = 1.0) -> tuple[float, int]:
        """Forward and backward of a share of an update; returns the loss, and how many tokens it is of."""
        given = batch(windows, self.device)
        if given is None:
            return 0.0, 0
        loss = self._loss(given)
        (share * loss).backward()
        return loss.item(), int(given.drafts_A.sum())

    def step(self) -> float:
        """One optimiser step with what was accumulated; returns the gradient's norm."""
        norm = torch.nn.utils.clip_grad_norm_(self.head.parameters(), GRAD_CLIP)
        for group in self._optimizer.param_groups:
            group["lr"] = self._settings.lr * min(1.0, (self.updates + 1) / RAMP)
        if torch.isfinite(norm):
            self._optimizer.step()
            self.updates += 1
        self._optimizer.zero_grad(set_to_none=True)
        return norm.item()

    def evaluate(self, windows: Sequence[Window], depth: int) -> Acceptance:
        """Of drafts of `depth` tokens."""
        return self._acceptance(self.head, batch(windows, self.device), depth)

    def compare(self, windows: Sequence[Window], depth: int) -> Comparison:
        """The head as it is now with the one published last."""
        given = batch(windows, self.device)
        return Comparison(
            candidate=self._acceptance(self.head, given, depth),
            published=self._acceptance(self.published, given, depth),
        )

    def mark_published(self) -> None:
        """Later candidates have to be better than the head as it is now."""
        self.published.load_state_dict(self.head.state_dict())

    def state(self) -> dict[str, Tensor]:
        """What a checkpoint needs: trainable tensors and their optimiser's, nothing of the target."""
        found = {"updates": torch.tensor(self.updates)}
        for name, parameter in self.head.named_parameters():
            found[name] = parameter.detach()
            for key, value in self._optimizer.state.get(parameter, {}).items():
                found[f"{name}/{key}"] = value
        return found

    def restore(self, state: dict[str, Tensor]) -> None:
        """Put `state()` back, bit for bit; it counts as published."""
        with torch.no_grad():
            for name, parameter in self.head.named_parameters():
                parameter.copy_(state[name])
                if f"{name}/step" in state:
                    self._optimizer.state[parameter] = {
                        key: state[f"{name}/{key}"].clone().to(self.device) for key in ("step", "exp_avg", "exp_avg_sq")
                    }
        self.updates = int(state["updates"])
        self.mark_published()

    def _loss(self, given: Batch) -> Tensor:
        settings, head = self._settings, self.head
        place_L = given.drafts_A.nonzero().squeeze(1)
        goal_L_E = given.goal_A_E[place_L]
        p_L_U = self._target_probs(head, goal_L_E)
        total = torch.zeros((), device=self.device)
        with torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=self.device.type == "cuda"):
            for index, (state_A_E, valid_A) in enumerate(unrolled(head, given, self._embedding_V_E, settings.unroll)):
                # As an embedding, whose backward is much faster than that of indexing.
                state_L_E = F.embedding(place_L, state_A_E)
                loss_L = F.cross_entropy(head.logits(state_L_E, self._output_V_E).float(), p_L_U, reduction="none")
                if head.config.kind == "eagle" and settings.hidden_weight:
                    gap_L_E = F.smooth_l1_loss(state_L_E.float(), goal_L_E, reduction="none")
                    loss_L = loss_L + settings.hidden_weight * gap_L_E.mean(-1)
                weight_L = valid_A[place_L].float()
                total = total + settings.decay**index * (loss_L * weight_L).sum() / weight_L.sum().clamp(min=1.0)
        return total

    @torch.no_grad()
    def _acceptance(self, head: Head, given: Batch | None, depth: int) -> Acceptance:
        if given is None:
            return Acceptance(length=1.0, rates=(0.0,) * depth, tokens=0)
        place_L = given.drafts_A.nonzero().squeeze(1)
        p_L_U = self._target_probs(head, given.goal_A_E[place_L])
        rates: list[float] = []
        accepted_A = torch.ones(len(given.drafts_A), device=self.device)
        for state_A_E, valid_A in unrolled(head, given, self._embedding_V_E, depth):
            q_L_U = head.logits(state_A_E[place_L], self._output_V_E).float().softmax(-1)
            alpha_A = torch.zeros_like(accepted_A).index_copy_(0, place_L, torch.minimum(p_L_U, q_L_U).sum(-1))
            accepted_A = accepted_A.roll(1) * alpha_A
            rates.append(float(accepted_A[valid_A].sum() / valid_A.sum().clamp(min=1)))
        return Acceptance(length=1.0 + sum(rates), rates=tuple(rates), tokens=len(place_L))

    @torch.no_grad()
    def _target_probs(self, head: Head, hidden_L_E: Tensor) -> Tensor:
        """Of the tokens that the head can draft; the others' share is missing, and no draft can be accepted there."""
        p_L_V = (hidden_L_E @ self._output_V_E.t()).softmax(-1)
        return p_L_V if head.drafts_U is None else p_L_V[:, head.drafts_U]
