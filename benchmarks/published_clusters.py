"""Published figures of clusters, and what the simulator computes for them from sizes, hardware and the shares that
software reaches. Nothing is run but simulations.

Trainers alone, tokens per second and GPU:
- torchtitan, benchmarks/llama3_h100_202412_torchtitan.md: Llama 3.1 8B, FSDP2 on 8 and 128 H100, 2 x 8,192 tokens.
- KempnerForge, benchmarks/mfu_scaling/mfu_scaling.md: Llama-3 shapes, FSDP2 on nodes of four H200, 4,096 tokens each.
- NeMo AutoModel, docs/performance-summary.md: Qwen3-30B-A3B on 8 H100, FSDP2 with experts over 8 ranks.
- prime-rl, benchmarks/results/BENCHMARKS.md: Qwen3-4B, all weights, 65,536 tokens, on 8 H100 and on 8 H200.
- Megatron, MoE ModelZoo, best_practice/Qwen3: Qwen3-235B-A22B on 256 H100 with its FSDP, experts over 8 ranks.

Weight updates alone, seconds: miles (broadcast by NCCL, H100), and TRL #7103 (Qwen3-32B, 16 + 16 H200, FSDP2).

Whole steps, seconds: NeMo-RL on H100, docs/about/performance-summary.md of v0.5 and v0.6 with the recipes of the same
names for batches and layouts, and the stages of v0.3 (its blog, and issue 959). GPUs of a synchronous step do both.
Megatron synchronizes gradients once per step, so a step is one batch here; its pipelines and tensor parallelism are not
modelled.
"""

from collections.abc import Iterable, Iterator
from statistics import fmean
from typing import NamedTuple

import msgspec

from asyncrl.config.staleness import FixedStaleness
from asyncrl.simulation.collectives import Links
from asyncrl.simulation.hardware import H100, H200, Hardware, Reached
from asyncrl.simulation.loop import simulate
from asyncrl.simulation.outcome import Rates
from asyncrl.simulation.profile import Answers, EngineCost, LogNormal, Profile, RewardCost, TrainerCost
from asyncrl.simulation.ranks import publication_seconds, training
from asyncrl.simulation.shape import Shape
from benchmarks.published import BETWEEN, Line, run

LLAMA_8B = Shape(layers=32, hidden=4096, heads=32, kv_heads=8, vocabulary=128256, width=14336)
LLAMA_13B = Shape(layers=40, hidden=5120, heads=40, kv_heads=8, vocabulary=128256, width=17920)
LLAMA_70B = Shape(layers=80, hidden=8192, heads=64, kv_heads=8, vocabulary=128256, width=28672)
QWEN_4B = Shape(layers=36, hidden=2560, heads=32, kv_heads=8, vocabulary=151936, width=9728, tied=True)
QWEN_32B = Shape(layers=64, hidden=5120, heads=64, kv_heads=8, vocabulary=151936, width=25600)
QWEN_30B_A3B = Shape(layers=48, hidden=2048, heads=32, kv_heads=4, vocabulary=151936, width=768, experts=128, active=8)
QWEN_235B_A22B = Shape(
    layers=94, hidden=4096, heads=64, kv_heads=4, vocabulary=151936, width=1536, experts=128, active=8
)
WITHIN = 0.15
"""The target for every row that nothing was fitted to."""
MISSED = {
    "AutoModel 30B-A3B, 8 H100": "training share of a dense model: small products of experts reach less",
    "Megatron 235B-A22B, 256 H100": "it hides the gathers of its experts, ours are not hidden",
    "miles 30B": "a second of fixed costs",
    "miles 106B": "one bandwidth for all sizes does not fit these five rows",
    "miles 235B": "as above",
    "miles 744B": "as above",
    "TRL 32B": "hardly: between 2.0 and 2.3 s are published, and 2.0 would be met",
    "NeMo-RL 70B, 64 GPUs, synchronous": "tensor and pipeline parallelism in training, four GPUs an engine",
    "NeMo-RL 8B, 8 + 8 GPUs, one step off": "two releases later, without a pipeline, its trainer is faster than fitted",
    "NeMo-RL 235B-A22B, 128 + 128 GPUs, one off": "generation: engines of eight GPUs are slower than computed",
}
"""Rows that miss it, and why, as far as we can tell."""
ROOM = 1e12
"""Bytes of a GPU: whether a published set-up fits is not the question here."""

