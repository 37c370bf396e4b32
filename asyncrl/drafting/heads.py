"""Drafting heads: one decoder layer that guesses the target's next tokens from the target's own hidden states.

The pair at position t is (feature of t, embedding of token t+1), and the head's state there stands for what the target
will know at t+1, so its logits are those of token t+2. A head that goes on alone takes its own state as the feature.

    EAGLE     feature = the target's final, normalised hidden state
              x = fc [embedding ; feature];  state = layer(x), without a norm before it;  logits = target head(state)
    EAGLE-3   feature = fc [residual stream at the taps]
              state = feature + attention [norm(embedding) ; norm(feature)], then the gated layer
              logits = own head(norm(state)), of a vocabulary that may be a part of the target's

Both are Llama layers, whatever the target's family, as vLLM has them. Embeddings are the target's and never trained.
Axis suffixes as in asyncrl.models.decoder; R width of what is read of the target, U tokens the head can draft.
"""

from typing import Literal

import msgspec
import torch
from torch import Tensor, nn

from asyncrl.models.config import ModelConfig
from asyncrl.models.decoder import GatedTensors, LayerTensors, plain_linear
from asyncrl.models.layers import Attend, NormScale, Rotate, rms_norm

Kind = Literal["eagle", "eagle3"]


class HeadConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The shape of a head; `target` is that of the model it drafts for, whose sizes it shares."""

    kind: Kind
    target: ModelConfig
    taps: tuple[int, ...] = ()
    """EAGLE-3: how many layers lie before each place in the residual stream that is read."""
    vocabulary: int

    @property
    def read_width(self) -> int:
        """Numbers read per token of the target."""
        return self.target.hidden_size * (len(self.taps) or 1)


def default_taps(layers: int) -> tuple[int, ...]:
    """An early, a middle and a late place, as vLLM has them, and fewer in a shallow model."""
    return (2, layers // 2, layers - 3) if layers >= 8 else tuple(sorted({0, layers // 2, layers - 1}))


class Head(nn.Module):
    """Weights are uninitialised: `initialise` draws them, `asyncrl.drafting.checkpoint` loads them."""

    drafts_U: Tensor | None
    """The target's id of each token that can be drafted; None where they are the same."""

    def __init__(self, config: HeadConfig, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.config = config
        cfg = config.target
        hidden, wide = cfg.hidden_size, cfg.intermediate_size
        third = config.kind == "eagle3"
        self.fc = plain_linear(config.read_width if third else 2 * hidden, hidden, False, dtype)
        self.qkv_proj = plain_linear(
            2 * hidden if third else hidden, (cfg.heads + 2 * cfg.kv_heads) * cfg.head_dim, False, dtype
        )
        self.o_proj = plain_linear(cfg.heads * cfg.head_dim, hidden, False, dtype)
        self.mlp_norm = nn.Parameter(torch.ones(hidden, dtype=dtype))
        self.gate_up_proj = plain_linear(hidden, 2 * wide, False, dtype)
        self.down_proj = plain_linear(wide, hidden, False, dtype)
        self.embedding_norm = nn.Parameter(torch.ones(hidden, dtype=dtype)) if third else None
        self.feature_norm = nn.Parameter(torch.ones(hidden, dtype=dtype)) if third else None
        self.norm = nn.Parameter(torch.ones(hidden, dtype=dtype)) if third else None
        self.lm_head = plain_linear(hidden, config.vocabulary, False, dtype) if third else None
        self.register_buffer("drafts_U", None)

    @torch.no_grad()
    def initialise(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        for name, parameter in self.named_parameters():
            if name.endswith("norm"):
                parameter.fill_(1.0)
            else:
                parameter.normal_(0.0, self.config.target.initializer_range, generator=generator)

    def features(self, read_T_R: Tensor) -> Tensor:
        """From what was read of the target to what `forward` takes."""
        return read_T_R if self.config.kind == "eagle" else self.fc(read_T_R)

    def forward(self, feature_T_E: Tensor, embedded_T_E: Tensor, rotate: Rotate, attend: Attend) -> Tensor:
        """The head's state, which is also the feature of the next position if the head goes on alone."""
        layer, eps = self._layer(), self.config.target.norm_eps
        if self.embedding_norm is None or self.feature_norm is None:
            x_T_E = y_T_X = self.fc(torch.cat([embedded_T_E, feature_T_E], -1))
        else:
            normed = rms_norm(embedded_T_E, NormScale.of(self.embedding_norm, eps))
            x_T_E = feature_T_E
            y_T_X = torch.cat([normed, rms_norm(feature_T_E, NormScale.of(self.feature_norm, eps))], -1)
        return layer.after_attention(x_T_E, attend(0, *layer.heads_of(y_T_X, rotate)))

    def logits(self, state_T_E: Tensor, target_V_E: Tensor) -> Tensor:
        """Of the head's vocabulary; `target_V_E` is the target's output matrix, which EAGLE uses."""
        if self.lm_head is None or self.norm is None:
            return state_T_E @ target_V_E.t()
        return self.lm_head(rms_norm(state_T_E, NormScale.of(self.norm, self.config.target.norm_eps)))

    def _layer(self) -> LayerTensors:
        cfg = self.config.target
        none = NormScale(None, torch.zeros(()))
        return LayerTensors(
            heads=cfg.heads,
            kv_heads=cfg.kv_heads,
            head_dim=cfg.head_dim,
            input_norm=none,
            qkv=self.qkv_proj.weight.t(),
            qkv_bias=None,
            qk_norm=None,
            out=self.o_proj.weight.t(),
            out_bias=None,
            mlp_norm=NormScale.of(self.mlp_norm, cfg.norm_eps),
            mlp=GatedTensors(self.gate_up_proj.weight.t(), None, self.down_proj.weight.t(), None),
        )
