"""The examples of other people's agents, trained for a few steps."""

from pathlib import Path

import pytest

from tests.support.agent_examples import run_example


@pytest.mark.slow
@pytest.mark.parametrize("name", ["openai_agents.py", pytest.param("own_tools.py", marks=pytest.mark.nightly)])
def test_an_example_trains(name: str, tmp_path: Path) -> None:
    run_example(name, tmp_path)
