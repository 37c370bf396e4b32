"""Costs of ranks: by hand on a model and machines of round numbers, and against vLLM on one H200."""

from math import isclose

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.config import Buffer, Flow, Rollout, Run
from asyncrl.errors import ConfigError
from asyncrl.simulation.collectives import Links
from asyncrl.simulation.hardware import H100, H200, Reached
from asyncrl.simulation.loop import simulate
from asyncrl.simulation.profile import (
    Affine,
    EngineCost,
    Fixed,
    Profile,
    RewardCost,
    Roofline,
    SyncCost,
    TrainerCost,
    convert,
)
from asyncrl.simulation.ranks import (
    exchange_seconds,
    expert_seconds,
    fsdp_seconds,
    on_cluster,
    problem,
    publication_seconds,
    training,
)
from asyncrl.simulation.shape import Shape
from asyncrl.simulation.sizing import size

DENSE = Shape(layers=2, hidden=10, heads=4, kv_heads=2, head_dim=5, vocabulary=100, width=20)
"""A layer has 2 * 10 * 6 * 5 = 600 weights of attention and 3 * 10 * 20 = 600 of its gated layer; 1,000 in each of the
input and the output matrix."""
EXPERTS = msgspec.structs.replace(DENSE, experts=8, active=2)
"""A layer has 4,800 weights in its experts, and 80 more beside them."""
QWEN3_8B = Shape(layers=36, hidden=4096, heads=32, kv_heads=8, vocabulary=151936, width=12288)
QWEN3_30B = Shape(layers=48, hidden=2048, heads=32, kv_heads=4, vocabulary=151936, width=768, experts=128, active=8)
QWEN3_235B = Shape(layers=94, hidden=4096, heads=64, kv_heads=4, vocabulary=151936, width=1536, experts=128, active=8)
ALL = Reached(memory=1, decoding=1, training=1, network=1, overlap=0, layer_seconds=0, row_seconds=0)
"""Software that reaches everything and hides nothing."""
SMALL = H100(flops=1e3, memory=100.0, capacity=1e6, inside=100.0, between=10.0, node=4, hop_inside=0.0, hop_between=0.0)
LINKS = Links(node=4, inside=100.0, between=10.0, hop_inside=0.0, hop_between=0.0)


def profile(shape: Shape = DENSE, **changes: object) -> Profile:
    given = Profile(hardware=SMALL, reached=ALL, model=shape, lengths=Fixed(tokens=10), reward=RewardCost(gather=0.0))
    return msgspec.structs.replace(given, **changes)


# -- sizes -----------------------------------------------------------------------------------------------------------


def test_sizes_of_a_model() -> None:
    assert (DENSE.attention, DENSE.gated, DENSE.parameters, DENSE.used) == (600, 600, 2 * 1200 + 2000, 2 * 1200 + 1000)
    assert (EXPERTS.attention, EXPERTS.gated) == (680, 4800)
    assert (EXPERTS.parameters, EXPERTS.used) == (2 * 5480 + 2000, 2 * (680 + 1200) + 1000)
    assert msgspec.structs.replace(DENSE, tied=True).parameters == 2 * 1200 + 1000


@pytest.mark.parametrize(("shape", "billions"), [(QWEN3_8B, 8.19), (QWEN3_30B, 30.5), (QWEN3_235B, 235.1)])
def test_sizes_of_known_models(shape: Shape, billions: float) -> None:
    assert shape.parameters / 1e9 == pytest.approx(billions, rel=0.002)


# -- engines ---------------------------------------------------------------------------------------------------------


def test_a_step_reads_weights_while_it_computes_rows() -> None:
    step = Roofline(seconds=1.0, per_row=0.1, read=5.0, compute_row=2.0, experts=4, active=1, all_experts=8.0)
    assert isclose(step.at(1), 1.0 + 0.1 + max(5.0 + 8.0 / 4, 2.0))
    assert isclose(step.at(10), 1.0 + 1.0 + 20.0)


