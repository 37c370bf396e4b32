"""A small trained model, and its drafting head, in the shape of a big one, computing the same function.

    python -m benchmarks.expand SMALL BIG --shape qwen3-8b [--head SMALLHEAD --head-out BIGHEAD] [--dtype bf16]
    python -m benchmarks.expand SMALL BIG --shape qwen3-1.7b --same-vocabulary      (to be trained)
    python -m benchmarks.expand SMALL BIG --shape qwen3-30b-a3b          (SMALL has experts, or is dense)

So a benchmark has a big model's cost and a real model's answers. Everything is a copy: axes name, for each new place,
the old one it copies and a factor. With powers of two between the sizes all factors are exact, also in bf16.

    residual stream   q copies of x; who reads them takes 1/q of each
    heads             copies; who reads them takes their mean. A longer head holds each number s times; all but every
                      s-th, which have the old rotation frequencies, are zero in the query; its scale makes up for s
    gated layer       copies; the down projection takes their mean, and nothing of those that are left over
    further layers    copies of the last that write zero, behind the old ones, so that taps stay where they were
    further tokens    Only a quarter of the stream holds copies, the rest is silent (norms, twice as large then, take
                      half of it). Its last channel holds a tiny constant, which no norm notices; the further tokens
                      have a huge negative weight there, so that they are never sampled.
    experts           Copies too, in groups: from top-2 of 8 to top-8 of 128 each has 16 copies, 4 in each of 4 groups.
                      A token has a group, by its number: its embedding has the tiny constant in one more silent
                      channel, the group's code, where routers have a huge negative weight for other groups. In its
                      group all copies of an expert score the same, so the best 8 are the copies of the old best 2, and
                      the old weights are shared evenly among them. A dense layer is one expert that every token has:
                      its 128 copies are 16 groups of 8. Equally frequent tokens use all groups alike. Training may
                      change codes; a token then goes to another group, which computes the same.

The output matrix is always of its own, as cost is the same.
"""

import argparse
import json
import math
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import torch
from safetensors.torch import save_file
from torch import Tensor

from asyncrl.drafting.checkpoint import head_tensors, load_head, save_head
from asyncrl.drafting.heads import Head, HeadConfig
from asyncrl.errors import CheckpointError
from asyncrl.models.checkpoint import WEIGHTS, load_model
from asyncrl.models.config import ARCHITECTURES, Experts, ModelConfig
from asyncrl.models.decoder import Decoder
from asyncrl.models.names import hf_tensors

CONSTANT, UNLIKELY = 2.0**-10, -(2.0**26)
"""In the last channel: what every token's embedding has, and what a further token's output row has."""
ELSEWHERE = -(2.0**20)
"""In the channel of a group's code: what a router has for the experts of all other groups."""
SILENT = 4
"""A stream with silent channels holds copies in one of so many."""
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
DRAFT_VOCABULARY = 32_000
"""Of an EAGLE-3 head for a big vocabulary, as published ones have it."""


class Shape(msgspec.Struct, frozen=True):
    """The sizes of a decoder, each a multiple of the small one's, but for gated layers, which may be any wider."""

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    num_experts: int = 0
    num_experts_per_tok: int = 0
    moe_intermediate_size: int = 0

    def settings(self) -> dict[str, Any]:
        """As `config.json` has them."""
        sizes = {name: size for name, size in msgspec.structs.asdict(self).items() if size}
        if not self.num_experts:
            return sizes
        architecture = f"{ARCHITECTURES['qwen3_moe']}ForCausalLM"
        return sizes | {"model_type": "qwen3_moe", "architectures": [architecture], "norm_topk_prob": True}


SHAPES = {
    "qwen3-30b-a3b": Shape(2048, 6144, 48, 32, 4, 128, 151936, 128, 8, 768),
    "qwen3-8b": Shape(4096, 12288, 36, 32, 8, 128, 151936),
    "qwen3-1.7b": Shape(2048, 6144, 28, 16, 8, 128, 151936),
    "qwen3-0.6b": Shape(1024, 3072, 28, 16, 8, 128, 151936),
    "tiny": Shape(512, 1000, 3, 8, 2, 64, 200),
}


