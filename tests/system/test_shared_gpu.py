"""Several ranks of NCCL on one GPU: which versions allow it, and what the ranks' process is told."""

import os

import pytest

from asyncrl.errors import ConfigError
from asyncrl.system import shared_gpu


def test_versions() -> None:
    assert shared_gpu.numbers(23007) == (2, 30, 7)
    assert shared_gpu.numbers(22703) == (2, 27, 3)
    assert shared_gpu.problem((2, 30, 0)) == shared_gpu.problem((3, 0, 1)) == shared_gpu.problem(()) == ""
    assert "needs NCCL 2.30 or newer, and 2.29.9 is here" in shared_gpu.problem((2, 29, 9))


def test_only_a_new_version_is_told_to(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(shared_gpu.VARIABLE, "0")
    monkeypatch.setattr(shared_gpu, "loaded", lambda: (2, 27, 3))
    with pytest.raises(ConfigError, match=r"2\.27\.3 is here"):
        shared_gpu.allow()
    assert os.environ[shared_gpu.VARIABLE] == "0"
    monkeypatch.setattr(shared_gpu, "loaded", lambda: (2, 30, 0))
    shared_gpu.allow()
    assert os.environ["NCCL_MULTI_RANK_GPU_ENABLE"] == "1"