def test_an_engine_of_one_gpu() -> None:
    found = on_cluster(profile(), engines=1, trainer_gpus=4).engine
    # The input matrix is not read: 3,400 weights of two bytes at 100 bytes a second; two operations each for a row.
    assert found.step == Roofline(read=68.0, compute_row=6.8)
    # Keys and values of two layers: two heads of 5 numbers of two bytes.
    assert isclose(found.per_context_token, 2 * 2 * 2 * 2 * 5 / 100)
    assert isclose(found.per_prefilled_token, 6.8)


def test_gpus_of_an_engine_add_up_what_each_has_computed() -> None:
    found = on_cluster(profile(engine=EngineCost(gpus=4)), engines=1, trainer_gpus=4).engine
    # Two sums in each of two layers, of ten numbers of two bytes: 2 * 20 * 3 / 4 / 100 seconds each.
    assert isclose(found.step.at(1), 68.0 / 4 + 4 * 0.3)
    assert isclose(found.step.at(3), 68.0 / 4 + 3 * 4 * 0.3)
    # Two heads of keys for four GPUs: two have one twice.
    assert isclose(found.per_context_token, 2 * 2 * 2 * 4 * 5 / 400)


def test_an_engine_reads_the_experts_of_its_batch() -> None:
    step = on_cluster(profile(EXPERTS), engines=1, trainer_gpus=4).engine.step
    assert isclose(step.at(1), 2 * (2 * 680 + 1000) / 100 + 2 * 9600 / 100 / 4)


@pytest.mark.parametrize(
    ("shape", "rows", "context", "measured"),
    [
        (QWEN3_8B, 1, 341, 5.38),
        (QWEN3_8B, 256, 304, 12.27),
        (QWEN3_8B, 24, 16_432, 19.31),
        (QWEN3_30B, 1, 512, 4.27),
        (QWEN3_30B, 8, 512, 9.59),
        (QWEN3_30B, 32, 512, 17.0),
        (QWEN3_30B, 128, 512, 21.5),
    ],
)
def test_steps_of_vllm_on_an_h200(shape: Shape, rows: int, context: int, measured: float) -> None:
    """Milliseconds of docs/benchmarks.md and docs/experts.md, to which `Reached` is fitted."""
    engine = on_cluster(Profile(hardware=H200(), model=shape), engines=1, trainer_gpus=64).engine
    found = engine.step.at(rows) + engine.per_context_token * rows * context
    assert 1e3 * found == pytest.approx(measured, rel=0.15)


def test_a_step_that_was_measured_stays() -> None:
    measured = EngineCost(step=Affine(seconds=0.5))
    assert on_cluster(profile(engine=measured), engines=1, trainer_gpus=4).engine == measured
    assert on_cluster(Profile(engine=measured), engines=1, trainer_gpus=4) == Profile(engine=measured)


# -- the trainer -----------------------------------------------------------------------------------------------------


def test_layers_are_gathered_twice_and_their_gradients_scattered() -> None:
    # Of 1,200 weights a rank lacks three quarters: 18 s in bf16, twice, and 36 s in fp32. The 2,000 outside of the
    # layers are gathered once.
    assert isclose(fsdp_seconds(DENSE, TrainerCost(), LINKS, 4), 2 * (2 * 18 + 36) + 30 + 60)
    assert isclose(fsdp_seconds(DENSE, TrainerCost(forwards=1), LINKS, 4), 2 * (3 * 18 + 36) + 2 * 30 + 60)
    # Two nodes: each gets the half of the bytes of the other through four cards.
    assert isclose(fsdp_seconds(DENSE, TrainerCost(), LINKS, 8), 2 * (2 * 30 + 60) + 50 + 100)


