"""Models of transformers behind our protocol: their own log-probabilities, gradients and files; samples stay apart."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, Gemma3Config, Gemma3ForConditionalGeneration, PreTrainedModel

from asyncrl.config.trainer import Lora
from asyncrl.errors import CheckpointError, ConfigError
from asyncrl.models import lora
from asyncrl.models.architectures import causal_language_models
from asyncrl.models.checkpoint import empty_policy, load_policy, save_model
from asyncrl.models.config import read_config
from asyncrl.models.decoder import Decoder
from asyncrl.models.execution import Execution
from asyncrl.models.files import WEIGHTS
from asyncrl.models.head import chunked_logprobs
from asyncrl.models.names import hf_tensors
from asyncrl.models.policy import PolicyModel, Taps
from asyncrl.models.transformers_model import TransformersModel
from tests.support.tiny_families import FAMILIES, tiny_family
from tests.support.tiny_model import SHAPE, tiny_checkpoint

pytestmark = pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")  # torch, on CPUs without bf16
LENGTHS = (12, 5, 7)
"""The last two share a row, where samples are packed."""
SAMPLES = [np.random.default_rng(1).integers(0, 40, length) for length in LENGTHS]


def _loaded(directory: Path, dtype: torch.dtype = torch.float32) -> PolicyModel:
    model = load_policy(directory, "transformers", dtype)
    model.packing = "padded" if model.try_out(narrow=False) else "packed"
    return model


def _states(model: PolicyModel, **settings: object) -> Tensor:
    ends = np.cumsum(LENGTHS)
    rows = [np.arange(end - length, end) for end, length in zip(ends, LENGTHS, strict=True)]
    positions = torch.cat([torch.arange(length) for length in LENGTHS])
    return model.states(torch.from_numpy(np.concatenate(SAMPLES)), positions, rows, narrow=False, **settings)  # type: ignore[arg-type]


def _alone(theirs: PreTrainedModel) -> Tensor:
    samples = [torch.from_numpy(sample)[None] for sample in SAMPLES]
    return torch.cat([theirs(input_ids=each, use_cache=False).logits[0] for each in samples]).log_softmax(-1)


def _close(found: Tensor, wanted: Tensor) -> bool:
    return torch.allclose(found, wanted, rtol=0, atol=1e-5 * max(1.0, float(wanted.detach().abs().max())))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_is_the_one_of_transformers(family: str, tmp_path: Path) -> None:
    """Log-probabilities and gradients are those of each sample alone, and the files are those that there were."""
    theirs = tiny_family(tmp_path, family)
    ours = _loaded(tmp_path)
    assert (ours.packing, ours.config.backend) == (FAMILIES[family].packing, "transformers")
    assert read_config(tmp_path, "auto").backend == "transformers", "no family that our own decoder computes"
    logp, expected = ours.logits(_states(ours)).log_softmax(-1), _alone(theirs)
    assert _close(logp, expected)
    for each in (logp, expected):
        (each[:, 3].sum() + each[5:8, 20].sum()).backward()
    gradients = {f"inner.{name}": parameter.grad for name, parameter in theirs.named_parameters()}
    for name, parameter in ours.named_parameters():
        wanted = gradients[name]
        assert (parameter.grad is None) == (wanted is None), name
        assert wanted is None or parameter.grad is None or _close(parameter.grad, wanted), name
    saved, found = load_file(tmp_path / WEIGHTS), dict(hf_tensors(ours))
    assert saved.keys() == found.keys()
    assert all(torch.equal(saved[name], tensor) for name, tensor in found.items())
    save_model(ours, tmp_path / "again")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "again")
    assert all(torch.equal(tensor, theirs.state_dict()[name]) for name, tensor in again.state_dict().items())


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # torch.compile looks at it
@pytest.mark.parametrize(
    ("family", "recomputed"),
    [("gemma3_text", 2), pytest.param("phi3", 0, marks=pytest.mark.nightly), ("qwen3_next", 2)],
)
def test_compiled_layers_change_nothing(family: str, recomputed: int, tmp_path: Path) -> None:
    """With an adapter in them. Layers that are not compiled are left as they are."""
    tiny_family(tmp_path, family)
    found: list[list[Tensor]] = []
    for execution in (Execution(recomputed), Execution(recomputed, their_layers=True)):
        model = _loaded(tmp_path)
        model.adapt(Lora(rank=2, targets=("down_proj",)), torch.Generator().manual_seed(0))
        states = [_states(model, execution=execution) for _ in range(2)]
        (states[0].square().sum() + states[1].sum()).backward()
        gradients = [each.grad for each in model.parameters() if each.grad is not None]
        found.append([*(each.detach() for each in states), *gradients])
        graphs = [each for each in model.blocks() if "forward" in vars(each)]
        assert len(graphs) == (len(model.blocks()) if execution.their_layers and family != "qwen3_next" else 0)
    assert len(found[0]) > 10
    assert all(_close(one, other) for one, other in zip(*found, strict=True))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_a_compiler_that_fails_is_done_without(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny_family(tmp_path, "phi3")
    plain, model = _loaded(tmp_path), _loaded(tmp_path)
    assert model.try_to_compile(narrow=False) == ""
    assert all("forward" in vars(each) for each in model.blocks())
    torch.compiler.reset()
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "empty"))
    with torch._inductor.config.patch({"cpp.cxx": (str(tmp_path / "no-compiler"),)}):  # pyright: ignore
        model = _loaded(tmp_path)
        assert "no-compiler" in model.try_to_compile(narrow=False)
    assert _close(_states(model), _states(plain))


@pytest.mark.parametrize("family", ["gemma2", "granite", "qwen3_next"])
def test_chunks_of_logits_and_layers_computed_again_change_nothing(family: str, tmp_path: Path) -> None:
    """And nothing is dropped out, whatever the config says."""
    theirs = tiny_family(tmp_path, family, attention_dropout=0.5)
    ours = _loaded(tmp_path)
    targets = torch.from_numpy(np.concatenate(SAMPLES))
    found = chunked_logprobs(
        _states(ours, execution=Execution(recomputed=1)),
        ours.output_matrix,
        targets,
        temperature=0.7,
        chunk=4,
        entropy=True,
        shape=ours.logit_shape,
    )
    samples = [torch.from_numpy(sample)[None] for sample in SAMPLES]
    logits = torch.cat([theirs(input_ids=each, use_cache=False).logits[0] for each in samples]) / 0.7
    logp = logits.log_softmax(-1)
    assert found.entropy_L is not None
    entropy = -(logp.exp() * logp).sum(-1)
    assert _close(found.logp_L, logp.gather(1, targets[:, None]).squeeze(1))
    assert _close(found.entropy_L, entropy)
    (found.logp_L.sum() + 2 * found.entropy_L.sum()).backward()
    (logp.gather(1, targets[:, None]).sum() + 2 * entropy.sum()).backward()
    gradients = {f"inner.{name}": parameter.grad for name, parameter in theirs.named_parameters()}
    for name, parameter in ours.named_parameters():
        wanted = gradients[name]
        assert wanted is None or parameter.grad is None or _close(parameter.grad, wanted), name


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "qwen3_moe"])
def test_our_own_families_are_the_same_through_transformers(family: str, tmp_path: Path) -> None:
    tiny_checkpoint(tmp_path, family)
    ours, theirs = load_policy(tmp_path, "auto", torch.float32), _loaded(tmp_path)
    assert isinstance(ours, Decoder)
    assert isinstance(theirs, TransformersModel)
    taps = Taps([0, 1]), Taps([0, 1])
    for found, wanted in zip(
        (_states(theirs, taps=taps[0]), *taps[0].found_T_E),
        (_states(ours, taps=taps[1]), *taps[1].found_T_E),
        strict=True,
    ):
        assert _close(found, wanted)
    assert {name: tensor.shape for name, tensor in hf_tensors(theirs)} == {n: t.shape for n, t in hf_tensors(ours)}


def test_files_of_transformers_own_layout_are_read_and_kept(tmp_path: Path) -> None:
    theirs = tiny_family(tmp_path, "mixtral")
    theirs.save_pretrained(tmp_path, save_original_format=False)
    names = set(load_file(tmp_path / WEIGHTS))
    ours = _loaded(tmp_path)
    assert {name for name, _ in hf_tensors(ours)} == names
    assert any(name.endswith("experts.gate_up_proj") for name in names)
    assert _close(ours.logits(_states(ours)).log_softmax(-1), _alone(theirs))


@pytest.mark.parametrize(
    "family", ["gemma2", "qwen3_next", "gpt_oss", pytest.param("falcon_h1", marks=pytest.mark.slow)]
)
def test_bf16_computes_about_the_same(family: str, tmp_path: Path) -> None:
    theirs = tiny_family(tmp_path, family)
    ours = load_policy(tmp_path, "transformers", torch.bfloat16)
    ours.packing = "padded" if ours.try_out(narrow=True) else "packed"
    assert ours.packing == FAMILIES[family].packing
    with torch.autocast("cpu", torch.bfloat16):
        hidden = _states(ours)
    assert hidden.dtype == torch.float32, "nothing rounds the residual stream"
    logp = ours.logits(hidden.bfloat16()).float().log_softmax(-1)
    assert float((logp - _alone(theirs)).detach().abs().mean()) < 0.2


def test_the_text_tower_of_a_model_that_sees_is_trained_alone(tmp_path: Path) -> None:
    text = {name: value for name, value in SHAPE.items() if value is not None} | FAMILIES["gemma3_text"].config
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    vision = sizes | {"image_size": 28, "patch_size": 14}
    config = Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=4, image_token_index=47)
    theirs = Gemma3ForConditionalGeneration(config).eval()
    theirs.save_pretrained(tmp_path)
    ours = _loaded(tmp_path)
    logp = ours.logits(_states(ours)).log_softmax(-1)
    assert _close(
        logp, torch.cat([theirs(input_ids=torch.from_numpy(each)[None]).logits[0] for each in SAMPLES]).log_softmax(-1)
    )
    logp.sum().backward()
    learned = {name for name, parameter in ours.named_parameters() if parameter.grad is not None}
    assert learned == {name for name, parameter in ours.named_parameters() if parameter.requires_grad}
    assert all("language_model" in name for name in learned)
    assert {name for name, _ in hf_tensors(ours)} == set(load_file(tmp_path / WEIGHTS))


def test_adapters_change_linear_layers_and_merge_into_their_weights(tmp_path: Path) -> None:
    tiny_family(tmp_path, "gemma3_text")
    ours = _loaded(tmp_path)
    lora.attach(ours, Lora(rank=2, targets=("q_proj", "down_proj")), seed=0)
    before = _states(ours)
    for _, _, adapter in ours.adapted():
        adapter.B.data.normal_()
    after = _states(ours)
    assert not torch.allclose(before, after, atol=1e-2)
    assert {name for name, p in ours.named_parameters() if p.requires_grad} == {
        f"{own}.{kind}" for _, own, _ in ours.adapted() for kind in "AB"
    }
    merged = _loaded(tmp_path)
    for own, parts in ours.parts():
        merged.weight(own).data.copy_(lora.merged(ours, own, parts, lambda whole: whole))
    assert _close(_states(merged), after)


def test_what_has_no_such_layer_is_not_adapted(tmp_path: Path) -> None:
    tiny_family(tmp_path, "phi3")
    with pytest.raises(ConfigError, match=r"targets names q_proj, k_proj.* Phi3.* some of .*gate_up_proj.*qkv_proj"):
        lora.attach(_loaded(tmp_path), Lora(rank=2), seed=0)


def test_a_model_without_a_head_for_a_critic(tmp_path: Path) -> None:
    tiny_family(tmp_path, "mistral")
    body = load_policy(tmp_path, "transformers", torch.float32, output=False)
    assert "lm_head.weight" not in dict(hf_tensors(body))
    assert _close(_states(body), _states(_loaded(tmp_path)))


def test_logits_that_our_head_does_not_make_are_refused(tmp_path: Path) -> None:
    tiny_family(tmp_path, "granite")
    model = load_policy(tmp_path, "transformers", torch.float32)
    model.logit_shape = model.logit_shape._replace(scale=1.0)
    with pytest.raises(CheckpointError, match="GraniteForCausalLM does more between hidden states and logits"):
        model.try_out(narrow=False)


def test_files_that_do_not_fit_are_named(tmp_path: Path) -> None:
    tiny_family(tmp_path, "mistral")
    tensors = load_file(tmp_path / WEIGHTS)
    tensors["model.extra.weight"] = tensors.pop("model.norm.weight")
    save_file(tensors, tmp_path / WEIGHTS)
    with pytest.raises(CheckpointError, match=r"missing model\.norm\.weight, unexpected model\.extra\.weight"):
        load_policy(tmp_path, "transformers", torch.float32)


def test_what_neither_knows_is_refused_in_one_sentence(tmp_path: Path) -> None:
    tiny_family(tmp_path, "mistral")
    raw = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(
        json.dumps(raw | {"model_type": "ours_alone", "auto_map": {"AutoModel": "x"}})
    )
    with pytest.raises(CheckpointError, match=r"model_type='ours_alone' is no causal language model .* never run"):
        empty_policy(tmp_path, "auto", torch.float32)
    with pytest.raises(CheckpointError, match=r"model_type='ours_alone' is not supported; use one of llama"):
        empty_policy(tmp_path, "native", torch.float32)


def test_the_list_of_classes_is_that_of_transformers() -> None:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    assert causal_language_models() == dict(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
