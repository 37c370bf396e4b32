"""The forward of training: log-probabilities of the sampled tokens, and hidden states for the critic.

Of a batch that several ranks share each computes its part, and all of them then have the log-probabilities of all of it
(`asyncrl.training.distributed.context`).
"""

from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from asyncrl.algorithms import losses
from asyncrl.config import Run, Trainer
from asyncrl.models.execution import Execution
from asyncrl.models.experts import Route
from asyncrl.models.head import (
    WHOLE,
    Support,
    TokenLogprobs,
    bf16_logits,
    chunked_logprobs,
    policy_logits,
    top_logprobs,
)
from asyncrl.models.policy import PolicyModel
from asyncrl.models.routes import RouteShape
from asyncrl.training.batches import PackedBatch
from asyncrl.training.distributed.context import Part
from asyncrl.training.hidden_capture import HiddenTap
from asyncrl.training.memory import chunk_tokens
from asyncrl.training.routes import ObservedRoutes

PLAIN = Execution()


def predicting_states(
    model: PolicyModel,
    batch: PackedBatch,
    settings: Trainer,
    tap: HiddenTap | None = None,
    execution: Execution = PLAIN,
    route: Route | None = None,
) -> Tensor:
    """The hidden state from which each sampled token of this rank's part was predicted."""
    here, narrow = batch.here, settings.dtype == "bf16"
    if here.group is not None:  # attention over ranks is no operation that can be compiled
        execution = execution._replace(flash=False)
    taps = None if tap is None else tap.taps()
    with torch.autocast(batch.tokens_T.device.type, dtype=torch.bfloat16, enabled=narrow):
        hidden_T = model.states(
            here.tokens_T,
            here.positions_T,
            batch.rows,
            narrow=narrow,
            taps=taps,
            execution=execution,
            route=route,
            exchange=None if here.group is None else partial(here.attend, narrow=narrow),
        )
    if tap is not None and taps is not None:
        tap.take(batch, hidden_T, taps.found_T_E)
    # The end of a prompt predicts the first token of many completions; an embedding's backward adds them up fast.
    return functional.embedding(here.predict_L, hidden_T)


def all_logits(model: PolicyModel, hidden_L_E: Tensor, *, narrow: bool) -> Tensor:
    """In fp32, and all at once."""
    return model.logit_shape(bf16_logits(hidden_L_E, model.output_matrix)) if narrow else model.logits(hidden_L_E)