def test_experts_that_ranks_share_are_no_part_of_it() -> None:
    alone, shared = TrainerCost(), TrainerCost(expert_parallel=4, recompute=False)
    whole, rest = (fsdp_seconds(EXPERTS, trainer, LINKS, 4) for trainer in (alone, shared))
    assert isclose(whole - rest, 2 * 4 * 4800 * 2 * 0.75 / 100)
    # Four ranks have every expert once. Eight have them twice: the copies are in different nodes, and share 2,400 bytes
    # of each layer through one card each, in a forward and a scatter.
    assert expert_seconds(EXPERTS, alone, LINKS, 4) == expert_seconds(EXPERTS, shared, LINKS, 4) == 0
    assert isclose(expert_seconds(EXPERTS, shared, LINKS, 8), 2 * 2 * 1200 / 10)


def test_tokens_travel_to_their_experts_and_back() -> None:
    shared = TrainerCost(expert_parallel=4, recompute=False)
    # 5 tokens to two experts each, ten numbers of two bytes, of which three quarters leave: there and back, forward
    # and backward, in two layers.
    assert isclose(exchange_seconds(EXPERTS, shared, LINKS, 5), 2 * 2 * 2 * 150 / 100)
    again = msgspec.structs.replace(shared, recompute=True)
    assert isclose(exchange_seconds(EXPERTS, again, LINKS, 5), 3 * 2 * 2 * 150 / 100)


def test_heads_travel_to_their_ranks_and_back() -> None:
    # 5 tokens: 4 + 2 * 2 heads of 5 numbers of two bytes there, and 4 back; half of them leave.
    assert isclose(exchange_seconds(DENSE, TrainerCost(context_parallel=2), LINKS, 5), 3 * 2 * (200 + 100) / 100)
    # Two heads of keys for four ranks: they are sent twice.
    assert isclose(exchange_seconds(DENSE, TrainerCost(context_parallel=4), LINKS, 5), 3 * 2 * (600 + 200) * 0.75 / 100)
    # Three ranks have one, one and two of the four: the last receives 600 bytes and sends 300.
    assert isclose(exchange_seconds(DENSE, TrainerCost(context_parallel=3), LINKS, 5), 3 * 2 * 900 * 2 / 3 / 100)


def test_a_backward_is_two_forwards_and_one_more_recomputes() -> None:
    """6,800 operations of a token's weights; 160 for each token that it attends to, half of ten on average. The
    backward of attention is two and a half forwards."""
    seconds = training(profile(), 1, [10])
    assert isclose(seconds(50), 50 * (4 * 6800 + 4.5 * 160 * 5) / 1e3)
    kept = profile(trainer=TrainerCost(recompute=False, forwards=2, per_take=7.0), prompt_tokens=2)
    # Of completions of 4 and 8 tokens with their prompts, (6 * 6 + 10 * 10) / 2 / 16 are attended to.
    assert isclose(training(kept, 1, [4, 8])(50), 7 + 50 * (5 * 6800 + 5.5 * 160 * 4.25) / 1e3)


def test_every_batch_costs_its_collectives() -> None:
    trainer = TrainerCost(per_token=0.1, token_budget=10, context_parallel=2)
    seconds = training(profile(trainer=trainer), 4, [10])
    batch = fsdp_seconds(DENSE, trainer, LINKS, 4)
    # Two pairs of ranks with ten tokens each at a time: 50 tokens are three batches, of which each rank has 50 / 12.
    assert isclose(seconds(50), 50 * 0.1 / 4 + 3 * (batch + exchange_seconds(DENSE, trainer, LINKS, 50 / 12)))
    assert isclose(seconds(0), batch)


@pytest.mark.parametrize(("tokens", "exposed"), [(10_000_000, 0.5), (0, 1.0)])
def test_what_is_hidden_is_a_share_and_no_more_than_is_computed(tokens: int, exposed: float) -> None:
    trainer = TrainerCost(per_token=0.1, token_budget=10_000_000)
    half = profile(trainer=trainer, reached=msgspec.structs.replace(ALL, overlap=0.5))
    found = training(half, 4, [10])(tokens) - tokens * 0.1 / 4
    assert isclose(found, exposed * fsdp_seconds(DENSE, trainer, LINKS, 4), rel_tol=1e-6)


