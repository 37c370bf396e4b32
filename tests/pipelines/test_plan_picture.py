"""What `plan` draws and counts, by hand."""

import io
from pathlib import Path

import pytest
from rich.console import Console

from asyncrl.config import Flow, Rollout, Run, Trainer
from asyncrl.config.placement import Placement
from asyncrl.config.staleness import EssBand
from asyncrl.fleet.placement import CPU, GPU, Offer
from asyncrl.simulation.outcome import Rates
from asyncrl.system import shared_gpu
from pipelines.cli import main
from pipelines.plan import plan
from pipelines.plan.estimate import Traffic, longest_prompt, model_config, needs, traffic
from pipelines.plan.render import Box, arithmetic, draw, show

PACE = Rates(
    seconds=100.0,
    step_seconds=4.0,
    samples_per_second=128.0,
    tokens_per_second=10_000.0,
    generated_tokens_per_second=12_000.0,
    trainer_wait=0.0,
    wait_seconds=0.0,
    rollout_idle=0.0,
    batch_mean=1.0,
    staleness_mean=1.0,
    staleness_max=2,
)


def _shown(run: Run, **options: object) -> str:
    screen = io.StringIO()
    show(run, Console(file=screen, width=100), **options)  # type: ignore[arg-type]
    return screen.getvalue()


def test_the_arithmetic_in_words() -> None:
    run = Run(flow=Flow(groups_per_step=64, groups_per_take=1), rollout=Rollout(group_size=8), max_staleness=4)
    assert arithmetic(run).startswith(
        "1 step = 64 prompts x 8 = 512 samples, 4 publishes ahead: 320 groups admitted, as few of them ready as keep "
        "the trainer busy, the oldest token at most 4 versions old; training begins with the first 1 complete group"
    )
    assert "1 publish ahead: 64 groups admitted, the oldest token at most 1 version old" in arithmetic(
        Run(flow=Flow(groups_per_step=32, max_ready_groups=0), max_staleness=1)
    )
    assert "256 samples, no publish ahead: synchronous, every token is of the version that is trained" in arithmetic(
        Run(flow=Flow(groups_per_step=32), max_staleness=0)
    )
    assert "samples, up to 3 publishes ahead, as staleness=ess decides: 128 groups" in arithmetic(
        Run(flow=Flow(groups_per_step=32), max_staleness=3, staleness=EssBand())
    )


def test_traffic_by_hand() -> None:
    run = Run(rollout=Rollout(replicas=3, group_size=8, max_tokens=256), flow=Flow(groups_per_step=32))
    prompt, required = 100, needs(run, model_config(run), 100)
    published = 302_976 * 4  # fp32
    longest = 256 * ((100 + 256) * 12 + 2048)
    assert traffic(run, required, prompt, None) == Traffic(longest, longest, 3 * published, "a step")
    rows = 128 * (100 * 12 + 2048)
    assert traffic(run, required, prompt, PACE) == Traffic(
        rows + 12 * 12_000, rows + 12 * 10_000, 3 * published / 4.0, "a second"
    )


def test_the_picture_of_two_boxes() -> None:
    drawn = draw([Box("rollout x 1", ["fast"], "completions"), Box("trainer x 1", ["slow"])], ("weights", "5 MB"))
    assert [line.replace("─" * 40, "~").replace(" " * 40, "_") for line in drawn] == [
        "┌─ rollout x 1 ~──────┐",
        "│ fast_               │◀──┐",
        "└~────────────────────┘   │",
        "   │ completions_         │ weights",
        "   ▼_                     │ 5 MB",
        "┌─ trainer x 1 ~──────┐   │",
        "│ slow_               │───┘",
        "└~────────────────────┘",
    ]


def test_everybody_is_in_the_picture(tmp_path: Path) -> None:
    run = Run(rollout=Rollout(replicas=2), trainer=Trainer(ranks=2), root=str(tmp_path))
    offer = Offer(nodes=({CPU: 8.0, GPU: 4.0, "rollout_slot": 2.0},))
    shown = _shown(run, offer=offer)
    order = ("prompts (chains)", "rollout (native) x 2", "reward x 1", "buffer x 1", "trainer (grpo) x 2")
    assert sorted(order, key=shown.index) == list(order)
    assert "each takes 1 CPU, 1 rollout_slot" in shown
    assert "together 4 CPU, 2 GPU, 2 rollout_slot; it has 8 CPU, 4 GPU, 2 rollout_slot" in shown
    assert "trajectories, at most" in shown
    assert "bytes per step;" in shown
    assert max(map(len, shown.splitlines())) <= 100


