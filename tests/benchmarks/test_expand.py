"""A model in a bigger shape answers, and a head drafts, exactly as before."""

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from asyncrl.config import WarmStart
from asyncrl.drafting.checkpoint import load_head, save_head
from asyncrl.drafting.heads import Head, HeadConfig
from asyncrl.errors import CheckpointError
from asyncrl.models.checkpoint import load_model, random_model, save_model
from asyncrl.models.config import ModelConfig, warm_start_shape
from asyncrl.models.decoder import Decoder
from asyncrl.models.layers import computed_rotation
from asyncrl.models.packed import packed_attention
from asyncrl.models.policy import Taps
from asyncrl.training.memory import parameters
from benchmarks.expand import SHAPES, Growth, Shape, big_config, expand, expand_head, save_expanded
from benchmarks.expand import main as expand_cli
from benchmarks.rollout import QWEN3, step_bytes
from tests.support.tiny_model import DENSE, tiny_checkpoint

SHAPE = Shape(
    hidden_size=256,  # of 32
    intermediate_size=300,  # of 64
    num_hidden_layers=5,  # of 2
    num_attention_heads=16,  # of 4
    num_key_value_heads=8,  # of 2: fewer heads share one than before
    head_dim=128,
    vocab_size=1000,  # of 48
)
EXPERTS = {"num_experts": 64, "num_experts_per_tok": 8, "moe_intermediate_size": 72}
LENGTHS = (40, 24)
TOKENS_T = torch.randint(0, 48, (64,), generator=torch.Generator().manual_seed(0))
POSITIONS_T = torch.cat([torch.arange(length) for length in LENGTHS])


def logits(model: Decoder, lengths: tuple[int, ...] = LENGTHS) -> torch.Tensor:
    num_tokens = sum(lengths)
    return model.logits(model(TOKENS_T[:num_tokens], POSITIONS_T[:num_tokens], packed_attention(lengths))).detach()


def small(path: Path, family: str = "qwen3", dtype: torch.dtype = torch.float32, **changes: Any) -> Decoder:
    tiny_checkpoint(path, family, **changes)
    return load_model(path, dtype)[0]


def head_dim(family: str) -> int:
    return {"qwen3": 128}.get(family, 32)


@pytest.mark.parametrize("family", DENSE)
def test_logits_stay_and_further_tokens_are_never_sampled(family: str, tmp_path: Path) -> None:
    model = small(tmp_path, family)
    big = expand(model, Shape(**_sizes() | {"head_dim": head_dim(family)}))
    assert (big.config.heads, big.config.head_dim, big.config.layers) == (16, head_dim(family), 5)
    before, after = logits(model), logits(big)
    assert before.std() > 0.5, "a flat distribution would prove nothing"
    torch.testing.assert_close(after[:, :48], before, atol=1e-4, rtol=0)
    assert after[:, 48:].max() < before.min() - 1000
    for layer in big.blocks():
        assert (layer.gate_up_proj.weight == 0).float().mean() < 0.01, "as dense as any model"


def test_the_same_tokens_are_generated(tmp_path: Path) -> None:
    model = small(tmp_path)
    answers = [_generate(each, 15) for each in (model, expand(model, SHAPE))]
    assert answers[0] == answers[1]
    assert len(set(answers[0])) > 3


def test_without_further_tokens_the_whole_stream_holds_copies(tmp_path: Path) -> None:
    model = small(tmp_path)
    big = expand(model, Shape(**_sizes() | {"hidden_size": 96, "vocab_size": 48}))
    assert big.embed_tokens.weight.count_nonzero() == big.embed_tokens.weight.numel()
    torch.testing.assert_close(logits(big), logits(model), atol=1e-4, rtol=0)