class PolicyForward:
    """A model as a policy: the distribution that the rollouts would sample from with its weights, at their temperature
    and with their top-k and top-p. A sampled token always belongs to it, so that its ratio is finite."""

    def __init__(
        self, model: PolicyModel, run: Run, execution: Execution = PLAIN, routes: RouteShape | None = None
    ) -> None:
        """With `routes`, those of the model, what its routers do is observed, and routes of a batch are replayed."""
        self._model, self._execution, self._routes = model, execution, routes
        self._balanced = run.algorithm.router_aux_loss > 0
        self._settings, self._distill = run.trainer, run.distill
        rollout, whole = run.rollout, run.algorithm.on_data or not run.rollout.temperature
        self._temperature = 1.0 if whole else rollout.temperature
        self._support = WHOLE if whole else Support(rollout.top_k, rollout.top_p)
        """Data is of the whole distribution at temperature 1, and that is what greedy completions report."""

    def __call__(
        self,
        batch: PackedBatch,
        *,
        entropy: bool = False,
        divergence: bool = False,
        tap: HiddenTap | None = None,
    ) -> TokenLogprobs:
        """`divergence`: from the teacher, whose likeliest tokens the batch has."""
        route = None
        if self._routes is not None:
            route = ObservedRoutes(self._routes, batch.here, balanced=self._balanced)
        hidden_L_E = predicting_states(self._model, batch, self._settings, tap, self._execution, route)
        top_L_X = batch.here.teacher_top_L_X if divergence else None
        found = self._logprobs(hidden_L_E, batch.here.target_L, entropy, top_L_X)
        return _of_all_parts(batch.here, found if route is None else found._replace(routing=route.found))

    @torch.no_grad()
    def top_logprobs(self, batch: PackedBatch, count: int, vocabulary: int) -> tuple[Tensor, Tensor, Tensor]:
        """Log-probabilities of the sampled tokens; at the place of each, the `count` likeliest of the first
        `vocabulary` tokens, and their log-probabilities and the tail's."""
        hidden_L_E = predicting_states(self._model, batch, self._settings, execution=self._execution)
        chunk, narrow = self._chunk, self._settings.dtype == "bf16"
        found: list[tuple[Tensor, ...]] = []
        for hidden_C_E, target_C in zip(hidden_L_E.split(chunk), batch.target_L.split(chunk), strict=True):
            logits_C_V = all_logits(self._model, hidden_C_E, narrow=narrow)
            logp_C = self._whole_logprobs(logits_C_V, target_C).logp_L
            top = top_logprobs(logits_C_V, temperature=self._temperature, count=count, vocabulary=vocabulary)
            found.append((logp_C, *top))
        logp_L, ids_L_K, top_L_B = (torch.cat(parts) for parts in zip(*found, strict=True))
        return logp_L, ids_L_K, top_L_B

    @property
    def _chunk(self) -> int:
        """Tokens whose logits may be there at a time."""
        return chunk_tokens(self._settings.logits_bytes, len(self._model.output_matrix))

    def _logprobs(self, hidden_L_E: Tensor, target_L: Tensor, entropy: bool, top_L_X: Tensor | None) -> TokenLogprobs:
        """Of this rank's part."""
        output_V_E, narrow = self._model.output_matrix, self._settings.dtype == "bf16"
        ids_L_K, teacher_L_B = (None, None) if top_L_X is None else _unpacked(top_L_X)
        if len(hidden_L_E) > self._chunk or ids_L_K is not None:
            if narrow:
                hidden_L_E, output_V_E = hidden_L_E.bfloat16(), output_V_E.bfloat16()
            found = chunked_logprobs(
                hidden_L_E,
                output_V_E,
                target_L,
                temperature=self._temperature,
                chunk=self._chunk,
                entropy=entropy,
                compile=self._execution.compiled,
                support=self._support,
                shape=self._model.logit_shape,
                ids_L_K=ids_L_K,
            )
            if found.top_L_B is None or teacher_L_B is None:
                return found
            return found._replace(divergence_L=losses.divergence(self._distill.divergence, found.top_L_B, teacher_L_B))
        return self._whole_logprobs(all_logits(self._model, hidden_L_E, narrow=narrow), target_L, entropy=entropy)

    def _whole_logprobs(self, logits_L_V: Tensor, target_L: Tensor, *, entropy: bool = False) -> TokenLogprobs:
        """From logits that are there all at once."""
        logits_L_V, outside_L = policy_logits(
            logits_L_V, target_L, temperature=self._temperature, support=self._support
        )
        logp_L = torch.log_softmax(logits_L_V, dim=-1).gather(1, target_L[:, None]).squeeze(1)
        return TokenLogprobs(logp_L, losses.entropy(logits_L_V) if entropy else None, outside_L)


def _unpacked(top_L_X: Tensor) -> tuple[Tensor, Tensor]:
    """Token ids, and log-probabilities of these and of the tail (`Trajectory.teacher_top_k`)."""
    count = top_L_X.shape[1] // 2
    return top_L_X[:, :count].long(), top_L_X[:, count:].view(torch.float32)


def _of_all_parts(here: Part, found: TokenLogprobs) -> TokenLogprobs:
    """What is there for each token, from the ranks that share the batch; all of it travels at once."""
    if here.group is None:
        return found
    rerouted_L = None if found.routing is None else found.routing.rerouted_L
    columns = [found.logp_L, found.entropy_L, found.outside_L, found.divergence_L, rerouted_L]
    whole = iter(here.whole(torch.stack([each.float() for each in columns if each is not None], 1)).unbind(1))
    logp_L, entropy_L, outside_L, divergence_L, rerouted_L = (None if each is None else next(whole) for each in columns)
    assert logp_L is not None
    if found.routing is not None:
        found = found._replace(
            routing=found.routing._replace(rerouted_L=None if rerouted_L is None else rerouted_L.detach())
        )
    outside_L = None if outside_L is None else outside_L > 0
    return TokenLogprobs(logp_L, entropy_L, outside_L, found.routing, divergence_L=divergence_L)
