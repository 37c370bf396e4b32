"""S1 to S3: who can reach a run, with what, and where."""

from typing import Any

import pytest

from tests.security.inside import is_loopback

pytestmark = pytest.mark.timeout(150)


def test_s1_a_client_without_the_token_is_refused_and_told_why(doors: dict[str, Any]) -> None:
    """These are our own sentences, said after one question: Ray's ConnectionError comes after 20 s."""
    answers = doors["clients"]
    assert answers["right token"] == "let in"
    assert "it wants its own token, not the one in RAY_AUTH_TOKEN" in answers["wrong token"]
    assert "there is no token for it here; copy the head node's ~/.ray/auth_token" in answers["no token"]
    assert "it wants its own token, but RAY_AUTH_MODE=disabled" in answers["anonymous"]


def test_s1_no_port_takes_a_job(doors: dict[str, Any]) -> None:
    """Without the dashboard there is no Jobs API; whatever speaks HTTP refuses, or is Ray's metrics page."""
    assert doors["posts"]
    for port, status, text in doors["posts"]:
        assert "submission_id" not in text
        assert isinstance(status, str) or status >= 400 or text.startswith("# HELP"), (port, status, text)


def test_s2_the_token_is_its_owners_alone(doors: dict[str, Any]) -> None:
    assert (doors["token"], doors["token directory"]) == ("600", "700")
    assert doors["default token"] == "600"  # Ray had left it at 644
    assert doors["left"] == []


def test_s2_the_token_is_nowhere_else(doors: dict[str, Any]) -> None:
    """Neither in arguments and environments, nor in Ray's logs, the run's directory or what it printed."""
    assert doors["processes"] > 8
    assert doors["files"] > 20
    assert doors["arguments"] == doors["environments"] == doors["written"] == []


def test_s3_nothing_listens_beyond_this_machine(doors: dict[str, Any]) -> None:
    """Ray's own sockets included: the allowlist is empty."""
    assert doors["before"] == []
    assert len(doors["listeners"]) > 4
    assert [host for host, _, _ in doors["listeners"] if not is_loopback(host)] == []
    assert doors["public"] == []


def test_s7_everything_a_run_writes_is_its_owners_alone(doors: dict[str, Any]) -> None:
    modes = doors["modes"]
    assert modes["root/run"] == "700"
    kinds = (".yaml", ".jsonl", ("open", ".seg"), "model.safetensors", "optimizer.safetensors", "tokenizer.json")
    assert all(any(path.endswith(kind) for path in modes) for kind in kinds), sorted(modes)
    assert {path: mode for path, mode in modes.items() if int(mode, 8) & 0o077} == {}
    assert doors["code"] == 10
