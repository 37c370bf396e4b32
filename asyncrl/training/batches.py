"""Groups to packed batches: tokens one after the other, no padding, each prompt once, at most a token budget each.

Axis suffixes: T all tokens of a batch, L its sampled tokens. The samples of a group share their prompt, so a block is
the prompt followed by each answer up to its last sampled token, from which nothing is predicted. Logits are needed only
where the *next* token was sampled: `predict_L` points at those positions, and everything per sampled token has the
same length.

The answer of an episode may be a tree (`asyncrl.data.episodes`): then it has a row for each path that leads to sampled
tokens, and what paths have in common is computed once, like a prompt. A model whose rows cannot have tokens in common
computes each path by itself. Either way a sampled token is predicted once, in the order in which it was sampled.

Where routes are replayed, each of the T tokens has its own: those that an engine fed are just those that are computed
here. A prompt is computed once, so it has the routes of the first trajectory.
"""

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from asyncrl.config.trainer import fewest_ranks
from asyncrl.data.episodes import Path, Places, Tree, predicting_tree
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
    advantages: Floats
    """Of its sampled tokens."""
    slot: Slot
    precision: str
    teacher_logprobs: Floats | None = None
    """Of its sampled tokens, in a distillation."""
    teacher_top_k: Ints | None = None
    """The same with `distill.top_k` (`Trajectory.teacher_top_k`)."""
    routes: Routes | None = None
    """Of its tokens but the last."""
    tree: Tree | None = None
    """How its tokens follow one another where that is not a line; its places count from the beginning of the prompt."""

    @property
    def num_sampled(self) -> int:
        return int(self.sampled.sum())

    @property
    def _last(self) -> int:
        """Place of the last sampled token."""
        return len(self.sampled) - 1 - int(self.sampled[::-1].argmax())

    def paths(self, prompt: int) -> Sequence[Path]:
        """What is computed of it behind a prompt of so many tokens; the prompt belongs to the paths."""
        return [Path(np.arange(prompt + self._last), 0)] if self.tree is None else self.tree.paths

    def before(self, prompt: int) -> Places:
        """The token that each sampled one goes on from."""
        places = prompt + np.flatnonzero(self.sampled)
        return places - 1 if self.tree is None else self.tree.before[places]

    def num_computed(self, prompt: int) -> int:
        """Of its own tokens, each once."""
        if self.tree is None:
            return self._last
        return sum(int((path.places[path.shared :] >= prompt).sum()) for path in self.tree.paths)


@dataclass(frozen=True, slots=True)
class Block:
    """A prompt and answers to it."""

    prompt: Ints
    answers: Sequence[Answer]
    routes: Routes | None = None
    """Of the prompt."""
    shared: bool = True
    """Whether tokens that several rows have are computed once, or in each row."""

    @property
    def num_tokens(self) -> int:
        prompt = len(self.prompt)
        if self.shared:
            return prompt + sum(answer.num_computed(prompt) for answer in self.answers)
        return sum(self.lengths)

    @property
    def lengths(self) -> list[int]:
        """Of its rows."""
        return [len(path.places) for answer in self.answers for path in answer.paths(len(self.prompt))]


class Row(NamedTuple):
    """What one row of a batch consists of."""

    sample: int
    prompt: int
    """Tokens of the prompt that the sample has in common with its group."""
    path: Path
    """Places in the sample's trajectory."""


@dataclass(frozen=True, slots=True)
class PackedBatch:
    """Everything one forward and backward needs."""

    tokens_T: torch.Tensor
    positions_T: torch.Tensor
    rows: list[Indices]
    """The positions in T that each sample consists of: the shared prompt's, then its own. A tree has several rows."""
    sources: list[Row]
    """The same in the samples."""
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
    teacher_logp_L: torch.Tensor | None = None
    """In a distillation."""
    teacher_top_L_X: torch.Tensor | None = None
    """With `distill.top_k`: at each place K token ids, then the bits of K + 1 log-probabilities."""
    routes_T_L_C: torch.Tensor | None = None
    """The experts of each token, where they are replayed (`asyncrl.models.routes`)."""
    part: Part | None = None
    """This rank's, where several share the batch."""

    @property
    def here(self) -> Part:
        """What this rank computes of it."""
        if self.part is not None:
            return self.part
        here = self.tokens_T, self.positions_T, self.predict_L, self.target_L, self.routes_T_L_C
        return Part(*here, teacher_top_L_X=self.teacher_top_L_X)

    @property
    def reports(self) -> bool:
        """Whether its figures are this rank's to tell: of ranks that share it the first does."""
        return self.part is None or self.part.group is None or self.part.group.rank == 0

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


