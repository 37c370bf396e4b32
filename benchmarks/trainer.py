"""One optimizer step of the trainer, alone on its device, beside plain transformers on the very same answers.

    python -m benchmarks.trainer [--out FILE]         Qwen3-1.7B's shape on a GPU, a tiny one on a CPU
    python -m benchmarks.trainer --vocabulary 49152 --untied            a smaller vocabulary, two matrices for it
    python -m benchmarks.trainer --shape smollm2-135m --answers 2048 --tokens 150 --tailed --prompt 128
    python -m benchmarks.trainer --shape qwen3-8b --lora 16 --tokens 1024 4096 16384      adapters, three lengths
    python -m benchmarks.trainer trainer.offload=optimizer --shape qwen3-8b          any setting of ours, named first

A step is forward, backward and update: for asyncrl `Learner.accumulate` and `Learner.step`, for transformers
`AutoModelForCausalLM` with sdpa attention under autocast, AdamW (fused) and gradients clipped as ours are. Activations
are `kept` for the backward or computed again in it (`recomputed`); `compiled` is recomputed under `torch.compile`,
`eager` is ours without it, and `their model` is ours with `model.backend=transformers`, recomputed. With --lora both
sides train adapters of that rank on frozen bf16 weights (peft's for transformers). Both sides load the same random
weights, take as many tokens at a time, and weigh each answer's log-probabilities by the same advantage, so gradients
have the same norm, which is shown. Each row is measured in a process of its own, after a warm-up, one length after
another. A row that fails, for lack of memory or of a compiler, says so.

TFLOP/s are those of the model: 6 for each weight of a matrix and token (2 forward, 4 backward, of which frozen weights
lack 2; of the embedding nothing, of experts only those of the token, of the output matrix only where a token is
predicted), and 12 for each number of a query and key that attention sees. What is computed again, padding, and prompts
that are repeated do not count, so all rows have the same count.
"""

import argparse
import gc
import os
import platform
import resource
import statistics
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import version
from pathlib import Path
from time import perf_counter
from typing import Any

import msgspec
import numpy as np
import torch
from torch.nn import functional as F

from asyncrl.config import Run, WarmStart
from asyncrl.config.algorithm import Importance
from asyncrl.config.trainer import PROJECTIONS, Lora, Trainer
from asyncrl.models.config import ATTENTION, ModelConfig, projection_shapes, read_config
from asyncrl.system.compiler import compiles
from asyncrl.training.advantages import with_advantages
from asyncrl.training.batches import Answer, Block, pack
from asyncrl.training.learner import Learner
from asyncrl.training.memory import Batch, parameters, recomputed_layers, training_memory
from asyncrl.types import Group, Segment, Slot, Trajectory
from benchmarks import expand
from benchmarks.rollout import QWEN3, made
from benchmarks.runs import alone

SMOLLM2 = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "rope_theta": 1e5,
    "max_position_embeddings": 8192,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 64,
    "vocab_size": 49152,
}
SHAPES = {name: QWEN3 | shape.settings() for name, shape in expand.SHAPES.items()}
SHAPES["smollm2-135m"] = QWEN3 | SMOLLM2
UNTIED = ("qwen3-8b", "qwen3-30b-a3b")
"""The published models with an output matrix of their own; the smaller ones use the embedding for it."""
THEIR_MODEL = "asyncrl their model"
ROWS = (
    "asyncrl recomputed",
    "asyncrl kept",
    "asyncrl eager",
    THEIR_MODEL,
    "transformers recomputed",
    "transformers kept",
    "transformers compiled",
)
GROUP = 8
"""Answers that share a prompt."""
SPREAD = 0.75
"""Of the logarithm of lengths with --tailed."""
CLIP = 1.0
DIFFERENCES = (
    "in bf16 asyncrl keeps fp32 weights as bf16 and the missing 16 bits, transformers keeps fp32 and casts in each "
    "forward (autocast)",
    "asyncrl makes logits in chunks and again in the backward, transformers makes those of all tokens at once",
    "asyncrl packs answers without padding and computes a common prompt once, transformers pads rows of similar length",
)


class Setting(msgspec.Struct, frozen=True, kw_only=True):
    """What all rows have in common."""

    config: dict[str, Any]
    """Of the model, as Hugging Face writes it."""
    answers: int
    tokens: int
    prompt: int
    tailed: bool
    budget: int
    """Tokens of one forward and backward."""
    kept_budget: int
    """The same with activations kept."""
    repeats: int
    device: str
    dtype: str
    lora: int = 0
    """The rank of adapters; 0 trains every weight."""
    ours: tuple[str, ...] = ()
    """Overrides of our trainer's settings."""

    def budget_of(self, row: str) -> int:
        return self.kept_budget if row.endswith("kept") else self.budget


