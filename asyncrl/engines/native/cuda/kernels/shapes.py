"""What kernels are told, and which ones there are: in Triton for a GPU (`triton_kernels`), in torch for a CPU."""

from collections.abc import Callable, Sequence
from math import inf
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from asyncrl.precision.quantizer import SIDE
from asyncrl.types import TensorSpec
from asyncrl.weights.flat import Flat


class Heads(NamedTuple):
    """The shape of attention."""

    queries: int
    keys: int
    dim: int

    @property
    def all(self) -> int:
        return self.queries + 2 * self.keys

    @property
    def group(self) -> int:
        """Query heads that share a key."""
        return self.queries // self.keys


class Queries(NamedTuple):
    """Tokens that attend: groups G of up to `width` consecutive tokens of one row, side by side in the flat batch."""

    width: int
    row_G: Tensor
    start_G: Tensor
    """Position of each group's first token."""
    count_G: Tensor
    """Tokens that the group really has; 0: it is padding, which writes nothing and gives zeros."""
    table_N_P: Tensor
    """Pages of the rows."""

    @property
    def groups(self) -> int:
        return self.row_G.shape[0]

    @property
    def tokens(self) -> int:
        return self.groups * self.width


class Kv(NamedTuple):
    """Keys and values of a layer."""

    pages_2_X_K_S_D: Tensor
    scales_2: Tensor | None = None
    """Of keys and of values, where pages hold E4M3 numbers. Values then lie by channels in a page, as D by S: products
    read their numbers along the sum, and single bytes cannot be turned on the way."""

    @property
    def parts(self) -> tuple[Tensor, Tensor]:
        """Views of keys and of values, both by tokens and channels."""
        keys_X_K_S_D, values_X_K_S_D = self.pages_2_X_K_S_D
        if self.scales_2 is not None:
            pages, heads, tokens, dim = values_X_K_S_D.shape
            values_X_K_S_D = values_X_K_S_D.view(pages, heads, dim, tokens).transpose(2, 3)
        return keys_X_K_S_D, values_X_K_S_D