# -- trainers --------------------------------------------------------------------------------------------------------


class Training(NamedTuple):
    """One trainer, and how many tokens a second each of its GPUs makes."""

    what: str
    published: float
    shape: Shape
    hardware: Hardware
    gpus: int
    tokens: int
    """Of a sequence."""
    batch: int
    """Tokens of a rank in one forward and backward."""
    experts: int = 1
    recompute: bool = True

    def predicted(self, share: float) -> float:
        """`share` of the GPU's operations that training reaches."""
        given = Profile(
            hardware=msgspec.structs.replace(self.hardware, capacity=ROOM),  # pyright: ignore[reportArgumentType]
            reached=Reached(training=share),
            model=self.shape,
            trainer=TrainerCost(token_budget=self.batch, expert_parallel=self.experts, recompute=self.recompute),
        )
        return self.batch / training(given, self.gpus, [self.tokens])(self.batch * self.gpus)

    def share(self) -> float:
        """The one with which the published figure is met."""
        low, high = 0.01, 1.0
        for _ in range(40):
            middle = (low + high) / 2
            low, high = (middle, high) if self.predicted(middle) < self.published else (low, middle)
        return high


LONG = 2 * 8192
FOUR = H200(node=4)
STACKS = {
    "torchtitan": (
        Training("8B, 8 H100", 5762, LLAMA_8B, H100(), 8, 8192, LONG, recompute=False),
        Training("8B, 128 H100", 5605, LLAMA_8B, H100(), 128, 8192, LONG, recompute=False),
    ),
    "torchtitan, compiled": (
        Training("8B, 8 H100", 6667, LLAMA_8B, H100(), 8, 8192, LONG, recompute=False),
        Training("8B, 128 H100", 6514, LLAMA_8B, H100(), 128, 8192, LONG, recompute=False),
    ),
    "KempnerForge": (
        Training("8B, 1 H200", 10_471, LLAMA_8B, FOUR, 1, 4096, 2 * 4096),
        Training("8B, 2 H200", 18_728 / 2, LLAMA_8B, FOUR, 2, 4096, 2 * 4096),
        Training("8B, 4 H200", 38_983 / 4, LLAMA_8B, FOUR, 4, 4096, 4 * 4096),
        Training("13B, 8 H200 in two nodes, not compiled", 35_405 / 8, LLAMA_13B, FOUR, 8, 4096, 4 * 4096),
    ),
}
"""The first of each tells what share its software reaches, the others are predicted with it."""
HIDDEN = "torchtitan 8B, 128 H100"
"""The row that `Reached.overlap` is fitted to."""
UNFITTED = (
    Training("prime-rl 4B, 65k tokens, 8 H100", 28_970 / 8, QWEN_4B, H100(), 8, 65_536, 65_536),
    Training("prime-rl 4B, 65k tokens, 8 H200", 29_540 / 8, QWEN_4B, H200(), 8, 65_536, 65_536),
    Training("AutoModel 30B-A3B, 8 H100", 12_040, QWEN_30B_A3B, H100(), 8, 4096, 4 * 4096, 8, recompute=False),
    Training("Megatron 235B-A22B, 256 H100", 2048 * 4096 / 17.6 / 256, QWEN_235B_A22B, H100(), 256, 4096, 2 * 4096, 8),
)


def training_lines() -> Iterator[Line]:
    for stack, (first, *others) in STACKS.items():
        share = first.share()
        yield Line(f"{stack} {first.what}: tokens/s/GPU", first.published, first.predicted(share), "fitted")
        for each in others:
            kind = "fitted" if f"{stack} {each.what}" == HIDDEN else "predicted"
            yield Line(f"{stack} {each.what}: tokens/s/GPU", each.published, each.predicted(share), kind)
    for each in UNFITTED:
        predicted = each.predicted(Reached().training)
        yield Line(f"{each.what}: tokens/s/GPU", each.published, predicted, "predicted")


# -- weight updates --------------------------------------------------------------------------------------------------

SENT = {
    "30B": (30.5e9, 2.67),
    "106B": (106.9e9, 5.0),
    "235B": (235.1e9, 10.8),
    "744B": (744e9, 58.3),
    "1T": (1.03e12, 53.3),
}
"""Parameters, and the seconds that miles takes to broadcast them in bf16."""


