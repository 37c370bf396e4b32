"""Hidden states for the drafter, taken out of the trainer's own forward: no extra one is made for them.

A step has more tokens than the drafter may get, so each answer is taken with the same chance, which follows from the
size of the step before. First come, first served would take short answers, which are complete first.
"""

import random
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from asyncrl.drafting.reading import cut
from asyncrl.drafting.settings import DrafterTraining
from asyncrl.drafting.windows import Window
from asyncrl.models.decoder import Taps
from asyncrl.training.packing import Answer, PackedBatch
from asyncrl.types import GIVEN, Ints

DTYPE = torch.bfloat16
"""Half the bytes, and more than a drafter needs."""


class HiddenTap:
    """Collects windows until they are drained."""

    def __init__(self, settings: DrafterTraining, layers: tuple[int, ...], seed: int) -> None:
        self._settings, self._layers = settings, layers
        self._random = random.Random(seed)
        self._version = self._seen = 0
        self._left = settings.tokens_per_step
        self._chance = 1.0
        self._windows: list[Window] = []

    def taps(self) -> Taps:
        return Taps(self._layers)

    def begin_step(self, version: int) -> None:
        if self._seen:
            self._chance = min(1.0, self._settings.tokens_per_step / self._seen)
        self._version, self._seen, self._left = version, 0, self._settings.tokens_per_step

    def take(self, batch: PackedBatch, hidden_T_E: Tensor, tapped: Sequence[Tensor]) -> None:
        """The states of some answers, gathered and brought to the CPU all at once."""
        chosen = [index for index, row in enumerate(batch.rows) if self._wants(len(row))]
        if not chosen:
            return
        rows = [batch.rows[index] for index in chosen]
        place = torch.from_numpy(np.concatenate(rows)).to(hidden_T_E.device)
        tokens = batch.tokens_T[place].cpu().numpy()
        states = [x.detach().index_select(0, place).to("cpu", DTYPE) for x in (hidden_T_E, *tapped)]
        end = 0
        for index, row in zip(chosen, rows, strict=True):
            here, end = slice(end, end + len(row)), end + len(row)
            hidden, *taps = (state[here] for state in states)
            self._windows.append(self._window(batch.answers[index], tokens[here], hidden, taps))

    def _wants(self, tokens: int) -> bool:
        self._seen += tokens
        if self._left <= 0 or self._random.random() >= self._chance:
            return False
        self._left -= min(tokens, self._settings.window_tokens)
        return True

    def _window(self, answer: Answer, tokens: Ints, hidden_T_E: Tensor, taps: Sequence[Tensor]) -> Window:
        given = len(tokens) + 1 - len(answer.tokens)
        return cut(
            slot=answer.slot,
            version=self._version,
            tokens=np.append(tokens, answer.tokens[-1]),
            versions=np.concatenate([np.full(given, GIVEN), np.where(answer.sampled, answer.versions, GIVEN)]),
            hidden_T_E=hidden_T_E,
            taps=taps,
            longest=self._settings.window_tokens,
            dtype=DTYPE,
        )

    def drain(self) -> list[Window]:
        windows, self._windows = self._windows, []
        return windows