class Axis(NamedTuple):
    """Which old place each new one copies, and times what."""

    source: Tensor
    factor: Tensor

    def grow(self, tensor: Tensor, dim: int) -> Tensor:
        shape = [-1 if axis == dim else 1 for axis in range(tensor.dim())]
        return tensor.index_select(dim, self.source).mul_(self.factor.to(tensor.dtype).view(shape))

    def beside(self, times: int, old_size: int) -> "Axis":
        """Several such axes in one, as where two vectors are read side by side."""
        source = torch.cat([self.source + part * old_size for part in range(times)])
        return Axis(source, self.factor.repeat(times))


class ExpertGrowth:
    """Which small expert each big one copies, and for which group of tokens; a dense layer is one expert."""

    def __init__(self, small: ModelConfig, big: Experts) -> None:
        old = small.experts or Experts(count=1, active=1, width=small.intermediate_size, renormalized=True)
        if not small.qk_norm or old.dense_layers:
            raise CheckpointError(
                "experts grow from a Qwen3 model, or from a Qwen3-MoE model with experts in every layer; choose "
                "another small model"
            )
        copies, chosen = (
            _times("num_experts", old.count, big.count),
            _times("num_experts_per_tok", old.active, big.active),
        )
        if copies % chosen:
            raise CheckpointError(
                f"num_experts={big.count} has {copies} copies of each expert, which must be a multiple of the {chosen} "
                f"that num_experts_per_tok={big.active} chooses; choose another shape or small model"
            )
        self.groups = copies // chosen
        expert_X = torch.arange(big.count)
        self.source_X, self.group_X = expert_X % old.count, expert_X // old.count % self.groups
        self.names = [f"mlp.experts.{expert}" for expert in range(old.count)] if small.experts else ["mlp"]
        """Of the small experts."""
        self.gated = _repeated(old.width, big.width)
        self.down = Axis(self.gated.source, _shares("moe_intermediate_size", old.width, big.width))

    def layer(self, old: Mapping[str, Tensor], growth: "Growth") -> Iterator[tuple[str, Tensor]]:
        """Router and experts; each copy has memory of its own, as files want it."""
        some = old[f"{self.names[0]}.up_proj.weight"]
        router = old.get("mlp.gate.weight", some.new_zeros(1, growth.small.hidden_size))
        router_X_E = growth.read.grow(router[self.source_X], 1)
        elsewhere_X_G = self.group_X[:, None] != torch.arange(self.groups)
        router_X_E[:, growth.codes] = ELSEWHERE * elsewhere_X_G[:, : len(growth.codes)].to(router.dtype)
        yield "mlp.gate.weight", router_X_E
        axes = {"gate_proj": (self.gated, growth.read), "up_proj": (self.gated, growth.read)}
        for kind, (rows, columns) in (axes | {"down_proj": (growth.write, self.down)}).items():
            grown = [columns.grow(rows.grow(old[f"{name}.{kind}.weight"], 0), 1) for name in self.names]
            for expert, source in enumerate(self.source_X.tolist()):
                yield f"mlp.experts.{expert}.{kind}.weight", grown[source].clone()


