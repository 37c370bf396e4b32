"""A real local Ray that exports what the tracker was told; prints the names and values that Prometheus would read."""

import json
import os
import sys
import time
import urllib.request
from pathlib import Path

os.environ |= {"RAY_metrics_report_interval_ms": "200"}  # 10 s by itself

from actors.runtime import prometheus
from actors.runtime.spawn import cluster
from asyncrl.observe.trackers.base import Session

DEADLINE_S = 60.0


def scrape(url: str) -> dict[str, float]:
    with urllib.request.urlopen(url, timeout=10) as page:  # noqa: S310 - a page of our own Ray
        lines = page.read().decode().splitlines()
    ours = [line for line in lines if line.startswith("ray_asyncrl_")]
    assert all('run="mine"' in line and 'project="tests"' in line for line in ours), ours
    return {line.partition("{")[0]: float(line.rpartition(" ")[2]) for line in ours}


def main() -> None:
    said: list[str] = []
    session = Session(name="mine", project="tests", directory=Path(), config={}, say=said.append)
    with cluster("local", cpus=1):
        tracker = prometheus.open(session)
        values = {name: float(index) for index, name in enumerate((*prometheus.GAUGES, *prometheus.COUNTERS), start=1)}
        tracker.step(0, dict.fromkeys(values, 0.5))
        tracker.step(1, values)
        tracker.evaluation(2, {"sampled": 0.25, "greedy": 0.75})
        (url,) = [word for text in said for word in text.split() if word.startswith("http://127.0.0.1:")]
        deadline = time.monotonic() + DEADLINE_S
        expected = len(values) + 2
        while len(found := scrape(url)) < expected or found.get("ray_asyncrl_reward") != values["reward"]:
            assert time.monotonic() < deadline, found
            time.sleep(0.1)
    json.dump({"told": values, "found": found}, sys.stdout)


if __name__ == "__main__":
    main()
