"""Groups to packed batches: tokens one after the other, no padding, each prompt once, at most a token budget each.

Axis suffixes: T all tokens of a batch, L its sampled tokens. The samples of a group share their prompt, so a block is
the prompt followed by each answer without its last token, from which nothing is predicted. Logits are needed only
where the *next* token was sampled: `predict_L` points at those positions, and everything per sampled token has the
same length.

Where routes are replayed, each of the T tokens has its own: those that an engine fed are just those that are computed
here. A prompt is computed once, so it has the routes of the first trajectory.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, replace

import numpy as np
import numpy.typing as npt
import torch

from asyncrl.errors import RouteError
from asyncrl.models.collectives import RankGroup
from asyncrl.models.layers import Indices
from asyncrl.models.policy import Packing
from asyncrl.models.routes import Routes, RouteShape
from asyncrl.training.distributed.context import Part
from asyncrl.types import GIVEN, Floats, Group, Ints, Slot, Trajectory


@dataclass(frozen=True, slots=True)
class Answer:
    """What follows the prompt in one trajectory."""

    tokens: Ints
    logprobs: Floats
    sampled: npt.NDArray[np.bool_]
    """False for tokens given in between, such as a tool's."""
    versions: Ints
    advantage: float
    slot: Slot
    precision: str
    routes: Routes | None = None
    """Of its tokens but the last."""

    @property
    def num_sampled(self) -> int:
        return int(self.sampled.sum())


@dataclass(frozen=True, slots=True)
class Block:
    """A prompt and answers to it."""

    prompt: Ints
    answers: Sequence[Answer]
    routes: Routes | None = None
    """Of the prompt."""

    @property
    def num_tokens(self) -> int:
        return len(self.prompt) + sum(len(answer.tokens) - 1 for answer in self.answers)


@dataclass(frozen=True, slots=True)
class PackedBatch:
    """Everything one forward and backward needs."""

    tokens_T: torch.Tensor
    positions_T: torch.Tensor
    rows: list[Indices]
    """The positions in T that each sample consists of: the shared prompt's, then its own."""
    predict_L: torch.Tensor
    target_L: torch.Tensor
    behaviour_logp_L: torch.Tensor
    version_L: torch.Tensor
    advantage_L: torch.Tensor
    sample_L: torch.Tensor
    answers: list[Answer]
    """The samples, in the order of `sample_L`."""
    idle: bool = False
    """Nothing to learn from: it is computed because the other ranks compute."""
    routes_T_L_C: torch.Tensor | None = None
    """The experts of each token, where they are replayed (`asyncrl.models.routes`)."""
    part: Part | None = None
    """This rank's, where several share the batch."""

    @property
    def here(self) -> Part:
        """What this rank computes of it."""
        if self.part is not None:
            return self.part
        return Part(self.tokens_T, self.positions_T, self.predict_L, self.target_L, self.routes_T_L_C)

    def shared(self, group: RankGroup) -> "PackedBatch":
        """Of a batch on the host: the ranks of the group compute it together."""
        return replace(self, part=self.here.of(group))

    def to(self, device: torch.device) -> "PackedBatch":
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        moved = {name: value.to(device) for name, value in values.items() if isinstance(value, torch.Tensor)}
        return replace(self, **moved, part=None if self.part is None else self.part.to(device))

    @property
    def lengths(self) -> list[int]:
        """Sampled tokens of each sample."""
        return [answer.num_sampled for answer in self.answers]


def block(group: Group, advantages: Sequence[float], shape: RouteShape | None = None) -> Block:
    """A group as a block; its trajectories must begin with the same given tokens. With a `shape` all have routes."""
    first = group.trajectories[0]
    length = int(np.argmax(first.versions != GIVEN))
    prompt = first.tokens[:length]
    routes = [None if shape is None else _routes(trajectory, shape) for trajectory in group.trajectories]
    answers: list[Answer] = []
    for trajectory, advantage, own in zip(group.trajectories, advantages, routes, strict=True):
        tokens, sampled = trajectory.tokens, trajectory.versions != GIVEN
        if not length or sampled[:length].any() or not np.array_equal(tokens[:length], prompt):
            raise ValueError(f"trajectory {trajectory.slot} does not begin with the prompt of its group")
        answers.append(
            Answer(
                tokens=tokens[length:],
                logprobs=trajectory.logprobs[length:],
                sampled=sampled[length:],
                versions=trajectory.versions[length:],
                advantage=advantage,
                slot=trajectory.slot,
                precision=trajectory.precision,
                routes=None if own is None else own[length:],
            )
        )
    return Block(prompt, answers, None if routes[0] is None else routes[0][:length])


def _routes(trajectory: Trajectory, shape: RouteShape) -> Routes:
    """Of every token but the last; a token that had to be routed anew would be another than the engine's."""
    data, fed, slot = trajectory.route_bytes, len(trajectory.tokens) - 1, trajectory.slot
    who = f"group {slot.group}, sample {slot.sample}"
    ways = "set rollout.router_replay=off to train without routes"
    if len(data) != fed * shape.token_bytes:
        raise RouteError(
            f"{who} has {len(data)} bytes of routes; its {fed} tokens before the last need {shape.token_bytes} each, "
            f"{len(shape.layers)} layers by {shape.active} experts: {ways}"
        )
    found = shape.read(data)
    if fed and found.max() >= shape.experts:
        raise RouteError(f"{who} has a route to expert {found.max()}, and a layer has {shape.experts}: {ways}")
    return found


