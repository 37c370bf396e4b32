"""AdamW on fp32 master weights of which little is on the card.

torch's own AdamW wants masters, their bf16 copies, gradients and two moments: 18 bytes a parameter. Here

    weights     bf16, which training and engines compute with; the other half of each fp32 master is 16 bits more
    gradients   fp32, to which those of each backward are added as soon as they are there
    moments     fp32, or one byte each (`EightBit`), which is approximate
    offload     moments and the masters' other halves lie in the host's memory and visit the card piece by piece

Weights that are fp32 themselves have no other half. A piece is updated by one function of flat tensors, which reads and
writes each number once when it is compiled. The same numbers go in and come out wherever they lie.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from mmap import MAP_ANONYMOUS, MAP_PRIVATE, mmap
from typing import Any, NamedTuple, Self, cast

import torch
from torch import Tensor, nn

from asyncrl.models.compiling import compiled
from asyncrl.training.host_copies import on_host

PIECE = 1 << 25
"""Numbers of a parameter that are updated at a time."""
BLOCK = 256
"""Numbers that share a scale in 8 bits."""
HALF = "half"
"""The other half of a master."""
Tensors = dict[str, Tensor]
"""Flat, by kind: `weight`, `gradient`, `half`, and those of the moments."""


class Rates(NamedTuple):
    """Of one step, as tensors without axes: numbers would be compiled into the update."""

    lr: Tensor
    shrink: Tensor
    """What weight decay leaves of a weight."""
    fresh: Tensor
    """What a gradient counts in the first moment."""
    bias1: Tensor
    bias2_root: Tensor
    seed: Tensor
    """Of the rounding of this step."""


EPS = 1e-8


def split(master: Tensor) -> tuple[Tensor, Tensor]:
    """An fp32 number as the nearest bf16 and what is missing: 16 bits that follow, or, if rounded up, precede it."""
    bits = master.view(torch.int32)
    upper = (bits + 0x8000) & ~0xFFFF
    return upper.view(torch.float32).bfloat16(), (bits - upper).to(torch.int16)


def join(weight: Tensor, half: Tensor) -> Tensor:
    return (weight.float().view(torch.int32) + half.to(torch.int32)).view(torch.float32)


class Fp32Moments:
    """The two moments as torch keeps them."""

    @staticmethod
    def empty(numel: int, make: Callable[[int, torch.dtype], Tensor]) -> Tensors:
        return {name: make(numel, torch.float32) for name in ("exp_avg", "exp_avg_sq")}

    @staticmethod
    def read(kept: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        return kept["exp_avg"], kept["exp_avg_sq"]

    @staticmethod
    def write(kept: Mapping[str, Tensor], first: Tensor, second: Tensor, seed: Tensor) -> None:
        kept["exp_avg"].copy_(first)
        kept["exp_avg_sq"].copy_(second)


class EightBit:
    """A byte each and a scale for every 256, in steps that are finer for small numbers.

    The first moment is kept as its signed square root, the second as its fourth root, both in proportion to the largest
    of the block. Rounding is up or down by chance, and right on average: a moment moves by 1 to 10 % a step, which
    rounding to the nearest would undo. The chance is a hash of place and step, so a resumed run rounds the same.
    """

    @staticmethod
    def empty(numel: int, make: Callable[[int, torch.dtype], Tensor]) -> Tensors:
        blocks = numel // BLOCK
        return {
            "exp_avg_8bit": make(numel, torch.int8),
            "exp_avg_scale": make(blocks, torch.float32),
            "exp_avg_sq_8bit": make(numel, torch.uint8),
            "exp_avg_sq_scale": make(blocks, torch.float32),
        }

    @staticmethod
    def read(kept: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        root = kept["exp_avg_8bit"].view(-1, BLOCK).float() / 127
        first = root * root.abs() * kept["exp_avg_scale"][:, None]
        fourth = kept["exp_avg_sq_8bit"].view(-1, BLOCK).float() / 255
        second = fourth.square().square() * kept["exp_avg_sq_scale"][:, None]
        return first.flatten(), second.flatten()

    @staticmethod
    def write(kept: Mapping[str, Tensor], first: Tensor, second: Tensor, seed: Tensor) -> None:
        first, second = first.view(-1, BLOCK), second.view(-1, BLOCK)
        most1, most2 = first.abs().amax(1, keepdim=True), second.amax(1, keepdim=True)
        chance = _chance(first, seed)
        root = _rounded(first.abs() / most1.clamp(min=torch.finfo().tiny), 127, 1, chance)
        fourth = _rounded(second / most2.clamp(min=torch.finfo().tiny), 255, 2, chance)
        kept["exp_avg_8bit"].copy_((root * first.sign()).flatten())
        kept["exp_avg_scale"].copy_(most1.flatten())
        # Never 0 where there was a gradient: it divides.
        kept["exp_avg_sq_8bit"].copy_(fourth.maximum((second > 0).float()).flatten())
        kept["exp_avg_sq_scale"].copy_(most2.flatten())


def _rounded(part: Tensor, levels: int, roots: int, chance: Tensor) -> Tensor:
    """The level of a number from 0 to 1 whose square or fourth root is kept, by chance the one below or above."""
    root = part
    for _ in range(roots):
        root = root.sqrt()
    low = torch.floor(root * levels).clamp(0, levels - 1)
    below, above = ((level / levels) ** 2**roots for level in (low, low + 1))
    return low + ((part - below) / (above - below) > chance).float()


Moments = type[Fp32Moments] | type[EightBit]


def _chance(like: Tensor, seed: Tensor) -> Tensor:
    """From 0 to 1, a hash of the place in the piece and the seed."""
    bits = torch.arange(like.numel(), device=like.device, dtype=torch.int64) + seed * 0x632BE5AB
    for factor in (0x7FEB352D, 0x846CA68B, 0x9E3779B1):
        bits = (bits * factor) & 0xFFFFFFFF
        bits = bits ^ (bits >> 15)
    return (bits.float() / 2**32).view_as(like)


def _update(moments: Moments, beta2: float, rates: Rates, kept: Mapping[str, Tensor]) -> None:
    """One step of a piece, in place."""
    weight, gradient = kept["weight"], kept["gradient"]
    master = join(weight, kept[HALF]) if HALF in kept else weight
    first, second = moments.read(kept)
    first = first + (gradient - first) * rates.fresh
    second = beta2 * second + (1 - beta2) * gradient * gradient
    moments.write(kept, first, second, rates.seed)
    change = rates.lr * (first / rates.bias1) / (second.sqrt() / rates.bias2_root + EPS)
    master = master * rates.shrink - change
    if HALF in kept:
        rounded, half = split(master)
        weight.copy_(rounded)
        kept[HALF].copy_(half)
    else:
        weight.copy_(master)


def _update_fp32(beta2: float, rates: Rates, kept: Tensors) -> None:
    _update(Fp32Moments, beta2, rates, kept)


def _update_8bit(beta2: float, rates: Rates, kept: Tensors) -> None:
    _update(EightBit, beta2, rates, kept)


class AdamW(torch.optim.Optimizer):
    """For parameters in bf16 or fp32; rate and betas of a step are set in `param_groups`, as with torch's own."""

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        *,
        betas: tuple[float, float],
        weight_decay: float,
        eight_bit: bool = False,
        offload: bool = False,
        compile: bool = False,
    ) -> None:
        super().__init__(parameters, {"lr": 0.0, "betas": betas, "weight_decay": weight_decay})
        self._compile, self._eight_bit = compile, eight_bit
        self._device = self._parameters[0].device
        self._zeros: Callable[[int, torch.dtype], Tensor] = partial(_host if offload else _on_card, self._device)
        self._staging = Staging(self._device) if offload else None
        self._sums: dict[Tensor, Tensor] = {}
        for parameter in self._parameters:
            if parameter.dtype == torch.bfloat16:
                self.state[parameter][HALF] = self._zeros(parameter.numel(), torch.int16)
                # Not `grad_dtype`: torch.compile refuses a parameter whose gradient has another dtype.
                # Of the sums alone: a hook that knew the optimizer would keep it and its parameters in memory for good.
                parameter.register_post_accumulate_grad_hook(partial(_add_up, self._sums))

    @property
    def _parameters(self) -> list[nn.Parameter]:
        return self.param_groups[0]["params"]

    def moments_of(self, parameter: Tensor) -> Moments:
        """Few numbers need no saving, and norms and biases no rounding."""
        small = parameter.numel() < 16 * BLOCK or parameter.numel() % BLOCK
        return EightBit if self._eight_bit and not small else Fp32Moments

    @torch.no_grad()
    def master(self, parameter: nn.Parameter) -> Tensor:
        """The fp32 weight, as a tensor of its own unless it is the parameter."""
        half = self.state[parameter].get(HALF)
        if half is None:
            return parameter.detach()
        return join(parameter.detach(), half.to(self._device).view(parameter.shape))

    @torch.no_grad()
    def master_copy(self, parameter: nn.Parameter) -> Tensor:
        """The same as a copy in the host's memory, joined there: beside training the card has no room for it."""
        half = self.state[parameter].get(HALF)
        if half is None:
            return on_host(parameter).float()
        found, weight = torch.empty(parameter.shape), parameter.detach().view(-1)
        for begin in range(0, parameter.numel(), PIECE):
            piece = slice(begin, begin + PIECE)
            found.view(-1)[piece] = join(on_host(weight[piece]), on_host(half[piece]))
        return found

    @torch.no_grad()
    def set_master(self, parameter: nn.Parameter, value: Tensor) -> None:
        half = self.state[parameter].get(HALF)
        if half is None:
            parameter.copy_(value)
            return
        rounded, rest = split(value.to(self._device, torch.float32))
        parameter.copy_(rounded)
        half.copy_(rest.flatten())

    def gradient(self, parameter: nn.Parameter) -> Tensor | None:
        """The sum since the last step, in fp32."""
        return parameter.grad if parameter.dtype == torch.float32 else self._sums.get(parameter)

    @torch.no_grad()
    def average_gradients(self, count: float, longest: float) -> Tensor:
        """Divide the sums, shorten them together to a norm of at most `longest`, and return what it was."""
        for parameter in self._parameters:
            if self.gradient(parameter) is None:  # nothing to learn: Adam still moves by its momentum
                parameter.grad = torch.zeros_like(parameter)
                if parameter.dtype != torch.float32:
                    _add_up(self._sums, parameter)
        found = [gradient for p in self._parameters if (gradient := self.gradient(p)) is not None]
        norm = nn.utils.get_total_norm(found) / count
        factor = (longest / (norm + 1e-6)).clamp(max=1.0) / count
        for gradient in found:
            gradient.mul_(factor)
        return norm

    def zero_grad(self, set_to_none: bool = True) -> None:
        super().zero_grad(set_to_none)
        self._sums.clear()

    def make_moments(self, parameter: nn.Parameter) -> Tensors:
        """Zeros, from here on in the state."""
        found = self.moments_of(parameter).empty(parameter.numel(), self._zeros)
        self.state[parameter] |= found | {"step": torch.zeros(())}
        return found

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """No closure is called: there are gradients already."""
        for parameter in self._parameters:
            if (gradient := self.gradient(parameter)) is None:
                continue
            state = self.state[parameter]
            if "step" not in state:
                self.make_moments(parameter)
            state["step"] += 1
            rates, kinds = self._rates(int(state["step"])), self.moments_of(parameter)
            update = partial(self._chosen(kinds), self.param_groups[0]["betas"][1], rates)
            pieces = _pieces(parameter, gradient, {k: v for k, v in state.items() if k != "step"})
            if self._staging is None:
                for here, kept in pieces:
                    update(here | kept)
            else:
                self._staging.run(update, pieces)
        if self._staging is not None:
            self._staging.finish()

    def _chosen(self, kinds: Moments) -> Callable[..., None]:
        function = _update_8bit if kinds is EightBit else _update_fp32
        return cast(Callable[..., None], compiled(function)) if self._compile else function

    def _rates(self, step: int) -> Rates:
        group = self.param_groups[0]
        lr, (beta1, beta2) = group["lr"], group["betas"]
        numbers = lr, 1 - lr * group["weight_decay"], 1 - beta1, 1 - beta1**step, (1 - beta2**step) ** 0.5
        return Rates(*map(torch.tensor, numbers), seed=torch.tensor(step))