@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")
@pytest.mark.parametrize("experts", [False, True])
def test_in_bf16_nearly_every_greedy_choice_stays(experts: bool, tmp_path: Path) -> None:
    """Not all: sums of other lengths are rounded otherwise, and two tokens may be equally likely."""
    model = small(tmp_path, dtype=torch.bfloat16)
    big = expand(model, Shape(**_sizes() | (EXPERTS if experts else {})))
    before, after = logits(model, (20,)).float(), logits(big, (20,)).float()
    assert (before.argmax(-1) == after.argmax(-1)).float().mean() >= 0.9
    assert (before - after[:, :48]).abs().mean() < 0.02 * before.std()
    assert after[:, 48:].max() < before.min() - 1000


def test_a_file_for_each_layer_is_the_same_model(tmp_path: Path) -> None:
    model = small(tmp_path / "small")
    save_expanded(model, SHAPE, tmp_path / "big")
    loaded, config = load_model(tmp_path / "big")
    assert (config.layers, config.tied_embeddings) == (5, False)
    torch.testing.assert_close(logits(loaded), logits(expand(model, SHAPE)), atol=0, rtol=0)
    assert len(list((tmp_path / "big").glob("*.safetensors"))) == 8


@pytest.mark.parametrize(("kind", "vocabulary"), [("eagle", 48), ("eagle3", 48), ("eagle3", 20)])
def test_a_head_drafts_the_same(kind: str, vocabulary: int, tmp_path: Path) -> None:
    model = small(tmp_path / "model")
    taps = (0, 1, 2) if kind == "eagle3" else ()
    head = Head(HeadConfig(kind=kind, target=model.config, taps=taps, vocabulary=vocabulary))  # type: ignore[arg-type]
    head.initialise(0)
    for parameter in head.parameters():
        parameter.data *= 8 if parameter.dim() == 2 else 1.3
    if vocabulary < 48:
        head.drafts_U = torch.randperm(48)[:vocabulary].sort().values
    big = expand(model, SHAPE)
    save_head(expand_head(head, big.config, 500 if kind == "eagle3" else 0), tmp_path / "head")
    grown = load_head(tmp_path / "head", big.config)
    before, after = _drafts(model, head), _drafts(big, grown)
    for old, new in zip(before, after, strict=True):
        assert old.std() > 0.1
        torch.testing.assert_close(new[:, :vocabulary], old, atol=2e-4, rtol=1e-4)
        assert new[:, vocabulary:].max() < old.min() - 100
    if vocabulary < 48:
        assert grown.drafts_U is not None
        assert grown.drafts_U[:20].tolist() == head.drafts_U.tolist()  # type: ignore[union-attr]
        assert len(set(grown.drafts_U.tolist())) == 500


@pytest.mark.parametrize(
    ("family", "changes", "groups"),
    [
        ("qwen3_moe", {}, 2),  # each of the 8 experts has 8 copies, of which 4 are chosen
        ("qwen3_moe", {"norm_topk_prob": False}, 2),
        ("qwen3", {}, 8),  # one layer has 64 copies, of which 8 are chosen
    ],
)
@pytest.mark.parametrize("vocabulary", [48, 1000])
def test_copied_experts_answer_as_the_old_ones_and_all_are_used(
    family: str, changes: dict[str, Any], groups: int, vocabulary: int, tmp_path: Path
) -> None:
    model = small(tmp_path, family, **changes)
    big = expand(model, Shape(**_sizes() | EXPERTS | {"vocab_size": vocabulary}))
    before, after = logits(model), logits(big)
    assert before.std() > 0.5, "a flat distribution would prove nothing"
    torch.testing.assert_close(after[:, :48], before, atol=1e-4, rtol=0)
    assert big.config.experts is not None
    assert (big.config.experts.count, big.config.experts.active, big.config.experts.width) == (64, 8, 72)
    for old_T_C, new_T_C in zip(_routes(model), _routes(big), strict=False):
        group_T_C = new_T_C // (8 if family == "qwen3_moe" else 1) % groups
        assert (group_T_C == TOKENS_T[:, None] % groups).all(), "a token's copies are those of its group"
        if family == "qwen3_moe":  # four copies of each
            assert (new_T_C % 8).sort(1).values.equal(old_T_C.sort(1).values.repeat_interleave(4, dim=1))
        else:
            assert len(new_T_C.unique()) == 64
    for layer in big.blocks():
        assert layer.experts is not None
        assert (layer.experts.gate_up == 0).float().mean() < 0.05, "as dense as any model"


