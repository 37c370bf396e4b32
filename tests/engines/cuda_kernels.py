"""Each kernel in Triton against the same in torch, on a GPU, or on a CPU in Triton's interpreter:

make test-kernels
PYTHONPATH=.venv/interpreter TRITON_INTERPRET=1 .venv/bin/python -m tests.engines.cuda_kernels attend
"""

import sys
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from asyncrl.engines.native.cuda.kernels.shapes import Heads, Kernels, Kv, Move, Queries
from asyncrl.weights.flat import Flat
from asyncrl.weights.manifest import layout
from tests.engines import cuda_adapters, cuda_experts, cuda_foreign_pages, cuda_fp8, cuda_fp8_pages
from tests.engines.cuda_verification import verify, verify_leaves_the_targets_distribution
from tests.support.cuda_cases import Case, cases
from tests.support.cuda_places import Place, both, close
from tests.support.triton_interpreter import round_as_hardware


def embed(place: Place) -> None:
    size = 4096 if place.large else 48
    table_V_E = place.normal(100, size, dtype=torch.bfloat16)
    tokens_T, sampled_N = place.integers([5, -1, 99, -3, 0]), place.integers([7, 8, 9])

    def run(kernels: Kernels) -> Tensor:
        out_T_E = torch.zeros(5, size, dtype=torch.bfloat16, device=place.device)
        kernels.embed(tokens_T, sampled_N, table_V_E, out_T_E)
        return out_T_E

    found, expected = both(run)
    assert torch.equal(found, expected)
    assert torch.equal(found, table_V_E[torch.tensor([5, 7, 99, 9, 0], device=place.device)])


def rms_norm(place: Place) -> None:
    size = 4096 if place.large else 48
    for dtype in (torch.float32, torch.bfloat16):
        x_T_E, weight_E = place.normal(3, size, dtype=dtype), place.normal(size, dtype=dtype)

        def run(kernels: Kernels, x: Tensor = x_T_E, weight: Tensor = weight_E) -> Tensor:
            out_T_E = torch.empty_like(x)
            kernels.rms_norm(x, weight, 1e-6, out_T_E)
            return out_T_E

        close(*both(run))


def gated(place: Place) -> None:
    width = 12288 if place.large else 100
    for dtype in (torch.float32, torch.bfloat16):
        gate_up_T_X = place.normal(3, 2 * width, dtype=dtype)

        def run(kernels: Kernels, gate_up: Tensor = gate_up_T_X, width: int = width) -> Tensor:
            out_T_F = gate_up.new_zeros(3, width)
            kernels.gated(gate_up, out_T_F)
            return out_T_F

        close(*both(run))