def pack(blocks: Iterable[Block], token_budget: int, packing: Packing = "shared") -> Iterator[PackedBatch]:
    """Largest blocks first, each batch filled up to the budget; a single answer may be longer than it."""
    parts = [part for block in _laid_out(blocks, packing) for part in _split(block, token_budget)]
    return map(_batch, _filled(parts, token_budget, packing))


def share(
    blocks: Sequence[Block], token_budget: int, rank: int, ranks: int, packing: Packing = "shared"
) -> list[PackedBatch]:
    """One rank's batches: about as many tokens as every other's, and exactly as many batches, some of them idle."""
    if ranks == 1:
        return list(pack(blocks, token_budget, packing))
    blocks = _laid_out(blocks, packing)
    most = min(token_budget, -(-sum(block.num_tokens for block in blocks) // ranks))
    parts = [part for block in blocks for part in _split(block, most)]
    shares: list[list[Block]] = [[] for _ in range(ranks)]
    tokens = [0] * ranks
    for part in sorted(parts, key=_tokens, reverse=True):
        least = tokens.index(min(tokens))
        shares[least].append(part)
        tokens[least] += part.num_tokens
    filled = [list(_filled(parts, token_budget, packing)) for parts in shares]
    own = [_batch(chosen) for chosen in filled[rank]]
    return own + [IDLE] * (max(map(len, filled)) - len(own))


def _laid_out(blocks: Iterable[Block], packing: Packing) -> Sequence[Block]:
    """Where no prompt is shared, each answer has it for itself."""
    if packing == "shared":
        return list(blocks)
    return [replace(block, answers=[answer]) for block in blocks for answer in block.answers]


def _tokens(part: Block) -> int:
    return part.num_tokens


def _filled(parts: Iterable[Block], token_budget: int, packing: Packing) -> Iterator[list[Block]]:
    """Padded, each counts as many tokens as the first of its batch, which is the longest."""
    chosen: list[Block] = []
    used = 0
    for part in sorted(parts, key=_tokens, reverse=True):
        counted = chosen[0].num_tokens if chosen and packing == "padded" else part.num_tokens
        if chosen and used + counted > token_budget:
            yield chosen
            chosen, used = [], 0
            counted = part.num_tokens
        chosen.append(part)
        used += counted
    if chosen:
        yield chosen


def _split(whole: Block, token_budget: int) -> Iterator[Block]:
    """Blocks within the budget, where single answers allow it; each has the prompt again."""
    answers: list[Answer] = []
    for answer in whole.answers:
        if answers and Block(whole.prompt, [*answers, answer]).num_tokens > token_budget:
            yield replace(whole, answers=answers)
            answers = []
        answers.append(answer)
    yield replace(whole, answers=answers)


def _batch(blocks: list[Block]) -> PackedBatch:
    tokens: list[Ints] = []
    rows: list[Indices] = []
    predict: list[Indices] = []
    routes: list[Routes] = []
    answers = [answer for block in blocks for answer in block.answers]
    end = 0
    for part in blocks:
        shared = np.arange(end, end + len(part.prompt))
        tokens.append(part.prompt)
        end += len(part.prompt)
        routes += [part.routes] if part.routes is not None else []
        for answer in part.answers:
            routes += [answer.routes] if answer.routes is not None else []
            row = np.concatenate([shared, np.arange(end, end + len(answer.tokens) - 1)])
            tokens.append(answer.tokens[:-1])
            end += len(answer.tokens) - 1
            rows.append(row)
            predict.append(row[len(shared) - 1 :][answer.sampled])
    positions = np.empty(end, dtype=np.int64)
    for row in rows:
        positions[row] = np.arange(len(row))
    lengths = [answer.num_sampled for answer in answers]
    return PackedBatch(
        tokens_T=torch.from_numpy(np.concatenate(tokens).astype(np.int64)),
        positions_T=torch.from_numpy(positions),
        rows=rows,
        predict_L=torch.from_numpy(np.concatenate(predict)),
        target_L=torch.from_numpy(np.concatenate([a.tokens[a.sampled] for a in answers]).astype(np.int64)),
        behaviour_logp_L=torch.from_numpy(np.concatenate([a.logprobs[a.sampled] for a in answers])),
        version_L=torch.from_numpy(np.concatenate([a.versions[a.sampled] for a in answers]).astype(np.int64)),
        advantage_L=torch.from_numpy(np.repeat(np.array([a.advantage for a in answers], np.float32), lengths)),
        sample_L=torch.from_numpy(np.repeat(np.arange(len(answers)), lengths)),
        answers=answers,
        routes_T_L_C=torch.from_numpy(np.concatenate(routes)) if routes else None,
    )


NEXT = Answer(
    tokens=np.zeros(1, np.int32),
    logprobs=np.zeros(1, np.float32),
    sampled=np.ones(1, np.bool_),
    versions=np.zeros(1, np.int32),
    advantage=0.0,
    slot=Slot(0, 0),
    precision="fp32",
)
"""Any one token: only what is predicted for its place counts."""
IDLE = replace(_batch([Block(np.zeros(1, np.int32), [NEXT])]), idle=True)