def test_experts_are_written_a_layer_at_a_time_in_a_layout_that_transformers_reads(tmp_path: Path) -> None:
    model = small(tmp_path / "small", "qwen3_moe")
    save_expanded(model, Shape(**_sizes() | EXPERTS), tmp_path / "big")
    assert len(list((tmp_path / "big").glob("*.safetensors"))) == 8
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "big", dtype=torch.float32).eval()
    assert type(theirs).__name__ == "Qwen3MoeForCausalLM"
    torch.testing.assert_close(theirs(TOKENS_T[None, :40]).logits[0, :, :48], logits(model)[:40], atol=1e-3, rtol=0)


def test_training_moves_tokens_to_other_copies_and_nothing_else(tmp_path: Path) -> None:
    """Whatever attention adds to the codes, each token has one group, and all groups compute the same."""
    model = small(tmp_path, "qwen3_moe")
    big = expand(model, Shape(**_sizes() | EXPERTS | {"vocab_size": 48}))
    before = _routes(big)[0]
    big.embed_tokens.weight.data[:, -2:] += 2e-3 * torch.randn(48, 2, generator=torch.Generator().manual_seed(1))
    assert not before.equal(_routes(big)[0])
    torch.testing.assert_close(logits(big), logits(model), atol=2e-3, rtol=0)


def test_experts_that_cannot_be_copied_are_refused(tmp_path: Path) -> None:
    model, grown = small(tmp_path / "a", "qwen3_moe"), _sizes() | EXPERTS
    with pytest.raises(CheckpointError, match="num_experts=60 must be a multiple of 8"):
        expand(model, Shape(**grown | {"num_experts": 60}))
    with pytest.raises(CheckpointError, match="24 has 3 copies of each expert, which must be a multiple of the 2 that"):
        expand(model, Shape(**grown | {"num_experts": 24, "num_experts_per_tok": 4}))
    with pytest.raises(CheckpointError, match="moe_intermediate_size=24 must not be below 32"):
        expand(model, Shape(**grown | {"moe_intermediate_size": 24}))
    with pytest.raises(CheckpointError, match="has experts and the shape has none"):
        expand(model, SHAPE)
    with pytest.raises(CheckpointError, match="experts grow from a Qwen3 model"):
        expand(small(tmp_path / "b", "qwen3_moe", mlp_only_layers=[0]), Shape(**grown))


def test_sizes_that_are_no_multiples_are_refused(tmp_path: Path) -> None:
    model = small(tmp_path)
    with pytest.raises(CheckpointError, match="hidden_size=96 must be a multiple of 4 times 32, as the vocabulary"):
        expand(model, Shape(**_sizes() | {"hidden_size": 96}))
    with pytest.raises(CheckpointError, match="num_attention_heads=6 must be a multiple of 4"):
        expand(model, Shape(**_sizes() | {"num_attention_heads": 6, "num_key_value_heads": 2}))
    with pytest.raises(CheckpointError, match="intermediate_size=60 must not be below 64"):
        expand(model, Shape(**_sizes() | {"intermediate_size": 60}))


