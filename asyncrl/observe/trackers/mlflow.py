"""MLflow: the server that MLFLOW_TRACKING_URI names, else files in `mlruns` beside the run's directory."""

import os
import time
from typing import Any

from asyncrl.observe.trackers.base import Figures, Session, Tracker, named
from asyncrl.system.optional import require

PARAM = 500
"""Characters of a setting's value that every server takes."""
DESCRIPTION = "mlflow.note.content"


def open(session: Session) -> Tracker:
    tracking = require("mlflow.tracking", extra="mlflow")
    # Files are read by every version; newer ones want to be told that they are wanted.
    os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
    local = session.directory.resolve().parent / "mlruns"
    client: Any = tracking.MlflowClient(tracking_uri=os.environ.get("MLFLOW_TRACKING_URI") or local.as_uri())
    return Mlflow(client, session.identity("mlflow", lambda: _create(client, session)))


def _create(client: Any, session: Session) -> str:
    found = client.get_experiment_by_name(session.project)
    experiment = found.experiment_id if found else client.create_experiment(session.project)
    run_id = client.create_run(experiment, run_name=session.name).info.run_id
    for name, value in _settings(session.config).items():
        client.log_param(run_id, name, value[:PARAM])
    return run_id


def _settings(config: dict[str, Any], prefix: str = "") -> dict[str, str]:
    found: dict[str, str] = {}
    for name, value in config.items():
        found |= _settings(value, f"{prefix}{name}.") if isinstance(value, dict) else {f"{prefix}{name}": str(value)}
    return found


class Mlflow:
    def __init__(self, client: Any, run_id: str) -> None:
        self._client, self._id = client, run_id
        client.update_run(run_id, status="RUNNING")
        self._notes: str = client.get_run(run_id).data.tags.get(DESCRIPTION, "")

    def step(self, step: int, figures: Figures) -> None:
        self._log("step", step, figures)

    def evaluation(self, step: int, scores: Figures) -> None:
        self._log("evaluation", step, scores)

    def _log(self, kind: str, step: int, figures: Figures) -> None:
        entities = require("mlflow.entities", extra="mlflow")
        now = int(time.time() * 1000)
        metrics = [entities.Metric(name, value, now, step) for name, value in named(kind, figures).items()]
        self._client.log_batch(self._id, metrics)

    def note(self, step: int, text: str) -> None:
        """In the run's description, where MLflow shows text."""
        self._notes += f"- step {step}: {text}\n"
        self._client.set_tag(self._id, DESCRIPTION, self._notes)

    def close(self) -> None:
        self._client.set_terminated(self._id)
