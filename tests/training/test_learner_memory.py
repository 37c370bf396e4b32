"""Training in less memory, and how much it takes: working copies, activations computed again, the arithmetic."""

from collections.abc import Callable
from pathlib import Path
from typing import Any
from weakref import finalize

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from asyncrl.algorithms import losses
from asyncrl.config import Run, Trainer
from asyncrl.config.algorithm import Grpo, Importance, Kl, Ppo
from asyncrl.config.distillation import Distillation
from asyncrl.config.drafter import DrafterTraining
from asyncrl.config.engine import FakeEngine, VllmEngine
from asyncrl.config.trainer import Lora
from asyncrl.errors import CheckpointError
from asyncrl.models import grouped
from asyncrl.models.config import ModelConfig
from asyncrl.models.decoder import Decoder
from asyncrl.models.execution import Execution
from asyncrl.models.experts import ExpertTensors
from asyncrl.models.head import chunked_logprobs
from asyncrl.models.packed import flash
from asyncrl.training import checkpoint, memory
from asyncrl.training.checkpoint import TrainingManifest
from asyncrl.training.hidden_capture import HiddenTap
from asyncrl.training.learner import Learner
from asyncrl.training.memory import Batch, training_memory
from asyncrl.types import Group
from tests.support import tiny_model
from tests.support.tiny_model import tiny_checkpoint
from tests.support.training_groups import gradients_of, make_groups

