"""Functions by name: what another process can find, what only this one has, and what must not happen on import."""

from importlib import import_module
from pathlib import Path

import pytest

from asyncrl.errors import ConfigError
from asyncrl.system.user_functions import find_function, keep_here, load_function, name_of
from asyncrl.tasks.chains import reward


def top(prompt: str) -> str:
    return prompt


def test_names() -> None:
    assert name_of(reward) == "asyncrl.tasks.chains:reward"
    assert find_function(str(name_of(top)))("x") == "x"

    def inner() -> None: ...

    assert name_of(inner) is None
    assert name_of(lambda: None) is None
    assert name_of(Path("x").exists) is None


def test_a_module_of_its_own_is_named_by_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_rewards.py").write_text("def mine(): return 3\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert name_of(import_module("my_rewards").mine) == f"{tmp_path / 'my_rewards.py'}:mine"
    assert find_function(f"{tmp_path / 'my_rewards.py'}:mine")() == 3


def test_what_only_this_process_has() -> None:
    location = keep_here(lambda: 1, "run/reward")
    assert find_function(location)() == load_function(location, "reward.function")() == 1
    keep_here(lambda: 2, "run/reward")
    assert load_function(location, "reward.function")() == 2, "the newer one counts: a cell was run again"
    with pytest.raises(ConfigError, match=r"here:gone was written in the program or notebook.*Pipeline\(...\)\.resume"):
        find_function("here:gone")
