"""Windows: stretches of completions with what the target made of them, which is all that a drafting head learns from.

At position t of a window lie token t, the target's final hidden state there (whose logits are those of token t+1),
and for EAGLE-3 the residual stream at the taps. Windows travel as Arrow record batches of raw bytes, so that no number
ever becomes a Python object. Axis suffixes: T tokens of the window, E hidden size, R width of the taps together.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import pyarrow
import torch
from torch import Tensor

from asyncrl.data import untrusted
from asyncrl.types import Slot

pa = cast(Any, pyarrow)  # its type stubs are incomplete: half of what is used here is unknown to them

BYTES = pa.large_binary()  # 2 GiB in one column are soon reached
COLUMNS = {
    "group": pa.int64(),
    "sample": pa.int32(),
    "version": pa.int32(),
    "answer_length": pa.int32(),
    "start": pa.int32(),
    "dtype": pa.string(),
    "tokens": BYTES,
    "sampled": BYTES,
    "hidden": BYTES,
    "taps": BYTES,
}
SCHEMA: Any = pa.schema([pa.field(name, kind, nullable=False) for name, kind in COLUMNS.items()])
SENT_DTYPE = torch.bfloat16
"""Of windows that travel: half the bytes, and more than a drafter needs."""
DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Window:
    """A stretch of one sample, prompt included where it is short enough."""

    slot: Slot
    version: int
    """Of the policy whose hidden states these are."""
    answer_length: int
    """Sampled tokens of the whole sample: short completions come first, and training must not see only them."""
    start: int
    """Position of the first token in its sample."""
    tokens_T: Tensor
    """int32"""
    sampled_T: Tensor
    """bool: whether the token *after* each one was sampled, which is where a draft would have been verified."""
    hidden_T_E: Tensor
    """fp32, bf16 or fp16, normalised: ready for the output matrix."""
    taps_T_R: Tensor | None = None

    def __len__(self) -> int:
        return len(self.tokens_T)

    @property
    def bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self._tensors())

    @property
    def bytes_per_token(self) -> float:
        return self.bytes / len(self)

    @property
    def read(self) -> Tensor:
        """What the head reads."""
        return self.hidden_T_E if self.taps_T_R is None else self.taps_T_R

    def _tensors(self) -> list[Tensor]:
        found = (self.tokens_T, self.sampled_T, self.hidden_T_E, self.taps_T_R)
        return [tensor for tensor in found if tensor is not None]


def encode(windows: Sequence[Window]) -> bytes:
    """One record-batch message, without its schema."""
    rows = [_row(window) for window in windows]
    columns = [pa.array([row[name] for row in rows], kind) for name, kind in COLUMNS.items()]
    return pa.RecordBatch.from_arrays(columns, schema=SCHEMA).serialize().to_pybytes()


def decode(payload: bytes) -> list[Window]:
    """Read them back, or raise ValueError with what is wrong with them."""
    batch = untrusted.read_batch(payload, SCHEMA, "a payload of windows")
    columns = {name: batch.column(name) for name in COLUMNS}
    return [_window({name: column[row] for name, column in columns.items()}) for row in range(batch.num_rows)]


def _row(window: Window) -> dict[str, Any]:
    return {
        "group": window.slot.group,
        "sample": window.slot.sample,
        "version": window.version,
        "answer_length": window.answer_length,
        "start": window.start,
        "dtype": str(window.hidden_T_E.dtype).removeprefix("torch."),
        "tokens": _raw(window.tokens_T),
        "sampled": _raw(window.sampled_T),
        "hidden": _raw(window.hidden_T_E),
        "taps": b"" if window.taps_T_R is None else _raw(window.taps_T_R),
    }


def _raw(tensor: Tensor) -> Any:
    return tensor.detach().contiguous().cpu().reshape(-1).view(torch.uint8).numpy().tobytes()


def _window(row: dict[str, Any]) -> Window:
    dtype = DTYPES.get(row["dtype"].as_py())
    if dtype is None:
        raise ValueError(f"window: dtype={row['dtype'].as_py()!r} is none of {', '.join(DTYPES)}")
    tokens_T = _tensor(row["tokens"], torch.int32)
    count = len(tokens_T)
    sampled_T = _tensor(row["sampled"], torch.uint8)
    hidden, taps = _tensor(row["hidden"], dtype), _tensor(row["taps"], dtype)
    if not count or len(sampled_T) != count or not len(hidden) or len(hidden) % count or len(taps) % count:
        raise ValueError(
            f"window: {count} tokens, {len(sampled_T)} marks, {len(hidden)} hidden and {len(taps)} tapped numbers do "
            f"not match"
        )
    return Window(
        slot=Slot(row["group"].as_py(), row["sample"].as_py()),
        version=row["version"].as_py(),
        answer_length=row["answer_length"].as_py(),
        start=row["start"].as_py(),
        tokens_T=tokens_T,
        sampled_T=sampled_T.bool(),
        hidden_T_E=hidden.view(count, -1),
        taps_T_R=taps.view(count, -1) if len(taps) else None,
    )


def _tensor(cell: Any, dtype: torch.dtype) -> Tensor:
    data = bytearray(cell.as_buffer())  # a copy, because a tensor must be writable and Arrow's memory is not
    if len(data) % dtype.itemsize:
        raise ValueError(f"window: {len(data)} bytes are no whole number of {dtype}")
    return torch.frombuffer(data, dtype=dtype) if data else torch.empty(0, dtype=dtype)