def _add_up(sums: dict[Tensor, Tensor], parameter: Tensor) -> None:
    grad = parameter.grad
    assert grad is not None
    if parameter in sums:
        sums[parameter].add_(grad)
    else:
        sums[parameter] = grad.float()
    parameter.grad = None


def _pieces(parameter: nn.Parameter, gradient: Tensor, state: Tensors) -> Iterator[tuple[Tensors, Tensors]]:
    """What is on the card and what may be elsewhere, for some numbers of a parameter at a time."""
    numel = parameter.numel()
    flat = {"weight": parameter.detach().view(-1), "gradient": gradient.view(-1)}
    for begin in range(0, numel, PIECE):
        end = min(begin + PIECE, numel)
        yield (
            {name: tensor[begin:end] for name, tensor in flat.items()},
            {k: t[begin * len(t) // numel : end * len(t) // numel] for k, t in state.items()},
        )


def _on_card(device: torch.device, numel: int, dtype: torch.dtype) -> Tensor:
    return torch.zeros(numel, dtype=dtype, device=device)


def _host(device: torch.device, numel: int, dtype: torch.dtype) -> Tensor:
    """Memory of the host that the card can copy from and to by itself."""
    if device.type != "cuda" or not numel:
        return torch.zeros(numel, dtype=dtype)
    return torch.frombuffer(PinnedMemory(numel * dtype.itemsize), dtype=dtype)


class PinnedMemory(mmap):
    """Zeros that CUDA may copy as they lie, until nothing refers to them.

    Not `pin_memory`, which rounds sizes up to powers of two. Not pages that others use too: memory that is given back
    while CUDA takes it for pinned is read and written at its old place by whoever gets it next.
    """

    def __new__(cls, size: int) -> Self:
        return super().__new__(cls, -1, size, flags=MAP_PRIVATE | MAP_ANONYMOUS)

    def __init__(self, size: int) -> None:
        self._address = torch.frombuffer(self, dtype=torch.uint8).data_ptr()
        if code := int(cast(Any, torch.cuda.cudart()).cudaHostRegister(self._address, size, 0)):
            self._address = 0
            raise RuntimeError(f"trainer.offload cannot pin {size} bytes of host memory (CUDA error {code})")

    def __del__(self) -> None:
        if self._address:
            torch.cuda.synchronize()  # a copy may be on its way
            cast(Any, torch.cuda.cudart()).cudaHostUnregister(self._address)


class Staging:
    """Room on the card for what visits it: while a piece is updated, the next comes in and the last goes out."""

    DEPTH = 3

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._device = device
        self._turn = 0
        self._rooms: list[Tensors] = [{} for _ in range(self.DEPTH)]
        self._free: list[Any] = [None] * self.DEPTH
        self._incoming, self._outgoing = (torch.cuda.Stream(device) if self._cuda else None for _ in range(2))

    def run(self, update: Callable[[Tensors], None], pieces: Iterable[tuple[Tensors, Tensors]]) -> None:
        for here, host in pieces:
            room = self._room(host)
            if not self._cuda:
                _copy(room, host)
                update(here | room)
                _copy(host, room)
                continue
            main = torch.cuda.current_stream(self._device)
            free, slot = self._free[self._turn], self._turn
            with torch.cuda.stream(self._incoming):
                if free is not None:
                    torch.cuda.current_stream().wait_event(free)
                _copy(room, host)
                arrived = torch.cuda.current_stream().record_event()
            main.wait_event(arrived)
            update(here | room)
            done = main.record_event()
            with torch.cuda.stream(self._outgoing):
                torch.cuda.current_stream().wait_event(done)
                _copy(host, room)
                self._free[slot] = torch.cuda.current_stream().record_event()
            self._turn = (slot + 1) % self.DEPTH

    def _room(self, host: Tensors) -> Tensors:
        rooms = self._rooms[self._turn]
        for name, tensor in host.items():
            if name not in rooms or len(rooms[name]) < len(tensor):
                self.finish()  # other streams may be at work in the room that is given up
                rooms[name] = torch.empty_like(tensor, device=self._device)
        return {name: rooms[name][: len(tensor)] for name, tensor in host.items()}

    def finish(self) -> None:
        """Everything is at home again: the host may read it."""
        if self._cuda:
            torch.cuda.synchronize(self._device)


def _copy(targets: Tensors, sources: Tensors) -> None:
    for name, target in targets.items():
        target.copy_(sources[name], non_blocking=True)
