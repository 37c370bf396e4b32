"""The decoder computes what transformers computes, and checkpoints go both ways unchanged."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from asyncrl.errors import CheckpointError
from asyncrl.models import checkpoint
from asyncrl.models.checkpoint import load_model, random_model, save_model
from asyncrl.models.config import ModelConfig
from asyncrl.models.decoder import Decoder
from asyncrl.models.head import bf16_logits
from asyncrl.models.names import hf_tensors
from asyncrl.models.packed import packed_attention
from tests.support.tiny_model import FAMILIES, LLAMA3_ROPE, tiny_checkpoint, tiny_config

LENGTHS = (5, 33, 1, 70, 12, 8)


def packed(lengths: tuple[int, ...], seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    tokens_T = torch.randint(0, 48, (sum(lengths),), generator=torch.Generator().manual_seed(seed))
    return tokens_T, torch.cat([torch.arange(length) for length in lengths])


def packed_logits(model: Decoder, tokens_T: torch.Tensor, positions_T: torch.Tensor) -> torch.Tensor:
    return model.logits(model(tokens_T, positions_T, packed_attention(LENGTHS)))


@pytest.mark.parametrize("family", FAMILIES)
def test_packed_logits_and_gradients_equal_transformers(family: str, tmp_path: Path) -> None:
    reference = tiny_checkpoint(tmp_path, family)
    model, _ = load_model(tmp_path)
    tokens_T, positions_T = packed(LENGTHS)
    ours = packed_logits(model, tokens_T, positions_T)
    theirs = torch.cat([reference(sample.unsqueeze(0)).logits[0] for sample in tokens_T.split(LENGTHS)])
    torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=0)
    assert theirs.std() > 0.5, "logits of a flat distribution would prove nothing"

    ours.logsumexp(-1).sum().backward()
    theirs.logsumexp(-1).sum().backward()
    embedding = reference.get_input_embeddings().weight
    torch.testing.assert_close(model.embed_tokens.weight.grad, embedding.grad, atol=1e-3, rtol=1e-4)


@pytest.mark.parametrize(
    "changes",
    [
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 5e4, "factor": 2.5}},
        {"rope_parameters": dict(LLAMA3_ROPE)},
        {"tie_word_embeddings": True},
        {"num_key_value_heads": 4},
        {"num_key_value_heads": 1},
        {"attention_bias": True},
    ],
    ids=str,
)
def test_variants_equal_transformers(changes: dict[str, Any], tmp_path: Path) -> None:
    reference = tiny_checkpoint(tmp_path, "qwen3", **changes)
    model, _ = load_model(tmp_path)
    tokens_T, positions_T = packed(LENGTHS)
    theirs = torch.cat([reference(sample.unsqueeze(0)).logits[0] for sample in tokens_T.split(LENGTHS)])
    torch.testing.assert_close(packed_logits(model, tokens_T, positions_T), theirs, atol=1e-4, rtol=0)


def test_old_rope_layout_means_the_same(tmp_path: Path) -> None:
    tiny_checkpoint(tmp_path, "llama")
    raw = json.loads((tmp_path / "config.json").read_text())
    new = ModelConfig.from_hf(raw)
    scaling = raw.pop("rope_parameters")
    raw["rope_theta"] = scaling.pop("rope_theta")
    raw["rope_scaling"] = scaling
    assert ModelConfig.from_hf(raw).rope == new.rope
    raw["rope_scaling"] = {"type": "linear", "factor": 2.0}
    assert ModelConfig.from_hf(raw).rope.type == "linear"


def test_no_attention_across_samples(tmp_path: Path) -> None:
    tiny_checkpoint(tmp_path)
    model, _ = load_model(tmp_path)
    tokens_T, positions_T = packed(LENGTHS)
    before = packed_logits(model, tokens_T, positions_T).split(LENGTHS)
    for changed in range(len(LENGTHS)):
        parts = list(tokens_T.split(LENGTHS))
        parts[changed] = (parts[changed] + 7) % 48
        after = packed_logits(model, torch.cat(parts), positions_T).split(LENGTHS)
        same = [torch.equal(x, y) for x, y in zip(before, after, strict=True)]
        assert same == [index != changed for index in range(len(LENGTHS))]


def test_padding_has_no_gradient(tmp_path: Path) -> None:
    tiny_checkpoint(tmp_path)
    model, _ = load_model(tmp_path)
    tokens_T, positions_T = packed(LENGTHS)
    packed_logits(model, tokens_T, positions_T).square().sum().backward()
    together = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    for tokens, positions in zip(tokens_T.split(LENGTHS), positions_T.split(LENGTHS), strict=True):
        model.logits(model(tokens, positions, packed_attention([len(tokens)]))).square().sum().backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, together[name], atol=1e-2, rtol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", FAMILIES)
def test_round_trip_keeps_every_byte(family: str, dtype: torch.dtype, tmp_path: Path) -> None:
    reference = tiny_checkpoint(tmp_path / "theirs", family).to(dtype)
    reference.save_pretrained(tmp_path / "theirs")
    model, _ = load_model(tmp_path / "theirs", dtype)
    save_model(model, tmp_path / "ours")
    theirs, ours = (tmp_path / who / "model.safetensors" for who in ("theirs", "ours"))
    assert ours.read_bytes() == theirs.read_bytes()
    configs = [json.loads(file.with_name("config.json").read_text()) for file in (theirs, ours)]
    assert configs[0] == configs[1]
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "ours", dtype="auto")
    assert loaded.dtype == dtype
    for name, tensor in reference.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor), name


def test_hf_tensors_are_views_of_the_model(tmp_path: Path) -> None:
    reference = tiny_checkpoint(tmp_path)
    model, _ = load_model(tmp_path)
    named = dict(hf_tensors(model))
    assert named.keys() == reference.state_dict().keys()
    named["model.layers.1.self_attn.k_proj.weight"].fill_(7.0)
    fused = model.blocks()[1].qkv_proj.weight
    assert (fused[128:192] == 7.0).all()
    assert not (fused[:128] == 7.0).any()
    assert sum(tensor.numel() for tensor in named.values()) == sum(p.numel() for p in model.parameters())


def test_sharded_checkpoint_loads(tmp_path: Path) -> None:
    reference = tiny_checkpoint(tmp_path / "one")
    reference.save_pretrained(tmp_path / "many", max_shard_size="20KB")
    assert (tmp_path / "many" / "model.safetensors.index.json").is_file()
    whole, sharded = (dict(hf_tensors(load_model(tmp_path / name)[0])) for name in ("one", "many"))
    assert all(torch.equal(tensor, sharded[name]) for name, tensor in whole.items())


def test_a_big_model_is_written_in_shards_that_transformers_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reference = tiny_checkpoint(tmp_path / "theirs")
    monkeypatch.setattr(checkpoint, "SHARD_BYTES", 20_000)
    model, _ = load_model(tmp_path / "theirs")
    save_model(model, tmp_path / "ours")
    files = sorted(path.name for path in (tmp_path / "ours").iterdir())
    count = len(files) - 2
    assert count > 2
    shards = [f"model-{number:05}-of-{count:05}.safetensors" for number in range(1, count + 1)]
    assert files == ["config.json", *shards, "model.safetensors.index.json"]
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "ours", dtype="auto").state_dict()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in reference.state_dict().items())
    again = dict(hf_tensors(load_model(tmp_path / "ours")[0]))
    assert all(torch.equal(again[name], tensor) for name, tensor in hf_tensors(model))


def test_positions_stay_exact_in_bf16(tmp_path: Path) -> None:
    tiny_checkpoint(tmp_path)
    model, _ = load_model(tmp_path)
    frequencies = model.frequencies_D.clone()
    assert torch.equal(model.to(torch.bfloat16).frequencies_D, frequencies)


def test_random_model_is_fixed_by_its_seed() -> None:
    config = ModelConfig.from_hf(tiny_config("llama").to_dict())
    first, again, other = (dict(hf_tensors(random_model(config, seed))) for seed in (1, 1, 2))
    assert all(torch.equal(tensor, again[name]) for name, tensor in first.items())
    name = "model.layers.0.mlp.up_proj.weight"
    assert not torch.equal(first[name], other[name])
    assert first[name].std().item() == pytest.approx(0.02, rel=0.1)
    assert (first["model.norm.weight"] == 1).all()
    assert (first["model.layers.0.mlp.up_proj.bias"] == 0).all()


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"model_type": "gpt2"}, "model_type='gpt2' is not supported; use one of llama, qwen2, qwen3"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 4.0}}, "rope_type='yarn'"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu'"),
        ({"vocab_size": 0}, "vocab_size=0"),
        ({"num_key_value_heads": 3}, "num_key_value_heads=3"),
        ({"use_sliding_window": True, "sliding_window": 64, "layer_types": ["sliding_attention"]}, "sliding_window=64"),
        ({"use_sliding_window": True, "sliding_window": 64, "layer_types": None, "max_window_layers": 1}, "sliding"),
    ],
)
def test_what_we_cannot_run_is_refused(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(CheckpointError, match=says):
        ModelConfig.from_hf(tiny_config("qwen3").to_dict() | changes)


@pytest.mark.parametrize(
    "changes",
    [
        {"use_sliding_window": False, "sliding_window": 64},
        {"use_sliding_window": True, "sliding_window": 512, "layer_types": ["sliding_attention"]},
        {"use_sliding_window": True, "sliding_window": 64, "layer_types": None, "max_window_layers": 2},
    ],
)
def test_sliding_window_that_never_applies_is_accepted(changes: dict[str, Any]) -> None:
    ModelConfig.from_hf(tiny_config("qwen3").to_dict() | changes)


def test_broken_directories_are_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no config\.json"):
        load_model(tmp_path / "nowhere")
    tiny_checkpoint(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    norm = tensors.pop("model.norm.weight")
    save_file(tensors | {"model.norm.wait": norm}, file)
    with pytest.raises(CheckpointError, match=r"missing model\.norm\.weight, unexpected model\.norm\.wait"):
        load_model(tmp_path)
    save_file(tensors | {"model.norm.weight": norm[:-1].clone()}, file)
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight has shape \(31,\)"):
        load_model(tmp_path)
    file.write_bytes(file.read_bytes()[:-10])
    with pytest.raises(CheckpointError, match="cannot be read"):
        load_model(tmp_path)
    file.rename(tmp_path / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match="pickled weights"):
        load_model(tmp_path)


def test_bf16_logits_are_not_rounded_and_have_the_gradients_of_the_product() -> None:
    generator = torch.Generator().manual_seed(0)
    hidden, output = (torch.randn(shape, generator=generator).bfloat16().float() for shape in ((5, 64), (7, 64)))
    leaves = [tensor.clone().requires_grad_() for tensor in (hidden, output)]
    logits = bf16_logits(*leaves)
    assert logits.dtype == torch.float32
    torch.testing.assert_close(logits, hidden @ output.t(), rtol=0, atol=1e-5)
    weights = torch.randn(5, 7, generator=generator).bfloat16().float()
    (logits * weights).sum().backward()
    for leaf, expected in zip(leaves, (weights @ output, weights.t() @ hidden), strict=True):
        assert leaf.grad is not None
        torch.testing.assert_close(leaf.grad, expected, rtol=2**-7, atol=1e-6)