class Growth:
    """The axes between two shapes."""

    def __init__(self, small: ModelConfig, big: ModelConfig) -> None:
        self.small, self.big = small, big
        self.further = big.vocabulary > small.vocabulary
        self.experts = None if big.experts is None else ExpertGrowth(small, big.experts)
        groups = self.experts.groups if self.experts is not None and self.experts.groups > 1 else 0
        silent = SILENT if self.further or groups else 1
        times = _times("hidden_size", small.hidden_size, big.hidden_size, silent)
        copies = times // silent
        self.louder = math.sqrt(times / copies)
        """A normalised copy, relative to the old number: its norm averages over silent channels too."""
        place_E = torch.arange(big.hidden_size)
        self.write = Axis(place_E % small.hidden_size, (place_E < copies * small.hidden_size).float())
        self.read = Axis(self.write.source, torch.full((big.hidden_size,), 1 / copies))
        self.normed = Axis(self.write.source, torch.full((big.hidden_size,), 1 / self.louder))
        if self.further:
            self.read.factor[-1] = 0
        end = big.hidden_size - self.further
        self.codes = torch.arange(end - groups, end)
        """Channels, one for each group of experts; none where all experts are one group."""
        self.read.factor[self.codes] = 0
        self.tokens = _repeated(small.vocabulary, big.vocabulary)
        self.gated = _repeated(small.intermediate_size, big.intermediate_size)
        self.down = Axis(
            self.gated.source, _shares("intermediate_size", small.intermediate_size, big.intermediate_size)
        )

    def attention(self, qk_norm: bool) -> dict[str, Axis]:
        """Rows of the projections to heads, columns of the one from them, and the norms inside a head."""
        small, big = self.small, self.big
        copies = _times("num_attention_heads", small.heads, big.heads)
        kv_copies = _times("num_key_value_heads", small.kv_heads, big.kv_heads)
        longer = _times("head_dim", small.head_dim, big.head_dim)
        dim_D = torch.arange(big.head_dim) // longer
        query_D = (torch.arange(big.head_dim) % longer == 0) * math.sqrt(longer)
        ones_D = torch.ones(big.head_dim)
        group = small.heads // small.kv_heads
        head_H = torch.arange(big.heads)
        old_H = head_H // (group * copies) * group + head_H % group
        old_K = torch.arange(big.kv_heads) // kv_copies
        # Norms inside a head share their epsilon with those of the stream; numbers half as large keep both exact.
        quiet = ones_D / self.louder
        return {
            "q_proj": _heads(old_H, dim_D, small.head_dim, quiet if qk_norm else query_D),
            "k_proj": _heads(old_K, dim_D, small.head_dim, quiet if qk_norm else ones_D),
            "v_proj": _heads(old_K, dim_D, small.head_dim, ones_D),
            "o_proj": _heads(old_H, dim_D, small.head_dim, ones_D / (copies * longer)),
            "q_norm": Axis(dim_D, query_D),
            "k_norm": Axis(dim_D, ones_D),
        }

    def layer(self, name: str, tensor: Tensor, heads: dict[str, Axis], read: Axis) -> Tensor:
        """One tensor of a layer, by its part's name; `read` is how its attention sees what it reads."""
        if name in ("q_norm", "k_norm"):
            return heads[name].grow(tensor, 0)
        if name.endswith("norm"):
            grown = self.normed.grow(tensor, 0)
            grown[self.codes] = 1
            return grown
        rows, columns = {
            "q_proj": (heads["q_proj"], read),
            "k_proj": (heads["k_proj"], read),
            "v_proj": (heads["v_proj"], read),
            "o_proj": (self.write, heads["o_proj"]),
            "gate_proj": (self.gated, self.read),
            "up_proj": (self.gated, self.read),
            "down_proj": (self.write, self.down),
        }[name]
        grown = rows.grow(tensor, 0)
        return columns.grow(grown, 1) if tensor.dim() == 2 else grown

    def whole_layer(self, old: Mapping[str, Tensor], heads: dict[str, Axis]) -> dict[str, Tensor]:
        """All tensors of a layer, by their names within it."""
        kept = {name: tensor for name, tensor in old.items() if self.experts is None or not name.startswith("mlp.")}
        grown = {name: self.layer(name.split(".")[-2], tensor, heads, self.read) for name, tensor in kept.items()}
        return grown | dict(self.experts.layer(old, self) if self.experts is not None else ())

    def final_norm(self, weight: Tensor) -> Tensor:
        grown = self.normed.grow(weight, 0)
        if self.further:
            grown[-1] = 1
        return grown

    def output(self, matrix: Tensor, rows: int) -> Tensor:
        grown = self.read.grow(_repeated(len(matrix), rows).grow(matrix, 0), 1)
        grown[len(matrix) :, -1] = UNLIKELY
        return grown


