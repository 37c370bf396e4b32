"""Which tensors of a checkpoint are quantized. Trainer and engine both ask here, and compare what they found."""

import re

PROJECTION = re.compile(r"model\.layers\.(\d+)\.(?:.+\.)?(?:q|k|v|o|gate|up|down)_proj\.weight")

PROJECTIONS = (*(f"self_attn.{name}_proj" for name in "qkvo"), *(f"mlp.{name}_proj" for name in ("gate", "up", "down")))
"""Of a layer without experts."""

SCALES = "_scale_inv"
"""Behind the name of a quantized tensor: what its values are multiplied with, as in published FP8 checkpoints."""

KV_CACHE = "kv_cache"
"""Stands for keys and values among the names of what is quantized."""


def is_quantized(name: str, layers: int, *, keep_first: int = 0, keep_last: int = 0) -> bool:
    """By its Hugging Face name: the projections of attention, MLP and experts.

    Everything else is kept: embeddings, norms, biases, `lm_head`, and the router of a mixture of experts
    (`mlp.gate.weight`), whose rounding would send tokens to other experts than the trainer's. `keep_first` and
    `keep_last` keep whole layers.
    """
    found = PROJECTION.fullmatch(name)
    return found is not None and keep_first <= int(found[1]) < layers - keep_last
