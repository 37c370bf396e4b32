"""What ranks of a trainer do together, each beside a learner that is alone and does the same."""

import os
import resource
from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from asyncrl.config import Rollout, Run, Trainer
from asyncrl.config.algorithm import Algorithm, Grpo, Importance, Kl, Ppo, ReinforcePp, Supervised
from asyncrl.config.distillation import Distillation, Teacher
from asyncrl.config.trainer import Lora
from asyncrl.errors import RankError, StorageError
from asyncrl.models.collectives import RankGroup
from asyncrl.training import checkpoint
from asyncrl.training.batches import block, by_degree, pack
from asyncrl.training.checkpoint import TrainingManifest
from asyncrl.training.distributed.ranks import Ranks
from asyncrl.training.export import likeliest
from asyncrl.training.learner import Learner
from asyncrl.types import Group, Segment
from asyncrl.weights.gather import Follower
from asyncrl.weights.transports.shared_memory import SharedMemoryWriter, read_tensors
from tests.support.tiny_model import tiny_checkpoint
from tests.support.training_groups import gradients_of, make_groups, with_likeliest

RUN = Run(trainer=Trainer(lr=1e-3), correction=Importance(reject=()))
TIED, UNTIED, EXPERTS = "tied", "untied", "experts"
THROUGH, PADDED = "through", "padded"
PPO = Ppo(critic_warmup_steps=0)
MANIFEST = TrainingManifest(step=0, samples_trained=0, consumed=())
ON_A_CARD = 1e-4
"""fp32 sums there have another order in batches of another size; the scores of experts are the most sensitive."""


def make_models(folder: Path, **changes: Any) -> Path:
    """What the scenes train."""
    tiny_checkpoint(folder / TIED, "qwen2", **changes)
    tiny_checkpoint(folder / UNTIED, "qwen3", **changes)
    tiny_checkpoint(folder / EXPERTS, "qwen3_moe", **changes)
    return folder


def _exact(learner: Learner) -> float:
    """Largest difference from what one rank computes in fp32."""
    return 1e-5 if learner.device.type == "cpu" else ON_A_CARD


def _both(folder: Path, ranks: Ranks, run: Run = RUN, model: str = TIED) -> tuple[Learner, Learner]:
    return Learner(folder / model, run), Learner(folder / model, run, ranks)


def _train(learner: Learner, groups: list[Group]) -> float:
    learner.accumulate(groups[:1])
    learner.accumulate(groups[1:])
    return learner.step().loss


def _close(one: Learner, all_of_it: Learner, tolerance: float) -> None:
    """Gradients of every weight, by the largest of each."""
    all_of_it.ranks.combine(all_of_it.model.parameters())
    names = [name for name, parameter in one.model.named_parameters() if parameter.requires_grad]
    for name, mine, theirs in zip(names, gradients_of(one), gradients_of(all_of_it), strict=True):
        apart = _apart(mine, all_of_it.ranks.whole(theirs) * all_of_it.ranks.world)
        assert apart <= tolerance, f"{name}: {apart:.2g} apart, {tolerance:.2g} allowed"


def _rounded(folder: Path, run: Run, groups: list[Group], one: Learner) -> float:
    """Half as much again as bf16 moves one rank's own gradients where it takes other batches; 2 % at least."""
    other = Learner(folder / EXPERTS, msgspec.structs.replace(run, trainer=Trainer(dtype="bf16", token_budget=60)))
    other.accumulate(groups)
    return max(0.02, 1.5 * max(_apart(*both) for both in zip(gradients_of(one), gradients_of(other), strict=True)))


def _apart(mine: Tensor, other: Tensor) -> float:
    """By the largest of them."""
    return float((other - mine).abs().max()) / float(mine.abs().max())


