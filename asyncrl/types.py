"""The vocabulary: everything that travels between actors. If a type is not here, it does not travel.

Facts are stored, views are derived: a trajectory is a list of segments, and masks, lengths, versions and staleness
are computed from them. Token ids and log-probabilities are kept as packed bytes (int32, float32) behind array
properties, because a tuple of Python floats costs thirty times the memory and the time to encode.
"""

from collections.abc import Sequence
from typing import Literal

import msgspec
import numpy as np
import numpy.typing as npt

# The part of the vocabulary (asyncrl.types) that tells of weights.


class TensorSpec(msgspec.Struct, frozen=True, array_like=True):
    """One tensor inside a weight publication."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    offset: int
    bytes: int


class Bucket(msgspec.Struct, frozen=True, array_like=True):
    """A range of a publication's bytes that travels, and is checked, on its own."""

    offset: int
    bytes: int
    digest: str


class Probe(msgspec.Struct, frozen=True, array_like=True):
    """What the trainer finds after each of some fixed prompts: the log-probability of the likeliest next token."""

    prompts: tuple[tuple[int, ...], ...]
    logprobs: tuple[float, ...]
    tolerance: float
    """Largest mean difference between an engine and the trainer."""


class Fp8Version(msgspec.Struct, frozen=True, array_like=True):
    """What engines have in FP8 under a version, as the trainer means it."""

    quantized: tuple[str, ...] = ()
    """Names of the quantized tensors, and `kv_cache`; engines compare them with what they quantize."""
    kv_scales: tuple[tuple[float, float, float], ...] = ()
    """Of queries, keys and values in each layer; empty where the engine is to find them."""