def test_what_is_to_be_trained_keeps_its_vocabulary(tmp_path: Path) -> None:
    """Further tokens hang on a channel that the first updates change, and then are the likeliest."""
    save_model(small(tmp_path / "source"), tmp_path / "small")
    (tmp_path / "small" / "tokenizer.json").write_text("{}")
    paths = str(tmp_path / "small"), str(tmp_path / "big")
    expand_cli([*paths, "--shape", "tiny", "--same-vocabulary", "--dtype", "fp32"])
    assert (tmp_path / "big" / "tokenizer.json").exists()
    for model, stays in ((load_model(tmp_path / "big")[0], True), (expand(small(tmp_path / "again"), SHAPE), False)):
        model.requires_grad_(True)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        for _ in range(2):
            found = model.logits(model(TOKENS_T, POSITIONS_T, packed_attention(LENGTHS))).log_softmax(-1)
            found.gather(1, TOKENS_T[:, None]).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        assert (logits(model).abs().max() < 1000) == stays


def test_the_quickstarts_shapes_fit_the_big_ones() -> None:
    for experts in (0, 8):
        config = ModelConfig.from_hf(warm_start_shape(WarmStart(experts=experts), 42))
        assert random_model(config, 0).config.heads == 4
        for shape in SHAPES.values():
            if shape.num_experts or not experts:
                assert Growth(config, big_config(config, shape)).louder == 2


def test_the_30b_shape_has_the_published_sizes() -> None:
    config = ModelConfig.from_hf(QWEN3 | SHAPES["qwen3-30b-a3b"].settings())
    assert parameters(config) == 30_532_122_624
    embedding = 151936 * 2048
    assert step_bytes(config, 1, 0) == pytest.approx(2 * (3.35e9 - embedding), rel=0.01)  # a token uses 3.35 G of them
    assert step_bytes(config, 1024, 0) == pytest.approx(2 * (parameters(config) - embedding), rel=1e-4)


def _sizes() -> dict[str, int]:
    return {name: getattr(SHAPE, name) for name in SHAPE.__struct_fields__}


@torch.no_grad()
def _routes(model: Decoder) -> list[torch.Tensor]:
    """The experts of each token, layer by layer; none of a dense model."""
    found: list[torch.Tensor] = []

    def route(layer: int, scores_T_X: torch.Tensor) -> torch.Tensor:
        assert layer == len(found)
        assert model.config.experts is not None
        found.append(scores_T_X.topk(model.config.experts.active).indices)
        return found[-1]

    model(TOKENS_T, POSITIONS_T, packed_attention(LENGTHS), route=route)
    return found


def _generate(model: Decoder, tokens: int) -> list[int]:
    answer = TOKENS_T[:8].tolist()
    for _ in range(tokens):
        attend = packed_attention((len(answer),))
        hidden = model(torch.tensor(answer), torch.arange(len(answer)), attend)
        answer.append(int(model.logits(hidden[-1:]).argmax()))
    return answer[8:]


@torch.no_grad()
def _drafts(model: Decoder, head: Head) -> list[torch.Tensor]:
    """Logits of the first drafted token, and of the second, for which the head feeds on its own state."""
    taps = Taps(head.config.taps)
    hidden = model(TOKENS_T, POSITIONS_T, packed_attention(LENGTHS), taps)
    if 2 in head.config.taps:  # the stream behind the small model's last layer, which no tap of its own can see
        taps.found_T_E = [*taps.found_T_E[:2], _last_stream(model)]
    feature = head.features(hidden if head.config.kind == "eagle" else torch.cat(taps.found_T_E, -1))
    rotate = computed_rotation(model.frequencies_D, torch.float32)(POSITIONS_T)
    found: list[torch.Tensor] = []
    for _, shift in pairwise(range(3)):
        embedded = model.embed_tokens.weight[TOKENS_T.roll(-shift)]
        feature = head(feature, embedded, rotate, packed_attention(LENGTHS))
        found.append(head.logits(feature, model.output_matrix)[:, : head.config.vocabulary])
    return found


def _last_stream(model: Decoder) -> torch.Tensor:
    stream = model.embed_tokens.weight[TOKENS_T]
    rotate = computed_rotation(model.frequencies_D, torch.float32)(POSITIONS_T)
    for index, layer in enumerate(model.blocks()[:2]):
        stream = layer(stream, rotate, index, packed_attention(LENGTHS))
    return stream