def gradients(ranks: Ranks, folder: Path) -> None:
    """Of any number of groups, in few and in many tokens; of one sample there is work for one rank only."""
    one_sample = [msgspec.structs.replace(make_groups(1)[0], trajectories=make_groups(1)[0].trajectories[1:2])]
    # A lone sample has no advantage, and of the first weights the KL has no gradient.
    kl = msgspec.structs.replace(RUN, algorithm=Grpo(kl=Kl(coefficient=0.1), entropy=0.1))
    recomputed = msgspec.structs.replace(RUN, trainer=Trainer(token_budget=60, checkpoint_activations=True))
    small = msgspec.structs.replace(RUN, trainer=Trainer(token_budget=120))
    scenes = [(small, TIED, make_groups(5)), (recomputed, UNTIED, make_groups(3)), (kl, UNTIED, one_sample)]
    scenes += [(small, EXPERTS, make_groups(5)), (kl, EXPERTS, one_sample)]
    for run, model, groups in scenes:
        one, several = _both(folder, ranks, run, model)
        for learner in (one, several):
            learner.accumulate(groups[:2])
            learner.accumulate(groups[2:])
        _close(one, several, _exact(one))


def on_data(ranks: Ranks, folder: Path) -> None:
    """Supervised steps, and the loss of samples that nothing is learned from, before and after them; of one sample
    there is work for one rank only."""
    run = msgspec.structs.replace(RUN, algorithm=Supervised(), trainer=Trainer(lr=1e-3, token_budget=120))
    for model in (TIED, EXPERTS):
        one, several = _both(folder, ranks, run, model)
        held_out = [trajectory for group in make_groups(3, 7) for trajectory in group.trajectories]
        for seed in range(2):
            for samples in (held_out, held_out[:1]):
                assert one.loss(samples) == pytest.approx(several.loss(samples), abs=1e-5)
            for learner in (one, several):
                learner.accumulate(make_groups(3, seed))
                assert learner.loss(held_out[:2]) > 0  # in the middle of a step
            _close(one, several, _exact(one))
            assert one.step().loss == pytest.approx(several.step().loss, abs=1e-5)


def distillation(ranks: Ranks, folder: Path) -> None:
    """From a teacher's likeliest tokens, of which each rank has those of its part; of one sample some have none."""
    teachers, distill = (Teacher(path="unused"),), Distillation(top_k=3, reward=1.0)
    run = msgspec.structs.replace(RUN, teachers=teachers, distill=distill, trainer=Trainer(lr=1e-3, token_budget=120))
    groups = with_likeliest(make_groups(3), 3)
    one_sample = [msgspec.structs.replace(groups[0], trajectories=groups[0].trajectories[1:2])]
    for model, chosen in ((TIED, groups), (UNTIED, one_sample)):
        one, several = _both(folder, ranks, run, model)
        for learner in (one, several):
            learner.accumulate(chosen)
        _close(one, several, _exact(one))
        mine, theirs = one.step().figures, several.step().figures
        for name in ("teacher_divergence", "teacher_kl", "informative_fraction"):
            assert mine[name] == pytest.approx(theirs[name], rel=1e-5), name


def log_probs(ranks: Ranks, folder: Path) -> None:
    """Of samples with several turns, cut at any of their tokens: those that one rank computes of the same batch."""
    for model in (TIED, UNTIED, EXPERTS):
        one, several = _both(folder, ranks, model=model)
        for length in range(7):
            turns = [Segment.sampled([3, 1, 4], [-3.0] * 3, 0), Segment.given([1, 5] * length + [9, 2])]
            blocks = [block(_with_turns(group, turns), [1.0] * 4) for group in make_groups(2, length)]
            for batch in pack(blocks, 120):
                group = ranks.contexts[max(ranks.contexts)]
                assert group is not None
                found = several.token_logprobs(batch.shared(group).to(several.device))
                gap = (found - one.token_logprobs(batch.to(one.device))).detach().abs().max()
                assert float(gap) < 1e-5, (model, length)


