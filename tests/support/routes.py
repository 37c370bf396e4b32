"""Routes to compare with: those of a whole sequence in one forward; and a batch that is nothing but routes."""

from collections.abc import Sequence

import torch
from torch import Tensor

from asyncrl.models.decoder import Decoder
from asyncrl.models.packed import packed_attention
from asyncrl.models.routes import Routes, RouteShape
from asyncrl.training.distributed.context import Part


def shape_of(model: Decoder) -> RouteShape:
    shape = RouteShape.of(model.config)
    assert shape is not None
    return shape


@torch.no_grad()
def routes_of(model: Decoder, tokens: Sequence[int]) -> Routes:
    """The model's own choice for every token."""
    shape, found = shape_of(model), list[Tensor]()

    def route(_: int, scores_T_X: Tensor) -> Tensor:
        found.append(scores_T_X.topk(shape.active).indices)
        return found[-1]

    model(torch.tensor(tokens), torch.arange(len(tokens)), packed_attention([len(tokens)]), route=route)
    return torch.stack(found, 1).numpy().astype(shape.dtype)


def part_of(predict_L: Tensor, routes_T_L_C: Tensor | None = None) -> Part:
    """As many tokens as `predict_L` names, each with its routes."""
    tokens_T = torch.arange(len(predict_L) if routes_T_L_C is None else len(routes_T_L_C))
    return Part(tokens_T, tokens_T, predict_L, predict_L, routes_T_L_C)
