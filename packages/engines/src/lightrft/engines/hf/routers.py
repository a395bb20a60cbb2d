"""Choice of experts in the layers of a model: seen in a trial pass, recorded, and replayed.

A layer chooses experts by a top-k of scores, whose indices then go to another module together with
as many weights. A trial pass finds these calls, in whichever module and family they stand. Replayed
choices keep the arithmetic of the model: weights, and gradients of the router, come from its scores
at these experts.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)
from torch.overrides import TorchFunctionMode

_TOP_K: tuple[Callable[..., object], ...] = (torch.topk, Tensor.topk)
_LAYER = re.compile(r"\blayers\.(\d+)\.")
# Tokens of the pass that finds routers.
TRIED_TOKENS = 8


Choice = tuple[Tensor, Tensor]  # values and indices of a top-k
# Function (scores, top-k of them) -> what the caller gets.
Answer = Callable[[Tensor, Callable[[], Choice]], Choice]


class _TopKCalls(TorchFunctionMode):
    """Passes every top-k inside to a function."""

    def __init__(self, answer: Answer) -> None:
        super().__init__()
        self._answer = answer

    def __torch_function__(
        self,
        func: Callable[..., object],
        types: object,
        args: tuple[object, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        options = dict(kwargs or {})
        if func not in _TOP_K:
            return func(*args, **options)
        scores = cast("Tensor", args[0] if args else options["input"])
        return self._answer(scores, lambda: cast("Choice", func(*args, **options)))


class Router:
    """Choice of experts of one layer.

    Args:
        name: Name of the module that chooses.
        module: That module.
        place: Number of the call of top-k within a pass of the module.
        k, num_experts: Experts that a token gets, and those there are.

    Attributes:
        replayed: [tokens, k] int64 experts of the next passes, -1 where the model chooses; None
            lets it choose.
        chosen: [tokens, k] int64 experts of the last pass.
        natural: [tokens, k] int64 experts that the model would have chosen in it.
    """

    def __init__(self, name: str, module: nn.Module, place: int, k: int, num_experts: int) -> None:
        self.name, self.k, self.num_experts, self._place = name, k, num_experts, place
        self.replayed: Tensor | None = None
        self.chosen: Tensor | None = None
        self.natural: Tensor | None = None
        plain = module.forward

        def forward(*args: object, **options: object) -> object:
            calls = iter(range(self._place, -1, -1))

            def answer(scores: Tensor, call: Callable[[], Choice]) -> Choice:
                return self._choose(scores, call) if next(calls, -1) == 0 else call()

            with _TopKCalls(answer):
                return plain(*args, **options)

        module.forward = forward

    def _choose(self, scores: Tensor, call: Callable[[], Choice]) -> Choice:
        result = call()
        natural = result[1]
        self.natural = self.chosen = natural.detach()
        if self.replayed is None:
            return result
        if len(self.replayed) != len(natural):
            raise RoutesError(
                f"{self.name} chooses experts for {len(natural)} tokens, and recorded ones are of "
                f"{len(self.replayed)}: report this with the type of the model"
            )
        self.chosen = torch.where(self.replayed < 0, natural, self.replayed)
        pair = scores.gather(-1, self.chosen), self.chosen
        return torch.return_types.topk(pair)


class RoutesError(RuntimeError):
    """Recorded experts that cannot be those of a model's tokens."""


@dataclass(slots=True)
class _Pass:
    """Pass of a module that has not ended, and the calls of top-k in it."""

    module: nn.Module
    num_calls: int = 0


@dataclass(slots=True)
class _Call:
    """Call of top-k directly in the pass of a module."""

    module: nn.Module
    place: int
    num_experts: int
    indices: Tensor

    def gave(self, indices: Tensor) -> bool:
        return self.indices.shape == indices.shape and torch.equal(self.indices, indices)


def find_routers(model: nn.Module, run: Callable[[], object]) -> list[Router]:
    """Return the routers of a model in the order of its layers; none for models without experts.

    Args:
        model: Model; modules that choose get a forward pass that can record and replay.
        run: Function that runs the model on a few tokens.
    """
    names = {module: name for name, module in model.named_modules()}
    stack: list[_Pass] = []
    calls: list[_Call] = []
    choosing: dict[int, _Call] = {}

    def enter(module: nn.Module, args: tuple[object, ...]) -> None:
        stack.append(_Pass(module))
        floats = {a.shape for a in args if isinstance(a, Tensor) and a.is_floating_point()}
        for each in args:
            if isinstance(each, Tensor) and each.dtype == torch.int64 and each.shape in floats:
                choosing.update((i, c) for i, c in enumerate(calls) if c.gave(each))

    def leave(module: nn.Module, args: object, output: object) -> None:
        del module, args, output
        stack.pop()

    def answer(scores: Tensor, call: Callable[[], Choice]) -> Choice:
        result = call()
        for each in stack:
            each.num_calls += 1
        if stack and scores.dim() == 2 and stack[-1].module in names:
            inner = stack[-1]
            place = inner.num_calls - 1
            calls.append(_Call(inner.module, place, scores.shape[-1], result[1].detach()))
        return result

    handles = [
        register_module_forward_pre_hook(enter),
        register_module_forward_hook(leave, always_call=True),
    ]
    try:
        with torch.no_grad(), _TopKCalls(answer):
            run()
    finally:
        for handle in handles:
            handle.remove()
    return [
        Router(names[each.module], each.module, each.place, each.indices.shape[1], each.num_experts)
        for _, each in sorted(choosing.items())
    ]