def degrees_by_length(ranks: Ranks, folder: Path) -> None:
    """Twenty steps: short completions on one rank each, longer ones on more, and the whole step is that of one rank.
    Of some groups a rank has completions of both kinds, of one sample there is work for some ranks only."""
    degrees, budget = list(ranks.contexts), 18
    blocks = [block(group, [1.0] * 4) for group in make_groups(2)]
    assert list(by_degree(blocks, budget, degrees)) == degrees == [n for n in (1, 2, 4) if n <= ranks.world]
    replayed = msgspec.structs.replace(RUN, rollout=Rollout(router_replay="on"))
    chosen: list[Algorithm] = [PPO, ReinforcePp(kl=Kl(coefficient=0.1, placement="reward")), Grpo(entropy=0.1)]
    scenes = [(msgspec.structs.replace(RUN, algorithm=algorithm), TIED, 2) for algorithm in chosen]
    for run, model, steps in [*scenes, (RUN, TIED, 20), (replayed, EXPERTS, 2)]:
        cut = msgspec.structs.replace(run, trainer=Trainer(lr=run.trainer.lr, token_budget=budget))
        one, several = Learner(folder / model, run), Learner(folder / model, cut, ranks)
        for seed in range(steps):
            groups = make_groups(2, seed)
            if run.algorithm.entropy and seed:  # a sample without an advantage
                groups = [msgspec.structs.replace(groups[0], trajectories=groups[0].trajectories[1:2])]
            for learner in (one, several):
                learner.accumulate(groups)
            if isinstance(run.algorithm, Grpo) and seed < 2:  # the others compute all of it in the step
                _close(one, several, (10 if seed else 1) * _exact(one))
            mine, theirs = one.step(), several.step()
            assert abs(mine.loss - theirs.loss) <= 1e-5
            assert abs(mine.grad_norm - theirs.grad_norm) <= 1e-4 * max(1, mine.grad_norm)
            for name, value in mine.figures.items():
                assert abs(value - theirs.figures[name]) < 1e-4 * max(1, abs(value)), name
            assert [share.tokens for share in mine.shares] == [share.tokens for share in theirs.shares]


def balancing(ranks: Ranks, folder: Path) -> None:
    """A load-balancing loss over batches, which are those of one rank where all ranks share them."""
    assert list(ranks.contexts) == [ranks.world]
    run = msgspec.structs.replace(RUN, algorithm=Grpo(router_aux_loss=0.5, entropy=0.01))
    one, several = _both(folder, ranks, run, EXPERTS)
    for learner in (one, several):
        learner.accumulate(make_groups(3))
    _close(one, several, _exact(one))
    mine, theirs = one.step(), several.step()
    for name in ("router_aux_loss", "entropy", "expert_load_max"):
        assert mine.figures[name] == pytest.approx(theirs.figures[name], rel=1e-5), name


def _with_turns(group: Group, turns: list[Segment]) -> Group:
    """Between the prompt and the rest."""
    found = [msgspec.structs.replace(t, segments=(t.segments[0], *turns, *t.segments[1:])) for t in group.trajectories]
    return msgspec.structs.replace(group, trajectories=tuple(found))


def expert_gradients(ranks: Ranks, folder: Path) -> None:
    """With replayed routes, of which few go to the experts of some rank, and with the router's own; in bf16; with a
    reference; with layers that are computed again; with a critic."""
    replay = msgspec.structs.replace(RUN, rollout=Rollout(router_replay="on"), trainer=Trainer(token_budget=120))
    recomputed = msgspec.structs.replace(replay, trainer=Trainer(token_budget=60, checkpoint_activations=True))
    balanced = msgspec.structs.replace(RUN, algorithm=Grpo(kl=Kl(coefficient=0.1), entropy=0.1))
    bf16 = msgspec.structs.replace(replay, trainer=Trainer(dtype="bf16"))
    lone = [msgspec.structs.replace(make_groups(1)[0], trajectories=make_groups(1)[0].trajectories[1:2])]
    scenes = [(replay, make_groups(4)), (recomputed, make_groups(3)), (balanced, make_groups(2)), (balanced, lone)]
    for run, groups in [*scenes, (bf16, make_groups(3))]:
        one, several = _both(folder, ranks, run, EXPERTS)
        for learner in (one, several):
            learner.accumulate(groups[:2])
            learner.accumulate(groups[2:])
        _close(one, several, _rounded(folder, run, groups, one) if run is bf16 else _exact(one))


