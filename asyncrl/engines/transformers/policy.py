"""A causal language model of transformers: its weights, a forward with its own cache, and new versions by name.

transformers loads a published version as it loads a checkpoint: a new model is made of the tensors, under the names
that a checkpoint has. So whatever a family does with its names (experts in one tensor, tied matrices) is done in one
place, and a version that does not fit leaves the old model as it is.

Axis suffixes: N rows, L tokens, V vocabulary, E hidden size.
"""

import inspect
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, Cache, DynamicCache
from transformers.utils import logging

from asyncrl.engines.native.weight_loading import Receiver, not_in_fp8, wrong_digest
from asyncrl.errors import EngineError, WeightSyncError
from asyncrl.models.head import fp32_product
from asyncrl.types import WeightManifest
from asyncrl.weights.transports.registry import digest_published, read_published

BY_LENGTH = ("dynamic", "longrope")
"""Kinds of rotary embedding whose frequencies depend on the length of the whole sequence, once it is long."""


class Policy:
    def __init__(self, path: Path, dtype: torch.dtype, device: torch.device, max_length: int) -> None:
        logging.disable_progress_bar()
        self._dtype, self._device = dtype, device
        self._config: Any = AutoConfig.from_pretrained(path, trust_remote_code=False)
        self._text: Any = self._config.get_text_config(decoder=True)
        for problem in _problems(path, self._config, self._text, max_length):
            raise EngineError(problem)
        # The attention that the family supports is transformers' own choice. Pickled weights are not read.
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            path,
            config=self._config,
            dtype=dtype,
            trust_remote_code=False,
            use_safetensors=True,
            output_loading_info=True,
        )
        model, report = loaded
        if wrong := _differing(report):
            raise EngineError(f"{path} does not fit its config.json: {wrong}; download or save the checkpoint again")
        accepted = inspect.signature(model.forward).parameters
        if "past_key_values" not in accepted:
            raise EngineError(
                f"{path}: model_type={self._config.model_type} has a cache of its own kind, which engine=transformers "
                "does not fill; use engine=vllm"
            )
        self._options = {"logits_to_keep": 1} if "logits_to_keep" in accepted else {}
        self._model = self._prepared(model)

    @property
    def vocabulary(self) -> int:
        return self._text.vocab_size

    def cache(self) -> Cache:
        """An empty one, with a layer of the right kind for each of the model's: as `generate` makes it."""
        return DynamicCache(config=self._config)

    def logits(self, tokens_N_L: Tensor, cache: Cache) -> Tensor:
        """After the last token of each row, in fp32; the cache is longer by these tokens then."""
        fed = tokens_N_L.to(self._device)
        return self._model(fed, past_key_values=cache, use_cache=True, **self._options).logits[:, -1].float()

    def load(self, manifest: WeightManifest, receiver: Receiver) -> str:
        if manifest.fp8 is not None:
            raise WeightSyncError(not_in_fp8(receiver.engine, manifest.version))
        digest = digest_published(manifest)
        if digest != manifest.digest:
            raise WeightSyncError(wrong_digest(manifest, digest, receiver))
        # Copies: the published memory is written again while these weights are in use.
        tensors = {name: tensor.clone() for name, tensor in read_published(manifest, torch.device("cpu"))}
        model, wrong = self._made_of(tensors)
        if wrong:
            raise WeightSyncError(
                f"engine {receiver.engine}: version {manifest.version} belongs to another {receiver.model}: {wrong}; "
                f"{receiver.kept} is kept, publish the {receiver.model} that the engine was started with"
            )
        self._model = self._prepared(model)
        return digest

    def _made_of(self, tensors: dict[str, Tensor]) -> tuple[Any, str]:
        """A model of these tensors, and what is wrong with it."""
        try:
            loaded: Any = type(self._model).from_pretrained(
                None,
                config=self._config,
                state_dict=tensors,
                dtype=self._dtype,
                ignore_mismatched_sizes=True,  # the report names them
                output_loading_info=True,
            )
        except Exception as error:  # whatever transformers raises, the model in use is as it was
            return None, str(error)
        return loaded[0], _differing(loaded[1])

    def _prepared(self, model: Any) -> Any:
        model = model.eval().requires_grad_(False).to(self._device)
        if self._dtype != torch.float32:
            model.set_output_embeddings(Fp32Head(model.get_output_embeddings()))
        return model


class Fp32Head(nn.Module):
    """Logits in fp32 whatever the model computes in, as the other engines have them (asyncrl/models/head.py)."""

    def __init__(self, head: nn.Linear) -> None:
        super().__init__()
        self.weight_E_V = head.weight.t()
        if not self.weight_E_V.is_cuda:
            self.weight_E_V = self.weight_E_V.float()  # once, and not for each token
        self.bias: Tensor | None = head.bias

    def forward(self, hidden_N_L_E: Tensor) -> Tensor:
        logits = fp32_product(hidden_N_L_E.flatten(0, -2), self.weight_E_V).unflatten(0, hidden_N_L_E.shape[:-1])
        return logits if self.bias is None else logits + self.bias.float()


def _problems(path: Path, config: Any, text: Any, max_length: int) -> Iterator[str]:
    if getattr(config, "quantization_config", None) is not None:
        yield (
            f"{path}: quantization_config is set, and quantized weights cannot be updated; use a checkpoint in fp32, "
            "fp16 or bf16"
        )
    for rope in _ropes(getattr(text, "rope_parameters", None) or {}):
        original = rope.get("original_max_position_embeddings") or text.max_position_embeddings
        if rope["rope_type"] in BY_LENGTH and max_length > original:
            yield (
                f"engine.max_length={max_length}: with rope_type={rope['rope_type']} a sequence of more than "
                f"{original} tokens has other keys from its first token on, and those in a cache would be wrong; set "
                f"engine.max_length={original}"
            )


def _ropes(parameters: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """One for all layers, or one for each kind of layer."""
    return [parameters] if "rope_type" in parameters else [each for each in parameters.values() if each]


def _differing(report: Mapping[str, Any]) -> str:
    """What a loading report complains about; empty: nothing."""
    kinds = {"missing_keys": "missing", "unexpected_keys": "unexpected", "mismatched_keys": "of another shape"}
    said = [f"{word} {', '.join(sorted(map(str, report[kind]))[:5])}" for kind, word in kinds.items() if report[kind]]
    return "; ".join(said)
