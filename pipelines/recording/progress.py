"""Progress on the terminal: a live panel for a person, one plain line a step for a log."""

from types import TracebackType
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.live import Live
from rich.table import Table

from asyncrl.config import Run

if TYPE_CHECKING:
    from pipelines.evaluate import Scores


class Progress:
    """Context manager; prints only what it is given."""

    def __init__(self, run: Run, console: Console | None = None) -> None:
        self._run = run
        self._console = console or Console(highlight=False)
        self._live: Live | None = None
        self._scores: dict[int, Scores] = {}
        self._previous: dict[str, Any] = {}

    def __enter__(self) -> "Progress":
        if self._console.is_terminal:
            self._live = Live(console=self._console, refresh_per_second=4, transient=False)
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live:
            self._live.stop()

    def say(self, text: str) -> None:
        """A line that stays."""
        self._console.print(text, soft_wrap=True)

    def warm_start(self, step: int, loss: float) -> None:
        if step % 100 == 0:
            self.say(f"warm start step {step}: loss {loss:.3f}")

    def evaluation(self, steps_done: int, scores: "Scores") -> None:
        self._scores[steps_done] = scores
        sizes = "  ".join(f"size {size}: {score:.2f}" for size, score in scores.by_size.items())
        passed = f"  passed {scores.passed:.3f}" if self._run.evaluation.samples > 1 else ""
        self.say(
            f"held-out after step {steps_done}: sampled {scores.sampled:.3f} ± {scores.interval:.3f}  greedy "
            f"{scores.greedy:.3f}{passed}   {sizes}"
        )
        for name, found in scores.suites.items():
            self.say(f"  {name}: sampled {found.sampled:.3f} ± {found.interval:.3f}  greedy {found.greedy:.3f}")

    def step(self, row: dict[str, Any]) -> None:
        figures = self._figures(row)
        if self._live:
            table = Table(title=f"asyncrl {self._run.name}", title_justify="left", show_header=False)
            for name, value in figures.items():
                table.add_row(name, value)
            self._live.update(table)
        else:
            self.say("  ".join(f"{name} {value}" for name, value in figures.items()))
        self._previous = row

    def _learned(self, row: dict[str, Any]) -> dict[str, str]:
        if self._run.algorithm.on_data:
            return {"loss": f"{row['loss']:.4f}"}
        held_out = f"{self._scores[max(self._scores)].sampled:.3f}" if self._scores else "-"
        return {"reward": f"{row['reward']:.3f}", "held-out": held_out}

    def _tokens(self, row: dict[str, Any], before: dict[str, Any]) -> int:
        """Trained on where none are generated."""
        on_data = self._run.algorithm.on_data
        return row["tokens"] if on_data else row["generated_tokens"] - before["generated_tokens"]

    def _figures(self, row: dict[str, Any]) -> dict[str, str]:
        before = self._previous or {"loop_seconds": 0.0, "generated_tokens": 0}
        seconds = max(row["loop_seconds"] - before["loop_seconds"], 1e-6)
        figures = {
            "step": f"{row['step'] + 1}/{self._run.steps}",
            **self._learned(row),
            "tokens/s": f"{self._tokens(row, before) / seconds:,.0f}",
            "samples/s": f"{row['samples'] / seconds:.0f}",
            "staleness": f"{row['staleness_mean']:.2f} (max {row['staleness_max']})",
            **self._pace(row),
            **({"teacher kl": f"{row['teacher_kl']:.3f}"} if "teacher_kl" in row else {}),
            "ess": f"{row['ess']:.3f}",
            **self._drafting(row),
            "buffered": f"{row['buffered']}",
            "in flight": f"{row['in_flight']}",
            "waits": _who_waits(row, seconds),
        }
        return figures

    def _drafting(self, row: dict[str, Any]) -> dict[str, str]:
        """Tokens per verified draft since the last step."""
        drafts = row["drafts"] - self._previous.get("drafts", 0)
        if not drafts:
            return {}
        accepted = row["accepted_tokens"] - self._previous.get("accepted_tokens", 0)
        return {"accepts": f"{1 + accepted / drafts:.2f}"}

    def _pace(self, row: dict[str, Any]) -> dict[str, str]:
        """What the staleness controller has chosen, where there is one."""
        if self._run.staleness.band is None:
            return {}
        return {"bound": f"{row['effective_staleness']}", "publish every": f"{row['publish_every']}"}


def _who_waits(row: dict[str, Any], seconds: float) -> str:
    """The side that waits: the trainer for data, or the engines for tickets within the staleness bound."""
    share = row["wait_seconds"] / seconds
    if share > 0.05:
        return f"trainer {share:.0%}"
    return "rollout (no free slot)" if row["running"] == 0 else "nobody"
