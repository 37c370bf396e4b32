"""The bar: three nodes by `ray up`, a run with a token, a node lost on the way, nothing else lost, `ray down`.

make test-cluster
"""

import json
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from asyncrl.errors import StoppedError
from tests.cluster import nodes

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(1200)]
REPOSITORY = Path(__file__).parents[2]
NAMESPACES = ["unshare", "--mount", "--pid", "--net", "--fork", "--mount-proc", "--kill-child"]
HEAD, KEPT, LOST = "127.0.0.1", "127.0.0.2", "127.0.0.3"


@pytest.fixture(scope="module")
def facts() -> Iterator[dict[str, Any]]:
    if why := nodes.missing():
        pytest.skip(why)
    directory = Path(tempfile.mkdtemp(prefix="cluster-"))
    try:
        words = [*NAMESPACES, sys.executable, "-m", "tests.cluster.inside", str(directory)]
        done = subprocess.run(words, cwd=REPOSITORY, capture_output=True, text=True, timeout=1100, check=False)
        log = directory / "submit.log"
        assert done.returncode == 0, done.stderr[-4000:] + (log.read_text()[-4000:] if log.exists() else "")
        found = json.loads((directory / "facts.json").read_text())
        print(found["seconds"])
        yield found
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def test_the_run_completes_although_a_node_is_lost(facts: dict[str, Any]) -> None:
    assert facts["engines"] == {HEAD: 0, KEPT: 1, LOST: 1}
    assert facts["lost"], "the engine on the node that was killed should have been missed"
    assert facts["first"] == 0, facts["output"][-4000:]


def test_the_node_that_returns_is_taken_in_again(facts: dict[str, Any]) -> None:
    """A submission begins when all nodes are there."""
    assert facts["second"] == 0, facts["output"][-4000:]


def test_nothing_acknowledged_is_lost(facts: dict[str, Any]) -> None:
    assert facts["sound"] == {"first": True, "second": True, "third": True}


def test_a_node_that_is_drained_ends_the_run_with_a_checkpoint(facts: dict[str, Any]) -> None:
    assert facts["drain"] == ""
    assert facts["third"] == StoppedError.exit_code, facts["output"][-4000:]
    said = facts["output"][-4000:]
    # Who was too busy to say where it is, is not named.
    assert re.search(r"the cluster drains node \w+ \(driver(, \S+)*\): the run writes", said), said


def test_nobody_joins_without_the_token(facts: dict[str, Any]) -> None:
    nowhere, alone = facts["alone"]
    assert nowhere == 2
    assert "cluster=auto: no Ray answers there (Could not find any running Ray instance" in alone
    (none, without), (wrong, another) = facts["strangers"]
    assert (none, wrong) == (2, 2)
    assert "there is no token for it here" in without
    assert "it wants its own token" in another
    assert facts["mounted"] == {HEAD: "0o600", KEPT: "0o600", LOST: "0o600"}


def test_ray_down_leaves_nothing_running(facts: dict[str, Any]) -> None:
    assert facts["left"] == {HEAD: 0, KEPT: 0, LOST: 0}
