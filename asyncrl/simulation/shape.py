"""The sizes of a model that its costs follow from."""

from asyncrl.config.base import Natural, Positive, Settings


class Shape(Settings, frozen=True, kw_only=True):
    """A decoder with gated layers, or with experts in all of its layers. bf16, two bytes a number."""

    layers: Positive
    hidden: Positive
    heads: Positive
    kv_heads: Positive
    head_dim: Positive = 128
    vocabulary: Positive
    width: Positive
    """Of the gated layer, or of that of one expert."""
    experts: Natural = 0
    """Of a layer; 0: it is dense."""
    active: Natural = 0
    """Experts of a token."""
    tied: bool = False
    """Input and output matrix are one."""

    def __post_init__(self) -> None:
        if bool(self.experts) != bool(self.active):
            raise ValueError("experts and active go together: set both, or none")
        if self.active > self.experts:
            raise ValueError(f"active={self.active} is more than experts={self.experts}")
        if self.heads % self.kv_heads:
            raise ValueError(f"kv_heads={self.kv_heads} does not divide heads={self.heads}")

    @property
    def attention(self) -> int:
        """Weights of one layer that are not of its gated layer."""
        return 2 * self.hidden * (self.heads + self.kv_heads) * self.head_dim + self.hidden * self.experts

    @property
    def gated(self) -> int:
        """Weights of one gated layer, or of all experts of a layer."""
        return 3 * self.hidden * self.width * max(1, self.experts)

    @property
    def table(self) -> int:
        """Weights of the input matrix, and of the output matrix."""
        return self.vocabulary * self.hidden

    @property
    def outside(self) -> int:
        """Weights that are in no layer."""
        return self.table * (1 if self.tied else 2)

    @property
    def parameters(self) -> int:
        return self.layers * (self.attention + self.gated) + self.outside

    @property
    def used(self) -> float:
        """Weights that one token is multiplied with."""
        share = self.active / self.experts if self.experts else 1.0
        return self.layers * (self.attention + self.gated * share) + self.table
