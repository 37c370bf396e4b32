"""The learner: groups in, weights out.

`accumulate` runs forward and backward on whatever groups are there and may be called many times per step, while the
rest of the step is still being generated. `step` divides the summed gradient by the token count of the whole step and
updates once. The result is that of one batch over all the groups, whatever the order and sizes of the calls.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from torch.nn import functional

from asyncrl.algorithms import corrections, grpo
from asyncrl.algorithms.advantage import group_relative
from asyncrl.algorithms.base import Tokens
from asyncrl.algorithms.settings import Algorithm, Correction
from asyncrl.config import Trainer
from asyncrl.models.checkpoint import load_model
from asyncrl.models.head import bf16_logits
from asyncrl.models.names import hf_tensors
from asyncrl.models.packed import row_attention
from asyncrl.training.diagnostics import ratio_sums, step_figures
from asyncrl.training.packing import Block, PackedBatch, block, pack
from asyncrl.training.report import StepReport
from asyncrl.types import Group


class Learner:
    """Fp32 master weights, AdamW, one optimizer step per quota of groups."""

    def __init__(
        self, model_path: Path, settings: Trainer, algorithm: Algorithm, correction: Correction, *, temperature: float
    ) -> None:
        self.device = _device(settings.device)
        model, self.model_config = load_model(model_path, dtype=torch.float32)
        self.model = model.to(self.device)
        self.version = 0
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(),
            lr=settings.lr,
            betas=(settings.beta1, settings.beta2),
            weight_decay=settings.weight_decay,
            fused=True,
        )
        self._settings = settings
        self._algorithm = algorithm
        self._correction = correction
        self._temperature = temperature if temperature > 0 else 1.0
        self._reset()

    def _reset(self) -> None:
        self._samples = 0
        self._tokens = 0
        self._sums: dict[str, float] = {"loss": 0.0}
        self.optimizer.zero_grad(set_to_none=True)

    def accumulate(self, groups: Sequence[Group]) -> None:
        """Forward and backward; gradients add up until `step`."""
        blocks = [self._block(group) for group in groups]
        self._samples += sum(len(block.answers) for block in blocks)
        self._tokens += sum(answer.num_sampled for block in blocks for answer in block.answers)
        # Advantage 0 adds tokens to the denominator and nothing to the gradient: no forward is spent on such a group.
        useful = [block for block in blocks if any(answer.advantage != 0.0 for answer in block.answers)]
        for batch in pack(useful, self._settings.token_budget):
            self._backward(batch.to(self.device))

    def _block(self, group: Group) -> Block:
        rewards = np.array([t.reward for t in group.trajectories], dtype=np.float64)
        return block(group, group_relative(rewards, normalize_std=self._algorithm.normalize_std).tolist())

    def _backward(self, batch: PackedBatch) -> None:
        logp_L = self.token_logprobs(batch)
        proximal_L, weight_L = corrections.apply(self._correction, logp_L, batch.behaviour_logp_L)
        output = grpo.loss(
            self._algorithm,
            Tokens(logp_L=logp_L, proximal_logp_L=proximal_L, weight_L=weight_L, advantage_L=batch.advantage_L),
        )
        output.loss.backward()
        self._add({"loss": float(output.loss.detach()), **output.sums})
        self._add(ratio_sums(corrections.log_ratio(logp_L, batch.behaviour_logp_L)))

    def token_logprobs(self, batch: PackedBatch) -> torch.Tensor:
        """Log-probability of each sampled token, at the temperature it was sampled with."""
        with torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=self._settings.dtype == "bf16"):
            hidden_T = self.model(batch.tokens_T, batch.positions_T, row_attention(batch.rows, self.device))
        # The end of a prompt predicts the first token of many answers; an embedding's backward adds them up fast.
        hidden_L = functional.embedding(batch.predict_L, hidden_T)
        narrow = self._settings.dtype == "bf16"
        logits_L = bf16_logits(hidden_L, self.model.output_matrix) if narrow else self.model.logits(hidden_L)
        logits_L = logits_L / self._temperature
        return torch.log_softmax(logits_L, dim=-1).gather(1, batch.target_L[:, None]).squeeze(1)

    def _add(self, sums: dict[str, float]) -> None:
        for name, value in sums.items():
            self._sums[name] = self._sums.get(name, 0.0) + value

    def step(self) -> StepReport:
        """One optimizer update from everything accumulated since the last."""
        parameters = list(self.model.parameters())
        for parameter in parameters:
            if parameter.grad is None:  # every advantage was 0: Adam still moves by its momentum, as one batch would
                parameter.grad = torch.zeros_like(parameter)
            parameter.grad.div_(max(self._tokens, 1))
        norm = float(torch.nn.utils.clip_grad_norm_(parameters, self._settings.grad_clip))
        loss = self._sums["loss"] / max(self._tokens, 1)
        skipped = not (np.isfinite(norm) and np.isfinite(loss))
        if not skipped:
            self.optimizer.param_groups[0]["lr"] = self._learning_rate()
            self.optimizer.step()
        self.version += 1
        report = StepReport(
            version=self.version,
            samples=self._samples,
            tokens=self._tokens,
            loss=loss,
            grad_norm=norm,
            skipped=skipped,
            figures=step_figures(self._sums),
        )
        self._reset()
        return report

    def _learning_rate(self) -> float:
        warmup = self._settings.warmup_steps
        return self._settings.lr * min(1.0, (self.version + 1) / warmup) if warmup else self._settings.lr

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The weights under their Hugging Face names, as the transports publish them."""
        return hf_tensors(self.model)


def _device(wanted: str) -> torch.device:
    return torch.device(("cuda" if torch.cuda.is_available() else "cpu") if wanted == "auto" else wanted)
