"""Prometheus reads what a run exports, and the dashboard asks for nothing else."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from actors.runtime import prometheus
from asyncrl.config.trackers import EXPORTS, is_installed
from tests.support import needs

REPOSITORY = Path(__file__).parents[2]
DASHBOARD = REPOSITORY / "configs" / "grafana" / "asyncrl.json"
PAGE = {
    *(f"ray_asyncrl_{name}" for name in prometheus.GAUGES),
    *(f"ray_asyncrl_{name}_total" for name in prometheus.COUNTERS),
    *(f"ray_asyncrl_held_out_{name}" for name in prometheus.SCORES),
}
"""What stands on the page that Prometheus reads."""
TOPICS = ("throughput", "waits", "staleness", "reward", "effective sample size", "sync", "buffer", "engines")


@pytest.mark.skipif(not all(map(is_installed, EXPORTS)), reason=needs.package("prometheus"))
def test_ray_exports_every_figure_with_its_value() -> None:
    """By a real Ray in processes of its own, read as Prometheus would."""
    command = [sys.executable, "-m", "tests.actors.ray_prometheus"]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    told, found = answer["told"], answer["found"]
    assert found.keys() == PAGE
    assert {name: found[f"ray_asyncrl_{name}"] for name in prometheus.GAUGES} == {n: told[n] for n in prometheus.GAUGES}
    assert found["ray_asyncrl_generated_tokens_total"] == told["generated_tokens"]
    assert (found["ray_asyncrl_held_out_sampled"], found["ray_asyncrl_held_out_greedy"]) == (0.25, 0.75)


def test_the_dashboard_asks_for_what_is_exported() -> None:
    dashboard = json.loads(DASHBOARD.read_text())
    queries = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    queries += [variable["definition"] for variable in dashboard["templating"]["list"] if "definition" in variable]
    named = {name for query in queries for name in re.findall(r"ray_asyncrl_\w+", query)}
    assert named == PAGE  # and nothing is exported that nobody looks at


def test_the_dashboard_has_what_people_look_for() -> None:
    dashboard = json.loads(DASHBOARD.read_text())
    titles = " / ".join(panel["title"].lower() for panel in dashboard["panels"])
    assert [topic for topic in TOPICS if topic not in titles] == []
    places = [(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in dashboard["panels"]]
    assert len(set(places)) == len(places)
    ids = [panel["id"] for panel in dashboard["panels"]]
    assert len(set(ids)) == len(ids)
