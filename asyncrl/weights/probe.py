"""The last check of a new version: does an engine compute what the trainer does?

A digest proves that the bytes arrived, not that they are used: a stale scale or a matrix that was packed before the
update gives wrong text and no error. So the trainer publishes what it finds after some fixed prompts, and each engine
answers them like any other request, before all that wait. Compared is the log-probability of the likeliest next token,
because it moves little where two tokens are equally likely and rounding decides between them.
"""

from math import isfinite

import numpy as np

from asyncrl.config import Run
from asyncrl.config.precision import numerics
from asyncrl.types import Probe, Request, Sampling

PROMPTS, LENGTH = 8, 8
TRAINED_IDS = 1024
"""Prompts have the first of the vocabulary: frequent ones, where the last may never have been trained."""

FP8_TOLERANCE = 0.3


def wanted(run: Run) -> bool:
    """An engine without a model has nothing to agree on."""
    return run.weights.probe and run.engine.has_model


def prompts(vocabulary: int) -> tuple[tuple[int, ...], ...]:
    """The same in every process and run."""
    ids = np.random.default_rng(0).integers(0, min(vocabulary, TRAINED_IDS), (PROMPTS, LENGTH))
    return tuple(tuple(row) for row in ids.tolist())


def tolerance(run: Run) -> float:
    """By the coarser of both precisions."""
    if run.engine.own_fp8 or numerics(run.rollout.precision, run.rollout.fp8) is not None:
        return FP8_TOLERANCE
    return 1e-3 if (run.rollout.precision, run.trainer.dtype) == ("fp32", "fp32") else 0.1


def requests(probe: Probe, version: int) -> list[Request]:
    sampling = Sampling(max_tokens=1, temperature=0.0)
    return [
        Request(id=f"probe/{version}/{number}", tokens=tokens, sampling=sampling, seed=0, ahead=True)
        for number, tokens in enumerate(probe.prompts)
    ]


def gap(probe: Probe, found: list[float]) -> float:
    """Mean difference; infinite for numbers that are none, or for answers that are missing."""
    if len(found) != len(probe.logprobs) or not all(map(isfinite, found)):
        return float("inf")
    return float(np.abs(np.array(found) - np.array(probe.logprobs)).mean())
