"""Any causal language model of Hugging Face's transformers, as training asks for it (asyncrl.models.policy).

What a layer computes is the family's own code: sliding windows, attention sinks, soft-capping, states of linear
attention. Ours are the rows around it, the head behind it, and the names of its weights in files. Code that comes with
a checkpoint is never run.

**Rows.** They are as long as the longest sample, and shorter ones lie one behind the other: in one long row attention
would look at every pair of tokens, only to mask most of them. transformers tells samples apart by positions that begin
again. Not every family looks at these: `try_out` packs a few samples, and where one changes another each gets a row of
its own. Rows are padded behind their tokens, where causal layers do not look.

**Precision.** In bf16 products are narrow (autocast) and the residual stream stays in fp32, as in our own decoder.

Axis suffixes: T flat tokens, N rows, L row length, E hidden size, V vocabulary.
"""

import logging
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from asyncrl.config.trainer import Lora, check_targets
from asyncrl.errors import CheckpointError
from asyncrl.models.adapters import Adapter
from asyncrl.models.config import OUTPUTS, ModelConfig
from asyncrl.models.experts import Route
from asyncrl.models.file_layout import file_layout
from asyncrl.models.files import tensor_sizes
from asyncrl.models.head import LogitShape
from asyncrl.models.layers import Exchange, Indices
from asyncrl.models.names import Part
from asyncrl.models.policy import Adapted, Packing, PolicyModel, Taps
from asyncrl.system.optional import require

if TYPE_CHECKING:
    from asyncrl.models.execution import Execution

log = logging.getLogger(__name__)

LOGIT_FACTORS = {"logit_scale": 1, "logits_scaling": -1, "lm_head_multiplier": 1}
"""Settings of families that multiply logits by a number, or divide them by it."""
PROBE_LENGTHS = (16, 9, 7)
"""The last two fit into a row as long as the first, one behind the other."""
TOLERANCE = {False: 1e-3, True: 5e-2}
"""Of hidden states against the largest of them, in fp32 and in bf16: sums have another order in rows of other lengths,
and where samples see each other the difference is about as large as the states."""
LEAK = 1e-3
"""The same of the states of others when one sample changes: rows are as long as before, so sums have the same order,
but for experts that get other tokens."""
ADAPTER = "lora"
"""The name of an adapter in the module that it changes."""


