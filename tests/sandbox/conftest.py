"""A sandbox that works, and one that contains nothing, to show that the attacks would succeed."""

import pytest

from asyncrl.errors import SandboxError
from asyncrl.sandbox.sandbox import Sandbox


@pytest.fixture(scope="session")
def sandbox() -> Sandbox:
    try:
        return Sandbox()
    except SandboxError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def uncontained() -> Sandbox:
    return Sandbox(allow_unsafe=True)
