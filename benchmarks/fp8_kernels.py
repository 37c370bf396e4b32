"""FP8 kernels of the native engine against bf16 on this GPU, one by one: products by tile, attention by programs.

    python -m benchmarks.fp8_kernels [--shape qwen3-8b] [--tokens 1 16 64 128 256 1024] [--long 24 16384]

Microseconds, in captured graphs, of the four products of a layer and of attention over pages. For a product: bf16 by
cuBLAS, ours with each tile, cuBLAS in FP8. The best tile is what `TILES` of `cuda/kernels/fp8_product.py` should have;
the same goes for the plans of attention and `PLAN` of `attention.py`. `--short` is a batch of rows with little text.
"""

import argparse
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from asyncrl.engines.native.cuda.fp8 import quantized_matrix
from asyncrl.engines.native.cuda.kernels.shapes import Codes, Heads, Kv, Queries
from asyncrl.engines.native.cuda.pages import PAGE, pages_of
from asyncrl.models.names import Part
from benchmarks.expand import SHAPES

PLANS = {
    "bf16": ((512, 4, 2), (512, 4, 3), (1024, 4, 2), (1024, 4, 3)),
    "FP8": ((512, 4, 3), (1024, 4, 2), (1024, 4, 3), (1024, 4, 4), (2048, 4, 3), (1024, 2, 3, 224), (1024, 4, 3, 168)),
}
"""Plans of attention that are compared."""
RUNS, COPIES = 20, 4
"""Several copies of the weights, so that none is left in the cache from the run before."""


def microseconds(launches: Sequence[Callable[[], object]]) -> float:
    """Of one launch; each of them runs in turn."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for launch in launches:
            launch()
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for launch in launches:
                launch()
        graph.replay()
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        for _ in range(RUNS):
            graph.replay()
        end.record()
        end.synchronize()
    return begin.elapsed_time(end) * 1e3 / RUNS / len(launches)


def products(shape: str, tokens: int) -> None:
    from asyncrl.engines.native.cuda.kernels import cublas
    from asyncrl.engines.native.cuda.kernels.fp8 import quantize
    from asyncrl.engines.native.cuda.kernels.fp8_product import TILES, Tile, multiply

    tiles = [*dict.fromkeys(TILES.values()), Tile(16, 32, 4, 5), Tile(64, 32, 4, 5), Tile(128, 128, 8, 3)]
    for name, (outputs, inputs) in matrices(shape).items():
        weights = [torch.randn(outputs, inputs, device="cuda", dtype=torch.bfloat16) * 0.02 for _ in range(COPIES)]
        x_T_I = torch.randn(tokens, inputs, device="cuda", dtype=torch.bfloat16)
        out_T_O = x_T_I.new_empty(tokens, outputs)
        narrow = [quantized_matrix(weight, [Part(name, outputs)], power_of_two=False) for weight in weights]
        codes = Codes.empty(tokens, inputs, x_T_I.device)
        found = {"bf16": microseconds([partial(torch.mm, x_T_I, weight.t(), out=out_T_O) for weight in weights])}
        found["quantize"] = microseconds([partial(quantize, x_T_I, codes, False)])
        for tile in tiles:
            if tokens <= 32 or tile.tokens >= 64:
                launches = [partial(multiply, codes, matrix, None, None, out_T_O, tile) for matrix in narrow]
                found["x".join(map(str, tile))] = microseconds(launches)
        if tokens % 16 == 0 and cublas.multiply(codes, narrow[0], out_T_O):
            found["cublas"] = microseconds([partial(cublas.multiply, codes, matrix, out_T_O) for matrix in narrow])
        print(f"{name:8} {tokens:5} tokens: " + ", ".join(f"{kind} {time:.1f}" for kind, time in found.items()))


def matrices(shape: str) -> dict[str, tuple[int, int]]:
    """Outputs and inputs."""
    found = SHAPES[shape]
    hidden, wide, dim = found.hidden_size, found.intermediate_size, found.head_dim
    query, key = found.num_attention_heads * dim, found.num_key_value_heads * dim
    return {
        "qkv": (query + 2 * key, hidden),
        "out": (hidden, query),
        "gate_up": (2 * wide, hidden),
        "down": (hidden, wide),
    }


def attention(shape: str, rows: int, context: int) -> None:
    from asyncrl.engines.native.cuda.kernels import attention as kernel

    found = SHAPES[shape]
    heads = Heads(found.num_attention_heads, found.num_key_value_heads, found.head_dim)
    each = pages_of(context + 1)
    table_N_P = torch.randperm(rows * each, device="cuda").view(rows, each).int()
    integers_3_N = torch.tensor([list(range(rows)), [context] * rows, [1] * rows], dtype=torch.int32, device="cuda")
    queries = Queries(1, integers_3_N[0], integers_3_N[1], integers_3_N[2], table_N_P)
    qkv = torch.randn(rows, heads.all * heads.dim, device="cuda", dtype=torch.bfloat16)
    out: Tensor = qkv.new_empty(rows, heads.queries * heads.dim)
    pages = torch.randn(2, rows * each, heads.keys, PAGE, heads.dim, device="cuda", dtype=torch.bfloat16)
    narrow = Kv(pages.to(torch.float8_e4m3fn), torch.ones(2, device="cuda"))
    # As vLLM holds them: the keys and values of a token side by side, and with FP8 pages queries in FP8.
    joined = torch.cat([pages[0], pages[1]], -1)
    joined_narrow = joined.to(torch.float8_e4m3fn)
    scales = kernel.Scales(*torch.ones(3, device="cuda").unbind())
    rest = integers_3_N[1] + 1, table_N_P, heads.dim**-0.5, out.view(rows, heads.queries, heads.dim)
    query = qkv.view(rows, heads.all, heads.dim)[:, : heads.queries]
    narrow_query = query.to(torch.float8_e4m3fn)
    launches: dict[tuple[str, str, int], Callable[[kernel.Plan], None]] = {
        ("bf16", "our pages", 2): partial(kernel.attend, qkv, Kv(pages), heads, queries, out),
        ("FP8", "our pages", 1): partial(kernel.attend, qkv, narrow, heads, queries, out),
        ("bf16", "vLLM's pages", 2): partial(kernel.attend_last, query, joined, None, *rest),
        ("FP8", "vLLM's pages", 1): partial(kernel.attend_last, narrow_query, joined_narrow, scales, *rest),
    }
    for (kind, whose, size), launch in launches.items():
        times = {
            " x ".join(map(str, plan)): microseconds([partial(launch, plan)])
            for plan in (kernel.Plan(*numbers) for numbers in PLANS[kind])
        }
        shown = sorted(times.items(), key=lambda pair: pair[1])
        rate = pages.numel() * size / shown[0][1] / 1e6
        print(f"attention in {kind}, {whose}, {rows} rows of {context}, best {rate:.2f} TB/s; ", end="")
        print(
            "programs x warps x stages x registers: " + ", ".join(f"{name} {time:.0f}" for name, time in shown),
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="qwen3-8b")
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 16, 64, 128, 256, 1024])
    parser.add_argument("--long", type=int, nargs=2, default=(24, 16384), metavar=("ROWS", "TOKENS"))
    parser.add_argument("--short", type=int, nargs=2, default=(256, 320), metavar=("ROWS", "TOKENS"))
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("needs a CUDA GPU")
    with torch.inference_mode():
        for rows, context in (arguments.long, arguments.short):
            attention(arguments.shape, rows, context)
        for tokens in arguments.tokens:
            products(arguments.shape, tokens)


if __name__ == "__main__":
    main()
