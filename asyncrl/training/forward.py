"""The forward of training: log-probabilities of the sampled tokens, and hidden states for the critic."""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from asyncrl.algorithms import penalties
from asyncrl.config import Run, Trainer
from asyncrl.models.decoder import Decoder
from asyncrl.models.head import bf16_logits
from asyncrl.models.packed import row_attention
from asyncrl.training.hidden import HiddenTap
from asyncrl.training.packing import PackedBatch


class Output(NamedTuple):
    logp_L: Tensor
    entropy_L: Tensor | None = None


def predicting_states(model: Decoder, batch: PackedBatch, settings: Trainer, tap: HiddenTap | None = None) -> Tensor:
    """The hidden state from which each sampled token was predicted."""
    device = batch.tokens_T.device
    taps = None if tap is None else tap.taps()
    with torch.autocast(device.type, dtype=torch.bfloat16, enabled=settings.dtype == "bf16"):
        hidden_T = model(batch.tokens_T, batch.positions_T, row_attention(batch.rows, device), taps)
    if tap is not None and taps is not None:
        tap.take(batch, hidden_T, taps.found_T_E)
    # The end of a prompt predicts the first token of many answers; an embedding's backward adds them up fast.
    return functional.embedding(batch.predict_L, hidden_T)


class PolicyForward:
    """A model as a policy: at the temperature that the rollouts sample with."""

    def __init__(self, model: Decoder, run: Run) -> None:
        self._model = model
        self._settings = run.trainer
        self._temperature = run.rollout.temperature or 1.0

    def __call__(self, batch: PackedBatch, *, entropy: bool = False, tap: HiddenTap | None = None) -> Output:
        hidden_L = predicting_states(self._model, batch, self._settings, tap)
        narrow = self._settings.dtype == "bf16"
        logits_L_V = bf16_logits(hidden_L, self._model.output_matrix) if narrow else self._model.logits(hidden_L)
        logits_L_V = logits_L_V / self._temperature
        logp_L = torch.log_softmax(logits_L_V, dim=-1).gather(1, batch.target_L[:, None]).squeeze(1)
        return Output(logp_L, penalties.entropy(logits_L_V) if entropy else None)