@pytest.mark.parametrize(("tokens", "measured"), [(1_024, 41_062), (4_096, 36_322), (16_384, 22_646), (32_768, 15_924)])
def test_our_trainer_on_an_h200(tokens: int, measured: float) -> None:
    """Tokens per second of docs/benchmarks.md, activations computed again, to which `training` is fitted."""
    shape = Shape(layers=28, hidden=2048, heads=16, kv_heads=8, vocabulary=49152, width=6144)
    seconds = training(Profile(hardware=H200(), model=shape), 1, [tokens])
    assert 65_536 / seconds(65_536) == pytest.approx(measured, rel=0.08)


# -- weights ---------------------------------------------------------------------------------------------------------


def test_weights_are_gathered_and_sent_in_turns() -> None:
    assert isclose(publication_seconds(800, LINKS, 2, 2), 400 / 100 + 800 / 100)  # all in one node
    assert isclose(publication_seconds(800, LINKS, 4, 4), 600 / 100 + 800 / 10)
    hops = LINKS._replace(inside=1e30, between=1e30, hop_inside=1.0, hop_between=100.0)
    assert publication_seconds(1 << 30, hops, 4, 4) == 4 * (3 + 3 + 100)  # buckets of 256 MiB


def test_an_update_that_was_measured_stays() -> None:
    known = SyncCost(seconds=3.0)
    assert on_cluster(profile(sync=known), engines=1, trainer_gpus=4).sync == known
    assert isclose(on_cluster(profile(), engines=4, trainer_gpus=1).sync.seconds, 8800 / 10)


# -- runs ------------------------------------------------------------------------------------------------------------


def one_run(**changes: object) -> Run:
    run = Run(
        steps=3,
        max_staleness=0,
        rollout=Rollout(group_size=2, max_tokens=100),
        flow=Flow(groups_per_step=2, groups_per_take=2, group_timeout_s=1e9),
        buffer=Buffer(max_bytes=1 << 40),
    )
    return msgspec.structs.replace(run, **changes)


def test_a_synchronous_step_is_the_sum_of_its_parts() -> None:
    costs = profile()
    cluster, trained = on_cluster(costs, engines=1, trainer_gpus=4), training(costs, 4, [10])(40)
    engine = cluster.engine
    decoded = 10 * engine.step.at(4) + engine.per_context_token * 4 * 10 * 10 / 2
    found = simulate(one_run(), costs, engines=1, trainer_gpus=4).rates
    assert isclose(found.step_seconds, decoded + trained + cluster.sync.seconds)


def test_machines_without_limits_cost_what_was_measured() -> None:
    """One GPU that trains, one that generates, in one node without latency: only the weights' way is added."""
    measured = Profile(
        lengths=Fixed(tokens=10),
        engine=EngineCost(step=Affine(seconds=0.01)),
        trainer=TrainerCost(per_token=0.002),
        sync=SyncCost(seconds=0.5),
        reward=RewardCost(gather=0.0),
    )
    run = one_run()
    with_machines = msgspec.structs.replace(measured, hardware=SMALL, model=DENSE)
    assert simulate(run, measured) == simulate(run, with_machines)


def test_splits_are_those_that_can_train() -> None:
    trainer = TrainerCost(expert_parallel=4)
    # 16 bytes for each of 12,960 parameters are 207,360; with 30,000 of each GPU's memory 8 GPUs are enough.
    costs = profile(EXPERTS, trainer=trainer, hardware=msgspec.structs.replace(SMALL, capacity=30_000.0))
    found = size(one_run(steps=2), costs, 20)
    assert {outcome.trainer_gpus for outcome in found.splits} <= {8, 12, 16}
    with pytest.raises(ConfigError, match=r"--gpus 8 cannot be split: 7 GPUs of 3e-05 GB are too few for .* give it 8"):
        size(one_run(), costs, 8)
    with pytest.raises(ConfigError, match="10 GPUs of the trainer are no multiple of 4, which"):
        simulate(one_run(), costs, engines=1, trainer_gpus=10)
    assert not problem(costs, 8)
    assert not problem(Profile(), 1)