def expert_steps(ranks: Ranks, folder: Path) -> None:
    """Twenty of them, with the loads of all experts as figures, a checkpoint in between; and a critic with experts."""
    replay = msgspec.structs.replace(RUN, rollout=Rollout(router_replay="on"))
    one, several = _both(folder, ranks, replay, EXPERTS)
    for seed in range(20):
        groups = make_groups(2, seed)
        for learner in (one, several):
            learner.accumulate(groups)
        mine, theirs = one.step(), several.step()
        assert abs(mine.loss - theirs.loss) <= 1e-5
        assert abs(mine.grad_norm - theirs.grad_norm) <= 1e-4 * max(1, mine.grad_norm)
        assert mine.figures["expert_load_max"] == pytest.approx(theirs.figures["expert_load_max"])
        if seed == 10:
            saved = checkpoint.save(several, folder / "steps", MANIFEST, model_path=folder / EXPERTS, keep=1)
            again = Learner(folder / EXPERTS, replay, ranks)
            checkpoint.restore(again, saved)
            _same(several, again)
            again.version, several = several.version, again
    one, several = _both(folder, ranks, msgspec.structs.replace(RUN, algorithm=PPO), EXPERTS)
    gaps = [abs(_train(one, make_groups(2, seed)) - _train(several, make_groups(2, seed))) for seed in range(3)]
    assert max(gaps) <= 1e-5


def expert_adapters(ranks: Ranks, folder: Path) -> None:
    _adapters(ranks, folder, EXPERTS)


def expert_publication(ranks: Ranks, folder: Path) -> None:
    one, several = _both(folder, ranks, model=EXPERTS)
    prompts = ((1, 2, 3), (4, 5, 6))
    assert likeliest(several.model, RUN.trainer, prompts) == pytest.approx(likeliest(one.model, RUN.trainer, prompts))
    _publishes(ranks, one, several, torch.bfloat16)


def changed_tokens(ranks: Ranks, folder: Path) -> None:
    """Two rows that arrive in another order, or another group for one of the ranks: every rank refuses the step."""
    assert ranks.experts is not None
    run, groups = msgspec.structs.replace(RUN, rollout=Rollout(router_replay="on")), make_groups(3)
    _, several = _both(folder, ranks, run, EXPERTS)
    honest = ranks.experts.group
    if ranks.rank == 0:
        ranks.experts.group = _Swapping(honest)
    several.accumulate(groups)
    ranks.experts.group = honest
    with pytest.raises(RankError, match=r"rank 0 of a group received in layer 1 are not those that rank \d sent"):
        several.step()
    _, several = _both(folder, ranks, run, EXPERTS)
    with pytest.raises(RankError, match=r"were given other samples than rank 0: 1"):
        several.accumulate(groups[1:] if ranks.rank == 1 else groups[:2])


class _Around(RankGroup):
    """Another group, whose exchanges are interfered with."""

    def __init__(self, honest: RankGroup) -> None:
        self._honest, self.rank, self.size = honest, honest.rank, honest.size


class _Swapping(_Around):
    """Swaps the first two rows that arrive."""

    def exchange(self, x_S_X: Tensor, sent: Sequence[int], received: Sequence[int]) -> Tensor:
        found = self._honest.exchange(x_S_X, sent, received)
        return torch.cat([found[1:2], found[:1], found[2:]]) if found.is_floating_point() else found


class _Dying(_Around):
    """Ends its process in the middle of a forward, or of the backward after it."""

    def __init__(self, honest: RankGroup, *, backward: bool) -> None:
        super().__init__(honest)
        self._backward, self._exchanges = backward, 0

    def exchange(self, x_S_X: Tensor, sent: Sequence[int], received: Sequence[int]) -> Tensor:
        self._exchanges += 1
        if self._exchanges == 4 and not self._backward:
            os._exit(9)
        found = self._honest.exchange(x_S_X, sent, received)
        if found.requires_grad and self._backward:
            found.register_hook(lambda _: os._exit(9))
        return found


