"""What steps leave behind on the device: for the next step, and for the host.

Axis suffixes: W columns of a row, B rows of the largest step, X rows times the columns of a step, N rows of a step.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from asyncrl.engines.native.cuda.inputs import Shape, Sizes
from asyncrl.engines.native.cuda.timeline import Mark, Timeline
from asyncrl.engines.native.sampling import Column


class Flight(NamedTuple):
    """A launched step, and where the host finds its result."""

    shape: Shape
    mark: Mark
    token_N_W: Column
    logprob_N_W: Column
    accepted_N: Column
    """Drafted tokens that were accepted; those of a row and one more are its result."""


class DeviceOutputs:
    def __init__(self, sizes: Sizes, timeline: Timeline) -> None:
        rows, width = sizes.rows, sizes.width
        self._width, self._timeline = width, timeline
        self._device = torch.zeros(3 * width + 1, rows, dtype=torch.int32, device=timeline.device)
        self._read = [timeline.pinned(3 * width + 1, rows) for _ in range(2)]
        self.ahead_W_B = self._device[:width]
        """The newest token of each row, and what was drafted behind it. Tokens -1-i of the next step are its i-th."""
        self._token = self._device[width : 2 * width].view(-1)
        self._logprob = self._device[2 * width : 3 * width].view(torch.float32).view(-1)
        self._accepted_B = self._device[3 * width]

    def tokens(self, shape: Shape) -> Tensor:
        """A step without drafts leaves its tokens for the next one at once."""
        return self.ahead_W_B[0, : shape.rows] if shape.width == 1 else self._token[: shape.rows * shape.width]

    def logprobs(self, shape: Shape) -> Tensor:
        return self._logprob[: shape.rows * shape.width]

    def accepted(self, rows: int) -> Tensor:
        return self._accepted_B[:rows]

    def read(self, shape: Shape) -> Flight:
        """Bring all of it to the host: a part would be gathered first, and waited for."""
        self._read.reverse()
        read, width = self._read[0], self._width
        read.copy_(self._device, non_blocking=True)
        host, count = read.numpy(), shape.rows * shape.width
        token_X = host[0, :count] if shape.width == 1 else host[width : 2 * width].reshape(-1)[:count]
        logprob_X = host[2 * width : 3 * width].reshape(-1)[:count].view("f4")
        grid = shape.rows, shape.width
        return Flight(
            shape, self._timeline.mark(), token_X.reshape(grid), logprob_X.reshape(grid), host[3 * width, : shape.rows]
        )
