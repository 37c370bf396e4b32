"""What becomes of drafts on a GPU, against p and q in fp64, and as a distribution."""

from typing import NamedTuple

import torch
from torch import Tensor

from asyncrl.engines.native.cuda.kernels.shapes import Drafts, Kernels, Proposals
from tests.support.cuda_places import Place, both


class Verified(NamedTuple):
    """Drafts of a few rows, made in other rows of the step before, and what became of them."""

    logits_N_W_V: Tensor
    drafts: Drafts
    token_N_W: Tensor
    logprob_N_W: Tensor
    accepted_N: Tensor

    def right(self) -> None:
        """Row by row in fp64: p and q, who passes, and that a drawn token's range holds the random number."""
        for row in range(len(self.accepted_N)):
            heat, drafted = float(self.drafts.temperature_N[row]), self.drafted(row)
            p_W_V = (self.logits_N_W_V[row].double() / (heat or 1.0)).softmax(-1)
            for column in range(self.token_N_W.shape[1]):
                token = int(self.token_N_W[row, column])
                assert abs(float(self.logprob_N_W[row, column]) - float(p_W_V[column, token].log())) < 1e-4
                if column == len(drafted) or not self.passes(row, column, drafted[column], p_W_V[column]):
                    assert column == int(self.accepted_N[row])
                    self.final(row, column, token, p_W_V[column], rejected=column < len(drafted))
                    break
                assert token == drafted[column]

    def drafted(self, row: int) -> list[int]:
        numbers = [int(number) for number in self.drafts.token_N_W[row, 1 : 1 + int(self.drafts.count_N[row])]]
        ahead = self.drafts.ahead_W_B.flatten().tolist()
        return [ahead[-1 - number] if number < 0 else number for number in numbers]

    def q(self, row: int, column: int) -> Tensor:
        found, heat = self.drafts.proposals, float(self.drafts.temperature_N[row])
        assert found is not None
        made_in = (-1 - int(self.drafts.token_N_W[row, 1])) % self.drafts.ahead_W_B.shape[1]
        q_U = (found.logits_C_B_U[column, made_in].double() / heat).softmax(-1)
        return torch.where(found.place_V < 0, 0.0, q_U[found.place_V.clamp(min=0).long()])

    def guesses(self, row: int) -> bool:
        return self.drafts.proposals is None or float(self.drafts.temperature_N[row]) == 0

    def passes(self, row: int, column: int, draft: int, p_V: Tensor) -> bool:
        if not self.guesses(row):
            ratio = float(p_V[draft] / self.q(row, column)[draft])
            return float(self.drafts.accept_N_W[row, column]) <= ratio
        if float(self.drafts.temperature_N[row]) == 0:
            return draft == int(p_V.argmax())
        return draft == int(self.token_N_W[row, column])

    def final(self, row: int, column: int, token: int, p_V: Tensor, *, rejected: bool) -> None:
        if float(self.drafts.temperature_N[row]) == 0:
            assert token == int(p_V.argmax())
            return
        uniform, weight_V = self.drafts.plain_N_W, p_V
        if rejected and not self.guesses(row):
            uniform, weight_V = self.drafts.residual_N_W, (p_V - self.q(row, column)).clamp(min=0)
        assert float(weight_V[token]) > 0
        upper = float(weight_V[: token + 1].sum() / weight_V.sum())
        lower = upper - float(weight_V[token] / weight_V.sum())
        assert lower - 1e-5 <= float(uniform[row, column]) <= upper + 1e-5