def update_lines() -> Iterator[Line]:
    """Cluster sizes of miles are not published: two nodes."""
    links = Links.of(H100(), Reached())
    for name, (parameters, seconds) in SENT.items():
        yield Line(
            f"miles {name}: weight update", seconds, publication_seconds(2 * parameters, links, 8, 8), "predicted"
        )
    found = publication_seconds(2 * QWEN_32B.parameters, links, 16, 16)
    yield Line("TRL 32B: weight update", fmean((2.0, 2.3)), found, "predicted")


# -- whole steps of NeMo-RL ------------------------------------------------------------------------------------------

HOST_SECONDS = 8.6e-3 / 256
"""Of vLLM's process for each row and step, where log-probabilities are read per request: ours, on the host of an H200
(docs/benchmarks.md, vLLM's host time)."""
SIGMA = 0.8
"""Assumed: spread of the lengths, of which means and caps are published."""
GROUP = 32


class Recipe(NamedTuple):
    """One row of NeMo-RL."""

    what: str
    step: float
    """Seconds, published."""
    shape: Shape
    gpus: int
    generating: int
    """Of the GPUs; in a synchronous step all do."""
    engine: int
    """GPUs of an engine."""
    lag: int
    prompts: int
    answer: float
    """Tokens, the mean."""
    prompt: int
    """What the published tokens per second have besides."""
    most: int
    """Tokens with the prompt."""
    recompute: bool = False
    experts: int = 1
    context: int = 1

    @property
    def training(self) -> int:
        return self.gpus - self.generating if self.lag else self.gpus

    def profile(self, share: float, fixed: float, forwards: int = 2) -> Profile:
        """`share` of the operations that training reaches; `fixed` seconds of a step for everything else. Policy and
        reference compute log-probabilities: two forwards. Every completion is trained with a prompt of its own."""
        return Profile(
            lengths=lengths(self.answer, self.most - self.prompt),
            prompt_tokens=self.prompt,
            engine=EngineCost(gpus=self.engine, max_batch=1024),
            trainer=TrainerCost(
                token_budget=1 << 40,
                recompute=self.recompute,
                forwards=forwards,
                expert_parallel=self.experts,
                context_parallel=self.context,
                per_step=fixed,
            ),
            reward=RewardCost(gather=0.0),
            hardware=H100(capacity=ROOM),
            reached=Reached(
                training=share * self.answer / (self.answer + self.prompt),
                row_seconds=Reached().row_seconds + HOST_SECONDS,
            ),
            model=self.shape,
        )

    def rates(self, profile: Profile) -> Rates:
        steps = 4 if self.lag else 2
        settings = run(self.prompts, GROUP, self.most - self.prompt, self.prompts, self.lag, FixedStaleness(), steps)
        engines, warm_up = self.generating // self.engine, self.lag + 2 if self.lag else 0
        return simulate(settings, profile, engines=engines, trainer_gpus=self.training, warm_up=warm_up).rates

    def train_seconds(self, profile: Profile) -> float:
        answers = Answers(profile, seed=0, group_size=GROUP, max_tokens=self.most - self.prompt)
        return training(profile, self.training, answers.some())(round(self.prompts * GROUP * self.answer))


def lengths(mean: float, most: int) -> LogNormal:
    """Those of which the mean is right once the longest are cut."""
    low, high = 1.0, 1e6
    for _ in range(40):
        found = LogNormal(median=(low * high) ** 0.5, sigma=SIGMA, between=BETWEEN)
        drawn = fmean(Answers(Profile(lengths=found), seed=0, group_size=GROUP, max_tokens=most).some())
        low, high = (found.median, high) if drawn < mean else (low, found.median)
    return LogNormal(median=high, sigma=SIGMA, between=BETWEEN)


