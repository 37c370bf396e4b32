"""Whole runs of a mixture of experts: routes travel with every sample, through a kill, and older runs have none."""

import json
import re
from pathlib import Path

import msgspec
import pyarrow.parquet as pq
import pytest
from safetensors.torch import load_file

from asyncrl.buffer.reader import read_run
from asyncrl.config import WarmStart
from asyncrl.config.task import ChainsTask
from asyncrl.models.config import read_config
from asyncrl.models.routes import RouteShape
from asyncrl.observe.query.tables import open_run
from asyncrl.training.checkpoint import numbered
from asyncrl.training.warm_start import make_model
from tests.pipelines.test_replay import graded, replay
from tests.support import quickstart_runs
from tests.support.command import asyncrl


@pytest.fixture(scope="module")
def experts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    shape = WarmStart(steps=40, experts=4, expert_size=32)
    return make_model(shape, ChainsTask(), 0, tmp_path_factory.mktemp("experts"))


def _check_routes(run: Path, model: Path) -> None:
    """Of every stored sample: two experts in each of two layers."""
    assert RouteShape.of(read_config(model)) == RouteShape(layers=(0, 1), active=2, experts=4)
    trajectories = list(read_run(run / "trajectories"))
    assert trajectories
    for trajectory in trajectories:
        assert len(trajectory.route_bytes) == (len(trajectory.tokens) - 1) * 2 * 2


def test_routes_are_stored_replayed_and_reported(tmp_path: Path, experts: Path) -> None:
    quickstart_runs.run(tmp_path, experts, graded(tmp_path), "max_staleness=2", "flow.groups_per_step=2")
    run = tmp_path / "run"
    _check_routes(run, experts)
    with open_run(run) as tables:
        shares = tables.execute("SELECT route_mismatch FROM metrics").fetchall()
        loads = tables.execute("SELECT expert_load_max, expert_idle FROM metrics").fetchall()
        stored = tables.execute("SELECT DISTINCT route_bytes / (len(tokens) - 1) FROM trajectories").fetchall()
    assert all(0 <= share < 0.5 for (share,) in shares)
    assert all(1 <= busiest <= 2 and 0 <= idle <= 0.5 for busiest, idle in loads), "two of four experts a token"
    assert stored == [(4,)]
    assert asyncrl("report", run).code == 0
    data = re.search(r'id="data">(.*?)</script>', (run / "report.html").read_text(), re.DOTALL)
    assert data is not None
    told = json.dumps(json.loads(data[1]))
    assert all(title in told for title in ("Router replay", "Busiest expert", "Idle experts"))
    done = replay(run)
    assert done.out.splitlines()[-1].startswith("identical: 4 steps again"), done.err


def test_adapters_on_experts_are_trained_and_published(tmp_path: Path, experts: Path) -> None:
    """Engine and trainer agree on every version: the one merges, the other multiplies both."""
    settings = "trainer.lora.rank=2", "trainer.lr=0.01", "max_staleness=0", "algorithm.router_aux_loss=0.01"
    quickstart_runs.run(tmp_path, experts, graded(tmp_path), *settings)
    metrics = pq.read_table(tmp_path / "run" / "metrics.parquet").to_pydict()
    assert max(metrics["mismatch_abs"]) < 1e-5
    assert all(2 <= loss <= 4 for loss in metrics["router_aux_loss"]), "two of four experts a token"
    (_, last) = numbered(tmp_path / "run" / "checkpoints")[-1]
    saved = load_file(last / "adapter" / "adapter_model.safetensors")
    changed = saved["base_model.model.model.layers.1.mlp.experts.3.down_proj.lora_B.weight"]
    assert changed.abs().max() > 1e-3


def test_a_run_recorded_without_routes_is_resumed_without_them(tmp_path: Path, experts: Path) -> None:
    """As an older version left it: its settings do not name router replay, and recorded samples have no routes."""
    quickstart_runs.run(tmp_path, experts, graded(tmp_path), "rollout.router_replay=off")
    run = tmp_path / "run"
    assert not any(trajectory.route_bytes for trajectory in read_run(run / "trajectories"))
    config = msgspec.yaml.decode((run / "config.yaml").read_bytes())
    assert config["rollout"].pop("router_replay") == "off"
    (run / "config.yaml").write_bytes(msgspec.yaml.encode(config))
    for step, path in numbered(run / "checkpoints"):
        if step > 2:
            path.rename(path.with_name(f"old-{step}"))
    refused = asyncrl("resume", run, "rollout.router_replay=on")
    assert refused.code == 2
    assert re.search(r"group \d+, sample \d+ has 0 bytes of routes.*set rollout.router_replay=off", refused.err)
    (run / "config.yaml").write_bytes(msgspec.yaml.encode(config))
    quickstart_runs.resume(run)
    assert quickstart_runs.summary(tmp_path)["steps"] == 4
    assert "route_mismatch" not in pq.read_schema(run / "metrics.parquet").names


@pytest.mark.slow
def test_a_killed_run_resumes_with_its_routes_and_replays_to_the_same_weights(tmp_path: Path, experts: Path) -> None:
    process = quickstart_runs.start(tmp_path, experts, "steps=6", graded(tmp_path))
    quickstart_runs.kill_after_step(process, tmp_path, 3)
    run = tmp_path / "run"
    for step, path in numbered(run / "checkpoints"):  # further back than needed, so that recorded steps are repeated
        if step > 1:
            path.rename(path.with_name(f"old-{step}"))
    quickstart_runs.resume(run)
    _check_routes(run, experts)
    assert all(share is not None for share in pq.read_table(run / "metrics.parquet")["route_mismatch"].to_pylist())
    done = replay(run)
    assert done.out.splitlines()[-1].startswith("identical: 6 steps again"), done.err
