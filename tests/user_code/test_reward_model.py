"""A reward model gives what transformers gives, in a worker of the pool, and what is none is refused with a reason."""

import asyncio
from collections.abc import Callable, Generator
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForSequenceClassification

from asyncrl.config import Reward
from asyncrl.config.user_code import MODEL_REWARD
from asyncrl.errors import ConfigError
from asyncrl.rewards.model import load, reward
from asyncrl.user_code.pool import RewardPool
from asyncrl.user_code.protocol import REWARD_MODEL, RewardInput, RewardResult
from pipelines.compose import compose
from tests.support.tiny_chat import CHATML, save_chat_tokenizer

LONGEST = 96


def classifier(directory: Path, *, labels: int = 1, template: str | None = CHATML) -> Path:
    directory.mkdir()
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=268,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=LONGEST,
    )
    config.num_labels = labels
    LlamaForSequenceClassification(config).save_pretrained(directory)
    save_chat_tokenizer(directory, template)
    return directory


def rewards(settings: Reward, *inputs: RewardInput) -> list[RewardResult]:
    async def run() -> list[RewardResult]:
        pool = RewardPool(settings)
        try:
            return await pool.score(inputs)
        finally:
            await pool.close()

    return asyncio.run(run())


def expected(directory: Path, tokens: list[int]) -> float:
    model = LlamaForSequenceClassification.from_pretrained(directory).eval()
    with torch.no_grad():
        return model(torch.tensor([tokens[-LONGEST:]])).logits.item()


def test_its_number_is_that_of_transformers(tmp_path: Path) -> None:
    directory = classifier(tmp_path / "chat")
    settings = Reward(function=MODEL_REWARD, model=str(directory), timeout_s=60)
    found = rewards(
        settings,
        RewardInput("1+1=", "2", "2"),
        RewardInput("1+1=", "=2", "2", ("?", "ask", "=2")),
        RewardInput("long " * 40, "2", "2"),
    )
    tokenizer = AutoTokenizer.from_pretrained(directory)

    def chat(*turns: str) -> list[int]:
        said = [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(turns)]
        return tokenizer.apply_chat_template(said, return_dict=False)

    assert found == [
        pytest.approx(expected(directory, chat("1+1=", "2")), abs=1e-6),
        pytest.approx(expected(directory, chat("1+1=", "?", "ask", "=2")), abs=1e-6),
        pytest.approx(expected(directory, chat("long " * 40, "2")), abs=1e-6),
    ]
    assert len(set(found)) == 3


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> Generator[Callable[[Path], None]]:
    """In this process, as a worker is told."""
    yield lambda directory: monkeypatch.setenv(REWARD_MODEL, f"cpu|{directory}")
    load.cache_clear()


def test_without_a_chat_template_it_reads_one_text(tmp_path: Path, here: Callable[[Path], None]) -> None:
    directory = classifier(tmp_path / "plain", template=None)
    here(directory)
    tokens = AutoTokenizer.from_pretrained(directory)("abcd")["input_ids"]
    assert reward("ab", "cd", "") == pytest.approx(expected(directory, tokens), abs=1e-6)


@pytest.mark.parametrize(
    ("labels", "said"),
    [(3, r"three is no reward model: its head gives 3 numbers, not one"), (0, r"three cannot be loaded as a reward")],
)
def test_what_is_no_reward_model_is_refused(
    labels: int, said: str, tmp_path: Path, here: Callable[[Path], None]
) -> None:
    here(classifier(tmp_path / "three", labels=labels) if labels else tmp_path / "three")
    with pytest.raises(ConfigError, match=r"reward\.model=.*" + said):
        load()


def test_the_two_settings_go_together() -> None:
    with pytest.raises(ConfigError, match=r"reward\.function=asyncrl\.rewards\.model:reward needs reward\.model"):
        compose([f"reward.function={MODEL_REWARD}"])
    with pytest.raises(
        ConfigError, match=r"reward\.model=m is for reward\.function=asyncrl\.rewards\.model:reward alone"
    ):
        compose(["reward.model=m"])
