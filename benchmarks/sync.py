"""How long new weights take from the trainer to a receiver in another process, by transport.

    python -m benchmarks.sync [--shape qwen3-0.6b qwen3-8b] [--transports cuda_ipc ...] [--precisions bf16 fp8]
        [--lora RANK] [--updates 5] [--out FILE]

Random bf16 weights, made on the GPU where there is one. The receiver holds plain tensors and no engine. For each
version: `publish` is the trainer's part (gather into one buffer, digest), `receive` maps the bytes or brings and checks
them, `digest` is the receiver's over all of it, `load` copies them into its tensors; `whole` is from the begin of
`publish` to the receiver's answer, and the rate follows from it. With `+delta` 1 % of the weights change, and only
these are sent. In `fp8` the trainer quantizes the projections as a part of `publish`, FP8 and scales are sent, and what
that adds to the whole is compared with its bar. With `--lora` the trainer sends adapters of all projections, and the
receiver merges them into its weights as the native engine does: `digest` includes its checks, `load` is the merging.
Medians, without the first update, in which memory is allocated and communicators are formed.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from time import perf_counter
from typing import NamedTuple, cast

import msgspec
import torch

from asyncrl.config.precision import Fp8
from asyncrl.config.trainer import PROJECTIONS, Lora
from asyncrl.config.weights import TransportName
from asyncrl.engines.native.cuda.adapters import Base
from asyncrl.engines.native.cuda.kernels.choice import kernels_of
from asyncrl.engines.native.cuda.timeline import Timeline
from asyncrl.engines.native.cuda.weights import Checked, Intake
from asyncrl.engines.native.weight_loading import Receiver
from asyncrl.models import lora
from asyncrl.models.config import ModelConfig
from asyncrl.models.decoder import Decoder
from asyncrl.precision.publication import Fp8Source
from asyncrl.system import shared_gpu
from asyncrl.training.adapter_source import AdapterSource
from asyncrl.training.distributed.ranks import Ranks
from asyncrl.types import SendOrder, WeightManifest
from asyncrl.weights.flat import Flat
from asyncrl.weights.gather import OneRank, Source
from asyncrl.weights.transports.registry import addressed_to, make_writer, published

RECEIVER = "receiver"
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
ADDED_MS = 100.0
"""What quantizing may add to an update."""
CHANGED = 100
"""With a delta every so many elements one changes."""
os.environ.setdefault(shared_gpu.VARIABLE, "1")  # both processes are on one card


class Shape(NamedTuple):
    hidden: int
    wide: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    tied: bool

    def tensors(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        yield "model.embed_tokens.weight", (self.vocabulary, self.hidden)
        for layer in range(self.layers):
            parts = {
                "self_attn.q_proj": (queries, self.hidden),
                "self_attn.k_proj": (keys, self.hidden),
                "self_attn.v_proj": (keys, self.hidden),
                "self_attn.o_proj": (self.hidden, queries),
                "self_attn.q_norm": (self.head_dim,),
                "self_attn.k_norm": (self.head_dim,),
                "mlp.gate_proj": (self.wide, self.hidden),
                "mlp.up_proj": (self.wide, self.hidden),
                "mlp.down_proj": (self.hidden, self.wide),
                "input_layernorm": (self.hidden,),
                "post_attention_layernorm": (self.hidden,),
            }
            yield from ((f"model.layers.{layer}.{name}.weight", shape) for name, shape in parts.items())
        yield "model.norm.weight", (self.hidden,)
        if not self.tied:
            yield "lm_head.weight", (self.vocabulary, self.hidden)


SHAPES = {
    "tiny": Shape(128, 256, 2, 4, 2, 32, 512, tied=True),
    "qwen3-0.6b": Shape(1024, 3072, 28, 16, 8, 128, 151936, tied=True),
    "qwen3-8b": Shape(4096, 12288, 36, 32, 8, 128, 151936, tied=False),
}


LORA_MS = {("qwen3-8b", "cuda_ipc"): 15.0}
"""Target for the whole of an update of adapters, on an H200."""


class Times(msgspec.Struct):
    """What the receiver measured, in seconds."""

    receive: float
    digest: float
    load: float


class Row(msgspec.Struct, kw_only=True):
    """One line of the table: medians in milliseconds."""

    shape: str
    transport: str
    precision: str
    device: str
    gigabytes: float
    publish_ms: float
    receive_ms: float
    digest_ms: float
    load_ms: float
    whole_ms: float
    gigabytes_per_second: float


class Copies:
    """A receiver of whole weights."""

    def __init__(self) -> None:
        self._held: dict[str, torch.Tensor] = {}

    def check(self, manifest: WeightManifest, flat: Flat) -> Callable[[], None]:
        if (digest := flat.digest()) != manifest.digest:
            raise SystemExit(f"version {manifest.version} arrived with digest {digest}")
        return lambda: self._load(flat)

    def _load(self, flat: Flat) -> None:
        for name, tensor in flat.tensors():
            if name not in self._held:
                self._held[name] = torch.empty_like(tensor, device=DEVICE)
            self._held[name].copy_(tensor)


class Merges:
    """A receiver of adapters: what the native engine does with them."""

    def __init__(self, shape: Shape) -> None:
        self._timeline = Timeline(DEVICE)
        held = weights(shape, DEVICE)
        base = Base(held.items(), PROJECTIONS)
        self._intake = Intake(held, self._timeline, kernels_of(DEVICE), middle=shape.layers // 2, base=base)
        synchronize()

    def check(self, manifest: WeightManifest, flat: Flat) -> Callable[[], None]:
        return partial(self._load, self._intake.check(manifest, Receiver(RECEIVER, "the version before", "model")))

    def _load(self, checked: Checked) -> None:
        with self._timeline.work():
            checked.update.load()


def receiver(shape: str) -> None:
    """The other process: one line of times for each manifest; `shape` is that of the model, if it gets adapters."""
    receives = Merges(SHAPES[shape]) if shape else Copies()
    for line in sys.stdin:
        manifest = msgspec.json.decode(line, type=WeightManifest)
        began = perf_counter()
        flat = published(manifest)
        received = perf_counter()
        load = receives.check(manifest, flat)
        digested = perf_counter()
        load()
        synchronize()
        print(
            msgspec.json.encode(Times(received - began, digested - received, perf_counter() - digested)).decode(),
            flush=True,
        )


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def weights(shape: Shape, device: torch.device) -> dict[str, torch.Tensor]:
    generator = torch.Generator(device).manual_seed(0)
    return {
        name: torch.empty(size, dtype=torch.bfloat16, device=device).normal_(0.0, 0.02, generator=generator)
        for name, size in shape.tensors()
    }


def adapters(shape: Shape, rank: int) -> Decoder:
    """The trainer's model, with adapters of all projections."""
    raw = {
        "model_type": "qwen3",
        "vocab_size": shape.vocabulary,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.wide,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "tie_word_embeddings": shape.tied,
    }
    with DEVICE:
        model = Decoder(ModelConfig.from_hf(raw), torch.bfloat16)
    lora.attach(model, Lora(rank=rank), seed=0)
    return model


