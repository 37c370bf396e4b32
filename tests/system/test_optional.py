"""What is said when an optional package is not there."""

import pickle
from pathlib import Path

import pytest

from asyncrl.errors import MissingDependencyError
from asyncrl.system.optional import require


def test_an_installed_module_is_returned() -> None:
    assert require("json.decoder", extra="x").JSONDecoder


def test_a_missing_one_names_its_command() -> None:
    with pytest.raises(MissingDependencyError) as caught:
        require("no_such_package.part", extra="things")
    assert "`pip install 'asyncrl[things]'`" in str(caught.value)
    assert isinstance(caught.value, ImportError)
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


def test_a_broken_one_shows_its_own_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "breaks_inside.py").write_text("import no_such_package\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError) as caught:
        require("breaks_inside", extra="x")
    assert caught.value.name == "no_such_package"
    assert not isinstance(caught.value, MissingDependencyError)
