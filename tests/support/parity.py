"""What transformers says about an engine's answer."""

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt
import torch
from transformers import DynamicCache, PreTrainedModel
from transformers.generation.logits_process import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from asyncrl.engines.base import OnUpdate
from asyncrl.types import Request, Sampling
from tests.support.driving import Answer


def gathered(logits_T_V: torch.Tensor, tokens: npt.ArrayLike) -> npt.NDArray[np.float32]:
    """Log-probabilities of the tokens."""
    index = torch.as_tensor(np.asarray(tokens), dtype=torch.int64).unsqueeze(1)
    return logits_T_V.log_softmax(-1).gather(1, index).squeeze(1).detach().numpy()


def reference_logits(model: PreTrainedModel, request: Request, answer: Answer) -> torch.Tensor:
    """Logits that transformers gives at each token of the answer."""
    whole = torch.tensor([[*request.tokens, *answer.tokens.tolist()]])
    return model(whole).logits[0, len(request.tokens) - 1 : -1]


@torch.inference_mode()
def stepped_logits(model: PreTrainedModel, request: Request, answer: Answer) -> torch.Tensor:
    """The same, token by token, as `generate` computes them."""
    cache, fed, found = DynamicCache(config=model.config), list(request.tokens), list[torch.Tensor]()
    for token in answer.tokens.tolist():
        found.append(model(torch.tensor([fed]), past_key_values=cache).logits[0, -1])
        fed = [token]
    return torch.stack(found)


def processed(logits_T_V: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """Logits of the distribution that is sampled from."""
    ids = torch.zeros(1, 1, dtype=torch.int64)
    if sampling.temperature not in (0, 1):
        logits_T_V = TemperatureLogitsWarper(sampling.temperature)(ids, logits_T_V)
    if sampling.top_k:
        logits_T_V = TopKLogitsWarper(sampling.top_k)(ids, logits_T_V)
    if sampling.top_p < 1:
        logits_T_V = TopPLogitsWarper(sampling.top_p)(ids, logits_T_V)
    return logits_T_V


def behaviour(
    models: Mapping[int, PreTrainedModel], prompt: tuple[int, ...], answer: Answer, on_update: OnUpdate
) -> npt.NDArray[np.float32]:
    """Log-probabilities with one cache through all versions (keep), or with a fresh one per version (recompute)."""
    config = next(iter(models.values())).config
    cache, pending, prefix = DynamicCache(config=config), list(prompt), list(prompt)
    parts: list[npt.NDArray[np.float32]] = []
    for segment in answer.segments:
        tokens = segment.tokens.tolist()
        if on_update == "recompute":
            cache, pending = DynamicCache(config=config), list(prefix)
        fed = torch.tensor([pending + tokens[:-1]])
        logits = models[segment.version](fed, past_key_values=cache).logits[0, len(pending) - 1 :]
        parts.append(gathered(logits, tokens))
        prefix += tokens
        pending = tokens[-1:]
    return np.concatenate(parts)