STAGES = {
    "8B": (
        Recipe("8B, 8 GPUs, synchronous", 112, LLAMA_8B, 8, 8, 1, 0, 64, 795, 120, 4096),
        {"train": 28.0, "logprobs": 18.0, "generation": 58.0},
    ),
    "70B": (
        Recipe("70B, 64 GPUs, synchronous", 147, LLAMA_70B, 64, 64, 4, 0, 64, 398, 120, 4096),
        {"train": 28.0, "logprobs": 18.0, "generation": 84.0},
    ),
}
"""NeMo-RL v0.3. What the stages leave of a step (weights, data, 8 and 17 s) is taken as it is."""
DENSE = (
    Recipe("8B, 16 GPUs, synchronous", 92.8, LLAMA_8B, 16, 16, 1, 0, 64, 1019, 127, 4096, recompute=True),
    Recipe("8B, 8 + 8 GPUs, one step off", 64.8, LLAMA_8B, 16, 8, 1, 1, 64, 1123, 131, 4096, recompute=True),
    Recipe("32B, 32 GPUs, synchronous", 376, QWEN_32B, 32, 32, 4, 0, 64, 3251, 100, 4096),
    Recipe("32B, 32 + 32 GPUs, one step off", 200, QWEN_32B, 64, 32, 4, 1, 64, 3252, 100, 4096),
)
"""v0.5, the last that published them."""
SPARSE = (
    Recipe("30B-A3B, 16 + 16 GPUs, one step off", 152, QWEN_30B_A3B, 32, 16, 2, 1, 64, 3201, 103, 4096, experts=8),
    Recipe("30B-A3B, 64 + 128 GPUs, eight off", 34.5, QWEN_30B_A3B, 192, 64, 2, 8, 64, 3206, 103, 4096, experts=8),
    Recipe("30B-A3B, 32 GPUs, synchronous", 192, QWEN_30B_A3B, 32, 32, 2, 0, 64, 3203, 103, 4096, experts=8),
    Recipe("235B-A22B, 128 GPUs, synchronous", 395, QWEN_235B_A22B, 128, 128, 16, 0, 16, 5698, 120, 8192, True, 16, 2),
    Recipe("235B-A22B, 256 GPUs, synchronous", 312, QWEN_235B_A22B, 256, 256, 16, 0, 16, 5713, 120, 8192, True, 16, 2),
    Recipe("235B-A22B, 128 + 128 GPUs, one off", 231, QWEN_235B_A22B, 256, 128, 8, 1, 16, 5721, 120, 8192, True, 16),
)
"""v0.6. The trainer is the bottleneck of the first two, which tell its share and what a step has besides."""


def nemo_dense_lines() -> Iterator[Line]:
    first, stages = STAGES["8B"]
    share = 0.5 * first.train_seconds(first.profile(0.5, 0.0, forwards=0)) / stages["train"]
    for name, (recipe, stages) in STAGES.items():
        fixed = recipe.step - sum(stages.values())
        trained, both = (recipe.train_seconds(recipe.profile(share, 0.0, forwards)) for forwards in (0, 2))
        rates = recipe.rates(recipe.profile(share, fixed))
        what = f"NeMo-RL {recipe.what}"
        yield Line(f"{what}: train", stages["train"], trained, "fitted" if name == "8B" else "predicted")
        yield Line(f"{what}: logprobs", stages["logprobs"], both - trained, "predicted")
        generated = rates.step_seconds - both - fixed
        yield Line(f"{what}: generation", stages["generation"], generated, "predicted")
        yield Line(f"{what}: step", recipe.step, rates.step_seconds, "predicted")
    fixed = first.step - sum(STAGES["8B"][1].values())
    for recipe in DENSE:
        found = recipe.rates(recipe.profile(share, fixed)).step_seconds
        yield Line(f"NeMo-RL {recipe.what}: step", recipe.step, found, "predicted")


def nemo_sparse_lines() -> Iterator[Line]:
    """Two unknowns from two steps: seconds of training fall with the share, what a step has besides does not."""
    few, many, *others = SPARSE
    low, high = 0.02, 0.5
    for _ in range(30):
        share = (low + high) / 2
        trained, less = (recipe.train_seconds(recipe.profile(share, 0.0)) for recipe in (few, many))
        low, high = (share, high) if trained - less > few.step - many.step else (low, share)
    fixed = few.step - few.train_seconds(few.profile(high, 0.0))
    for recipe in SPARSE:
        found = recipe.rates(recipe.profile(high, fixed)).step_seconds
        yield Line(f"NeMo-RL {recipe.what}: step", recipe.step, found, "predicted" if recipe in others else "fitted")


def missed(lines: Iterable[Line]) -> set[str]:
    """The rows with a figure that was predicted, and not within the target."""
    return {line.what.split(":")[0] for line in lines if line.kind == "predicted" and abs(line.error) > WITHIN}


def cluster_lines() -> Iterator[Line]:
    yield from training_lines()
    yield from update_lines()
    yield from nemo_dense_lines()
    yield from nemo_sparse_lines()
