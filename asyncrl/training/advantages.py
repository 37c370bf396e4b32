"""From rewards to advantages: of whole samples by the algorithm, of single tokens with a critic or a KL penalty.

`with_advantages` gives every sample of a group the advantage that the algorithm's registry entry computes. For PPO and
REINFORCE++ that is a reward, of which `TokenAdvantages` makes the advantages of tokens:

    reward at the last token -> less a KL penalty at each -> generalised advantage estimation -> normalised over the
    tokens of the step
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from asyncrl.algorithms import registry
from asyncrl.algorithms.advantages import Rewards, gae, overlong_penalty, standardized, whitened
from asyncrl.config import Run
from asyncrl.config.algorithm import AlgorithmBase
from asyncrl.models.routes import RouteShape
from asyncrl.training.batches import Block, PackedBatch, block
from asyncrl.training.critic import Critic
from asyncrl.training.distributed.ranks import Ranks
from asyncrl.training.forward import PolicyForward
from asyncrl.types import Group


def with_advantages(run: Run, groups: Sequence[Group], routes: RouteShape | None = None) -> list[Block]:
    """The groups that there is something to learn from, as blocks; `routes` are those that all of them must have."""
    rewards = [_rewards(run, group) for group in groups]
    advantages = registry.entry(run.algorithm).advantages(run.algorithm, rewards)
    blocks = [block(group, found.tolist(), routes) for group, found in zip(groups, advantages, strict=True)]
    if _learns_from_everything(run):
        return blocks
    # Advantage 0 adds tokens to the denominator and nothing to the gradient: no forward is spent on such a group.
    return [block for block in blocks if any(answer.advantage != 0.0 for answer in block.answers)]


def _learns_from_everything(run: Run) -> bool:
    """Whether a group can matter although its rewards are all equal."""
    algorithm = run.algorithm
    return algorithm.learns_from_equal_rewards or bool(algorithm.kl.coefficient or algorithm.entropy)


def _rewards(run: Run, group: Group) -> Rewards:
    lengths = np.array([t.sampled_tokens for t in group.trajectories])
    rewards = np.array([t.reward for t in group.trajectories], dtype=np.float64)
    return rewards + overlong_penalty(run.algorithm.overlong, lengths, run.rollout.max_tokens)


class TokenAdvantages:
    def __init__(
        self,
        algorithm: AlgorithmBase,
        policy: PolicyForward,
        reference: PolicyForward | None,
        critic: Critic | None,
        ranks: Ranks,
    ) -> None:
        self._algorithm, self._ranks = algorithm, ranks
        self._policy, self._critic = policy, critic
        self._penalty = reference if algorithm.kl.placement == "reward" else None
        """The policy that the KL penalty in the reward is against."""

    def assign(self, batches: Sequence[PackedBatch]) -> list[PackedBatch]:
        """The batches of a whole step with advantages per token; the critic learns its returns on the way."""
        credit = self._algorithm.credit
        advantages: list[Tensor] = []
        for batch in batches:
            value_L = self._values(batch)
            advantages.append(self._estimated(batch, value_L))
            if self._critic is not None:
                self._critic.learn(batch, advantages[-1] + value_L)
        if advantages and credit.whiten:
            advantages = self._whitened([found for b, found in zip(batches, advantages, strict=True) if not b.idle])
            advantages += [batch.advantage_L for batch in batches if batch.idle]  # which come last
        return [replace(batch, advantage_L=found) for batch, found in zip(batches, advantages, strict=True)]

    def _estimated(self, batch: PackedBatch, value_L: Tensor) -> Tensor:
        credit = self._algorithm.credit
        if self._critic is None and self._penalty is None and credit.discount == credit.trace == 1:
            return batch.advantage_L  # every token has the reward of its sample to come
        return gae(self._rewards(batch), value_L, batch.lengths, credit.discount, credit.trace)

    def _whitened(self, advantages: Sequence[Tensor]) -> list[Tensor]:
        """Over the shares of all ranks."""
        if self._ranks.world == 1:
            return whitened(advantages)
        mine = b"".join(part.cpu().numpy().tobytes() for part in advantages if self._ranks.reports)
        parts = [torch.frombuffer(bytearray(part), dtype=torch.float32) for part in self._ranks.exchange(mine) if part]
        everything = torch.cat(parts)
        return [standardized(part, everything.to(part.device)) for part in advantages]

    @torch.no_grad()
    def _values(self, batch: PackedBatch) -> Tensor:
        return torch.zeros_like(batch.advantage_L) if self._critic is None else self._critic(batch)

    @torch.no_grad()
    def _rewards(self, batch: PackedBatch) -> Tensor:
        """The sample's reward at its last token; a KL penalty at each. `advantage_L` still holds plain rewards."""
        last_S = torch.tensor(batch.lengths, device=batch.advantage_L.device).cumsum(0) - 1
        reward_L = torch.zeros_like(batch.advantage_L)
        reward_L[last_S] = batch.advantage_L[last_S]
        if self._penalty is None:
            return reward_L
        gap_L = self._policy(batch).logp_L - self._penalty(batch).logp_L
        return reward_L - self._algorithm.kl.coefficient * gap_L