def killed_in_forward(ranks: Ranks, folder: Path) -> None:
    _killed(ranks, folder, backward=False)


def killed_in_backward(ranks: Ranks, folder: Path) -> None:
    _killed(ranks, folder, backward=True)


def killed_in_checkpoint(ranks: Ranks, folder: Path) -> None:
    _killed(ranks, folder)


def _killed(ranks: Ranks, folder: Path, *, backward: bool | None = None) -> None:
    """The last rank is; the others are not left waiting for it."""
    assert ranks.experts is not None
    _, several = _both(folder, ranks, model=EXPERTS)
    last = ranks.rank == ranks.world - 1
    if backward is not None and last:
        ranks.experts.group = _Dying(ranks.experts.group, backward=backward)
    if backward is not None:
        with pytest.raises(RuntimeError, match=r"[Cc]onnection|[Tt]imed out"):
            several.accumulate(make_groups(3))
        return
    several.accumulate(make_groups(3))
    several.step()
    if last:
        os._exit(9)
    with pytest.raises(RuntimeError, match=r"[Cc]onnection|[Tt]imed out"):
        checkpoint.save(several, folder / "killed", MANIFEST, model_path=folder / EXPERTS, keep=1)
    assert checkpoint.numbered(folder / "killed") == []


def arrival(ranks: Ranks, folder: Path) -> None:
    ranks.fence()


def bf16_gradients(ranks: Ranks, folder: Path) -> None:
    """Batches are cut in other places, and bf16 rounds what is added up within one."""
    one, several = _both(folder, ranks, msgspec.structs.replace(RUN, trainer=Trainer(dtype="bf16")))
    for learner in (one, several):
        learner.accumulate(make_groups(4))
    _close(one, several, 0.02)


def bf16_reduction(ranks: Ranks, folder: Path) -> None:
    """Gradients of an fp32 computation arrive as bf16 numbers, close to those that one rank computes."""
    for model in (TIED, EXPERTS):
        one, several = _both(folder, ranks, model=model)
        for learner in (one, several):
            learner.accumulate(make_groups(3))  # one batch: the next would be added to it in fp32
        _close(one, several, 0.02)
        found = [ranks.mine(gradient) for gradient in gradients_of(several)]
        if model == TIED or ranks.experts is None:
            assert all(torch.equal(gradient, gradient.bfloat16().float()) for gradient in found)
        if ranks.rank == 0:
            assert any(not torch.equal(gradient, gradient.bfloat16().float()) for gradient in gradients_of(one))


def algorithms(ranks: Ranks, folder: Path) -> None:
    """Whole steps: a critic, advantages over the step, penalties in the reward, weights that are normalised, experts
    whose loads are figures."""
    chosen: list[Algorithm] = [PPO, ReinforcePp(kl=Kl(coefficient=0.1, placement="reward"))]
    normalized = msgspec.structs.replace(RUN, correction=Importance(reject=(), batch_normalize=True))
    scenes = [(normalized, TIED), (RUN, EXPERTS)]
    scenes += [(msgspec.structs.replace(RUN, algorithm=algorithm), TIED) for algorithm in chosen]
    for run, model in scenes:
        one, several = _both(folder, ranks, run, model)
        for seed in range(2):
            groups = make_groups(3, seed)
            for learner in (one, several):
                for group in groups:
                    learner.accumulate([group])
            mine, theirs = one.step(), several.step()
            assert mine.samples == theirs.samples
            assert abs(mine.loss - theirs.loss) < 1e-5
            assert abs(mine.grad_norm - theirs.grad_norm) < 1e-4
            for name, value in mine.figures.items():
                assert abs(value - theirs.figures[name]) < 1e-4 * max(1, abs(value)), name
            assert [share.tokens for share in mine.shares] == [share.tokens for share in theirs.shares]
            furthest, found = mine.off_policy, theirs.off_policy
            assert furthest is not None
            assert found is not None
            assert (furthest.group, furthest.sample) == (found.group, found.sample)