def rotate_and_store(place: Place) -> None:
    for case in cases(place):
        queries = case.queries(place)
        turns_2_L_C = place.normal(2, max(case.starts) + case.width, case.heads.dim // 2)
        norm_2_D = place.normal(2, case.heads.dim, dtype=case.dtype) if case.norm else None
        stored: list[Tensor] = []
        rotated: list[Tensor] = []

        def run(
            kernels: Kernels,
            case: Case = case,
            queries: Queries = queries,
            turns: Tensor = turns_2_L_C,
            norm: Tensor | None = norm_2_D,
            stored: list[Tensor] = stored,
            rotated: list[Tensor] = rotated,
        ) -> Tensor:
            kv, qkv = case.kv(place, queries), case.qkv(place)
            kernels.rotate_and_store(qkv, turns, norm, 1e-6, Kv(kv), case.heads, queries)
            stored.append(kv)
            by_head = qkv.view(len(case.starts), case.width, case.heads.all, case.heads.dim)
            rotated.append(by_head[:, :, : case.heads.queries])
            return kv

        both(run)
        close(stored[0], stored[1])
        for group, count in enumerate(case.counts):
            close(rotated[0][group, :count], rotated[1][group, :count])


def attend(place: Place) -> None:
    for case in cases(place):
        queries = case.queries(place)
        qkv, kv = case.qkv(place), case.kv(place, queries)

        def run(
            kernels: Kernels, case: Case = case, queries: Queries = queries, qkv: Tensor = qkv, kv: Tensor = kv
        ) -> Tensor:
            out_T_X = qkv.new_full((qkv.shape[0], case.heads.queries * case.heads.dim), 7.0)
            kernels.attend(qkv, Kv(kv), case.heads, queries, out_T_X)
            return out_T_X

        found, expected = both(run)
        close(found, expected)
        for group, count in enumerate(case.counts):
            assert not found.view(len(case.starts), case.width, -1)[group, count:].any(), "padding gives zeros"


def attend_ignores_what_lies_behind_the_end(place: Place) -> None:
    """A page is used again: behind the end of a row it may hold anything."""
    from asyncrl.engines.native.cuda.kernels import triton_kernels

    case = Case(Heads(4, 2, 32), 16, 1, [20], [1])
    queries = case.queries(place)
    qkv, kv = case.qkv(place), case.kv(place, queries)
    outs: list[Tensor] = []
    for garbage in (0.0, float("nan")):
        last = int(queries.table_N_P[0, 1])
        kv[:, last, :, 5:] = garbage
        out_T_X = qkv.new_zeros(1, 128)
        triton_kernels.KERNELS.attend(qkv, Kv(kv), case.heads, queries, out_T_X)
        outs.append(out_T_X)
    close(outs[1], outs[0], 0.0)


def sample(place: Place) -> None:
    size = 151_936 if place.large else 5000
    logits_N_V = place.normal(6, size) * 3
    logits_N_V[5, 4] = 50.0
    temperature_N = torch.tensor([1.0, 0.0, 0.7, 1.0, 1.3, 1.0], device=place.device)
    for uniforms in ([0.5, 0.5, 0.25, 2**-24, 1.0, 0.9], [0.1, 0.2, 0.9, 1.0, 0.77, 1.0]):
        uniform_N = torch.tensor(uniforms, device=place.device)
        tokens: list[Tensor] = []

        def run(kernels: Kernels, uniform_N: Tensor = uniform_N, tokens: list[Tensor] = tokens) -> Tensor:
            token_N = torch.full((6,), -1, dtype=torch.int32, device=place.device)
            logprob_N = torch.full((6,), 9.0, device=place.device)
            kernels.sample(logits_N_V, temperature_N, uniform_N, token_N, logprob_N)
            tokens.append(token_N.long())
            return logprob_N

        found, _ = both(run)
        heat_N_1 = torch.where(temperature_N == 0, 1.0, temperature_N)[:, None]
        probs_N_V = (logits_N_V.double() / heat_N_1.double()).softmax(-1)
        close(found.double(), probs_N_V.gather(1, tokens[0][:, None])[:, 0].log(), 1e-4)
        assert int(tokens[0][1]) == int(logits_N_V[1].argmax())
        upper_N = probs_N_V.cumsum(-1).gather(1, tokens[0][:, None])[:, 0]
        lower_N = upper_N - probs_N_V.gather(1, tokens[0][:, None])[:, 0]
        inside_N = (uniform_N >= lower_N - 1e-5) & (uniform_N <= upper_N + 1e-5) & (tokens[0] < size)
        assert bool((inside_N | (temperature_N == 0)).all())


def sample_says_that_logits_are_no_numbers(place: Place) -> None:
    from asyncrl.engines.native.cuda.kernels import triton_kernels

    logits_N_V = place.normal(1, 300)
    logits_N_V[0, 7] = float("nan")
    token_N, logprob_N = place.integers([-1]), torch.zeros(1, device=place.device)
    ones = torch.ones(1, device=place.device)
    triton_kernels.KERNELS.sample(logits_N_V, ones, ones / 2, token_N, logprob_N)
    assert bool(logprob_N.isnan().all())
    assert 0 <= int(token_N) < 300


def mover(place: Place) -> None:
    """Tensors of many pieces and of one, ends that are no piece, and what is no matter of whole words; anywhere."""
    sizes = (1 << 20 if place.large else 70_000, 32768, 4096, 17, 8, 1)
    normal, zeros = partial(place.normal, dtype=torch.bfloat16), partial(torch.zeros, device=place.device)
    given = [*map(normal, sizes), normal(4, 8), normal(8), normal(32), normal(40).view(torch.uint8)]
    specs, total = layout((str(number), tensor) for number, tensor in enumerate(given))
    both_places = torch.zeros(2 * total, dtype=torch.uint8, device=place.device)

    def run(kernels: Kernels) -> None:
        matrix, odd = zeros(4, 24, dtype=torch.bfloat16), zeros(33, dtype=torch.bfloat16)[1:]
        held = [
            *map(torch.zeros_like, given[: len(sizes)]),
            matrix[:, 8:16],
            zeros(8),
            odd,
            zeros(80, dtype=torch.uint8),
        ]
        move = kernels.mover([Move(*pair) for pair in zip(specs, held, strict=True)])
        assert not any(each.any() for each in held), "not yet"
        for memory in both_places.chunk(2):
            flat = Flat(specs, memory)
            for spec, source in zip(specs, given, strict=True):
                flat.put(spec, source.mul_(2))
            move(flat)
            for source, target in zip(given, held, strict=True):
                assert torch.equal(source.float(), target.float()), source.shape
        assert matrix.count_nonzero() == matrix[:, 8:16].count_nonzero()

    both(run)


CHECKS: dict[str, Callable[[Place], None]] = {
    check.__name__: check
    for check in (
        embed,
        rms_norm,
        gated,
        rotate_and_store,
        attend,
        attend_ignores_what_lies_behind_the_end,
        mover,
        cuda_adapters.merge_adapters,
        sample,
        sample_says_that_logits_are_no_numbers,
        verify,
        verify_leaves_the_targets_distribution,
        cuda_fp8.fp8_quantize,
        cuda_fp8.fp8_behind_norm_and_gating,
        cuda_fp8.fp8_weights,
        cuda_fp8.fp8_product,
        cuda_fp8.fp8_product_in_bf16,
        cuda_fp8_pages.fp8_rotate_and_store,
        cuda_fp8_pages.fp8_attend,
        cuda_fp8_pages.fp8_attend_ignores_what_lies_behind_the_end,
        cuda_foreign_pages.attend_last_of_foreign_pages,
        cuda_experts.expert_choice,
        cuda_experts.expert_sorting,
        cuda_experts.expert_products,
    )
}

if __name__ == "__main__":
    round_as_hardware()
    for name in sys.argv[1:]:
        CHECKS[name](Place(torch.device("cpu"), large=False))
        print(name, "ok")
