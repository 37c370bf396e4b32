"""Hidden states for the drafter, taken out of the trainer's own forward: no extra one is made for them."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from asyncrl.config.drafter import DrafterTraining
from asyncrl.drafting.hidden_capture import Budget
from asyncrl.drafting.reading import cut
from asyncrl.drafting.windows import SENT_DTYPE, Window
from asyncrl.models.policy import Taps
from asyncrl.training.batches import Answer, PackedBatch
from asyncrl.types import GIVEN, Ints


class HiddenTap:
    """Collects windows until they are drained."""

    def __init__(self, settings: DrafterTraining, layers: tuple[int, ...], seed: int) -> None:
        self._settings, self._layers = settings, layers
        self._budget = Budget(settings.tokens_per_source, settings.window_tokens, seed)
        self._version = 0
        self._windows: list[Window] = []

    def taps(self) -> Taps:
        return Taps(self._layers)

    def begin_step(self, version: int) -> None:
        self._version = version
        self._budget.begin_step()

    def take(self, batch: PackedBatch, hidden_T_E: Tensor, tapped: Sequence[Tensor]) -> None:
        """The states of some answers, gathered and brought to the CPU all at once."""
        chosen = [index for index, row in enumerate(batch.rows) if self._budget.chooses(len(row))]
        if not chosen:
            return
        rows = [batch.rows[index] for index in chosen]
        place = torch.from_numpy(np.concatenate(rows)).to(hidden_T_E.device)
        tokens = batch.tokens_T[place].cpu().numpy()
        states = [x.detach().index_select(0, place).to("cpu", SENT_DTYPE) for x in (hidden_T_E, *tapped)]
        end = 0
        for index, row in zip(chosen, rows, strict=True):
            here, end = slice(end, end + len(row)), end + len(row)
            hidden, *taps = (state[here] for state in states)
            self._windows.append(self._window(batch.answers[index], tokens[here], hidden, taps))

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
            dtype=SENT_DTYPE,
        )

    def drain(self) -> list[Window]:
        windows, self._windows = self._windows, []
        return windows
