"""The benchmark of speculation runs as it stands, at a size that a CPU can bear."""

import json
from pathlib import Path

import pytest

from benchmarks import speculation
from tests.support.real_vllm import needs_vllm


@needs_vllm
@pytest.mark.nightly
@pytest.mark.timeout(300)
def test_the_benchmark_measures_plain_decoding_fixed_depths_and_the_bandit(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "figures.json"
    small = ["--shape", "tiny", "--tokens", "2", "--batches", "1", "4", "--size", "3", "--eager", "--memory", "0.2"]
    small += ["--temperature", "0"]
    speculation.main([*small, "--seconds", "1", "--learn", "1", "--out", str(out)])
    found = json.loads(out.read_text())
    assert [(each["batch"], each["name"]) for each in found] == [
        (batch, name) for names in (["plain"], ["depth 0", "depth 2", "bandit"]) for batch in (1, 4) for name in names
    ]
    assert all(each["tokens_per_second"] > 0 and each["running"] > 0 for each in found)
    drafting = [each for each in found if each["name"] == "depth 2"]
    assert all(len(each["by_position"]) == 2 and 1 <= each["accepted"] <= 3 for each in drafting)
    assert all(each["by_position"] == [] for each in found if each["name"] in ("plain", "depth 0"))
    assert capsys.readouterr().out.count("bandit") == 2 * 3, "for each batch a row of the table and two bars"