class WeightManifest(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """What one policy version consists of, and the digest that proves it arrived."""

    version: int
    tensors: tuple[TensorSpec, ...]
    total_bytes: int
    digest: str
    location: str
    """Where a receiver finds the bytes; its meaning belongs to the transport."""
    buckets: tuple[Bucket, ...] = ()
    probe: Probe | None = None
    base: str = ""
    """Digest of the publication that `delta` changes into this one."""
    delta: "WeightManifest | None" = None
    """The changed elements, as a publication of their own; without it every byte is sent."""
    fp8: Fp8Version | None = None
    """Without it nothing is in FP8."""


class WeightAck(msgspec.Struct, frozen=True, array_like=True):
    """An engine's word that it now serves `version`, with the digest of what it really holds."""

    engine: str
    version: int
    digest: str
    reprefilled_tokens: int = 0
    """Tokens of running completions whose keys and values are computed again after a weight update."""
    probe_gap: float | None = None
    """Mean difference to the log-probabilities of the manifest's probe, if it has one."""


class SendOrder(msgspec.Struct, frozen=True, array_like=True):
    """One attempt to bring a version to its receivers."""

    epoch: int = 1
    """Grows when an attempt has failed: what belongs to an earlier one no longer counts."""
    members: tuple[str, ...] = ()
    """Names of the receivers, in the order of their ranks."""
    dense: bool = False
    """Every byte, whatever the receivers should hold already."""


Ints = npt.NDArray[np.int32]
Floats = npt.NDArray[np.float32]
Finish = Literal["stop", "length", "abort"]
GIVEN = -1
"""Version written for tokens that were given to the model, not sampled by it."""


class Slot(msgspec.Struct, frozen=True, array_like=True, order=True):
    """The reservation of one sample of a group: filled at most once, whatever is retried."""

    group: int
    sample: int


class Segment(msgspec.Struct, frozen=True, kw_only=True, array_like=True, gc=False):
    """A run of tokens with one origin: given to the model, or sampled by one policy version."""

    token_bytes: bytes
    logprob_bytes: bytes = b""
    version: int = GIVEN
    route_bytes: bytes = b""
    """Of a mixture of experts: the routes recorded while these tokens were sampled (`Trajectory.route_bytes`)."""

    def __post_init__(self) -> None:
        expected = 0 if self.version == GIVEN else len(self.token_bytes)
        if len(self.logprob_bytes) != expected:
            raise ValueError(
                f"a segment of version {self.version} with {len(self.token_bytes) // 4} tokens "
                f"carries {len(self.logprob_bytes) // 4} log-probabilities"
            )

    @classmethod
    def given(cls, tokens: Sequence[int] | npt.NDArray[np.integer]) -> "Segment":
        return cls(token_bytes=np.asarray(tokens, dtype=np.int32).tobytes())

    @classmethod
    def sampled(
        cls,
        tokens: Sequence[int] | npt.NDArray[np.integer],
        logprobs: Sequence[float] | npt.NDArray[np.floating],
        version: int,
        route_bytes: bytes = b"",
    ) -> "Segment":
        return cls(
            token_bytes=np.asarray(tokens, dtype=np.int32).tobytes(),
            logprob_bytes=np.asarray(logprobs, dtype=np.float32).tobytes(),
            version=version,
            route_bytes=route_bytes,
        )

    @property
    def tokens(self) -> Ints:
        return np.frombuffer(self.token_bytes, dtype=np.int32)

    @property
    def logprobs(self) -> Floats:
        """Behaviour log-probabilities, the engine's own; empty when the tokens were given."""
        return np.frombuffer(self.logprob_bytes, dtype=np.float32)

    def __len__(self) -> int:
        return len(self.token_bytes) // 4


class Branch(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A place where the tokens of an episode do not go on from the token before them."""

    start: int
    """Of its first token in the trajectory."""
    after: int
    """The token that it goes on from, having seen all that this one saw; -1: from nothing."""
    cause: str = ""
    """Why the call did not continue what was sampled before it, such as `history_edited`."""


class Turn(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What the model sampled in one call of an episode."""

    start: int
    stop: int
    reward: float = 0.0
    """Its own, on top of the episode's."""
    tool_calls: int = 0


class Episode(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """What a trajectory of a harness has beside its tokens: a tree of turns, each token in it once."""

    branches: tuple[Branch, ...] = ()
    """In the order of their tokens; none: each call continued the one before it."""
    turns: tuple[Turn, ...] = ()
    """In the order of their tokens; every sampled token is in one."""
    model_s: float = 0.0
    """Seconds in which at least one call was being sampled."""
    tools_s: float = 0.0
    """Seconds between calls: the harness and its tools."""
    wasted_tokens: int = 0
    """Sampled and not trained: of calls that were cut off."""


class Trajectory(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """One finished sample. Times are seconds of the wall clock."""

    slot: Slot
    prompt: str
    """Identity of the prompt inside its source, such as `chains/train/17`."""
    segments: tuple[Segment, ...]
    reward: float
    finish: Finish
    started: float
    finished: float
    engine: str
    precision: str = "fp32"
    parts: dict[str, float] = {}
    """What the reward is made of, where its function says so."""
    episode: Episode | None = None
    """Of a harness."""
    teacher_logprob_bytes: bytes = b""
    """Of a distillation: log-probability of each sampled token under its teachers, their weighted mean."""
    teacher_top_k_bytes: bytes = b""
    """With `distill.top_k`, of each sampled token's place: the teacher's K likeliest tokens, their log-probabilities,
    and that of all other tokens together."""

    @property
    def tokens(self) -> Ints:
        return np.concatenate([segment.tokens for segment in self.segments])

    @property
    def versions(self) -> Ints:
        """Policy version of each token, GIVEN where it was not sampled."""
        return np.concatenate([np.full(len(segment), segment.version, np.int32) for segment in self.segments])

    @property
    def logprobs(self) -> Floats:
        """Behaviour log-probability of each token, 0 where it was given."""
        parts = [s.logprobs if s.version != GIVEN else np.zeros(len(s), np.float32) for s in self.segments]
        return np.concatenate(parts)

    @property
    def teacher_logprobs(self) -> Floats:
        """Of the sampled tokens; empty without a teacher."""
        return np.frombuffer(self.teacher_logprob_bytes, dtype=np.float32)

    @property
    def teacher_top_k(self) -> Ints:
        """A row of K token ids, then the bits of K + 1 float32, for each sampled token; rows are empty without."""
        return np.frombuffer(self.teacher_top_k_bytes, dtype=np.int32).reshape(max(1, self.sampled_tokens), -1)

    @property
    def route_bytes(self) -> bytes:
        """The experts of every token but the last (`asyncrl.models.routes`), where they were recorded.

        A token has its route once it is fed to the model, which is when its successor is sampled. So a sampled segment
        holds the routes from where the one before it ended up to its own last token, which has none yet: in front of
        its own tokens those of the prompt, of what was given since, and of the last token before an update."""
        return b"".join([segment.route_bytes for segment in self.segments])

    @property
    def branches(self) -> tuple[Branch, ...]:
        return () if self.episode is None else self.episode.branches

    @property
    def sampled_tokens(self) -> int:
        return sum(len(segment) for segment in self.segments if segment.version != GIVEN)

    @property
    def oldest_version(self) -> int:
        """Version of the oldest sampled token: the one that staleness counts from."""
        return min((s.version for s in self.segments if s.version != GIVEN), default=GIVEN)


class Group(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """All samples of one prompt, the unit of advantage and of delivery."""

    id: int
    trajectories: tuple[Trajectory, ...]


class Prompt(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """A prompt, and `answer`: the reference that its reward compares a completion with."""

    uid: str
    text: str
    answer: str = ""
    size: int = 0
    """Problem size, for evaluation by difficulty; 0 where the source has none."""
    earlier: tuple[str, ...] = ()
    """Turns of the chat before this one, the user's and the model's in alternation: solved examples."""
    source: str = ""
    """Name of its source, where the task mixes several."""


class Ticket(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """Leave to generate the named samples of one group."""

    group: int
    samples: tuple[int, ...]
    version: int
    """Published policy version at admission; no token of the group can be older."""
    deadline: float
    """Wall-clock second after which the group is dropped as `DropReason.TIMEOUT`."""
    prompt: int = -1
    """Index of the prompt that a curriculum chose."""

    @property
    def prompt_index(self) -> int:
        """Of the group's prompt in the training stream of the task; without a curriculum the group's own number."""
        return self.group if self.prompt < 0 else self.prompt


class Receipt(msgspec.Struct, frozen=True, array_like=True):
    """The result of an append: durable at the configured level, or why it was not kept."""

    slot: Slot
    status: Literal["stored", "duplicate", "dropped"]


class Delivery(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """Complete groups delivered to the trainer for one forward and backward of `step`."""

    step: int
    groups: tuple[int, ...]
    replayed: bool = False
    """True when a resumed run re-delivers what was recorded before it was killed."""
    starved: bool = False
    """True when the trainer had to wait for it, and not only for stragglers in their last step."""


class LedgerCounts(msgspec.Struct, frozen=True, kw_only=True):
    """Where every slot is. `balanced` holds at every moment. The names are keys of `summary.json`."""

    leased: int
    """Slots for which a ticket was issued."""
    in_flight: int
    buffered: int
    consumed: int
    dropped: dict[str, int]
    """By reason: see `asyncrl.drop_reasons`."""

    @property
    def balanced(self) -> bool:
        return self.leased == self.in_flight + self.buffered + self.consumed + sum(self.dropped.values())


class BufferStatus(msgspec.Struct, frozen=True, kw_only=True):
    """The buffer at one moment, for progress lines and for the sentence that explains a stall."""

    step: int
    """The step being assembled."""
    version: int
    taken: int
    """Groups of the step that the trainer already has."""
    complete: int
    """Complete groups that wait to be taken."""
    incomplete: int
    bytes: int
    """Held by stored samples and reserved for missing ones."""
    replaying: bool
    oldest_group: int | None = None
    """The incomplete group that was admitted first, and its missing samples."""
    missing: tuple[int, ...] = ()
    refusal: str = ""
    """Why no further group is admitted now."""


class Sampling(msgspec.Struct, frozen=True, kw_only=True, array_like=True, forbid_unknown_fields=True):
    """How to draw tokens. Temperature 0 is greedy."""

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    """0 keeps the whole vocabulary."""
    stop: tuple[int, ...] = ()


class Request(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """One completion to be generated.

    A partial completion is resumed by naming how many of the last `tokens` were already sampled: they count towards
    `max_tokens`, and the random stream of `seed` goes on where it stopped.
    """

    id: str
    tokens: tuple[int, ...]
    sampling: Sampling
    seed: int
    resumed: int = 0
    ahead: bool = False
    """It goes before all that wait."""
    routed: int = 0
    """So many of the first `tokens` have their routes from the engine that fed them first; those of the others are
    returned."""
    conversation: str = ""
    """Another request may go on from this one, under the same name: its keys and values are worth keeping. Empty: none
    will."""

    def after(self, sampled: Sequence[Segment]) -> "Request":
        """The rest, behind what was sampled of it."""
        said = [token for segment in sampled for token in segment.tokens.tolist()]
        return msgspec.structs.replace(self, tokens=(*self.tokens, *said), resumed=self.resumed + len(said))


class Delta(msgspec.Struct, frozen=True, array_like=True):
    """Newly sampled tokens of one request, all from one policy version."""

    request: str
    segment: Segment
    finish: Finish | None = None


class SpeculationArm(msgspec.Struct, frozen=True, array_like=True):
    """What one drafting strategy was measured to give in one range of batch sizes."""

    batch: int
    """First batch size of the range."""
    depth: int
    """Tokens drafted along one path; 0 is plain decoding."""
    verify: int
    """Drafted tokens checked per step."""
    steps: int
    tokens_per_second: float


class EngineStats(msgspec.Struct, frozen=True, kw_only=True):
    """Counters since start, plus the present load."""

    running: int
    waiting: int
    version: int
    generated_tokens: int
    prefilled_tokens: int
    """Computed, of prompts and of earlier turns."""
    reprefilled_tokens: int
    steps: int
    busy_seconds: float
    cached_tokens: int = 0
    """The same, but their keys and values were there: from a sibling, an earlier turn, or another prompt."""
    kv_tokens: int = 0
    """That it has room for; 0 where it does not say."""
    preempted: int = 0
    """Requests that lost their place in the KV cache and were computed again."""
    drafts: int = 0
    """Steps of single completions that verified a draft."""
    drafted_tokens: int = 0
    accepted_by_position: tuple[int, ...] = ()
    """Accepted draft tokens by their position in the draft."""
    speculation: tuple[SpeculationArm, ...] = ()
    """Measured by the bandit; empty without one."""
