"""From rewards to advantages: of whole samples by the algorithm, of single tokens with a critic or a KL penalty.

`with_advantages` gives every sample of a group the advantage that the algorithm's registry entry computes. For PPO and
REINFORCE++ that is a reward, of which `TokenAdvantages` makes the advantages of tokens:

    reward at the last token -> less a KL penalty at each -> generalised advantage estimation -> normalised over the
    tokens of the step

A turn's own reward counts for its tokens: it is added to that of its episode before the baseline is taken off. For PPO
and REINFORCE++ it lies at the turn's last token, and so counts for all that was sampled before it as well.

What teachers say is added where the policy's own log-probabilities are known, in the learner: to the advantages
(`towards_teacher`), or to the loss (`distill.top_k`).
"""

import logging
from collections.abc import Sequence
from dataclasses import replace
from functools import cache

import numpy as np
import torch
from torch import Tensor

from asyncrl.algorithms import registry
from asyncrl.algorithms.advantages import Rewards, gae, overlong_penalty, standardized, whitened
from asyncrl.config import Run
from asyncrl.config.algorithm import AlgorithmBase
from asyncrl.errors import DistillationError
from asyncrl.models.routes import RouteShape
from asyncrl.training.batches import Block, PackedBatch, block
from asyncrl.training.critic import Critic
from asyncrl.training.distributed.ranks import Ranks
from asyncrl.training.forward import PolicyForward
from asyncrl.types import Floats, Group, Trajectory

log = logging.getLogger(__name__)


def with_advantages(run: Run, groups: Sequence[Group], routes: RouteShape | None = None) -> list[Block]:
    """The groups that there is something to learn from, as blocks; `routes` are those that all of them must have."""
    if run.teachers:
        _check_taught(groups, run.distill.top_k)
    if not run.learns_from_rewards:
        blocks = [block(group, [0.0] * len(group.trajectories), routes) for group in groups]
        return [each for each in blocks if each.answers]
    rewards = [_rewards(run, group) for group in groups]
    own = [[_turn_rewards(trajectory) for trajectory in group.trajectories] for group in groups]
    rated = [any(turn_N.any() for turn_N in turns) for turns in own]
    entry = registry.entry(run.algorithm)
    totals = rewards
    if entry.whole_step and any(rated):
        totals = [reward_G + [turn_N.sum() for turn_N in turns] for reward_G, turns in zip(rewards, own, strict=True)]
    advantages = entry.advantages(run.algorithm, totals)
    blocks: list[Block] = []
    for group, reward_G, turns, is_rated, found_G in zip(groups, rewards, own, rated, advantages, strict=True):
        found: Sequence[float | Floats] = found_G.tolist()
        if is_rated and entry.whole_step:
            totals_G = zip(found_G.tolist(), turns, group.trajectories, strict=True)
            found = [_spread(_to_come(total, turn_N), t) for total, turn_N, t in totals_G]
        elif is_rated:
            both = [reward + turn_N for reward, turn_N in zip(reward_G, turns, strict=True)]
            if (found_N := entry.turns(run.algorithm, both)) is None:
                _tell()
            else:
                found = [_spread(each_N, t) for each_N, t in zip(found_N, group.trajectories, strict=True)]
        blocks.append(block(group, found, routes))
    if _learns_from_everything(run):
        return [block for block in blocks if block.answers]
    # Advantage 0 adds tokens to the denominator and nothing to the gradient: no forward is spent on such a group.
    return [block for block in blocks if any(answer.advantages.any() for answer in block.answers)]


def _check_taught(groups: Sequence[Group], top_k: int) -> None:
    """No sample is trained on without its teachers."""
    sampled = (t for group in groups for t in group.trajectories if t.sampled_tokens)
    for trajectory in sampled:
        who = f"sample {trajectory.slot.group}/{trajectory.slot.sample}"
        if not trajectory.teacher_logprob_bytes:
            raise DistillationError(
                f"{who} has no log-probabilities of the teachers: it was not recorded by a run with teachers; set "
                "teachers=[]"
            )
        if top_k and (recorded := trajectory.teacher_top_k.shape[1] // 2) != top_k:
            raise DistillationError(
                f"{who} has the {recorded} likeliest tokens of its teacher, and distill.top_k={top_k} needs as many: "
                f"it was recorded with distill.top_k={recorded}, so set that"
            )


def _turn_rewards(trajectory: Trajectory) -> Rewards:
    """Its turns' own; one turn where it has none."""
    turns = () if trajectory.episode is None else trajectory.episode.turns
    return np.array([turn.reward for turn in turns] or [0.0], np.float64)


def _spread(value_N: Rewards, trajectory: Trajectory) -> Floats:
    """From turns to sampled tokens."""
    turns = () if trajectory.episode is None else trajectory.episode.turns
    lengths = [turn.stop - turn.start for turn in turns] or [trajectory.sampled_tokens]
    return np.repeat(value_N.astype(np.float32), lengths)


def _to_come(total: float, turn_N: Rewards) -> Rewards:
    """In each turn, of a sample's `total`: what was not earned before it."""
    return total - (turn_N.cumsum() - turn_N)


@cache
def _tell() -> None:
    log.warning(
        "rewards of single turns are left out, because algorithm.advantages knows those of whole samples only: "
        "give them in the episode's reward, or leave algorithm.advantages out"
    )


def _learns_from_everything(run: Run) -> bool:
    """Whether a group can matter although its rewards are all equal."""
    algorithm = run.algorithm
    taught = algorithm.learns_from_equal_rewards or bool(run.teachers)
    return taught or bool(algorithm.kl.coefficient or algorithm.entropy)


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
            advantages = self._whitened(batches, advantages)
        return [replace(batch, advantage_L=found) for batch, found in zip(batches, advantages, strict=True)]

    def _estimated(self, batch: PackedBatch, value_L: Tensor) -> Tensor:
        credit = self._algorithm.credit
        if self._critic is None and self._penalty is None and credit.discount == credit.trace == 1:
            return batch.advantage_L  # every token has the reward of its sample to come
        return gae(self._rewards(batch), value_L, batch.lengths, credit.discount, credit.trace)

    def _whitened(self, batches: Sequence[PackedBatch], advantages: Sequence[Tensor]) -> list[Tensor]:
        """Over the shares of all ranks."""
        if self._ranks.world == 1:
            return whitened(advantages)
        told = [part for b, part in zip(batches, advantages, strict=True) if b.reports and not b.idle]
        mine = b"".join(part.cpu().numpy().tobytes() for part in told)
        parts = [torch.frombuffer(bytearray(part), dtype=torch.float32) for part in self._ranks.exchange(mine) if part]
        everything = torch.cat(parts)
        return [standardized(part, everything.to(part.device)) for part in advantages]

    @torch.no_grad()
    def _values(self, batch: PackedBatch) -> Tensor:
        return torch.zeros_like(batch.advantage_L) if self._critic is None else self._critic(batch)

    @torch.no_grad()
    def _rewards(self, batch: PackedBatch) -> Tensor:
        """The sample's reward at its last token, those of turns at theirs; a KL penalty at each. `advantage_L` still
        holds the rewards that are to come: what changes from one token to the next was earned there."""
        last_S = torch.tensor(batch.lengths, device=batch.advantage_L.device).cumsum(0) - 1
        reward_L = batch.advantage_L - batch.advantage_L.roll(-1)
        reward_L[last_S] = batch.advantage_L[last_S]
        if self._penalty is None:
            return reward_L
        gap_L = self._policy(batch).logp_L - self._penalty(batch).logp_L
        return reward_L - self._algorithm.kl.coefficient * gap_L