class Figures(msgspec.Struct, frozen=True, kw_only=True):
    """One row."""

    row: str
    tokens: int
    """Of a completion."""
    budget: int
    seconds: float = 0.0
    """Of a step, the median."""
    all_seconds: tuple[float, ...] = ()
    tokens_per_second: float = 0.0
    """Of answers; prompts do not count."""
    samples_per_second: float = 0.0
    tflops: float = 0.0
    peak_bytes: int = 0
    """Allocated on the GPU; on a CPU what the whole process has in memory."""
    predicted_bytes: int | None = None
    """By `asyncrl plan`'s arithmetic, on a GPU."""
    gradient_norm: float = 0.0
    error: str = ""


def trainer_run(setting: Setting, row: str) -> Run:
    """Plain GRPO: a token's ratio is 1, as all samples are the policy's own, and nothing is rejected."""
    settings = {
        "dtype": setting.dtype,
        "device": setting.device,
        "token_budget": setting.budget_of(row),
        "checkpoint_activations": not row.endswith("kept"),
        "compile": "off" if row.endswith("eager") else "auto",
        "grad_clip": CLIP,
        "lora": {"rank": setting.lora, "targets": ATTENTION if "num_experts" in setting.config else PROJECTIONS},
    }
    settings |= {key.removeprefix("trainer."): value for key, value in (each.split("=") for each in setting.ours)}
    return Run(
        model=WarmStart(backend="transformers" if row == THEIR_MODEL else "auto"),  # where it is, the learner is told
        trainer=msgspec.convert(settings, Trainer, strict=False),
        correction=Importance(proximal="trainer", weight="none", reject=(), max_drift=0.0),
    )


def lengths(setting: Setting) -> list[int]:
    """Of the answers: all the same, or quantiles of a log-normal distribution whose median is `tokens`."""
    if not setting.tailed:
        return [setting.tokens] * setting.answers
    normal = statistics.NormalDist(0.0, SPREAD)
    drawn = [setting.tokens * np.exp(normal.inv_cdf((i + 0.5) / setting.answers)) for i in range(setting.answers)]
    return [max(2, round(float(each))) for each in np.random.default_rng(0).permutation(drawn)]


def make_groups(setting: Setting) -> list[Group]:
    """Random tokens; half of each group's answers are right, so that all are learned from."""
    rng, vocabulary = np.random.default_rng(1), setting.config["vocab_size"]
    found: list[Group] = []
    sizes = lengths(setting)
    for first in range(0, setting.answers, GROUP):
        prompt = Segment.given(rng.integers(0, vocabulary, setting.prompt))
        trajectories = tuple(
            Trajectory(
                slot=Slot(len(found), place),
                prompt="p",
                segments=(prompt, Segment.sampled(rng.integers(0, vocabulary, size), np.full(size, -1.0), 0)),
                reward=float(place % 2),
                finish="stop",
                started=0.0,
                finished=1.0,
                engine="e",
            )
            for place, size in enumerate(sizes[first : first + GROUP])
        )
        found.append(Group(id=len(found), trajectories=trajectories))
    return found


def warm_up(setting: Setting, row: str, groups: Sequence[Group]) -> Sequence[Group]:
    """Two forwards of full size where all answers are alike, else everything: lengths are what is compiled for."""
    needed = 2 * setting.budget_of(row) // (setting.tokens * GROUP) + 1
    return groups if setting.tailed else groups[:needed]