def block(group: Group, advantages: Sequence[float | Floats], shape: RouteShape | None = None) -> Block:
    """A group as a block; an advantage is that of a sample, or of each of its sampled tokens. With a `shape` all have
    routes. Trajectories must begin with the same given tokens, unless a harness has chosen them: then what all begin
    with is the prompt."""
    prompt = _prompt(group.trajectories)
    length = len(prompt)
    routes = [None if shape is None else _routes(trajectory, shape) for trajectory in group.trajectories]
    answers: list[Answer] = []
    for trajectory, advantage, own in zip(group.trajectories, advantages, routes, strict=True):
        sampled = trajectory.versions != GIVEN
        if not sampled.any():  # a harness that was never answered
            continue
        answers.append(
            Answer(
                tokens=trajectory.tokens[length:],
                logprobs=trajectory.logprobs[length:],
                sampled=sampled[length:],
                versions=trajectory.versions[length:],
                advantages=np.broadcast_to(np.asarray(advantage, np.float32), int(sampled.sum())),
                slot=trajectory.slot,
                precision=trajectory.precision,
                teacher_logprobs=trajectory.teacher_logprobs if trajectory.teacher_logprob_bytes else None,
                teacher_top_k=trajectory.teacher_top_k if trajectory.teacher_top_k_bytes else None,
                routes=None if own is None else own[length:],
                tree=predicting_tree(sampled, trajectory.branches) if trajectory.branches else None,
            )
        )
    return Block(prompt, answers, None if routes[0] is None else routes[0][:length])


def _prompt(trajectories: Sequence[Trajectory]) -> Ints:
    """What all begin with, before anything was sampled, and before the first branch."""
    first, *others = (_opening(trajectory) for trajectory in trajectories)
    length = len(first)
    for trajectory, opening in zip(trajectories[1:], others, strict=True):
        most = min(length, len(opening))
        differs = np.flatnonzero(opening[:most] != first[:most])
        common = int(differs[0]) if len(differs) else most
        if common < length and trajectory.episode is None:
            raise ValueError(f"trajectory {trajectory.slot} does not begin with the prompt of its group")
        length = common
    return first[:length]


def _opening(trajectory: Trajectory) -> Ints:
    sampled = trajectory.versions != GIVEN
    stop = int(np.argmax(sampled)) if sampled.any() else len(sampled)
    if not stop:
        raise ValueError(f"trajectory {trajectory.slot} does not begin with the prompt of its group")
    return trajectory.tokens[: min([stop, *(branch.start for branch in trajectory.branches[:1])])]


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


def by_degree(blocks: Iterable[Block], token_budget: int, degrees: Collection[int]) -> dict[int, list[Block]]:
    """Answers by how many ranks share them: as few as leave each at most so many tokens."""
    found: dict[int, list[Block]] = {}
    for whole in blocks:
        answers: dict[int, list[Answer]] = {}
        for answer in whole.answers:
            tokens = len(whole.prompt) + answer.num_computed(len(whole.prompt))
            answers.setdefault(fewest_ranks(degrees, token_budget, tokens), []).append(answer)
        for number, chosen in answers.items():
            found.setdefault(number, []).append(replace(whole, answers=chosen))
    return dict(sorted(found.items()))


def _laid_out(blocks: Iterable[Block], packing: Packing) -> Sequence[Block]:
    """Where no prompt is shared, each answer has it for itself."""
    if packing == "shared":
        return list(blocks)
    return [replace(block, answers=[answer], shared=False) for block in blocks for answer in block.answers]


