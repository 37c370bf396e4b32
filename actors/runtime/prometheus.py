"""Prometheus: the driver's figures go out with Ray's own metrics, which every node of a cluster exports.

Ray puts `ray_` before each name. configs/grafana/asyncrl.json draws them.
"""

from typing import Any, cast

from asyncrl.observe.trackers.base import Figures, Session, Tracker

GAUGES = {
    "reward": "Mean reward of the last step's samples",
    "samples_per_second": "Samples trained per second, over the last step",
    "generated_tokens_per_second": "Tokens sampled per second, over the last step",
    "step_seconds": "Seconds from step to step",
    "wait_seconds": "Seconds that the trainer waited for data in the last step",
    "train_seconds": "Seconds of forward and backward in the last step",
    "sync_seconds": "Seconds from export to last acknowledgement of the last publication",
    "staleness_mean": "Mean age of the trained samples, in policy versions",
    "staleness_max": "Largest age of the trained samples, in policy versions",
    "effective_staleness": "Staleness bound that groups are admitted under",
    "ess": "Effective sample size of the importance weights, 1 is on-policy",
    "mismatch_kl": "Mean of log mu - log pi per token",
    "grad_norm": "Norm of the gradient",
    "length_mean": "Mean tokens of a completion",
    "length_max": "Longest completion, in tokens",
    "buffered": "Samples complete and not yet trained on",
    "in_flight": "Samples being generated or scored",
    "replicas": "Engines that serve",
    "running": "Completions that the engines are generating",
    "waiting": "Requests that wait in the engines",
    "version": "Newest policy version",
}
COUNTERS = {
    "generated_tokens": "Tokens sampled since the run began",
    "dropped": "Samples dropped since the run began",
}
SCORES = {"sampled": "Held-out accuracy, sampled", "greedy": "Held-out accuracy, greedy"}
TAGS = ("run", "project")


def open(session: Session) -> Tracker:
    """Print where Prometheus finds the run; the endpoints of a cluster's nodes are in a file that Ray writes."""
    tracker = RayMetrics({"run": session.name, "project": session.project})
    session.say(f"Prometheus finds this run at {_page()}")
    return tracker


def _page() -> str:
    import ray

    here = ray.get_runtime_context().get_node_id()
    (node,) = [each for each in cast("list[dict[str, Any]]", ray.nodes()) if each["NodeID"] == here]
    if (port := node["MetricsExportPort"]) <= 0:
        raise OSError("Ray exports no metrics here: its dashboard agent does not run")
    return f"http://{node['NodeManagerAddress']}:{port}/metrics"


class RayMetrics:
    """A tracker: exports the latest values."""

    def __init__(self, tags: dict[str, str]) -> None:
        from ray.util import metrics

        self._tags = tags
        kinds: Any = metrics
        self._gauges = {name: kinds.Gauge(exported(name), text, TAGS) for name, text in GAUGES.items()}
        self._counters = {name: kinds.Counter(exported(name), text, TAGS) for name, text in COUNTERS.items()}
        self._scores = {name: kinds.Gauge(exported(f"held_out_{name}"), text, TAGS) for name, text in SCORES.items()}
        self._counted = dict.fromkeys(COUNTERS, 0.0)

    def step(self, step: int, figures: Figures) -> None:
        for name in GAUGES.keys() & figures.keys():
            self._gauges[name].set(figures[name], self._tags)
        for name, counter in self._counters.items():
            if (more := figures[name] - self._counted[name]) > 0:
                counter.inc(more, self._tags)
                self._counted[name] = figures[name]

    def evaluation(self, step: int, scores: Figures) -> None:
        for name, gauge in self._scores.items():
            gauge.set(scores[name], self._tags)

    def note(self, step: int, text: str) -> None:
        """Prometheus holds numbers only."""

    def close(self) -> None:
        """The exported values end with the driver."""


def exported(name: str) -> str:
    """The name under which Ray registers a metric."""
    return f"asyncrl_{name}"