def twenty_steps(ranks: Ranks, folder: Path) -> None:
    one, several = _both(folder, ranks)
    gaps = [abs(_train(one, make_groups(3, seed)) - _train(several, make_groups(3, seed))) for seed in range(20)]
    assert max(gaps) <= 1e-5
    (folder / "gap").write_text(f"{max(gaps):.2g}")


def means_of_replicas(ranks: Ranks, folder: Path) -> None:
    """By hand: replica r has a gradient of r + 1 everywhere. The norm is that of the first replica, at all of them."""
    trained = list(Learner(folder / TIED, RUN, ranks).model.parameters())
    shards = cast(DTensor, trained[0]).device_mesh.size()
    replicas, own = ranks.world // shards, ranks.rank // shards + 1
    count = sum(parameter.numel() for parameter in trained)
    for parameter in trained:
        parameter.grad = torch.full_like(parameter, own)
    assert ranks.clip(trained, 1e9) == pytest.approx(count**0.5)
    ranks.combine(trained)
    for parameter in trained:
        assert parameter.grad is not None
        assert (ranks.mine(parameter.grad) == (replicas + 1) / 2).all()
    norm = (replicas + 1) / 2 * count**0.5
    assert ranks.clip(trained, norm / 4) == pytest.approx(norm)
    assert trained[0].grad is not None
    assert ranks.mine(trained[0].grad).numpy() == pytest.approx((replicas + 1) / 8)