RAW = msgspec.to_builtins(EXPERTS)


@pytest.mark.parametrize(
    ("raw", "said"),
    [
        ({"hardware": {"type": "h100"}}, "hardware says how fast machines are, and model is missing"),
        ({"hardware": {"type": "h300"}}, "hardware.type=h300: invalid value 'h300'; use one of h100, h200"),
        ({"hardware": {"type": "h200", "betwen": 1e9}}, "unknown key hardware.betwen: did you mean hardware.between?"),
        ({"model": RAW, "trainer": {"expert_parallel": 3}}, "trainer.expert_parallel=3 does not divide the 8 experts"),
        ({"model": {**RAW, "active": 9}}, "active=9 is more than experts=8"),
        ({"model": {**RAW, "experts": 0}}, "experts and active go together"),
        ({"model": {**RAW, "kv_heads": 3}}, "kv_heads=3 does not divide heads=4"),
    ],
)
def test_what_does_not_fit_is_refused(raw: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        convert({"hardware": {"type": "h100"}, **raw})
    assert said in str(refused.value)


def test_an_engine_that_is_too_small_is_refused() -> None:
    large = Profile(hardware=H100(), model=QWEN3_235B)
    with pytest.raises(ConfigError, match=r"profile\.engine\.gpus=1: each would hold 470 GB .* set 7 or more"):
        on_cluster(large, engines=1, trainer_gpus=64)


HARDWARE = st.builds(
    H100,
    inside=st.floats(1e9, 1e12),
    between=st.floats(1e8, 1e11),
    hop_between=st.floats(0, 1e-3),
    capacity=st.just(1e15),
)
TRAINERS = st.builds(
    TrainerCost,
    token_budget=st.integers(100, 100_000),
    context_parallel=st.sampled_from([1, 2, 4]),
    expert_parallel=st.sampled_from([1, 2, 8]),
    recompute=st.booleans(),
    forwards=st.integers(0, 2),
)


@given(HARDWARE, TRAINERS, st.floats(0, 1), st.integers(0, 10_000_000), st.sampled_from([8, 64, 512]))
def test_communication_only_adds_and_faster_links_never_hurt(
    hardware: H100, trainer: TrainerCost, overlap: float, tokens: int, gpus: int
) -> None:
    given_ = Profile(hardware=hardware, reached=Reached(overlap=overlap), model=QWEN3_30B, trainer=trainer)
    alone = msgspec.structs.replace(
        given_,
        hardware=msgspec.structs.replace(hardware, inside=1e30, between=1e30, hop_inside=0.0, hop_between=0.0),
    )
    faster = msgspec.structs.replace(
        given_, hardware=msgspec.structs.replace(hardware, inside=2 * hardware.inside, between=2 * hardware.between)
    )
    least, better, found = (training(each, gpus, [1000])(tokens) for each in (alone, faster, given_))
    assert least <= better * (1 + 1e-9)
    assert better <= found * (1 + 1e-9)


@given(HARDWARE, st.floats(0, 1), st.integers(0, 1_000_000))
def test_a_trainer_of_one_rank_communicates_with_nobody(hardware: H100, overlap: float, tokens: int) -> None:
    known = TrainerCost(per_token=1e-4, per_take=0.1)
    found = Profile(hardware=hardware, reached=Reached(overlap=overlap), model=QWEN3_8B, trainer=known)
    assert training(found, 1, [1000])(tokens) == training(Profile(trainer=known), 1, [1000])(tokens)


@given(HARDWARE, TRAINERS, st.integers(0, 1_000_000), st.integers(0, 1_000_000))
def test_more_tokens_never_take_less(hardware: H100, trainer: TrainerCost, fewer: int, further: int) -> None:
    seconds = training(Profile(hardware=hardware, model=QWEN3_30B, trainer=trainer), 64, [1000])
    assert seconds(fewer) <= seconds(fewer + further) * (1 + 1e-9)