def available() -> list[str]:
    """The transports of this machine, the fastest first."""
    names = ["shared_memory", "file", "file+delta"]
    if torch.cuda.is_available() and find_spec("cupy") is not None:
        from asyncrl.weights.transports import nccl

        too_old = shared_gpu.problem(shared_gpu.numbers(nccl.nccl().get_version()))
        names = ["cuda_ipc", *([] if too_old else ["nccl", "nccl+delta"]), *names]
    return names


def measure(shape: str, transport: str, precision: str, updates: int, rank: int = 0) -> Row:
    source: Source
    if rank:
        model = adapters(SHAPES[shape], rank)
        source, precision = AdapterSource(model, Ranks()), f"r{rank}"
        tensors = {name: each.data for name, each in model.named_parameters() if each.requires_grad}
    else:
        tensors = weights(SHAPES[shape], DEVICE)
        source = OneRank(tensors.items)
    gigabytes = 0.0
    name, _, delta = transport.partition("+")
    found: list[tuple[float, Times, float]] = []
    command = [sys.executable, "-m", "benchmarks.sync", RECEIVER, shape if rank else ""]
    with (
        tempfile.TemporaryDirectory(prefix="asyncrl-sync-") as folder,
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child,
    ):
        assert child.stdin is not None
        assert child.stdout is not None
        writer = make_writer(
            Fp8Source(source, SHAPES[shape].layers, Fp8()) if precision == "fp8" else source,
            cast(TransportName, name),
            prefix="sync",
            folder=Path(folder) / "weights",
            delta=bool(delta),
        )
        for version in range(updates + 1):
            change(tensors, sparsely=bool(delta))
            synchronize()
            began = perf_counter()
            manifest = writer.publish(version, SendOrder(1, (RECEIVER,)))
            publish, gigabytes = perf_counter() - began, manifest.total_bytes / 1e9
            child.stdin.write(msgspec.json.encode(addressed_to(manifest, RECEIVER)).decode() + "\n")
            child.stdin.flush()
            line = child.stdout.readline()
            if not line:
                raise SystemExit(f"{transport}: the receiver ended; it says why above")
            found.append((publish, msgspec.json.decode(line, type=Times), perf_counter() - began))
        child.stdin.close()
        child.wait(timeout=60)
        writer.close()
    return summed_up((shape, transport, precision, DEVICE.type), gigabytes, found[1:])


