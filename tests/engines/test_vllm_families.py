"""Families that our own decoder does not know, in vLLM: as transformers computes them, also after updates."""

from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from tests.support.driving import Answer, ask, collect_all, publishing_files
from tests.support.families import family_checkpoint
from tests.support.parity import gathered, reference_logits
from tests.support.real_vllm import SharedVllm, needs_vllm

pytestmark = [needs_vllm, pytest.mark.slow, pytest.mark.timeout(300)]
EXACT = 1e-4
"""Largest difference of fp32 log-probabilities."""
SOME = ("gemma3",)
OTHERS = (
    "glm4_moe",
    "mistral",
    "gemma2",
    "phi3",
    "glm4",
    "olmo2",
    "granite",
    "llama_yarn",
    "cohere",
    "mixtral",
    "gpt2",
)


@pytest.mark.parametrize("family", [*SOME, *(pytest.param(name, marks=pytest.mark.nightly) for name in OTHERS)])
def test_every_version_is_exact(family: str, tmp_path: Path) -> None:
    models = [family_checkpoint(tmp_path / str(seed), family, seed=seed) for seed in (0, 1)]
    requests = [ask(str(seed), seed=seed, max_tokens=30) for seed in range(3)]

    async def answers() -> list[list[Answer]]:
        async with shared.engine() as engine:
            found = [await collect_all(engine, requests)]
            for version, seed in enumerate((1, 0), start=1):
                with publishing_files(tmp_path / str(seed)) as publish:
                    await engine.load_weights(publish(version), "keep")
                found.append(await collect_all(engine, requests))
            return found

    with closing(SharedVllm(tmp_path / "0")) as shared:
        found = shared.run(answers())
    for model, of_version in zip([*models, models[0]], found, strict=True):
        for request, answer in zip(requests, of_version, strict=True):
            expected = gathered(reference_logits(model, request, answer), answer.tokens)
            np.testing.assert_allclose(answer.logprobs, expected, rtol=0, atol=EXACT)
