"""Bf16 working copies of fp32 master weights: what forward and backward read, and what engines are given.

Autocast alone would cast every weight at every use, and keep the result until the backward. Gradients of the copies
are bf16 as autocast's would be; each is added to its master's in fp32 as soon as it is there, and dropped.
"""

from functools import partial

import torch
from torch import Tensor, nn

from asyncrl.models.decoder import Decoder


class WorkingCopy:
    """`refresh` after every change of the masters."""

    def __init__(self, master: Decoder) -> None:
        self.model = Decoder(master.config, torch.bfloat16).to(master.norm.device)
        self._pairs = list(zip(self.model.parameters(), master.parameters(), strict=True))
        for copy, owner in self._pairs:
            copy.register_post_accumulate_grad_hook(partial(_hand_over, owner))
        self.refresh()

    @torch.no_grad()
    def refresh(self) -> None:
        for copy, owner in self._pairs:
            copy.copy_(owner)


def _hand_over(owner: nn.Parameter, copy: Tensor) -> None:
    grad = copy.grad
    assert grad is not None
    if owner.grad is None:
        owner.grad = grad.float()
    else:
        owner.grad.add_(grad)
    copy.grad = None