def model_flops(config: ModelConfig, blocks: Sequence[Block], *, frozen: bool = False) -> float:
    """Of forward and backward; see above what counts."""
    layers = sum(_used_weights(config, layer) for layer in range(config.layers))
    output = config.vocabulary * config.hidden_size
    answers = [answer for block in blocks for answer in block.answers]
    pairs = sum(len(block.prompt) * (len(block.prompt) + 1) // 2 for block in blocks)
    for block in blocks:
        news = [len(answer.tokens) - 1 for answer in block.answers]
        pairs += sum(new * len(block.prompt) + new * (new + 1) // 2 for new in news)
    matrices = layers * sum(block.num_tokens for block in blocks)
    predicted = output * sum(answer.num_sampled for answer in answers)
    return (4.0 if frozen else 6.0) * (
        matrices + predicted
    ) + 12.0 * config.layers * config.heads * config.head_dim * pairs


def _used_weights(config: ModelConfig, layer: int) -> int:
    """Of the matrices that a token passes: of the experts, its own, and the router."""
    experts = config.experts_of(layer)
    copies, router = (1, 0) if experts is None else (experts.active, experts.count * config.hidden_size)
    shapes = projection_shapes(config, layer).items()
    return router + sum(rows * columns * (1 if name in ATTENTION else copies) for name, (rows, columns) in shapes)


class Ours:
    """The learner of a run, as its actor calls it."""

    def __init__(self, model: Path, setting: Setting, row: str) -> None:
        self._run = trainer_run(setting, row)
        self._learner = Learner(model, self._run)

    def step(self, groups: Sequence[Group]) -> float:
        self._learner.accumulate(groups)
        report = self._learner.step()
        if report.skipped:
            raise RuntimeError(report.fault)
        return report.grad_norm


class Plain:
    """What one writes with transformers alone."""

    def __init__(self, model: Path, setting: Setting, row: str) -> None:
        os.environ.setdefault("HF_HUB_OFFLINE", "1")
        from transformers import AutoModelForCausalLM
        from transformers.utils import logging

        logging.disable_progress_bar()
        self._run, self._device = trainer_run(setting, row), torch.device(setting.device)
        self._narrow, self._budget = setting.dtype == "bf16", setting.budget_of(row)
        held = torch.bfloat16 if setting.lora and self._narrow else torch.float32
        loaded: Any = AutoModelForCausalLM.from_pretrained(model, dtype=held, attn_implementation="sdpa")
        if setting.lora:
            loaded = self._adapted(loaded, self._run.trainer.lora)
        self._model = loaded.to(self._device).train()  # only then anything is computed again
        if not row.endswith("kept"):
            self._model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        self._loss: Callable[..., torch.Tensor] = torch.compile(self._sum) if row.endswith("compiled") else self._sum
        settings = self._run.trainer
        self._trained = [parameter for parameter in self._model.parameters() if parameter.requires_grad]
        self._optimizer = torch.optim.AdamW(
            self._trained,
            lr=settings.lr,
            betas=(settings.beta1, settings.beta2),
            weight_decay=settings.weight_decay,
            fused=True,
        )

    @staticmethod
    def _adapted(model: Any, settings: Lora) -> Any:
        from peft import LoraConfig, get_peft_model

        model.enable_input_require_grads()
        targets = list(settings.targets)
        return get_peft_model(model, LoraConfig(r=settings.rank, lora_alpha=settings.alpha, target_modules=targets))

    def _sum(self, tokens_B_T: torch.Tensor, target_B_T: torch.Tensor, weight_B_T: torch.Tensor) -> torch.Tensor:
        with torch.autocast(self._device.type, dtype=torch.bfloat16, enabled=self._narrow):
            logits = self._model(input_ids=tokens_B_T, use_cache=False).logits
        losses = F.cross_entropy(logits.float().flatten(0, 1), target_B_T.flatten(), reduction="none")
        return (losses * weight_B_T.flatten()).sum()

    def step(self, groups: Sequence[Group]) -> float:
        tokens = sum(t.sampled_tokens for group in groups for t in group.trajectories)
        for rows in padded(with_advantages(self._run, groups), self._budget):
            (self._loss(*(part.to(self._device) for part in rows)) / tokens).backward()
        norm = torch.nn.utils.clip_grad_norm_(self._trained, CLIP)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        return float(norm)


def padded(blocks: Sequence[Block], budget: int) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Tokens, targets and the weight of each target, as rows of similar length with padding behind them.

    Nothing looks ahead, so padding needs no mask: it has weight 0.
    """
    rows = sorted(((block.prompt, answer) for block in blocks for answer in block.answers), key=_length, reverse=True)
    while rows:
        count = max(1, budget // _length(rows[0]))
        yield _rows(rows[:count])
        rows = rows[count:]


def _length(row: tuple[np.ndarray, Answer]) -> int:
    prompt, answer = row
    return len(prompt) + len(answer.tokens) - 1


def _rows(rows: Sequence[tuple[np.ndarray, Answer]]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    shape = len(rows), _length(rows[0])
    tokens_B_T, target_B_T = torch.zeros(shape, dtype=torch.int64), torch.zeros(shape, dtype=torch.int64)
    weight_B_T = torch.zeros(shape)
    for row, (prompt, answer) in enumerate(rows):
        both = torch.from_numpy(np.concatenate([prompt, answer.tokens]).astype(np.int64))
        tokens_B_T[row, : len(both) - 1], target_B_T[row, : len(both) - 1] = both[:-1], both[1:]
        weight_B_T[row, len(prompt) - 1 : len(both) - 1] = float(answer.advantages[0])
    return tokens_B_T, target_B_T, weight_B_T


def measure(model: Path, settings: Sequence[Setting], row: str) -> list[Figures]:
    """One row at each length of `settings`, in this process."""
    found: list[Figures] = []
    for setting in settings:
        try:
            found.append(_measure(model, setting, row))
        except (RuntimeError, torch.OutOfMemoryError) as error:
            found.append(failed(setting, row, error))
        torch.compiler.reset()  # the next length is compiled for itself
        gc.collect()
        if setting.device == "cuda":
            torch.cuda.empty_cache()
    return found


def failed(setting: Setting, row: str, error: Exception) -> Figures:
    return Figures(row=row, tokens=setting.tokens, budget=setting.budget_of(row), error=str(error).splitlines()[0])


def _measure(model: Path, setting: Setting, row: str) -> Figures:
    groups, on_gpu = make_groups(setting), setting.device == "cuda"
    run, config = trainer_run(setting, row), read_config(model)
    blocks = with_advantages(run, groups)
    side = (Ours if row.startswith("asyncrl") else Plain)(model, setting, row)
    side.step(warm_up(setting, row, groups))
    if on_gpu:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    seconds: list[float] = []
    norms: list[float] = []
    for _ in range(setting.repeats):
        began = perf_counter()
        norms.append(side.step(groups))
        if on_gpu:
            torch.cuda.synchronize()
        seconds.append(perf_counter() - began)
    tokens, each = sum(lengths(setting)), statistics.median(seconds)
    resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if platform.system() == "Darwin" else 1024)
    return Figures(
        row=row,
        tokens=setting.tokens,
        budget=setting.budget_of(row),
        seconds=each,
        all_seconds=tuple(seconds),
        tokens_per_second=tokens / each,
        samples_per_second=setting.answers / each,
        tflops=model_flops(config, blocks, frozen=setting.lora > 0) / each / 1e12,
        peak_bytes=torch.cuda.max_memory_allocated() if on_gpu else resident,
        predicted_bytes=predicted(run, config, blocks)
        if on_gpu and isinstance(side, Ours) and row != THEIR_MODEL
        else None,
        gradient_norm=norms[0],
    )


def predicted(run: Run, config: ModelConfig, blocks: Sequence[Block]) -> int:
    """The peak of the largest batch."""
    seen = max((int(b.tokens_T.numel()), sum(map(len, b.rows))) for b in pack(blocks, run.trainer.token_budget))
    layers = recomputed_layers(run, config, None)
    batch, compiled = (
        Batch(seen[0], seen[1] / seen[0]),
        config.experts is None and compiles(run.trainer.compile, "cuda"),
    )
    return training_memory(run, config, batch, recomputed=layers, compiled=compiled).peak


def matrix_tflops() -> float:
    """What a plain bf16 product of two random matrices makes on this GPU: the limit of every row."""
    size, times = 8192, list[float]()
    a, b = (torch.randn(size, size, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    for _ in range(4):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        for _ in range(10):
            a @ b
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1e4)
    del a, b
    torch.cuda.empty_cache()
    return 2 * size**3 / statistics.median(times[1:]) / 1e12


def compare(model: Path, settings: Sequence[Setting], rows: Sequence[str]) -> Iterator[Figures]:
    for row in rows:
        try:  # each in its own process: nothing of the one before is in memory, and its failure is its own
            yield from alone(measure, model, settings, row)
        except RuntimeError as error:
            yield from (failed(setting, row, error) for setting in settings)


HEAD = (
    f"{'':24}{'length':>8}{'seconds':>9}{'samples/s':>11}{'tokens/s':>10}{'TFLOP/s':>9}{'peak GB':>9}{'planned':>9}"
    f"{'gradient':>10}{'tokens at a time':>18}"
)


def line(found: Figures) -> str:
    if found.error:
        return f"{found.row:24}{found.tokens:8} left out: {found.error}"
    planned = f"{found.predicted_bytes / 1e9:9.1f}" if found.predicted_bytes else f"{'':9}"
    digits = 1 if found.tflops >= 10 else 4
    return (
        f"{found.row:24}{found.tokens:8}{found.seconds:9.3f}{found.samples_per_second:11.1f}{found.tokens_per_second:10,.0f}"
        f"{found.tflops:9.{digits}f}{found.peak_bytes / 1e9:9.2f}{planned}{found.gradient_norm:10.5f}{found.budget:18}"
    )


def describe(settings: Sequence[Setting], shape: str) -> str:
    """`settings` differ in their lengths."""
    setting = settings[0]
    config = ModelConfig.from_hf(setting.config)
    device = torch.cuda.get_device_name() if setting.device == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    matrix = "shared with the embedding" if config.tied_embeddings else "of its own"
    tailed = "; lengths are medians, long-tailed" if setting.tailed else ""
    sizes = ", ".join(f"{each.answers} x {each.tokens}" for each in settings)
    precision = "bf16 products, fp32 master weights" if setting.dtype == "bf16" else "fp32"
    packages = ", ".join(f"{name} {version(name)}" for name in ("torch", "transformers"))
    return (
        f"{device}; {packages}; {precision}, AdamW\n"
        f"{shape}: {parameters(config) / 1e9:.3f} G parameters, vocabulary {config.vocabulary}, output matrix "
        f"{matrix}\n"
        f"answers x tokens: {sizes}, behind prompts of {setting.prompt}{tailed}; median of {setting.repeats} steps"
    )


def setting_of(options: argparse.Namespace, tokens: int | None = None) -> Setting:
    """`tokens` of a completion; None: as many as usual."""
    on_gpu = options.device == "cuda"
    raw = SHAPES[options.shape] | {"tie_word_embeddings": options.shape not in UNTIED and not options.untied}
    if options.vocabulary:
        raw |= {"vocab_size": options.vocabulary}
    budget = options.budget or (32_768 if on_gpu else 4096)
    return Setting(
        config=raw,
        answers=options.answers or (max(2, options.step_tokens // (tokens or 4096)) if on_gpu else 16),
        tokens=tokens or (4096 if on_gpu else 256),
        prompt=options.prompt,
        tailed=options.tailed,
        budget=budget,
        kept_budget=options.kept_budget or budget // 2,
        repeats=options.repeats,
        device=options.device,
        dtype=options.dtype or ("bf16" if on_gpu else "fp32"),
        lora=options.lora,
        ours=tuple(options.ours),
    )


def parse(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, help="qwen3-1.7b, on a CPU tiny")
    parser.add_argument("--vocabulary", type=int, metavar="N", help="instead of the shape's own")
    parser.add_argument("--untied", action="store_true", help="an output matrix of its own, also in small shapes")
    parser.add_argument(
        "--answers", type=int, metavar="N", help="of a step; as many as make --step-tokens, on a CPU 16"
    )
    parser.add_argument("--step-tokens", type=int, default=2**18, metavar="N", help="of all answers of a step")
    parser.add_argument("--tokens", type=int, nargs="+", metavar="N", help="of an answer; 4096, on a CPU 256")
    parser.add_argument("--lora", type=int, default=0, metavar="RANK", help="train adapters; 0 trains every weight")
    parser.add_argument("--tailed", action="store_true", help="lengths are log-normal, with --tokens in the middle")
    parser.add_argument("--prompt", type=int, default=1, metavar="N", help="tokens of a prompt, which 8 answers share")
    parser.add_argument("--budget", type=int, metavar="N", help="tokens at a time; 32768, on a CPU 4096")
    parser.add_argument("--kept-budget", type=int, metavar="N", help="with activations kept; half of --budget")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=list(ROWS), metavar="ROW", help=", ".join(ROWS))
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", choices=("bf16", "fp32"), help="bf16, on a CPU fp32")
    parser.add_argument("--out", type=Path, metavar="FILE", help="the figures as JSON")
    parser.add_argument("ours", nargs="*", metavar="trainer.NAME=VALUE", help="settings of our trainer")
    options = parser.parse_args(words)
    options.shape = options.shape or ("qwen3-1.7b" if options.device == "cuda" else "tiny")
    return options


def main(words: Sequence[str] | None = None) -> None:
    options = parse(words)
    with made(ModelConfig.from_hf(setting_of(options).config), options.device) as model:
        run(model, options)


def run(model: Path, options: argparse.Namespace) -> None:
    limit, found = matrix_tflops() if options.device == "cuda" else None, list[Figures]()
    settings = [setting_of(options, tokens) for tokens in options.tokens or [None]]
    print(describe(settings, options.shape))
    if limit:
        print(f"a plain product of bf16 matrices makes {limit:.0f} TFLOP/s here")
    print(HEAD, flush=True)
    for figures in compare(model, settings, options.rows):
        found.append(figures)
        print(line(figures), flush=True)
        if options.out:
            whole = {"shape": options.shape, "limit_tflops": limit, "settings": settings, "rows": found}
            options.out.write_bytes(msgspec.json.format(msgspec.json.encode(whole)))
    print("TFLOP/s: 6 a weight and token (4 if frozen) + attention, nothing for what is computed again. What differs:")
    print("\n".join(f"- {each}" for each in DIFFERENCES))


if __name__ == "__main__":
    main()