def change(tensors: dict[str, torch.Tensor], *, sparsely: bool) -> None:
    for tensor in tensors.values():
        tensor.view(-1)[:: CHANGED if sparsely else 1] += 0.01


def summed_up(what: tuple[str, str, str, str], gigabytes: float, found: Sequence[tuple[float, Times, float]]) -> Row:
    def ms(values: Iterator[float]) -> float:
        return statistics.median(values) * 1e3

    whole = ms(times[2] for times in found)
    return Row(
        shape=what[0],
        transport=what[1],
        precision=what[2],
        device=what[3],
        gigabytes=gigabytes,
        publish_ms=ms(times[0] for times in found),
        receive_ms=ms(times[1].receive for times in found),
        digest_ms=ms(times[1].digest for times in found),
        load_ms=ms(times[1].load for times in found),
        whole_ms=whole,
        gigabytes_per_second=gigabytes / whole * 1e3,
    )


def main() -> None:
    if sys.argv[1:2] == [RECEIVER]:
        receiver(sys.argv[2])
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    on_gpu = torch.cuda.is_available()
    parser.add_argument(
        "--shape", nargs="+", choices=SHAPES, default=["qwen3-0.6b", "qwen3-8b"] if on_gpu else ["tiny"]
    )
    parser.add_argument("--transports", nargs="+", choices=available(), default=available())
    parser.add_argument("--precisions", nargs="+", choices=("bf16", "fp8"), default=["bf16"])
    parser.add_argument("--lora", type=int, default=0, metavar="RANK", help="send adapters of this rank, not weights")
    parser.add_argument("--updates", type=int, default=5)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    if arguments.lora and arguments.precisions != ["bf16"]:
        parser.error("--lora is measured with --precisions bf16")
    rows: list[Row] = []
    print(f"{'shape':12}{'transport':15}{'':5}{'GB':>7}   ms: publish  receive   digest     load    whole      GB/s")
    for shape in arguments.shape:
        for transport in arguments.transports:
            for precision in arguments.precisions:
                rows.append(measure(shape, transport, precision, arguments.updates, arguments.lora))
                print(line(rows[-1]), flush=True)
                if arguments.out:
                    arguments.out.write_text(json.dumps(msgspec.to_builtins(rows), indent=1))
    print("\n".join([*added(rows), *targets(rows)]))


def line(row: Row) -> str:
    times = (row.publish_ms, row.receive_ms, row.digest_ms, row.load_ms, row.whole_ms)
    return (
        f"{row.shape:12}{row.transport:15}{row.precision:5}{row.gigabytes:7.3f}      "
        + "".join(f"{value:9.2f}" for value in times)
        + f"{row.gigabytes_per_second:10.2f}"
    )


def added(rows: Sequence[Row]) -> list[str]:
    """What FP8 adds to an update, or takes from it."""
    plain = {(row.shape, row.transport): row.whole_ms for row in rows if row.precision == "bf16"}
    lines: list[str] = []
    for row in rows:
        if row.precision == "fp8" and (row.shape, row.transport) in plain:
            more = row.whole_ms - plain[row.shape, row.transport]
            told = "held" if more <= ADDED_MS else "NOT held"
            lines.append(f"{row.shape}, {row.transport}: FP8 adds {more:.1f} ms (bar {ADDED_MS:g}: {told})")
    return lines


def targets(rows: Sequence[Row]) -> list[str]:
    """Of adapters."""
    lines: list[str] = []
    for row in rows:
        target = LORA_MS.get((row.shape, row.transport))
        if row.precision.startswith("r") and target is not None:
            told = "held" if row.whole_ms <= target else "NOT held"
            lines.append(f"{row.shape}, {row.transport}: adapters in {row.whole_ms:.1f} ms (target {target:g}: {told})")
    return lines


if __name__ == "__main__":
    main()