class TransformersModel(PolicyModel):
    """Weights are uninitialised: `asyncrl.models.checkpoint` loads them. Without `output` it ends at the hidden states,
    and an output matrix that is not tied to the embeddings is left out."""

    def __init__(self, directory: Path, config: ModelConfig, dtype: torch.dtype, *, output: bool = True) -> None:
        super().__init__()
        self.config = config
        self.inner = _empty(directory, dtype)
        embedding, head = self.inner.get_input_embeddings(), self.inner.get_output_embeddings()
        self._tied = head is None or head.weight is embedding.weight
        if not output and not self._tied:
            self.inner.set_output_embeddings(None)
        self._output = output
        self.logit_shape = _logit_shape(self.inner.config.get_text_config())
        self.packing: Packing = "packed"
        self._layout = file_layout(self.inner, tensor_sizes(directory))
        self._recomputed = 0
        self._compiled = False
        self._adapted: list[Adapted] = []
        embedding.register_forward_hook(_widen)
        trained = {id(each) for module in (self.decoder, embedding, head) if module for each in module.parameters()}
        for parameter in self.inner.parameters():  # a tower for pictures or sound sees nothing to learn from
            parameter.requires_grad_(id(parameter) in trained)

    @property
    def decoder(self) -> nn.Module:
        """What makes hidden states of tokens."""
        found = self.inner.get_decoder()
        return self.inner.model if found is self.inner else found

    def states(
        self,
        tokens_T: Tensor,
        positions_T: Tensor,
        rows: Sequence[Indices],
        *,
        narrow: bool,
        taps: Taps | None = None,
        execution: "Execution | None" = None,
        route: Route | None = None,
        exchange: Exchange | None = None,
    ) -> Tensor:
        assert exchange is None, "attention of transformers sees the tokens of this rank only"
        assert sum(map(len, rows)) == len(tokens_T), "samples share tokens, which attention of transformers cannot"
        if execution is not None:
            self._recompute(execution.recomputed)
            if execution.their_layers and not self._compiled:
                self._compile()
        layout = _in_rows(rows, packed=self.packing == "packed")
        source_N_L, positions_N_L, place_T = (torch.from_numpy(each).to(tokens_T.device) for each in layout)
        found: tuple[Tensor, ...] = self(tokens_T[source_N_L], positions_N_L, every=taps is not None)
        hidden_T_E, *before = (x_N_L_E.flatten(0, 1).index_select(0, place_T) for x_N_L_E in found)
        for layer, x_T_E in enumerate(before[: self.config.layers]):
            if taps is not None:
                taps.see(layer, x_T_E)
        return hidden_T_E

    def forward(
        self, tokens_N_L: Tensor, positions_N_L: Tensor, *, every: bool = False, logits: bool = False
    ) -> tuple[Tensor, ...]:
        """Final hidden states; behind them, with `every`, those before each layer, and with `logits` the model's own
        logits. All of it is computed in here, so that hooks of the module (FSDP's) come before it."""
        found = self.decoder(
            input_ids=tokens_N_L, position_ids=positions_N_L, use_cache=False, output_hidden_states=every
        )
        if logits:
            own = self.inner(input_ids=tokens_N_L, position_ids=positions_N_L, use_cache=False).logits
            return found.last_hidden_state, own
        return found.last_hidden_state, *(found.hidden_states if every else ())

    def _recompute(self, layers: int) -> None:
        """Have so many of the first layers computed again in the backward."""
        if layers == self._recomputed or not self.inner.supports_gradient_checkpointing:
            return
        self._recomputed = layers
        self.inner.gradient_checkpointing_enable({"use_reentrant": False})
        for index, block in enumerate(self.blocks()):
            cast(Any, block).gradient_checkpointing = index < layers
            block.train(index < layers)  # transformers asks for it; nothing is dropped (`_empty`)

    @property
    def _has_graphs(self) -> bool:
        """What experts compute depends on how many tokens each has, and states that run through a row are loops: no
        graph is good at these."""
        return self.config.experts is None and self.packing == "packed"

    def _compile(self) -> None:
        """Each layer for itself: all are one graph, with the adapters in it and FSDP's hooks around it."""
        self._compiled = True
        if self._has_graphs:
            for block in self.blocks():
                block.forward = torch.compile(block.forward, dynamic=True)

    @property
    def output_matrix(self) -> Tensor:
        head = self.inner.get_output_embeddings()
        return (self.inner.get_input_embeddings() if head is None else head).weight

    @property
    def dtype(self) -> torch.dtype:
        return self.inner.get_input_embeddings().weight.dtype

    @property
    def device(self) -> torch.device:
        return self.inner.get_input_embeddings().weight.device

    def blocks(self) -> Sequence[nn.Module]:
        for module in self.decoder.modules():
            if isinstance(module, nn.ModuleList) and len(module) == self.config.layers:
                return list(module)
        raise CheckpointError(f"{type(self.inner).__name__} has no list of {self.config.layers} layers to be sharded")

    def parts(self) -> Iterator[tuple[str, tuple[Part, ...]]]:
        return ((f"inner.{name}", parts) for name, parts in self._layout.items())

    def redundant(self, name: str) -> bool:
        ignored = self.inner._keys_to_ignore_on_load_unexpected or ()
        left_out = (self._tied or not self._output) and name.endswith(OUTPUTS)
        return left_out or name.endswith(".rotary_emb.inv_freq") or any(re.search(each, name) for each in ignored)

    # Adapters.

    def adapt(self, settings: Lora, generator: torch.Generator) -> None:
        found = dict(self._linears())
        check_targets(settings, {name.rpartition(".")[2] for name in found}, type(self.inner).__name__)
        for name, linear in found.items():
            if name.rpartition(".")[2] in settings.targets:
                adapter = Adapter(linear.in_features, linear.out_features, settings.rank, settings.alpha, generator)
                linear.add_module(ADAPTER, adapter.to(linear.weight.device))
                linear.register_forward_hook(_add_change)
                (part,) = self._layout[f"{name}.weight"]
                self._adapted.append(Adapted(part.name.removesuffix(".weight"), f"inner.{name}.{ADAPTER}", adapter))

    def adapted(self) -> Iterator[Adapted]:
        return iter(self._adapted)

    def _linears(self) -> Iterator[tuple[str, nn.Linear]]:
        """Of the layers, by their names in `inner`."""
        blocks = {id(each) for block in self.blocks() for each in block.modules()}
        for name, module in self.inner.named_modules():
            if isinstance(module, nn.Linear) and id(module) in blocks and len(self._layout[f"{name}.weight"]) == 1:
                yield name, module

    # What is tried before the first batch.

    @torch.no_grad()
    def try_out(self, *, narrow: bool) -> str:
        if self._output:
            self._check_logits(narrow=narrow)
        kinds = getattr(self.inner.config.get_text_config(), "layer_types", None) or ()
        if "chunked_attention" in kinds:  # chunks are longer than what is tried
            return "its chunks of attention are counted from the beginning of a row"
        return "" if self._packs(narrow=narrow) else "packed, they would see each other"

    def _packs(self, *, narrow: bool) -> bool:
        """Whether samples that lie one behind the other have the states that each has alone, and whether the last one
        keeps its own if the others change."""
        samples = [torch.from_numpy(each) for each in _probe(self.config.vocabulary)]
        *others, last = samples
        changed = [(each + 1) % self.config.vocabulary for each in others]
        packed, *alone = (self._probed(some, narrow=narrow) for some in (samples, *([each] for each in samples)))
        beside = self._probed([*changed, last], narrow=narrow)
        apart = (packed - torch.cat(alone)).abs().max() / packed.abs().max()
        leaked = (packed - beside)[-len(last) :].abs().max() / packed.abs().max()
        return bool(apart <= TOLERANCE[narrow] and leaked <= LEAK)

    def _probed(self, samples: Sequence[Tensor], *, narrow: bool) -> Tensor:
        ends = np.cumsum([len(each) for each in samples])
        rows = [np.arange(end - len(each), end) for each, end in zip(samples, ends, strict=True)]
        positions_T = torch.cat([torch.arange(len(each)) for each in samples]).to(self.device)
        with torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=narrow):
            return self.states(torch.cat(list(samples)).to(self.device), positions_T, rows, narrow=narrow)

    def try_to_compile(self, *, narrow: bool) -> str:
        if not self._has_graphs:
            return ""
        self._compile()
        samples = [torch.from_numpy(each) for each in _probe(self.config.vocabulary)]
        try:
            with torch.enable_grad():
                self._probed(samples, narrow=narrow).float().sum().backward()
        except Exception as error:  # a compiler raises whatever it likes, and is not needed
            for block in self.blocks():
                del block.forward
            return f"{type(error).__name__}: {error}".splitlines()[0]
        return ""

    def _check_logits(self, *, narrow: bool) -> None:
        """That our head computes what the model's own does."""
        tokens_1_L = torch.from_numpy(_probe(self.config.vocabulary)[0])[None].to(self.device)
        positions_1_L = torch.arange(tokens_1_L.shape[1], device=self.device)[None]
        with torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=narrow):
            hidden, own = (x[0] for x in self(tokens_1_L, positions_1_L, logits=True))
            apart = (self.logits(hidden) - own).abs().max() / own.abs().max()
        if not apart <= TOLERANCE[narrow]:
            raise CheckpointError(
                f"{type(self.inner).__name__} does more between hidden states and logits than to scale and cap them, "
                "which our head does not know: use a model of another family"
            )