def verify(place: Place) -> None:
    size, vocabulary = (151_936, 32_000) if place.large else (5000, 700)
    rows, width, others = 12, 4, 16
    logits_N_W_V = place.normal(rows, width, size) * 2
    place_V = torch.full((size,), -1, dtype=torch.int32, device=place.device)
    ids_U = torch.randperm(size, generator=torch.Generator().manual_seed(3))[:vocabulary].to(place.device)
    place_V[ids_U] = torch.arange(vocabulary, dtype=torch.int32, device=place.device)
    logits_N_W_V[:, :, ids_U] += 3.0  # so that drafts have a chance
    temperature_N = torch.tensor([0.0, *[1.0] * 5, 0.7, *[1.0] * 3, 1.4, 0.5], device=place.device)
    made_in_N = torch.arange(rows) + 3
    q_C_B_U = place.normal(width - 1, others, vocabulary) * 2
    q_C_B_U[:, made_in_N] = 0.9 * logits_N_W_V[:, :-1, ids_U].transpose(0, 1) + 0.1 * q_C_B_U[:, made_in_N]
    heat_N_1 = torch.where(temperature_N == 0, 1.0, temperature_N)[:, None]
    logq_C_N_U = (q_C_B_U[:, made_in_N] / heat_N_1).log_softmax(-1)
    chosen_C_N = (logq_C_N_U + 0.5 * place.normal(*logq_C_N_U.shape)).argmax(-1)
    ahead_W_B = torch.zeros(width, others, dtype=torch.int32, device=place.device)
    ahead_W_B[1:, made_in_N] = ids_U[chosen_C_N].int()
    logprob_C_B = torch.zeros(width - 1, others, device=place.device)
    logprob_C_B[:, made_in_N] = logq_C_N_U.gather(2, chosen_C_N[:, :, None])[..., 0]
    numbers_N_W = -1 - (torch.arange(width) * others + made_in_N[:, None])
    plain, accept, residual = torch.rand(3, rows, width, generator=torch.Generator().manual_seed(5)).to(place.device)
    drafts = Drafts(
        numbers_N_W.to(place.device, torch.int32),
        ahead_W_B,
        place.integers([3, 3, 3, 3, 2, 0, 3, 1, 3, 3, 3, 3]),
        temperature_N,
        plain,
        accept,
        residual,
        Proposals(q_C_B_U, logprob_C_B, place_V),
    )
    accepted: list[list[int]] = []

    def run(kernels: Kernels, drafts: Drafts, logits_N_W_V: Tensor = logits_N_W_V) -> None:
        grid = drafts.token_N_W.shape
        token_X = torch.zeros(grid.numel(), dtype=torch.int32, device=place.device)
        logprob_X, accepted_N = torch.zeros(grid.numel(), device=place.device), place.integers([9] * grid[0])
        kernels.verify(logits_N_W_V.flatten(0, 1), drafts, token_X, logprob_X, accepted_N)
        Verified(logits_N_W_V, drafts, token_X.view(grid), logprob_X.view(grid), accepted_N).right()
        accepted.append(accepted_N.tolist())

    for case in (drafts, drafts._replace(proposals=None)):
        both(lambda kernels, case=case: run(kernels, case))
    assert accepted[0] == accepted[1]
    assert {0, 3} < set(accepted[0]), "nothing, all, and something in between"
    assert accepted[2] == accepted[3]
    lukewarm = slice(6, 7)  # one row, and others of other temperatures behind it in memory
    parts = {"token_N_W", "count_N", "temperature_N", "plain_N_W", "accept_N_W", "residual_N_W"}
    alone = drafts._replace(**{name: getattr(drafts, name)[lukewarm] for name in parts})
    both(lambda kernels: run(kernels, alone, logits_N_W_V[lukewarm]))


def verify_leaves_the_targets_distribution(place: Place) -> None:
    """Two drafts from q and one token more, many times: first tokens, and pairs, are distributed as p."""
    rows, width = (60_000 if place.large else 500), 3
    p_V, q_V = (torch.tensor(x, device=place.device) for x in ([0.5, 0.2, 0.3], [0.2, 0.7, 0.1]))
    uniform = 1 - torch.rand(4, rows, width, generator=torch.Generator().manual_seed(0)).to(place.device)
    draft_N_C = torch.searchsorted(q_V.cumsum(0), uniform[3, :, :2].contiguous()).clamp(max=2)
    ahead_W_B = torch.zeros(width, rows, dtype=torch.int32, device=place.device)
    ahead_W_B[1:] = draft_N_C.t()
    row_N = torch.arange(rows, dtype=torch.int32, device=place.device)
    numbers_N_W = torch.stack([-1 - (column * rows + row_N) for column in range(width)], 1)
    proposals = Proposals(
        q_V.log().expand(2, rows, 3).contiguous(),
        q_V.log()[draft_N_C.t()].contiguous(),
        torch.arange(3, dtype=torch.int32, device=place.device),
    )
    ones_N = torch.ones(rows, device=place.device)
    plain, accept, residual = uniform[:3]
    drafts = Drafts(numbers_N_W, ahead_W_B, torch.full_like(row_N, 2), ones_N, plain, accept, residual, proposals)

    def run(kernels: Kernels) -> None:
        token_X = torch.zeros(rows * width, dtype=torch.int32, device=place.device)
        logprob_X, accepted_N = torch.zeros(rows * width, device=place.device), torch.zeros_like(row_N)
        kernels.verify(p_V.log().repeat(rows * width, 1), drafts, token_X, logprob_X, accepted_N)
        token_N_W = token_X.view(rows, width)
        first = token_N_W[:, 0].long()
        second = token_N_W[accepted_N > 0, :2].long()
        chi(first.bincount(minlength=3), rows * p_V, 13.8)  # 2 degrees of freedom, p = 0.001
        expected = second[:, 0].bincount(minlength=3)[:, None] * p_V
        chi((second[:, 0] * 3 + second[:, 1]).bincount(minlength=9), expected.flatten(), 22.5)  # 6 degrees
        overlap = float(torch.minimum(p_V, q_V).sum())
        assert abs(float((accepted_N > 0).float().mean()) - overlap) < 5 * (overlap / rows) ** 0.5

    both(run)


def chi(found: Tensor, expected: Tensor, limit: float) -> None:
    assert float(((found - expected) ** 2 / expected).sum()) < limit