def _tokens(part: Block) -> int:
    return part.num_tokens


def _filled(parts: Iterable[Block], token_budget: int, packing: Packing) -> Iterator[list[Block]]:
    """Padded, each row counts as many tokens as the longest of its batch."""
    chosen: list[Block] = []
    tokens = rows = longest = 0
    for part in sorted(parts, key=_tokens, reverse=True):
        lengths = part.lengths
        tokens, rows, longest = tokens + part.num_tokens, rows + len(lengths), max(longest, *lengths)
        if chosen and (rows * longest if packing == "padded" else tokens) > token_budget:
            yield chosen
            chosen, tokens, rows, longest = [], part.num_tokens, len(lengths), max(lengths)
        chosen.append(part)
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
    sources: list[Row] = []
    predict: list[Indices] = []
    routes: list[Routes] = []
    answers: list[Answer] = []
    end = 0
    for part in blocks:
        length = len(part.prompt)
        prompt_place = np.full(length, -1)
        for answer in part.answers:
            whole = np.concatenate([part.prompt, answer.tokens])
            place = np.concatenate([prompt_place, np.full(len(answer.tokens), -1)])
            for path in answer.paths(length):
                # A path goes on from what is there already, so what is new of it comes last.
                fresh = path.places[place[path.places] < 0] if part.shared else path.places
                place[fresh] = np.arange(end, end + len(fresh))
                end += len(fresh)
                tokens.append(whole[fresh])
                rows.append(place[path.places])
                sources.append(Row(len(answers), length, path))
                if part.routes is not None and answer.routes is not None:
                    routes.append(np.concatenate([part.routes, answer.routes])[fresh])
            prompt_place = place[:length]
            predict.append(place[answer.before(length)])
            answers.append(answer)
    positions = np.empty(end, dtype=np.int64)
    for row in rows:
        positions[row] = np.arange(len(row))
    lengths = [answer.num_sampled for answer in answers]
    teacher = [answer.teacher_logprobs for answer in answers if answer.teacher_logprobs is not None]
    top_k = [answer.teacher_top_k for answer in answers if answer.teacher_top_k is not None]
    is_ranked = len(top_k) == len(answers) and len({each.shape[1] for each in top_k}) == 1
    return PackedBatch(
        tokens_T=torch.from_numpy(np.concatenate(tokens).astype(np.int64)),
        positions_T=torch.from_numpy(positions),
        rows=rows,
        sources=sources,
        predict_L=torch.from_numpy(np.concatenate(predict)),
        target_L=torch.from_numpy(np.concatenate([a.tokens[a.sampled] for a in answers]).astype(np.int64)),
        behaviour_logp_L=torch.from_numpy(np.concatenate([a.logprobs[a.sampled] for a in answers])),
        version_L=torch.from_numpy(np.concatenate([a.versions[a.sampled] for a in answers]).astype(np.int64)),
        advantage_L=torch.from_numpy(np.concatenate([a.advantages for a in answers])),
        sample_L=torch.from_numpy(np.repeat(np.arange(len(answers)), lengths)),
        answers=answers,
        teacher_logp_L=torch.from_numpy(np.concatenate(teacher)) if len(teacher) == len(answers) else None,
        teacher_top_L_X=torch.from_numpy(np.concatenate(top_k)) if is_ranked else None,
        routes_T_L_C=torch.from_numpy(np.concatenate(routes)) if routes else None,
    )


NEXT = Answer(
    tokens=np.zeros(1, np.int32),
    logprobs=np.zeros(1, np.float32),
    sampled=np.ones(1, np.bool_),
    versions=np.zeros(1, np.int32),
    advantages=np.zeros(1, np.float32),
    slot=Slot(0, 0),
    precision="fp32",
)
"""Any one token: only what is predicted for its place counts."""
IDLE = replace(_batch([Block(np.zeros(1, np.int32), [NEXT])]), idle=True)