def big_config(small: ModelConfig, shape: Shape) -> ModelConfig:
    if small.experts is not None and not shape.num_experts:
        raise CheckpointError("the small model has experts and the shape has none; choose another shape")
    raw = {**small.raw, "tie_word_embeddings": False} | shape.settings()
    raw.pop("num_local_experts", None)  # what transformers 5 calls num_experts
    if small.experts is not None:
        raw["norm_topk_prob"] = small.experts.renormalized
    # Silent channels make the mean square of the stream smaller.
    raw["rms_norm_eps"] = small.norm_eps / Growth(small, ModelConfig.from_hf(raw)).louder ** 2
    return ModelConfig.from_hf(raw)


def expand(model: Decoder, shape: Shape) -> Decoder:
    big = Decoder(big_config(model.config, shape), model.norm.dtype)
    wanted = dict(hf_tensors(big))
    for name, tensor in expanded_tensors(model, big.config):
        wanted[name].copy_(tensor)
    return big


def expanded_tensors(model: Decoder, big: ModelConfig) -> Iterator[tuple[str, Tensor]]:
    """By their Hugging Face names, one layer after the other."""
    growth = Growth(model.config, big)
    heads = growth.attention(model.config.qk_norm)
    old = dict(hf_tensors(model))
    embedding = growth.write.grow(growth.tokens.grow(old["model.embed_tokens.weight"], 0), 1)
    if growth.further:
        embedding[:, -1] = CONSTANT
    if groups := len(growth.codes):
        token_V = torch.arange(big.vocabulary)
        embedding[token_V, growth.codes[token_V % groups]] = CONSTANT
    yield "model.embed_tokens.weight", embedding
    last: dict[str, Tensor] = {}
    for index in range(big.layers):
        if index < model.config.layers:
            prefix = f"model.layers.{index}."
            last = {name.removeprefix(prefix): tensor for name, tensor in old.items() if name.startswith(prefix)}
            last = growth.whole_layer(last, heads)
        elif index == model.config.layers:
            silent = [name for name in last if name.split(".")[-2] in ("o_proj", "down_proj")]
            last |= {name: torch.zeros_like(last[name]) for name in silent}
        yield from ((f"model.layers.{index}.{name}", tensor) for name, tensor in last.items())
    yield "model.norm.weight", growth.final_norm(old["model.norm.weight"])
    yield "lm_head.weight", growth.output(model.output_matrix.detach(), big.vocabulary)


