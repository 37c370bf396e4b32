"""Momentum that is the shorter, the older samples are.

Adam averages gradients over about 1 / (1 - beta1) steps, which makes each of them count late: by 9 steps on average at
0.9. Samples that are `a` versions old are late already. On a steep curve the two add up, and what a run learns a sample
falls behind a synchronous one (docs/staleness.md has the figures; for plain gradient descent: Mitliagkas et al. 2016,
"Asynchrony begets momentum"). So beta1 is raised to the power 1 + a: gradients of age 1 are averaged over half as many
steps. With samples of the trainer's own version nothing changes.
"""

from collections.abc import Iterable

from asyncrl.types import Trajectory


class Momentum:
    """`observe` every sample of a step, then take `beta1`, and call `applied` if the step is made."""

    def __init__(self, beta1: float, *, shortened: bool) -> None:
        self._beta1, self._shortened = beta1, shortened
        self.ages = 0.0
        """The sum over all steps made, by which the first moment's weights are known; a checkpoint keeps it."""
        self.begin()

    def begin(self) -> None:
        """A new step."""
        self._sum, self._samples = 0, 0

    def observe(self, trajectories: Iterable[Trajectory], version: int) -> None:
        ages = [max(0, version - trajectory.oldest_version) for trajectory in trajectories]
        self._sum += sum(ages)
        self._samples += len(ages)

    @property
    def _age(self) -> float:
        return self._sum / max(self._samples, 1) if self._shortened else 0.0

    @property
    def beta1(self) -> float:
        """Of this step."""
        return self._beta1 ** (1 + self._age)

    def applied(self, steps: int) -> float:
        """Count this step in, the one of this number; what its rate is multiplied by.

        Adam divides the first moment by the sum of its weights, 1 - beta1^steps were all steps like this one. It is 1
        less the product of all that beta1 has been.
        """
        self.ages += self._age
        return (1 - self.beta1**steps) / (1 - self._beta1 ** (steps + self.ages))