def _empty(directory: Path, dtype: torch.dtype) -> Any:
    """The model of a directory without its weights, in memory that nothing is written to yet. Nothing is dropped out:
    policies are compared by their probabilities, and the same weights must give the same ones."""
    transformers = require("transformers", extra="transformers")
    initialization = require("transformers.initialization", extra="transformers")
    config = transformers.AutoConfig.from_pretrained(directory, trust_remote_code=False)
    for part in (config, config.get_text_config()):
        for name, value in vars(part).items():
            if isinstance(value, float) and ("drop" in name or name == "router_jitter_noise"):
                setattr(part, name, 0.0)
    with initialization.no_init_weights():
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=False)
    model.tie_weights()
    return model.eval()


def _logit_shape(config: Any) -> LogitShape:
    scale = 1.0
    for name, power in LOGIT_FACTORS.items():
        scale *= float(getattr(config, name, None) or 1.0) ** power
    return LogitShape(scale, float(getattr(config, "final_logit_softcapping", None) or 0.0))


def _in_rows(samples: Sequence[Indices], *, packed: bool) -> tuple[Indices, Indices, Indices]:
    """The flat token at each place of N_L and its position, and the place of each flat token. Padding goes on with the
    last sample of a row."""
    longest = max(map(len, samples))
    rows = _filled(samples, longest) if packed else [[sample] for sample in samples]
    source_N_L, positions_N_L = np.empty((2, len(rows), longest), np.int64)
    place_T = np.empty(sum(map(len, samples)), np.int64)
    for number, row in enumerate(rows):
        found = np.concatenate(row)
        place_T[found] = number * longest + np.arange(len(found))
        source_N_L[number] = np.pad(found, (0, longest - len(found)), mode="edge")
        end = longest - len(found) + len(row[-1])
        positions_N_L[number] = np.concatenate([*(np.arange(len(each)) for each in row[:-1]), np.arange(end)])
    return source_N_L, positions_N_L, place_T


def _filled(samples: Sequence[Indices], longest: int) -> list[list[Indices]]:
    """Each into the first row that has room for it, the long ones first."""
    rows: list[list[Indices]] = []
    room: list[int] = []
    for sample in sorted(samples, key=len, reverse=True):
        row = next((number for number, left in enumerate(room) if left >= len(sample)), len(rows))
        if row == len(rows):
            rows.append([])
            room.append(longest)
        rows[row].append(sample)
        room[row] -= len(sample)
    return rows


def _probe(vocabulary: int) -> list[Indices]:
    random = np.random.default_rng(0)
    return [random.integers(0, vocabulary, length) for length in PROBE_LENGTHS]


def _widen(_embedding: nn.Module, _inputs: Any, output: Tensor) -> Tensor:
    return output.float() if torch.is_autocast_enabled(output.device.type) else output


def _add_change(linear: nn.Module, inputs: tuple[Tensor], output: Tensor) -> Tensor:
    adapter = cast(Adapter, getattr(linear, ADAPTER))
    return output + (inputs[0] @ adapter.A.t()) @ adapter.scaled().t()
