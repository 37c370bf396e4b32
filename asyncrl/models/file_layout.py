"""Which tensors of a checkpoint a weight of transformers is made of.

transformers converts many checkpoints as it loads them: it renames tensors, and stacks the matrices of a layer's
experts into one weight. `save_pretrained` turns that around. Here the numbers of rows go through the same conversion in
place of weights: what comes out under a name says which rows that tensor has. So shards of a weight can be read from
the original files, and weights are saved and published in the layout that they had, which is also the one that vLLM
loads.
"""

from collections.abc import Container, Iterator
from typing import Any

import torch
from torch import Tensor

from asyncrl.errors import CheckpointError
from asyncrl.models.names import Part
from asyncrl.system.optional import require

COLUMNS = 2
"""Of the row numbers: with two a transposed matrix is told from one that is not."""
Layout = dict[str, tuple[Part, ...]]


def file_layout(model: Any, files: Container[str]) -> Layout:
    """The parts of every weight of a `PreTrainedModel`, by the names that it has in the files.

    Files may be in the original layout, in that layout below the prefix that a model with other towers has, or hold the
    weights as transformers has them. Missing tensors are named as in the original.
    """
    mapping = require("transformers.conversion_mapping", extra="transformers")
    loading = require("transformers.core_model_loading", extra="transformers")
    known = mapping.get_model_conversion_mapping(model, add_legacy=False)
    plain = [each for each in known if not isinstance(each, loading.PrefixChange)]
    found: Layout = {}
    for name, weight in saved_weights(model):
        layouts: list[tuple[Part, ...]] = [(Part(name, len(weight) if weight.ndim else 1),)]
        for conversions in (known, plain) if len(known) > len(plain) else (plain,):
            model._weight_conversions = conversions  # as `from_pretrained` leaves them
            converted = loading.revert_weight_conversion(model, {name: _row_numbers(weight)})
            layouts.append(_parts(weight, name, converted))
        layouts.reverse()
        found[name] = next((each for each in layouts if all(part.name in files for part in each)), layouts[0])
    del model._weight_conversions
    _check_disjoint(found)
    return found


def saved_weights(model: Any) -> Iterator[tuple[str, Tensor]]:
    """Parameters, tied ones once, and the buffers that are saved with them."""
    yield from model.named_parameters()
    kept = set(model.state_dict())
    yield from ((name, buffer) for name, buffer in model.named_buffers() if name in kept)


def _row_numbers(weight: Tensor) -> Tensor:
    shape = weight.shape if weight.ndim < 2 else (*weight.shape[:-1], COLUMNS)
    return torch.arange(int(torch.Size(shape).numel())).view(shape)


def _parts(weight: Tensor, name: str, converted: dict[str, Tensor]) -> tuple[Part, ...]:
    columns = 1 if weight.ndim < 2 else COLUMNS
    found = sorted(converted.items(), key=lambda each: int(each[1].flatten()[0]))
    parts: list[Part] = []
    end = 0
    for part, numbers in found:
        begin, end = end, end + numbers.numel()
        if not torch.equal(numbers.flatten(), torch.arange(begin, end)):
            break
        if weight.ndim < 2 or len(found) == 1:
            rows = len(weight) if weight.ndim else 1
        elif numbers.ndim == weight.ndim:
            rows = len(numbers)
        else:  # without the axis of the experts
            rows = numbers.numel() // columns
        parts.append(Part(part, rows, flat=weight.ndim == 2 and numbers.ndim == 1))
    else:
        if end == _row_numbers(weight).numel():
            return tuple(parts)
    raise CheckpointError(
        f"transformers makes {name} of {', '.join(converted)} by more than stacking rows, which can be loaded but not "
        "published yet: use a model of another family"
    )


def _check_disjoint(layout: Layout) -> None:
    owners: dict[str, str] = {}
    for name, parts in layout.items():
        for part in parts:
            if (other := owners.setdefault(part.name, name)) != name:
                raise CheckpointError(
                    f"transformers makes both {other} and {name} of {part.name}, which can be loaded but not published "
                    "yet: use a model of another family"
                )