class Codes(NamedTuple):
    """Activations in FP8: a scale for 128 channels of a token."""

    values_T_I: Tensor
    scales_B_T: Tensor

    @classmethod
    def empty(cls, tokens: int, inputs: int, device: torch.device) -> "Codes":
        values_T_I = torch.empty(tokens, inputs, dtype=torch.float8_e4m3fn, device=device)
        return cls(values_T_I, torch.empty(-(-inputs // SIDE), tokens, device=device))

    @classmethod
    def of(cls, x_T_I: Tensor) -> "Codes":
        """Room for this in FP8."""
        return cls.empty(x_T_I.shape[0], x_T_I.shape[1], x_T_I.device)


class Fp8Matrix(NamedTuple):
    """Outputs by inputs, as in checkpoints. Where projections are fused, each has blocks of its own."""

    values_O_I: Tensor
    scales_X_B: Tensor
    """The blocks of all projections, one below the other."""
    block_O: Tensor
    """The row of `scales` that belongs to each output."""
    regular: bool
    """Blocks are 128 outputs high throughout."""


_TILES = (8, 16), (20, 32), (64, 64), (inf, 128)
"""How high tiles are, for up to so many rows of an expert on average: an expert that fits into one is read once."""
_FP8_TILES = (16, 16), (inf, 64)


class SortedRows(NamedTuple):
    """Rows, a token once for each of its experts, by expert. A tile has rows of one expert."""

    tile: int
    active: int
    """Experts of a token: row `r` is of token r // active."""
    rows: int
    row_P: Tensor
    """The row in each place; `rows`: there is none. Places of tiles without an expert are not filled in."""
    expert_B: Tensor
    """Of each tile; -1: there is none."""

    @classmethod
    def empty(cls, tokens: int, active: int, experts: int, device: torch.device, *, fp8: bool) -> "SortedRows":
        """Room for any choice."""
        rows = tokens * active
        tile = next(tile for mean, tile in (_FP8_TILES if fp8 else _TILES) if rows <= mean * experts)
        used = min(rows, experts)
        tiles = used + (rows - used) // tile
        return cls(
            tile,
            active,
            rows,
            torch.empty(tiles * tile, dtype=torch.int32, device=device),
            torch.empty(tiles, dtype=torch.int32, device=device),
        )


class Proposals(NamedTuple):
    """What drafts were drawn from: by their place in the draft (C), and by the row they were drafted in (B)."""

    logits_C_B_U: Tensor
    """Of the tokens that can be drafted, before the temperature."""
    logprob_C_B: Tensor
    """Of the drafted tokens."""
    place_V: Tensor
    """Where each token is among those that can be drafted; -1: it cannot."""


class Drafts(NamedTuple):
    """What a step verifies: rows (N) of a token and the drafted ones behind it, all in W columns."""

    token_N_W: Tensor
    """-1-i: the i-th of `ahead`."""
    ahead_W_B: Tensor
    """The newest token of each row of the step before, and what was drafted behind it."""
    count_N: Tensor
    """Drafted tokens to be verified."""
    temperature_N: Tensor
    plain_N_W: Tensor
    """Random numbers for the token behind each column: to draw it, ..."""
    accept_N_W: Tensor
    """... to accept a drafted one, ..."""
    residual_N_W: Tensor
    """... and to replace one."""
    proposals: Proposals | None
    """None: drafts are guesses."""


class Move(NamedTuple):
    """A tensor of a publication to its place."""

    spec: TensorSpec
    target: Tensor

    def make(self, flat: Flat) -> None:
        _plain(self.target).copy_(_plain(flat.tensor(self.spec)))


class Merge(NamedTuple):
    """The adapters of a projection, added to the base in some of its matrices. M counts all: those of every layer, and
    of every expert where layers have experts."""

    down: TensorSpec
    """Of a publication: M_R_I."""
    up: TensorSpec
    """With its scale: M_O_R."""
    base_M_O_I: Tensor
    numbers: Sequence[int]
    """Of the matrices."""
    targets: Sequence[Tensor]
    """Of these, each O_I and in one piece: in the number format of the base, or in FP8 made of that."""
    scales: Sequence[Tensor] = ()
    """Of targets in FP8."""
    power_of_two: bool = False


def _plain(tensor: Tensor) -> Tensor:
    """FP8 as bytes: not every operation of torch knows it."""
    return tensor.view(torch.uint8) if tensor.dtype == torch.float8_e4m3fn else tensor


class ExpertProduct(Protocol):
    def __call__(
        self, x: Tensor | Codes, matrix: Tensor | Fp8Matrix, rows: SortedRows, out_X_O: Tensor, *, first: bool
    ) -> None:
        """Each row with the matrix of its expert; `matrix` has those of all, one below the other, outputs by inputs.

        The first product of a layer takes its inputs by tokens and leaves its outputs by places of `rows`; the second
        takes them by places and leaves them by rows.
        """
        ...


class Kernels(NamedTuple):
    """Axis suffixes: T tokens, N rows, E hidden size, F width of the gated layer, X all heads side by side, or pages,
    or rows times columns, K key/value heads, S tokens of a page, D head dimension, L positions, C = D/2, V vocabulary.
    """

    embed: Callable[[Tensor, Tensor, Tensor, Tensor], None]
    """(tokens_T, sampled_N, embedding_V_E, out_T_E): a token -1-i is what row i has sampled in the step before."""
    rms_norm: Callable[[Tensor, Tensor, float, Tensor], None]
    """(x_T_E, weight_E, eps, out_T_E)."""
    gated: Callable[[Tensor, Tensor], None]
    """(gate_up_T_2F, out_T_F): silu(gate) * up."""
    rotate_and_store: Callable[[Tensor, Tensor, Tensor | None, float, Kv, Heads, Queries], None]
    """(qkv_T_X, turns_2_L_C, norm_2_D, eps, kv, heads, queries): normalise and rotate queries and keys in
    place, and write keys and values into their pages. Turns are the cosines and sines of all positions."""
    attend: Callable[[Tensor, Kv, Heads, Queries, Tensor], None]
    """(qkv_T_X, kv, heads, queries, out_T_X): each query sees the keys up to its own position."""
    sample: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], None]
    """(logits_N_V, temperature_N, uniform_N, token_N, logprob_N): temperature 0 takes the likeliest token, and reports
    the log-probability at 1."""
    verify: Callable[[Tensor, Drafts, Tensor, Tensor, Tensor], None]
    """(logits_X_V, drafts, token_X, logprob_X, accepted_N): the tokens behind each row's own, `accepted` drafted ones
    and one more, as `asyncrl.engines.native.verification` does it; columns behind that are garbage. Drafts of
    rows at temperature 0 are guesses."""
    quantize: Callable[[Tensor, Codes, bool], None]
    """(x_T_I, codes, power_of_two): as `asyncrl.precision.quantizer` defines it, as are the next two."""
    rms_norm_quantized: Callable[[Tensor, Tensor, float, Codes, bool], None]
    """(x_T_E, weight_E, eps, codes, power_of_two): `rms_norm`, whose result is only kept in FP8."""
    gated_quantized: Callable[[Tensor, Codes, bool], None]
    """(gate_up_T_2F, codes, power_of_two): the same for `gated`."""
    fp8_product: Callable[[Codes, Fp8Matrix, Tensor | None, Tensor | None, Tensor], None]
    """(codes, matrix, bias_O, addend_T_O, out_T_O): each block of 128 inputs is scaled as it is added, in fp32. The
    addend may be `out` itself."""
    choose: Callable[[Tensor, bool, Tensor, Tensor], None]
    """(logits_T_X, renormalized, chosen_T_C, weight_T_C): the likeliest experts of each token, and what each counts."""
    store_routes: Callable[[Tensor, Tensor, Queries], None]
    """(chosen_T_C, routes_X_S_C, queries): where keys are, into pages of one layer."""
    sort: Callable[[Tensor, int, SortedRows], None]
    """(chosen_T_C, experts, rows)."""
    expert_product: "ExpertProduct"
    add_weighted: Callable[[Tensor, Tensor, Tensor], None]
    """(y_R_E, weight_T_C, x_T_E): what the experts of a token answer is added to it, in place."""
    mover: Callable[[Sequence[Move]], Callable[[Flat], None]]
    """What makes these moves out of any publication of these tensors, each time that it is called."""
    merger: Callable[[Sequence[Merge]], Callable[[Flat], None]]
    """The same for adapters; the publication is on the device."""
