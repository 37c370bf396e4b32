"""What a run does about FP8: diagnostics by precision, and the way out when the mismatch grows too large."""

import pytest
import torch

from asyncrl.algorithms.base import Samples
from asyncrl.algorithms.corrections import Corrected
from asyncrl.config import Sentinel
from asyncrl.errors import DivergenceError, Fp8Error
from asyncrl.training.diagnostics import Observed, figures, shares
from asyncrl.training.guardrails import Guardrails
from asyncrl.training.report import Share, StepReport


def _report(kl: float, *precisions: str) -> StepReport:
    parts = tuple(
        Share(by="precision", value=name, tokens=5, rho_mean=1, ess=1, mismatch_kl=kl, mismatch_k3=kl)
        for name in precisions
    )
    figures = {"mismatch_kl": kl, "ess": 0.5}
    return StepReport(
        version=4, samples=1, tokens=1, loss=0.0, grad_norm=0.0, skipped=False, figures=figures, shares=parts
    )


def test_fp8_beyond_the_bound_stops_the_run() -> None:
    with pytest.raises(DivergenceError, match=r"mismatch_kl=0\.6 is past .*0\.6 at precision fp8_full"):
        Guardrails(Sentinel(), "fp8_full").check(_report(0.6, "fp8_full"))


def test_or_falls_back_and_says_so_once() -> None:
    watch = Guardrails(Sentinel(on_fp8="fall_back"), "fp8_full")
    assert watch.check(_report(0.4, "fp8_full")).alarms == ()
    assert not watch.fell_back
    (said,) = watch.check(_report(0.6, "fp8_full")).alarms
    assert said.startswith("fp8_fallback=1: mismatch_kl=0.6 is past sentinel.max_kl=0.5 with FP8 rollouts")
    assert watch.fell_back
    late = watch.check(_report(0.7, "fp8_full", "fp32"))
    assert late.alarms == (), "answers that were begun in FP8"
    with pytest.raises(DivergenceError, match="at precision fp32"):
        watch.check(_report(0.6, "fp32"))


def test_or_ends_this_attempt_and_bears_with_old_answers_in_the_next() -> None:
    with pytest.raises(Fp8Error, match=r"mismatch_kl=0\.6 is past sentinel\.max_kl=0\.5 with FP8 rollouts"):
        Guardrails(Sentinel(on_fp8="restart"), "fp8_full").check(_report(0.6, "fp8_full"))
    again = Guardrails(Sentinel(on_fp8="restart"), "bf16")
    assert len(again.check(_report(0.6, "fp8_full")).alarms) == 1
    with pytest.raises(DivergenceError, match="at precision bf16"):
        again.check(_report(0.6, "bf16"))


def test_falling_back_is_for_fp8_only() -> None:
    with pytest.raises(DivergenceError):
        Guardrails(Sentinel(on_fp8="fall_back"), "fp8_full").check(_report(0.6, "bf16"))


def test_figures_by_precision() -> None:
    """Two answers of two and three tokens: log rho is -0.1 in fp32 and -0.3 in FP8."""
    log_rho_L = torch.tensor([-0.1, -0.1, -0.3, -0.3, -0.3])
    samples = Samples(torch.tensor([0, 0, 1, 1, 1]), 2, torch.zeros(5, dtype=torch.int64))
    kept_L = torch.ones(5, dtype=torch.bool)
    corrected = Corrected(
        weight_L=log_rho_L.exp(), proximal_logp_L=log_rho_L, log_rho_L=log_rho_L, truncated_L=~kept_L, kept_L=kept_L
    )
    found = shares([Observed.of(corrected, samples, ["fp32", "fp8_full"])])
    assert {share.value: (share.tokens, round(share.mismatch_kl, 6)) for share in found if share.by == "precision"} == {
        "fp32": (2, 0.1),
        "fp8_full": (3, 0.3),
    }


@pytest.mark.parametrize(
    ("kept", "used"),
    [([True, True, True], 4**2 / (3 * 6)), ([True, True, False], 2**2 / (3 * 2)), ([False, False, False], 0.0)],
)
def test_one_absurd_token_does_little_to_the_weights_that_are_used(kept: list[bool], used: float) -> None:
    """Ratios of 1, 1 and 20, truncated at 2; some of them rejected."""
    log_rho_L, kept_L = torch.tensor([1.0, 1.0, 20.0]).log(), torch.tensor(kept)
    corrected = Corrected(
        weight_L=torch.tensor([1.0, 1.0, 2.0]) * kept_L,
        proximal_logp_L=log_rho_L,
        log_rho_L=log_rho_L,
        truncated_L=torch.tensor([False, False, True]),
        kept_L=kept_L,
    )
    samples = Samples(torch.zeros(3, dtype=torch.int64), 1, torch.zeros(3, dtype=torch.int64))
    found = figures([Observed.of(corrected, samples, ["fp8_full"])])
    assert found["ess"] == pytest.approx(22**2 / (3 * 402))
    assert found["ess_used"] == pytest.approx(used)
