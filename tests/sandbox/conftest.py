"""A sandbox that works, and one that contains nothing, to show that the attacks would succeed."""

import pytest

from asyncrl.sandbox.sandbox import Sandbox
from tests.support import needs


@pytest.fixture(scope="session")
def sandbox() -> Sandbox:
    if why := needs.bubblewrap():
        pytest.skip(why)
    return Sandbox()


@pytest.fixture(scope="session")
def uncontained() -> Sandbox:
    return Sandbox(allow_unsafe=True)
