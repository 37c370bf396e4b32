"""How training runs the layers of a decoder: as they are or compiled, with activations kept or computed again.

Compiled, a layer is one graph for all layers and all lengths: norms, rotation, gated product and residual become a few
kernels, and autograd keeps less. What is kept is said by operation, whatever the compiler would choose:

    kept        results of products and of attention; what lies between is computed again while it is read
    recomputed  the layer's input and the result of attention, which costs the most to compute again

Not compiled, or in two parts around an attention that cannot be, `kept` is all that autograd wants and `recomputed` the
input alone.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from asyncrl.models.compiling import compiled
from asyncrl.models.decoder import Layer, LayerForward, keeping
from asyncrl.models.experts import Route
from asyncrl.models.layers import Attend, Rotate, rms_norm

ATTENTION = (torch.ops.aten._flash_attention_forward.default,)
PRODUCTS = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)


class Execution(NamedTuple):
    """Of the layers of one model."""

    recomputed: int = 0
    """So many of the first layers are computed again in the backward: by then those behind have freed their memory."""
    compiled: bool = False
    flash: bool = False
    """Attention is one operation that can be compiled with the rest; other kinds have a layer compiled in two parts.
    Not for experts, of which nothing is compiled: the second part is left as it is."""
    their_layers: bool = False
    """Compile the layers of a model of transformers too."""

    def layer(self, index: int) -> LayerForward:
        recompute = index < self.recomputed and torch.is_grad_enabled()
        if self.compiled and self.flash:
            return compiled(_keep_attention if recompute else _keep_products)
        run = _in_two_parts if self.compiled else keeping
        return partial(_recompute, run) if recompute else run


def _recompute(
    run: LayerForward,
    layer: Layer,
    x_T_E: Tensor,
    rotate: Rotate,
    index: int,
    attend: Attend,
    route: Route | None = None,
) -> Tensor:
    def again(x_T_E: Tensor) -> Tensor:
        return run(layer, x_T_E, rotate, index, attend, route)

    return cast(Tensor, checkpoint(again, x_T_E, use_reentrant=False, preserve_rng_state=False))


def _in_two_parts(
    layer: Layer, x_T_E: Tensor, rotate: Rotate, index: int, attend: Attend, route: Route | None = None
) -> Tensor:
    y_T_X = attend(index, *compiled(_before)(layer, x_T_E, rotate))
    # What experts compute depends on how many tokens each has: no graph holds that.
    return (_after if layer.experts else compiled(_after))(layer, x_T_E, y_T_X, index, route)


def _before(layer: Layer, x_T_E: Tensor, rotate: Rotate) -> tuple[Tensor, Tensor, Tensor]:
    tensors = layer.tensors()
    return tensors.heads_of(rms_norm(x_T_E, tensors.input_norm), rotate)


def _after(layer: Layer, x_T_E: Tensor, y_T_X: Tensor, index: int, route: Route | None) -> Tensor:
    return layer.tensors().after_attention(x_T_E, y_T_X, index, route)


def _keep_products(
    layer: Layer, x_T_E: Tensor, rotate: Rotate, index: int, attend: Attend, _route: Route | None = None
) -> Tensor:
    return _saving(ATTENTION + PRODUCTS, partial(keeping, layer, rotate=rotate, index=index, attend=attend), x_T_E)


def _keep_attention(
    layer: Layer, x_T_E: Tensor, rotate: Rotate, index: int, attend: Attend, _route: Route | None = None
) -> Tensor:
    return _saving(ATTENTION, partial(keeping, layer, rotate=rotate, index=index, attend=attend), x_T_E)


def _saving(operations: tuple[Any, ...], run: Callable[[Tensor], Tensor], x_T_E: Tensor) -> Tensor:
    contexts = partial(create_selective_checkpoint_contexts, partial(_policy, operations))
    return cast(Tensor, checkpoint(run, x_T_E, use_reentrant=False, preserve_rng_state=False, context_fn=contexts))


def _policy(saved: tuple[Any, ...], _context: Any, operation: Any, *_: Any, **__: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operation in saved else CheckpointPolicy.PREFER_RECOMPUTE