def expand_head(head: Head, big: ModelConfig, vocabulary: int = 0) -> Head:
    """`vocabulary` is how many tokens an EAGLE-3 head can draft; 0: as many as before, or all if it was all."""
    config, growth = head.config, Growth(head.config.target, big)
    third = config.kind == "eagle3"
    rows = vocabulary or (config.vocabulary if config.vocabulary < config.target.vocabulary else big.vocabulary)
    new = Head(
        HeadConfig(kind=config.kind, target=big, taps=config.taps, vocabulary=rows if third else big.vocabulary),
        head.fc.weight.dtype,
    )
    wanted, heads, hidden = dict(head_tensors(new)), growth.attention(qk_norm=False), config.target.hidden_size
    for name, tensor in head_tensors(head):
        if name == "fc.weight":
            read = growth.read.beside(tensor.shape[1] // hidden, hidden)
            wanted[name].copy_(read.grow(growth.write.grow(tensor, 0), 1))
            if growth.further:  # the constant goes on: from the first tap, or from EAGLE's feature behind the embedding
                wanted[name][-1, big.hidden_size * (1 if third else 2) - 1] = 1
        elif name == "norm.weight":
            wanted[name].copy_(growth.final_norm(tensor))
        elif name == "lm_head.weight":
            wanted[name].copy_(growth.output(tensor, rows))
        elif name in wanted:
            read = growth.read.beside(2 if third else 1, hidden)
            wanted[name].copy_(growth.layer(name.split(".")[-2], tensor, heads, read))
    if third and rows < big.vocabulary:
        drafts_U = torch.arange(config.vocabulary) if head.drafts_U is None else head.drafts_U
        new.drafts_U = torch.cat([drafts_U, config.target.vocabulary + torch.arange(rows - len(drafts_U))])
    return new


def save_expanded(model: Decoder, shape: Shape, directory: Path) -> ModelConfig:
    """Write a model that need not fit into memory, a file for each layer; the tensors' dtype is the small model's."""
    directory.mkdir(parents=True, exist_ok=True)
    big = big_config(model.config, shape)
    files: dict[str, str] = {}
    held: dict[str, Tensor] = {}
    place = "begin"

    def write() -> None:
        save_file(held, directory / f"model-{place}.safetensors", metadata={"format": "pt"})
        files.update(dict.fromkeys(held, f"model-{place}.safetensors"))
        held.clear()

    for name, tensor in expanded_tensors(model, big):
        here = name.split(".")[2] if name.startswith("model.layers.") else name.split(".")[-2]
        if held and here != place:
            write()
        place = here
        held[name] = tensor
    write()
    (directory / f"{WEIGHTS}.index.json").write_text(json.dumps({"metadata": {}, "weight_map": files}))
    raw: dict[str, Any] = {**big.raw, "dtype": str(model.norm.dtype).removeprefix("torch.")}
    (directory / "config.json").write_text(json.dumps(raw, indent=2, sort_keys=True) + "\n")
    return big


def _times(name: str, small: int, big: int, multiple: int = 1) -> int:
    if big % (small * multiple):
        why = f"{multiple} times {small}, as the vocabulary grows" if multiple > 1 else f"{small}, the small model's"
        raise CheckpointError(f"{name}={big} must be a multiple of {why}; choose another shape or small model")
    return big // small


def _repeated(small: int, big: int) -> Axis:
    return Axis(torch.arange(big) % small, torch.ones(big))


def _shares(name: str, small: int, big: int) -> Tensor:
    """Of each copy in the mean: a power of two, so that it is exact; nothing of the copies that are left over."""
    if big < small:
        raise CheckpointError(f"{name}={big} must not be below {small}, the small model's")
    copies = 1 << (big // small).bit_length() - 1
    return (torch.arange(big) < copies * small) / copies


def _heads(old_H: Tensor, dim_D: Tensor, old_dim: int, factor_D: Tensor) -> Axis:
    return Axis((old_H[:, None] * old_dim + dim_D).flatten(), factor_D.repeat(len(old_H)))


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("small", type=Path)
    parser.add_argument("big", type=Path)
    parser.add_argument("--shape", choices=SHAPES, required=True)
    parser.add_argument("--head", type=Path)
    parser.add_argument("--head-out", type=Path)
    parser.add_argument("--dtype", choices=DTYPES, default="bf16")
    vocabulary = parser.add_mutually_exclusive_group()
    vocabulary.add_argument("--same-vocabulary", action="store_true", help="the small one's; for models to be trained")
    vocabulary.add_argument("--vocabulary", type=int, metavar="N", help="instead of the shape's own")
    args = parser.parse_args(words)
    model, config = load_model(args.small, DTYPES[args.dtype])
    shape = SHAPES[args.shape]
    if size := config.vocabulary if args.same_vocabulary else args.vocabulary:
        shape = msgspec.structs.replace(shape, vocab_size=size)
    big = save_expanded(model, shape, args.big)
    for file in args.small.glob("*token*"):
        shutil.copy(file, args.big)
    if args.head is not None:
        head = load_head(args.head, config, DTYPES[args.dtype])
        save_head(expand_head(head, big, min(DRAFT_VOCABULARY, big.vocabulary)), args.head_out)


if __name__ == "__main__":
    main()
