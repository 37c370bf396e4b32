"""Levels beyond which learning is in danger: alarms that are reported, and bounds that stop the run.

The alarm levels are those of verl's rollout correction documents. Pure: figures in, words out.
"""

from collections.abc import Mapping

import msgspec

from asyncrl.config import Sentinel
from asyncrl.errors import DivergenceError, Fp8Error
from asyncrl.training.report import StepReport

STALER = "lower max_staleness or trainer.lr"
NO_SIGNAL = (
    "no signal: every advantage of the step was 0, and its rewards taught nothing; look at the rewards, take prompts "
    "that are harder or easier, raise rollout.group_size, or set algorithm.dynamic_sampling=true"
)


def alarms(figures: Mapping[str, float]) -> tuple[str, ...]:
    """What is out of its range, with the way back."""
    checks = (
        (not 0.5 <= figures["rho_mean"] <= 2, "rho_mean", "outside 0.5 to 2: engine and trainer disagree"),
        (figures["rho_std"] > 1, "rho_std", f"above 1: weights vary too much; {STALER}"),
        (figures["ess"] < 0.3, "ess", f"below 0.3: most samples hardly count; {STALER}"),
        (abs(figures["mismatch_kl"]) > 0.1, "mismatch_kl", f"beyond 0.1: far off-policy; {STALER}"),
        (figures["chi2_token"] > 1, "chi2_token", f"above 1: {STALER}"),
        (figures["rejected_samples"] > 0.5, "rejected_samples", f"above 0.5: little is left to learn from; {STALER}"),
        (figures.get("informative_fraction") == 0, "informative_fraction", NO_SIGNAL),
    )
    return tuple(f"{name}={figures[name]:.3g} is {words}" for wrong, name, words in checks if wrong)


class Guardrails:
    """Stops a run that cannot recover by itself."""

    def __init__(self, settings: Sentinel, precision: str, directory: str = "RUN") -> None:
        """`precision` is that of rollouts: one that started again without FP8 may still meet answers in FP8.
        `directory` is the run's, for what is said about resuming it."""
        self._settings, self._in_fp8 = settings, precision.startswith("fp8")
        self._directory, self._resume = directory, f"asyncrl resume {directory}"
        self._skipped = 0
        self.fell_back = False
        """Whether FP8 was left: no version after it is published in FP8."""

    def check(self, report: StepReport) -> StepReport:
        """The report of a step not yet taken, with an alarm where the run goes on without FP8; DivergenceError where it
        cannot go on. Steps that the settings leave out are not judged."""
        if report.version in self._settings.skip_steps:
            return report
        self._skipped = self._skipped + 1 if report.skipped else 0
        if self._skipped >= self._settings.max_skipped:
            raise DivergenceError(
                f"{self._skipped} steps in a row were skipped, the last because {report.fault}; the weights are those "
                f"of version {report.version - self._skipped}. Look at these samples: if they are at fault, "
                f"`{self._resume}` continues after them; if the weights are, begin a new run from older ones, with "
                f"model=checkpoint model.path={self._directory}/checkpoints/step-N and a lower trainer.lr"
            )
        kl, bound = report.figures["mismatch_kl"], self._settings.max_kl
        if bound and abs(kl) > bound:
            if self._settings.on_fp8 != "stop" and any(share.value.startswith("fp8") for share in report.shares):
                return self._fall_back(report, kl)
            shares = ", ".join(
                f"{share.mismatch_kl:.2g} at {share.by} {share.value}" for share in report.shares if share.tokens
            )
            raise DivergenceError(
                f"step {report.version}: mismatch_kl={kl:.3g} is past sentinel.max_kl={bound:g} ({shares}; ess "
                f"{report.figures['ess']:.2g}). The step was not taken. {self._advice(report.version)}"
            )
        return report

    def _advice(self, step: int) -> str:
        """What `resume` takes."""
        skipped = ",".join(map(str, sorted({*self._settings.skip_steps, step})))
        precision = "use rollout.precision=bf16" if self._in_fp8 else "compare engine and trainer"
        return (
            "A gap that grows with age is staleness: lower trainer.lr or max_staleness; one at age 0 is a difference "
            f"between engine and trainer: {precision}. Continue without these samples and with what you changed: "
            f"`{self._resume} 'sentinel.skip_steps=[{skipped}]' trainer.lr=...`; or train on them: "
            f"`{self._resume} sentinel.max_kl=...`"
        )

    def _fall_back(self, report: StepReport, kl: float) -> StepReport:
        """Said once; answers that were begun in FP8 may still come, and do not stop the run."""
        if self.fell_back:
            return report
        self.fell_back = True
        said = f"mismatch_kl={kl:.3g} is past sentinel.max_kl={self._settings.max_kl:g} with FP8 rollouts"
        if self._settings.on_fp8 == "restart" and self._in_fp8:
            raise Fp8Error(f"step {report.version}: {said}")
        said = f"fp8_fallback=1: {said}"
        return msgspec.structs.replace(report, alarms=(*report.alarms, f"{said}; they go on without FP8 from now on"))
