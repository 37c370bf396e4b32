"""What the trainer finds after the fixed prompts that every new version is probed with."""

import numpy as np
import torch

from asyncrl.config import Trainer
from asyncrl.models.decoder import Decoder
from asyncrl.models.head import bf16_logits
from asyncrl.training.forward import predicting_states
from asyncrl.training.packing import NEXT, Block, pack


@torch.no_grad()
def likeliest(model: Decoder, settings: Trainer, prompts: tuple[tuple[int, ...], ...]) -> tuple[float, ...]:
    """Log-probability of the likeliest token after each prompt, at temperature 1; all prompts are equally long."""
    blocks = [Block(np.array(prompt, np.int32), [NEXT]) for prompt in prompts]
    (batch,) = pack(blocks, sum(map(len, prompts)))
    hidden_L_E = predicting_states(model, batch.to(model.norm.device), settings)
    narrow = settings.dtype == "bf16"
    logits_L_V = bf16_logits(hidden_L_E, model.output_matrix) if narrow else model.logits(hidden_L_E)
    return tuple(logits_L_V.float().log_softmax(-1).amax(-1).tolist())
