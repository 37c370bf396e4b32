"""The critic of PPO: a model of the policy's shape, started from its weights, that predicts the reward to come."""

from pathlib import Path

import torch
from torch import Tensor, nn

from asyncrl.algorithms import losses
from asyncrl.config import Trainer
from asyncrl.models.execution import Execution
from asyncrl.models.policy import PolicyModel
from asyncrl.training.batches import PackedBatch
from asyncrl.training.distributed.ranks import Ranks
from asyncrl.training.forward import predicting_states


class Critic(nn.Module):
    """Its head begins at zero, so the first values are 0 and the first advantages the rewards.

    Every weight of the body is trained, tied embeddings as well: to the critic they are its input. It has no output
    matrix.
    """

    def __init__(
        self,
        model_path: Path,
        policy: PolicyModel,
        rate: float,
        settings: Trainer,
        device: torch.device,
        ranks: Ranks,
        execution: Execution,
    ) -> None:
        super().__init__()
        backend = policy.config.backend
        self.body = ranks.load(model_path, backend, device, torch.float32, output=False)
        self.body.packing = policy.packing
        self.head = nn.Parameter(torch.zeros(policy.config.hidden_size, device=device))
        ranks.shard(self, self.body, model_path, torch.float32)
        self._ranks, self._settings, self._execution = ranks, settings, execution
        self.optimizer = torch.optim.AdamW(
            self.parameters(),
            lr=rate,
            betas=(settings.beta1, settings.beta2),
            weight_decay=settings.weight_decay,
            fused=True,
        )
        self.loss = 0.0
        """Of what was learned since the last step, summed over the tokens."""

    def forward(self, batch: PackedBatch) -> Tensor:
        """Of the state before each sampled token."""
        value_L = predicting_states(self.body, batch, self._settings, execution=self._execution) @ self.head
        return batch.here.whole(value_L)

    def learn(self, batch: PackedBatch, return_L: Tensor) -> None:
        loss = losses.critic(self(batch), return_L).sum() * (not batch.idle)
        loss.backward()
        self.loss += float(loss.detach()) * batch.reports

    def step(self, tokens: int, *, frozen: bool) -> dict[str, float]:
        """Update from what was learned since the last step, unless the step is skipped."""
        parameters = [p for p in self.parameters() if p.grad is not None]
        self._ranks.combine(parameters)
        for parameter in parameters:
            assert parameter.grad is not None
            parameter.grad.div_(max(tokens, 1) / self._ranks.world)  # of ranks the mean is there already
        norm = self._ranks.clip(parameters, self._settings.grad_clip) if parameters else 0.0
        if not frozen and torch.isfinite(torch.tensor(norm)):
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        found = {"critic_loss": self.loss / max(tokens, 1), "critic_grad_norm": norm}
        self.loss = 0.0
        return found