def equal_replicas(ranks: Ranks, folder: Path) -> None:
    """Every replica has all weights, moments and norms, the same to the bit after steps whose gradient is shortened;
    each of its ranks has only its part of them."""
    run = msgspec.structs.replace(RUN, algorithm=PPO, trainer=Trainer(lr=1e-3, grad_clip=0.1))
    for model in (TIED, EXPERTS):
        learner, norms = Learner(folder / model, run, ranks), list[float]()
        for seed in range(3):
            learner.accumulate(make_groups(3, seed))
            norms.append(learner.step().grad_norm)
        assert learner.critic is not None
        held = {name: ranks.mine(p.detach()) for name, p in learner.model.named_parameters()}
        held |= {f"critic.{name}": ranks.mine(p.detach()) for name, p in learner.critic.named_parameters()}
        moments = [ranks.mine(state["exp_avg_sq"]) for state in learner.optimizer.state.values()]
        digest = sha256(repr(norms).encode())
        for tensor in (*held.values(), *moments):
            digest.update(tensor.cpu().numpy().tobytes())
        places = [found.decode() for found in ranks.exchange(digest.hexdigest().encode())]
        shards = len(set(places))
        assert places == places[:shards] * (ranks.world // shards), "by the place in a replica"
        first = next(learner.model.parameters())
        rows = [int(count) for count in ranks.exchange(str(len(ranks.mine(first))).encode())]
        assert sum(rows[:shards]) == len(first)
        (folder / f"shards-{ranks.rank}").write_text(str(shards))


def resume(ranks: Ranks, folder: Path) -> None:
    """2 -> 1 -> 2: nothing of weights and optimizer changes on the way, and training goes on as without it."""
    run = msgspec.structs.replace(RUN, algorithm=PPO)
    one, several = _both(folder, ranks, run)
    for seed in range(2):
        _train(several, make_groups(3, seed))
    first = checkpoint.save(several, folder / "first", MANIFEST, model_path=folder / TIED, keep=1)
    checkpoint.restore(one, first)
    alone = folder / f"alone-{ranks.rank}"
    second = checkpoint.save(one, alone, MANIFEST, model_path=folder / TIED, keep=1)
    again = Learner(folder / TIED, run, ranks)
    checkpoint.restore(again, second)
    _same(several, again)
    files = {f"critic-{rank + 1:05}-of-{ranks.world:05}.safetensors" for rank in range(ranks.world)}
    assert files <= set(os.listdir(first))
    again.version = one.version = several.version
    groups = make_groups(3, 7)
    assert _train(several, groups) == _train(again, groups)
    _same(several, again)
    assert abs(_train(one, groups) - _train(Learner(folder / TIED, run), groups)) > 1e-6  # it has learned before


def leave_checkpoint(ranks: Ranks, folder: Path) -> None:
    """Of a dense model with a critic, and of experts; for ranks of another number."""
    for model, algorithm in ((TIED, PPO), (EXPERTS, Grpo())):
        learner = Learner(folder / model, msgspec.structs.replace(RUN, algorithm=algorithm), ranks)
        for seed in range(2):
            _train(learner, make_groups(3, seed))
        checkpoint.save(learner, folder / f"left-{model}", MANIFEST, model_path=folder / model, keep=1)


def find_checkpoint(ranks: Ranks, folder: Path) -> None:
    """Every number is what one rank reads, and the next step is that of one rank."""
    for model, algorithm in ((TIED, PPO), (EXPERTS, Grpo())):
        one, several = _both(folder, ranks, msgspec.structs.replace(RUN, algorithm=algorithm), model)
        for learner in (one, several):
            checkpoint.restore(learner, folder / f"left-{model}" / "step-0")
        _same(several, one)
        assert abs(_train(several, make_groups(3, 7)) - _train(one, make_groups(3, 7))) < 1e-5


def _same(a: Learner, b: Learner) -> None:
    pairs: list[tuple[nn.Module, torch.optim.Optimizer, nn.Module, torch.optim.Optimizer]]
    pairs = [(a.model, a.optimizer, b.model, b.optimizer)]
    if a.critic is not None and b.critic is not None:
        pairs.append((a.critic, a.critic.optimizer, b.critic, b.critic.optimizer))
    for mine, my_optimizer, theirs, their_optimizer in pairs:
        for (name, p), q in zip(mine.named_parameters(), theirs.parameters(), strict=True):
            assert torch.equal(a.ranks.whole(p), b.ranks.whole(q)), name
            state, other = my_optimizer.state.get(p, {}), their_optimizer.state.get(q, {})
            assert state.keys() == other.keys()
            for key in state:
                x, y = (s[key] if key == "step" else r.ranks.whole(s[key]) for r, s in ((a, state), (b, other)))
                assert torch.equal(x, y), (name, key)


def adapters(ranks: Ranks, folder: Path) -> None:
    """LoRA: the same steps, files and publications."""
    for model in (UNTIED, EXPERTS):
        _adapters(ranks, folder, model)


def _adapters(ranks: Ranks, folder: Path, model: str) -> None:
    run = msgspec.structs.replace(RUN, trainer=Trainer(lr=1e-2, lora=Lora(rank=2, targets=("q_proj", "down_proj"))))
    one, several = _both(folder, ranks, run, model)
    for seed in range(3):
        assert abs(_train(one, make_groups(2, seed)) - _train(several, make_groups(2, seed))) < 1e-5
    saved = checkpoint.save(several, folder / f"adapted-{model}", MANIFEST, model_path=folder / model, keep=1)
    checkpoint.restore(one, saved)
    source = several.source(torch.float32, adapters_only=True)
    specs, _ = source.layout()
    assert [spec.shape[0] for spec in specs] == [2] * 4, "both layers in one tensor"
    found = {spec.name: source.gather(spec) for spec in specs}
    expected = one.source(torch.float32, adapters_only=True)
    for spec in expected.layout()[0]:
        tensor, other = found[spec.name], expected.gather(spec)
        assert (tensor is None) == (ranks.rank > 0)
        assert other is not None
        assert tensor is None or torch.equal(tensor, other)
    merged = checkpoint.weights(saved)
    assert all(torch.equal(tensor, merged[name]) for name, tensor in one.tensors())


def of_transformers(ranks: Ranks, folder: Path) -> None:
    """Experts in one weight with three axes, buffers, rows that are padded: gradients, files and publications."""
    for model, padded in ((THROUGH, False), (PADDED, True)):
        run = msgspec.structs.replace(RUN, trainer=Trainer(token_budget=120, checkpoint_activations=padded))
        one, several = _both(folder, ranks, run, model)
        assert one.model.packing == several.model.packing == ("padded" if padded else "packed")
        for learner in (one, several):
            learner.accumulate(make_groups(3))
        _close(one, several, _exact(one))
        assert abs(one.step().loss - several.step().loss) < 1e-5
        saved = checkpoint.save(several, folder / f"saved-{model}", MANIFEST, model_path=folder / model, keep=1)
        checkpoint.restore(one, saved)
        _publishes(ranks, one, several, torch.float32)


def broken_numbers(ranks: Ranks, folder: Path) -> None:
    """A sample on one rank makes a loss that is no number: every rank skips the step, and says why."""
    group = make_groups(1)[0]
    unsure = Segment.sampled([1, 2, 3], [float("nan")] * 3, 0)
    bad = msgspec.structs.replace(group.trajectories[1], segments=(group.trajectories[1].segments[0], unsure))
    _, several = _both(folder, ranks)
    before = {name: several.ranks.whole(p.detach()).clone() for name, p in several.model.named_parameters()}
    several.accumulate(make_groups(3, 1))
    several.accumulate([msgspec.structs.replace(group, trajectories=(group.trajectories[0], bad))])
    report = several.step()
    assert report.skipped
    assert "is not finite" in report.fault
    assert all(torch.equal(several.ranks.whole(p), before[name]) for name, p in several.model.named_parameters())


def publication(ranks: Ranks, folder: Path) -> None:
    """The first rank publishes what a learner alone would, also when something was computed in between."""
    one, several = _both(folder, ranks)
    prompts = ((1, 2, 3), (4, 5, 6))
    for dtype in (torch.float32, torch.bfloat16):
        assert torch.allclose(
            torch.tensor(likeliest(several.model, RUN.trainer, prompts)),
            torch.tensor(likeliest(one.model, RUN.trainer, prompts)),
        )
        _publishes(ranks, one, several, dtype)


def _publishes(ranks: Ranks, one: Learner, several: Learner, dtype: torch.dtype) -> None:
    source = several.source(dtype)
    if ranks.rank:
        Follower(source).publish(1)
        return
    writer = SharedMemoryWriter(source, prefix="test")
    published = dict(read_tensors(writer.publish(1)))
    expected = dict(one.served_tensors(dtype))
    assert published.keys() == expected.keys()
    assert all(torch.equal(published[name], tensor) for name, tensor in expected.items())
    writer.close()


def full_disk(ranks: Ranks, folder: Path) -> None:
    """One rank cannot write its files: every rank is told, and none waits for another. Nor where it is the first, which
    has files of its own before all others and after them."""
    several = Learner(folder / TIED, RUN, ranks)
    if ranks.rank == 0:
        (folder / "taken").write_text("no directory")
        (folder / "long").mkdir()
        (folder / "long" / "chat_template.jinja").write_text("{# #}" * 1_000_000)
    ranks.fence()
    with pytest.raises(StorageError, match="rank 0 cannot write: Not a directory"):
        checkpoint.save(several, folder / "taken" / "full", MANIFEST, model_path=folder / TIED, keep=1)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    if ranks.rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1024, hard))
    with pytest.raises(StorageError, match="rank 1 cannot write: File too large"):
        checkpoint.save(several, folder / "full", MANIFEST, model_path=folder / TIED, keep=1)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4_000_000 if ranks.rank == 0 else soft, hard))
    with pytest.raises(StorageError, match="rank 0 cannot write: File too large"):
        checkpoint.save(several, folder / "full", MANIFEST, model_path=folder / "long", keep=1)
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert checkpoint.numbered(folder / "full") == []