# A CPU without bf16 instructions says so once.
pytestmark = pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")
SHAPES = {
    "llama": {"model_type": "llama", "num_attention_heads": 6, "num_key_value_heads": 2, "tie_word_embeddings": True},
    "qwen3": {"model_type": "qwen3", "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 32},
    "qwen3_moe": {
        "model_type": "qwen3_moe",
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 32,
        "num_experts": 16,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 128,
    },
}
SIZES = {"vocab_size": 4096, "hidden_size": 192, "intermediate_size": 512, "num_hidden_layers": 6}
SMOLLM2 = ModelConfig.from_hf(tiny_model.SMOLLM2)


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    tiny_checkpoint(directory)
    return directory


def _learner(model_path: Path, **settings: Any) -> Learner:
    trainer = Trainer(lr=1e-3, grad_clip=1e9, **settings)
    return Learner(model_path, Run(trainer=trainer, correction=Importance(reject=())))


def _trained(learner: Learner, found: list[Group]) -> list[Tensor]:
    learner.accumulate(found)
    gradients = [gradient.clone() for gradient in gradients_of(learner)]
    learner.step()
    return gradients


# What is computed.


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_activations_computed_again_give_the_same_gradients_and_hidden_states(model_path: Path, dtype: str) -> None:
    kept, again = (_learner(model_path, dtype=dtype, checkpoint_activations=choice) for choice in (False, True))
    for learner in (kept, again):
        learner.hidden = HiddenTap(DrafterTraining(), (0, 1), seed=0)
    expected, found = (_trained(learner, make_groups(3)) for learner in (kept, again))
    assert len(expected) == len(list(kept.model.parameters()))
    assert all(torch.equal(one, other) for one, other in zip(expected, found, strict=True))
    assert kept.hidden is not None
    assert again.hidden is not None
    for one, other in zip(kept.hidden.drain(), again.hidden.drain(), strict=True):
        assert torch.equal(one.hidden_T_E, other.hidden_T_E)
        assert one.taps_T_R is not None
        assert other.taps_T_R is not None
        assert torch.equal(one.taps_T_R, other.taps_T_R)


def test_logits_in_chunks_give_the_same_update(model_path: Path) -> None:
    whole, chunked = _learner(model_path), _learner(model_path, logits_bytes=5 * 48 * 4)
    for one, other in zip(_trained(whole, make_groups(3)), _trained(chunked, make_groups(3)), strict=True):
        torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("algorithm", [Grpo(entropy=0.01), Grpo(kl=Kl(coefficient=0.1)), Ppo()])
def test_entropy_reference_and_critic_train_alike_in_little_memory(model_path: Path, algorithm: Grpo | Ppo) -> None:
    reports = []
    for settings in ({}, {"checkpoint_activations": True, "logits_bytes": 5 * 48 * 4}):
        learner = Learner(model_path, Run(algorithm=algorithm, trainer=Trainer(lr=1e-3, **settings)))
        learner.accumulate(make_groups(3))
        reports.append(learner.step())
    assert reports[1].figures == pytest.approx(reports[0].figures, rel=1e-3, abs=1e-6)
    assert reports[1].loss == pytest.approx(reports[0].loss, rel=1e-3, abs=1e-6)


def test_weights_are_the_masters_rounded_and_what_engines_get(model_path: Path) -> None:
    learner = _learner(model_path, dtype="bf16")
    for step in range(3):
        learner.accumulate(make_groups(2, step))
        learner.step()
        served = dict(learner.served_tensors(torch.bfloat16))
        for name, master in learner.tensors():  # of two that are equally near the trainer takes the larger
            distance = (served[name].float() - master).abs()
            assert torch.equal(distance, (master.bfloat16().float() - master).abs())
        assert any(not torch.equal(master, served[name].float()) for name, master in learner.tensors())


@pytest.mark.parametrize("optimizer", ["adamw", "adamw_8bit"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_run_resumes_to_the_bit(dtype: str, optimizer: str, model_path: Path, tmp_path: Path) -> None:
    learner, resumed = (_learner(model_path, dtype=dtype, optimizer=optimizer) for _ in range(2))
    for step in range(3):
        learner.accumulate(make_groups(2, step))
        learner.step()
    manifest = TrainingManifest(step=3, samples_trained=24, consumed=())
    saved = checkpoint.save(learner, tmp_path, manifest, model_path=model_path, keep=1)
    checkpoint.restore(resumed, saved)
    for one in (learner, resumed):
        one.accumulate(make_groups(2, 9))
        one.step()
    expected = dict(learner.tensors())
    assert all(torch.equal(tensor, expected[name]) for name, tensor in resumed.tensors())
    other = _learner(model_path, dtype=dtype, optimizer="adamw" if optimizer == "adamw_8bit" else "adamw_8bit")
    with pytest.raises(CheckpointError, match=r"written with another trainer\.optimizer"):
        checkpoint.restore(other, saved)


def test_a_checkpoint_of_the_old_format_loads(model_path: Path, tmp_path: Path) -> None:
    """Moments in the shapes of their parameters, as torch's AdamW keeps them: fp32 and bf16 read each other's."""
    wide = _learner(model_path)
    wide.accumulate(make_groups(2))
    wide.step()
    manifest = TrainingManifest(step=1, samples_trained=8, consumed=())
    saved = checkpoint.save(wide, tmp_path, manifest, model_path=model_path, keep=1)
    narrow = _learner(model_path, dtype="bf16")
    checkpoint.restore(narrow, saved)
    expected = dict(wide.tensors())
    assert all(torch.equal(tensor, expected[name]) for name, tensor in narrow.tensors())
    for one, other in zip(narrow.model.parameters(), wide.model.parameters(), strict=True):
        assert torch.equal(narrow.optimizer.state[one]["exp_avg"], wide.optimizer.state[other]["exp_avg"].flatten())


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # torch.compile looks at it
@pytest.mark.parametrize("layers", [0, 1], ids=["kept", "one recomputed"])
def test_compiled_gradients_are_those_of_the_plain_path(layers: int, model_path: Path) -> None:
    """On a CPU a layer is compiled in two parts, around an attention whose buckets differ from batch to batch."""
    plain, compiled = (
        _learner(
            model_path, compile=compile, token_budget=120, logits_bytes=4096, checkpoint_activations=layers or False
        )
        for compile in ("off", "on")
    )
    expected, found = (_trained(learner, make_groups(6)) for learner in (plain, compiled))
    for one, other in zip(found, expected, strict=True):
        assert float((one - other).abs().max()) <= 1e-5 * float(other.abs().max())


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
def test_compiled_gradients_of_adapters_are_those_of_the_plain_path(family: str, tmp_path: Path) -> None:
    tiny_checkpoint(tmp_path, family)
    targets: Any = ("q_proj", "v_proj", "up_proj", "down_proj")
    plain, compiled = (
        _learner(tmp_path, compile=compile, token_budget=120, lora=Lora(rank=4, targets=targets))
        for compile in ("off", "on")
    )
    expected, found = (_trained(learner, make_groups(3)) for learner in (plain, compiled))
    assert any(gradient.any() for gradient in expected)
    for one, other in zip(found, expected, strict=True):
        assert float((one - other).abs().max()) <= 1e-5 * float(other.abs().max())


def test_gradients_of_many_narrow_batches_add_up_in_fp32(model_path: Path) -> None:
    """Adding in bf16 would lose what is below a 256th of the sum."""
    narrow, wide = _learner(model_path, dtype="bf16", token_budget=50), _learner(model_path)
    found, expected = (_trained(learner, make_groups(12)) for learner in (narrow, wide))
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == torch.float32
        assert F.cosine_similarity(one.flatten(), other.flatten(), dim=0) > 0.995
    assert any(not torch.equal(one, one.bfloat16().float()) for one in found)


def test_engines_in_fp32_get_the_masters(model_path: Path) -> None:
    learner = _learner(model_path, dtype="bf16")
    masters = dict(learner.tensors())
    assert all(torch.equal(tensor, masters[name]) for name, tensor in learner.served_tensors(torch.float32))


# How much it takes.


class _Live(TorchDispatchMode):
    """Bytes of the tensors that are there, and the most that ever were."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: dict[int, int] = {}
        self.peak = 0

    @property
    def now(self) -> int:
        return sum(self.sizes.values())

    def see(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        if storage._cdata not in self.sizes:
            self.sizes[storage._cdata] = storage.nbytes()
            finalize(storage, self.sizes.pop, storage._cdata)
            self.peak = max(self.peak, self.now)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor):
                self.see(leaf)
        return out


def _fake(model: Decoder) -> Decoder:
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                module._parameters[name] = nn.Parameter(torch.empty(parameter.shape, dtype=parameter.dtype))
        for name, buffer in module._buffers.items():
            module._buffers[name] = torch.empty(buffer.shape, dtype=buffer.dtype)
    model.frequencies_D = torch.empty(model.frequencies_D.shape)
    return model


def _attention(tokens: int, spread: int) -> Callable[[int, Tensor, Tensor, Tensor], Tensor]:
    """As on a GPU: the operator is real, its tensors have no contents."""
    source = torch.empty(tokens * spread, dtype=torch.int64)
    starts = torch.empty(9, dtype=torch.int32)

    def attend(_layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k, v = (F.embedding(source, x.flatten(1)).view(-1, *x.shape[1:]) for x in (k, v))
        return flash(q, k, v, starts, starts, tokens, tokens).flatten(1)

    return attend


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("family", SHAPES)
@pytest.mark.parametrize("spread", [1, 3])
def test_activations_are_those_that_autograd_keeps(
    family: str, recompute: bool, spread: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def always(*_: object) -> bool:
        return True

    monkeypatch.setattr(grouped, "has_kernel", always)  # as on a GPU
    tokens = 2048
    config = ModelConfig.from_hf(SIZES | SHAPES[family])
    model = Decoder(config, torch.bfloat16)
    with FakeTensorMode(), _Live() as live:
        _fake(model)
        for parameter in model.parameters():
            live.see(parameter)
            parameter.grad = torch.empty_like(parameter)
        index = torch.empty(tokens, dtype=torch.int64)
        attend = _attention(tokens, spread)
        before = live.now
        with torch.autocast("cpu", dtype=torch.bfloat16):
            hidden = model(index, index, attend, run=Execution(config.layers * recompute).layer)
        kept = live.now - before
        live.peak = 0
        hidden.sum().backward()
        peak = live.peak - before
    run = Run(trainer=Trainer(dtype="bf16"))
    found = training_memory(run, config, Batch(tokens, spread), recomputed=config.layers * recompute)
    assert found.activations == pytest.approx(kept, rel=0.03)
    layer = memory._layer_backward_bytes(  # the head's logits, which lie higher, are not in this backward
        config, spread, memory.layer_bytes(config, spread, narrow=True) if recompute else 0, narrow=True
    )
    assert found.activations + tokens * layer == pytest.approx(peak, rel=0.08)


@pytest.mark.parametrize("frozen", [False, True])
def test_activations_of_experts_are_those_that_autograd_keeps(frozen: bool) -> None:
    """Real tensors: how many rows an expert has depends on scores. Frozen experts keep neither what they are given nor
    the gated product, for which the plan leaves room nevertheless."""
    tokens, hidden, width, active = 2048, 64, 24, 8
    sizes = {"num_experts": 16, "num_experts_per_tok": active, "moe_intermediate_size": width, "hidden_size": hidden}
    gated = memory._Gated.of(ModelConfig.from_hf(SIZES | SHAPES["qwen3"] | sizes | {"model_type": "qwen3_moe"}))
    shapes = (hidden, 16), (16, hidden, 2 * width), (16, width, hidden)
    weights = [torch.randn(shape).requires_grad_(not frozen) for shape in shapes]
    x_T_E = torch.randn(tokens, hidden).requires_grad_()
    with _Live() as live:
        for tensor in (*weights, x_T_E):
            live.see(tensor)
        before = live.now
        y_T_E = ExpertTensors(*weights, active=active, renormalized=True).forward(x_T_E, 0, None)
        kept = live.now - before - y_T_E.nbytes
        live.peak = 0
        y_T_E.sum().backward()
        peak = live.peak - before
    unused = active * (hidden + width) if frozen else 0
    assert 4 * tokens * (gated.kept - unused) == pytest.approx(kept, rel=0.08)
    assert 4 * tokens * (gated.kept - unused + gated.backward) == pytest.approx(peak, rel=0.1)


def _head_inputs(live: "_Live", tokens: int, vocabulary: int, hidden: int) -> tuple[list[torch.Tensor], int]:
    """States, the output matrix and targets, and what they take."""
    states, output = torch.empty(tokens, hidden).requires_grad_(), torch.empty(vocabulary, hidden).requires_grad_()
    inputs = [states, output, torch.empty(tokens, dtype=torch.int64)]
    for tensor in inputs:
        live.see(tensor)
    return inputs, live.now


def test_the_head_takes_two_blocks_of_logits_and_its_gradient() -> None:
    tokens, rows, vocabulary, hidden = 640, 64, 4096, 192
    with FakeTensorMode(), _Live() as live:
        (states, output, target), before = _head_inputs(live, tokens, vocabulary, hidden)
        chunked_logprobs(states, output, target, temperature=0.7, chunk=rows).logp_L.sum().backward()
        peak = live.peak - before
    run = Run(trainer=Trainer(logits_bytes=rows * vocabulary * 4))
    config = ModelConfig.from_hf(SHAPES["llama"] | SIZES)
    expected = memory._head_bytes(run, config, tokens) - tokens * hidden * 4  # the states are not counted above
    assert expected == pytest.approx(peak, rel=0.05)


@pytest.mark.parametrize("rows", [64, 640])
def test_a_teachers_likeliest_tokens_take_a_third_block_and_some_numbers_each(rows: int) -> None:
    tokens, vocabulary, hidden, count = 640, 4096, 192, 300
    with FakeTensorMode(), _Live() as live:
        (states, output, target), before = _head_inputs(live, tokens, vocabulary, hidden)
        said = torch.empty(tokens, 2 * count + 1)
        ids, teacher = said[:, :count].long(), said[:, count:]
        found = chunked_logprobs(states, output, target, temperature=0.7, chunk=rows, ids_L_K=ids)
        assert found.top_L_B is not None
        (found.logp_L + losses.divergence("reverse", found.top_L_B, teacher)).sum().backward()
        peak = live.peak - before
    run = Run(trainer=Trainer(logits_bytes=rows * vocabulary * 4), distill=Distillation(top_k=count))
    expected = memory._head_bytes(run, ModelConfig.from_hf(SHAPES["llama"] | SIZES), tokens) - tokens * hidden * 4
    assert expected == pytest.approx(peak, rel=0.05)


def test_the_peak_by_hand() -> None:
    """SmolLM2-135M in bf16, 8,192 tokens, each prompt for itself."""
    run = Run(trainer=Trainer(dtype="bf16", logits_bytes=1 << 30))
    found = training_memory(run, SMOLLM2, Batch(8192))
    count = 134_515_008
    assert memory.parameters(SMOLLM2) == count
    assert found.weights == 4 * count  # in two halves
    assert found.optimizer == 12 * count
    # residual 2 x 4, norms 2 x 6 of 576; gated 8 of 1536; q, k and the answer 2 of 1344, 4 of 9 heads, k and v 4 of 192
    layer = 20 * 576 + 8 * 1536 + 2 * (768 + 576) + 36 + 4 * 192
    assert found.activations == 8192 * (30 * layer + 12 * 576 + 4 * 64)
    # 5,461 tokens of logits twice, the gradient of the output matrix, states and their gradient
    assert found.backward == 2 * 5461 * 49152 * 4 + 4 * 49152 * 576 + 4 * 8192 * 576
    assert training_memory(run, SMOLLM2, Batch(8192), recomputed=30).activations == 8192 * (30 * 2304 + 7168)


def test_state_off_the_card_by_hand() -> None:
    """16 bytes a parameter, 10 of them in the host's memory; in 8 bits 10 and 4, and two scales for 256 numbers."""
    count = memory.parameters(SMOLLM2)

    def held(**settings: Any) -> tuple[float, float]:
        found = training_memory(Run(trainer=Trainer(dtype="bf16", **settings)), SMOLLM2, Batch(8192))
        return (found.weights + found.optimizer) / count, found.offloaded / count

    staged = (3 << 25) / count
    assert held() == (16, 0)
    assert held(offload="optimizer") == pytest.approx((6 + 10 * staged, 10))
    assert held(optimizer="adamw_8bit") == pytest.approx((10 + 8 / 256, 0))
    assert held(optimizer="adamw_8bit", offload="optimizer") == pytest.approx((6 + 4.03125 * staged, 4.03125))


def test_auto_computes_again_only_what_would_not_fit() -> None:
    def chosen(card: int | None, **changes: Any) -> int:
        trainer = Trainer(dtype="bf16", token_budget=changes.pop("token_budget", 65_536))
        return memory.recomputed_layers(Run(trainer=trainer, **changes), SMOLLM2, card)

    half = VllmEngine(memory=0.5)
    assert chosen(None, engine=half) == 0  # a CPU
    assert chosen(80 << 30, engine=FakeEngine()) == 0
    assert chosen(80 << 30, engine=half, token_budget=8192) == 0
    assert 0 < chosen(80 << 30, engine=half) < 30, "as many layers as there is room for"
    assert chosen(1 << 30, engine=half) == 30
    for setting, layers in ((True, 30), (False, 0), (7, 7), (99, 30)):
        run = Run(trainer=Trainer(checkpoint_activations=setting))
        assert memory.recomputed_layers(run, SMOLLM2, None) == layers
        assert memory.recomputed_layers(run, SMOLLM2, 1) == layers


def test_the_layers_chosen_fit_and_one_fewer_would_not() -> None:
    run, card = Run(trainer=Trainer(dtype="bf16", token_budget=65_536), engine=VllmEngine(memory=0.5)), 32 << 30
    layers = memory.recomputed_layers(run, SMOLLM2, card, compiled=True)
    assert 0 < layers < 30
    published = 2 * 4 * memory.parameters(SMOLLM2)  # two versions in fp32, as the engine asks for
    room, batch = memory.AUTO_SHARE * (card / 2 - published), Batch(65_536, memory.AUTO_SPREAD)
    peaks = [training_memory(run, SMOLLM2, batch, recomputed=n, compiled=True).peak for n in (layers - 1, layers)]
    assert peaks[1] <= room < peaks[0]