def stacked_choices(routers: Sequence[Router]) -> Tensor:
    """Return the experts of the last pass: [tokens, layers * k] uint8, or int16 above 256."""
    chosen = [router.chosen for router in routers if router.chosen is not None]
    return torch.cat(chosen, dim=1).to(route_dtype(routers))


def route_dtype(routers: Sequence[Router]) -> torch.dtype:
    """Return the dtype in which experts are recorded."""
    return torch.uint8 if max(r.num_experts for r in routers) <= 256 else torch.int16


def replay(routers: Sequence[Router], routes: Tensor | None) -> None:
    """Let routers take recorded experts from now on.

    They stay until the next call, since checkpointed layers run again in the backward pass.

    Args:
        routers: Routers of all layers.
        routes: [tokens, layers * k] int64, -1 where the model chooses; None lets it choose.
    """
    place = 0
    for router in routers:
        router.replayed = None if routes is None else routes[:, place : place + router.k]
        place += router.k


def unpack_routes(packed: Tensor, routers: Sequence[Router]) -> Tensor:
    """Return experts [..., layers * k] int64 from their bytes [..., bytes] uint8.

    Args:
        packed: Experts of the layers with routers, or of all layers, as vLLM gives them.
        routers: Routers of the model.

    Raises:
        RoutesError: They are not so many as the layers choose, or a layer has no such expert.
    """
    limits = torch.tensor(
        [r.num_experts for r in routers for _ in range(r.k)], device=packed.device
    )
    size = 1 if not routers or route_dtype(routers) == torch.uint8 else 2
    packed = _of_layers(packed, routers, size)
    if packed.shape[-1] != size * len(limits):
        raise RoutesError(
            f"the engine recorded {packed.shape[-1]} bytes of experts a token, and the model's "
            f"{len(routers)} layers with experts choose {len(limits)}: both must be one model; "
            "--routing_replay off trains without them"
        )
    wide = packed.long()
    routes = wide if size == 1 else wide[..., 0::2] + 256 * wide[..., 1::2]
    if bool((routes >= limits).any()):
        raise RoutesError("the engine recorded an expert that a layer does not have")
    return routes


def _of_layers(packed: Tensor, routers: Sequence[Router], size: int) -> Tensor:
    """Return the bytes of the layers with routers, if there are those of all layers."""
    numbers = [_LAYER.search(router.name) for router in routers]
    sizes = {size * router.k for router in routers}
    if len(sizes) != 1 or packed.shape[-1] == max(sizes) * len(routers):
        return packed
    (width,) = sizes
    places = [int(each[1]) for each in numbers if each is not None]
    num_layers, rest = divmod(packed.shape[-1], width)
    if rest or len(places) < len(routers) or max(places) >= num_layers:
        return packed
    by_layer = packed.reshape(*packed.shape[:-1], num_layers, width)
    return by_layer[..., places, :].flatten(-2)


def prove_routers(routers: Sequence[Router], run: Callable[[], Tensor]) -> None:
    """Raise unless a replayed pass is the recorded one, and other experts change it.

    Args:
        routers: Routers of a model.
        run: Function that runs the model on a few tokens and returns its hidden states.

    Raises:
        RoutesError: Replaying the choices of the model changes its output, or other choices do not.
    """
    with torch.no_grad():
        replay(routers, None)
        plain = run()
        recorded = torch.cat([r.chosen for r in routers if r.chosen is not None], dim=1)
        replay(routers, recorded)
        again = run()
        counts = torch.tensor(
            [r.num_experts for r in routers for _ in range(r.k)], device=recorded.device
        )
        replay(routers, (recorded + 1) % counts)
        other = run()
        replay(routers, None)
    change, moved = (float((each - plain).abs().max()) for each in (again, other))
    if change != 0 or not moved > 0:
        raise RoutesError(
            f"recorded experts cannot be replayed in {routers[0].name} and {len(routers) - 1} "
            f"further layers: the choices of the model change its output by {change:.2g}, expected "
            f"0, and others by {moved:.2g}; --routing_replay off trains without them"
        )