def test_with_a_pace_bytes_are_told_by_the_second(tmp_path: Path) -> None:
    run = Run(root=str(tmp_path))
    shown = _shown(run, pace=PACE)
    prompt = longest_prompt(run)
    to_trainer = (128 * (prompt * 12 + 2048) + 12 * 10_000) / 1000
    assert f"batches, about {to_trainer:.3g} kB a second" in shown
    assert "303 kB" in shown  # 302,976 parameters in 4 bytes, every 4 s
    assert "as simulated, not measured: a step takes about 4 s" in shown


def test_the_command_simulates_the_pace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["plan", "--profile", "h20_7b", "steps=2", "flow.groups_per_step=4"]) == 0
    assert "a second" in capsys.readouterr().out
    assert main(["plan", "--profile", "h20_8b"]) == 2
    assert "did you mean h20_7b?" in capsys.readouterr().err


def test_a_terminal_without_boxes_gets_plain_ones(tmp_path: Path) -> None:
    raw = io.BytesIO()
    screen = io.TextIOWrapper(raw, encoding="ascii")
    show(Run(root=str(tmp_path)), Console(file=screen, width=100))
    screen.flush()
    assert b"+- rollout (native) x 1 ---" in raw.getvalue()
    assert b"weights" in raw.getvalue()


@pytest.mark.parametrize(
    ("cards", "trainer", "said"),
    [
        (
            2,
            Trainer(ranks=4),
            "trainer.ranks=4 need a GPU each, and this machine has 2: use trainer.ranks=2, trainer.device=cpu, or "
            "placement.share_gpu=true to put several on one",
        ),
        (4, Trainer(ranks=4), ""),
        (2, Trainer(ranks=4, device="cpu"), ""),
        (0, Trainer(ranks=4), ""),  # CPUs are shared
        (0, Trainer(device="cuda"), "trainer.device=cuda, and this machine has no GPU; use trainer.device=auto"),
    ],
)
def test_ranks_without_a_gpu_of_their_own_are_refused(
    cards: int, trainer: Trainer, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan, "gpu_count", lambda: cards)
    found = [problem for problem in plan.problems(Run(trainer=trainer)) if "trainer." in problem]
    assert [problem[: len(said)] for problem in found] == [said] * bool(said)


def test_ranks_that_share_a_gpu_need_a_new_nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "gpu_count", lambda: 1)
    run = Run(trainer=Trainer(ranks=2), placement=Placement(share_gpu=True))

    def said() -> list[str]:
        return [problem for problem in plan.problems(run) if "share_gpu" in problem or "ranks" in problem]

    monkeypatch.setattr(shared_gpu, "installed", lambda: (2, 27, 7))
    assert said() == [
        "placement.share_gpu=true needs NCCL 2.30 or newer, and 2.27.7 is here: install a newer nvidia-nccl-cu13, or "
        "set placement.share_gpu=false with a GPU for each of trainer.ranks"
    ]
    for found in ((2, 30, 0), (3,), ()):
        monkeypatch.setattr(shared_gpu, "installed", lambda found=found: found)
        assert said() == []


def test_ranks_are_counted_against_a_cluster_too() -> None:
    run = Run(trainer=Trainer(ranks=4), cluster="auto")
    one = Offer(nodes=({CPU: 8.0, GPU: 1.0},))
    assert any("the cluster has 1: use trainer.ranks=1" in problem for problem in plan.problems(run, one))
    scaling = one._replace(could_have={CPU: 32.0, GPU: 8.0})
    assert not any("need a GPU each" in problem for problem in plan.problems(run, scaling))


def test_a_pace_from_no_run_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--from", str(tmp_path)]) == 2
    assert "is not a run directory" in capsys.readouterr().err
