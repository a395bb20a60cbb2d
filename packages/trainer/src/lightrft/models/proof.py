"""The proof at load: a prepared model computes what its own, unmodified forward pass computes.

On a few ragged rows of random tokens, in the run's dtype and through whatever a strategy has put
around the model, the logprobs of each token (of models without logits: projections of hidden
states) are compared with those of the model's own forward pass of that row alone, by the attention
that the model's authors wrote ("eager").

How much is rounding follows from the model: its own pass is repeated with the output of every layer
changed by one unit in the last place, up or down at random. The limit between two ways of a pass is
`FACTOR` times what that changes; where the same hidden states are computed in the same way twice
(two heads over them, rows beside other ones), once what it changes. To both `FLOOR` roundings of
the largest logit in float32 are added.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)
from torch.nn.utils.rnn import pad_sequence

from lightrft.engines.hf.attention import set_text_attention, unfused_layers
from lightrft.models.actor import Actor
from lightrft.models.loading import ModelLoadError
from lightrft.models.sequence_model import SequenceModel, trunk_output
from lightrft.models.ulysses import LayoutRefusedError
from lightrft.strategy.backend import inner_module
from lightrft.strategy.weight_sync.parameter_source import reshard_modules

if TYPE_CHECKING:
    from lightrft.strategy.distributed.context import DistributedContext

LENGTHS = (12, 4, 7)
# Ids that every vocabulary has.
MAX_TOKEN = 4096
EAGER = "eager"
FACTOR, FLOOR, FURTHER_DRAWS = 8.0, 64.0, 4


class Proof:
    """The passes of one model over the rows; collective.

    Args:
        model: Prepared; its modes, layout and attention are put back after each pass.
        context: The ranks, which all pass the same rows and agree on every distance.
    """

    def __init__(self, model: nn.Module, context: DistributedContext) -> None:
        self.model, self.context = model, context
        self.inner = cast("SequenceModel", inner_module(model))
        self.name = type(self.inner.pretrained).__name__
        self.rows = random_rows(self.inner, context.device)
        self._largest, self._draws = 1.0, 0
        with self._attending(EAGER):
            self.expected = [self._own(row) for row in self.rows]
        # Of a layer's rounding, and of sums of logits in float32.
        self.unit, self.floor = 0.0, 0.0
        self.measure_rounding(self.rows[:1], 1)

    def limit(self, *, is_same_way: bool = False) -> float:
        """Return the largest distance that is rounding; arguments as for `exceeds`."""
        return (1.0 if is_same_way else FACTOR) * self.unit + self.floor

    def measure_rounding(self, rows: Sequence[Tensor], num_draws: int) -> None:
        """Measure by further draws on the first rows; the largest change counts."""
        found = [0.0]
        with self._attending(EAGER):
            for _ in range(num_draws):
                self._draws += 1
                with _rounded_otherwise(self._draws):
                    pairs = zip(rows, self.expected, strict=False)
                    found += [_distance(self._own(row), expected) for row, expected in pairs]
        self.unit = max(self.unit, self._agreed(max(found)))
        self.floor = self._agreed(FLOOR * torch.finfo(torch.float32).eps * self._largest)

    def exceeds(self, found: float, *, is_same_way: bool = False) -> bool:
        """Return whether a distance is more than rounding; close calls are measured again.

        Args:
            found: The distance.
            is_same_way: Hidden states were computed in the same way twice.
        """
        # Written so that NaN is more.
        if not found <= self.limit(is_same_way=is_same_way) and self._draws == 1:
            # All rows: in some, a rounding may send a token to another expert.
            self.measure_rounding(self.rows, FURTHER_DRAWS)
        return not found <= self.limit(is_same_way=is_same_way)

    def numbers(self, found: float, *, is_same_way: bool = False) -> str:
        """Return a distance beside what is rounding; arguments as for `exceeds`."""
        what = "d log p" if isinstance(self.inner, Actor) else "d of hidden states"
        limit = self.limit(is_same_way=is_same_way)
        return f"max |{what}| = {found:.2g}, at most {limit:.2g} is rounding"

    @property
    def is_finite(self) -> bool:
        """Return whether the model's own pass gives numbers, and so anything can be proved."""
        is_finite = all(bool(row.isfinite().all()) for row in self.expected)
        return self._agreed(0.0 if is_finite else 1.0) == 0.0

    def distances_of_parts(self) -> tuple[float, float]:
        """Distances of the head from the model's own, and of the attention from the authors'."""
        own = self._own(self.rows[0])
        head = _distance(self._as_run(self.rows[:1])[0], own)
        return self._agreed(head), self._agreed(_distance(own, self.expected[0]))

    def distance_of_layout(self, *, is_training: bool = False) -> float:
        """The distance of rows that are laid out together, in training mode or not, from alone."""
        together = self._as_run(self.rows, is_training=is_training)
        pairs = zip(together, self.expected, strict=True)
        return self._agreed(max(_distance(*pair) for pair in pairs))

    def hold_noise(self) -> float:
        """The distance in training mode, with modules that draw noise there kept in evaluation.

        For good: a ratio to another pass would be of two random models.
        """
        with _drawing_modules(self.context.device) as noisy:
            distance = self.distance_of_layout(is_training=True)
        if not self._agreed(float(len(noisy))):
            return distance
        for module in noisy:
            module.register_forward_pre_hook(_evaluate)
        self.context.print(
            f"{', '.join(sorted({type(module).__name__ for module in noisy}))} of {self.name} "
            "would draw random numbers in training mode, and computes as in evaluation mode"
        )
        return self.distance_of_layout(is_training=True)

    def leak_between_rows(self) -> float:
        """Return the change of the other rows by other tokens in the first one."""
        before = self._as_run(self.rows)
        after = self._as_run([self.rows[0].flip(0), *self.rows[1:]])
        return self._agreed(max(map(_distance, before[1:], after[1:])))

    def _agreed(self, distance: float) -> float:
        return float(self.context.all_reduce(distance, "max"))

    def _own(self, row: Tensor) -> Tensor:
        """[tokens] of a row by the unmodified forward pass; the first is 0."""
        return self._through(self._own_values, row[None])

    def _own_values(self, token_ids: Tensor) -> Tensor:
        if not isinstance(self.inner, Actor):
            output = self.inner.pretrained(input_ids=token_ids, use_cache=False)
            values = projected(output.last_hidden_state[0, :-1])
        else:
            logprobs = self._own_logits(token_ids).log_softmax(-1)
            values = logprobs[0, :-1].gather(-1, token_ids[0, 1:, None]).squeeze(-1)
        return torch.cat([values.new_zeros(1), values])

    def _own_logits(self, token_ids: Tensor) -> Tensor:
        """[1, tokens, vocab] float32, with what is never sampled at -inf."""
        actor = cast("Actor", self.inner)
        head = actor.head
        with head.in_float32():
            logits: Tensor = actor.model(input_ids=token_ids, use_cache=False).logits.float()
        self._largest = max(self._largest, float(logits.abs().max()))
        never = logits.new_tensor(head.forbidden_ids).long()
        return logits.index_fill(-1, never, -torch.inf)[..., : head.num_tokens]

    def _as_run(self, rows: Sequence[Tensor], *, is_training: bool = False) -> list[Tensor]:
        """[tokens] of each row as the run computes them, all in one pass."""
        token_ids = pad_sequence(list(rows), batch_first=True)
        mask = pad_sequence([torch.ones_like(row, dtype=torch.bool) for row in rows], True)
        function = None if isinstance(self.inner, Actor) else self._projections
        values = self._through(function, token_ids, mask, is_training=is_training)
        return [value[is_real] for value, is_real in zip(values, mask, strict=True)]

    def _projections(self, token_ids: Tensor, attention_mask: Tensor) -> Tensor:
        layout = self.inner.lay_out(token_ids, attention_mask)
        hidden: Tensor = trunk_output(self.inner.pretrained, layout).last_hidden_state
        return layout.scatter(projected(layout.select(hidden)))

    @torch.no_grad()
    def _through(
        self,
        function: Callable[..., Tensor] | None,
        *inputs: Tensor,
        is_training: bool = False,
    ) -> Tensor:
        """Values of a function of the inner model, called through all that is wrapped around it.

        Args:
            function: Takes the place of the model's `forward`; None takes the logprobs of that.
            inputs: Arguments.
            is_training: In training mode.
        """
        modes = [(module, module.training) for module in self.model.modules()]
        self.model.train(is_training)
        if function is not None:
            self.inner.forward = function
        try:
            # What is compiled would keep the hooks of `_rounded_otherwise`.
            with torch.compiler.set_stance("force_eager"):
                output = self.model(*inputs)
        finally:
            vars(self.inner).pop("forward", None)
            for module, mode in modes:
                module.training = mode
            reshard_modules(self.model)
        values: Tensor = output if function is not None else output.logprobs
        return values.float()

    @contextmanager
    def _attending(self, name: str) -> Iterator[None]:
        """The model with another attention, and without packing."""
        before = self.inner.config.get_text_config()._attn_implementation
        with ExitStack() as stack:
            stack.callback(set_text_attention, self.inner.pretrained, before)
            set_text_attention(self.inner.pretrained, name)
            yield


def prove_model(model: nn.Module, context: DistributedContext, *, is_random: bool) -> Proof | None:
    """Prove head, attention and padding of a prepared model; collective.

    Attention that ignores what the configuration asks for is replaced by the authors' own, which
    is said in a line.

    Args:
        model: A sequence model within what a strategy has put around it.
        context: The ranks.
        is_random: Its dropout acts in training mode, which is not tried then, or it is not trained.

    Returns:
        The proof, for what is packed; None if the model's own pass gives no numbers.

    Raises:
        ModelLoadError: It computes something else than the model.
    """
    proof = Proof(model, context)
    if not proof.is_finite:
        return None
    name = proof.name
    if proof.inner.sequence_group is not None:
        if not is_random:
            proof.hold_noise()
        require_packing(proof)
        return proof
    head, attention = proof.distances_of_parts()
    if proof.exceeds(attention):
        set_text_attention(proof.inner.pretrained, EAGER)
        context.print(
            f"attention of {name} is transformers' eager one: torch's fused one computes "
            f"others, {proof.numbers(attention)}"
        )
        head, _ = proof.distances_of_parts()
    elif unfused_layers(proof.inner.pretrained):
        context.print(
            f"attention of {name} is transformers' eager one, which knows its caps and sinks; "
            "torch's fused one does not"
        )
    if proof.exceeds(head, is_same_way=True):
        raise ModelLoadError(
            f"the head computes other log-probabilities than {name}: "
            f"{proof.numbers(head, is_same_way=True)}; it changes hidden states or logits around "
            "its output projection in a way that is not known here, and cannot be trained"
        )
    _require_padding(proof, is_random=is_random)
    return proof


def _require_padding(proof: Proof, *, is_random: bool) -> None:
    """Prove that padding changes nothing, nor training mode, in one pass; see `prove_model`."""
    found = proof.distance_of_layout() if is_random else proof.hold_noise()
    if not proof.exceeds(found):
        return
    if not is_random and not proof.exceeds(proof.distance_of_layout()):
        raise ModelLoadError(
            f"in training mode {proof.name} computes otherwise than in evaluation mode: "
            f"{proof.numbers(found)}; ratios would be of two different models"
        )
    raise ModelLoadError(
        f"padded rows are not computed by {proof.name} as each row alone: "
        f"{proof.numbers(found)}; a model in which padding matters cannot be trained in batches"
    )


def require_packing(proof: Proof) -> None:
    """Prove that rows in one stream are as alone; collective.

    Args:
        proof: Of a model that packs by now.

    Raises:
        LayoutRefusedError: They are not; or the model's attention cannot be packed.
    """
    for found, is_same_way in (
        (proof.leak_between_rows(), True),
        (proof.distance_of_layout(), False),
    ):
        if proof.exceeds(found, is_same_way=is_same_way):
            raise LayoutRefusedError(
                f"{proof.name} mixes packed sequences: "
                f"{proof.numbers(found, is_same_way=is_same_way)}; train without packing_samples "
                "and sp_size"
            )


def random_rows(model: SequenceModel, device: torch.device) -> list[Tensor]:
    """Return the rows of `LENGTHS` random tokens that a text may have."""
    generator = torch.Generator().manual_seed(0)
    size = min(model.config.get_text_config().vocab_size, MAX_TOKEN)
    if isinstance(model, Actor):
        size = min(size, model.head.num_tokens or size)
    is_allowed = torch.ones(size, dtype=torch.bool)
    if isinstance(model, Actor):
        is_allowed[[token for token in model.head.forbidden_ids if token < size]] = False
    allowed = is_allowed.nonzero().flatten()
    drawn = torch.randint(len(allowed), (sum(LENGTHS),), generator=generator)
    return list(torch.split(allowed[drawn].to(device), list(LENGTHS)))


def projected(hidden: Tensor) -> Tensor:
    """[tokens] of hidden states [tokens, hidden]: a random projection of their direction."""
    generator = torch.Generator().manual_seed(0)
    direction = torch.randn(hidden.shape[-1], generator=generator).to(hidden.device)
    return nn.functional.normalize(hidden.float(), dim=-1) @ direction


@contextmanager
def _rounded_otherwise(seed: int) -> Iterator[None]:
    """Move what each layer without parts computes by a unit in the last place."""
    generator = torch.Generator().manual_seed(seed)

    def move(module: nn.Module, _: object, output: object) -> Tensor | None:
        is_number = isinstance(output, Tensor) and output.is_floating_point()
        if not is_number or next(module.children(), None) is not None:
            return None
        values = cast("Tensor", output)
        signs = torch.randint(2, values.shape, generator=generator).to(values.device) * 2 - 1
        return values * (1 + signs * torch.finfo(values.dtype).eps).to(values.dtype)

    # Its annotation knows of no hook that returns something.
    handle = register_module_forward_hook(cast("Callable[..., None]", move))
    try:
        yield
    finally:
        handle.remove()


def _evaluate(module: nn.Module, _: object) -> None:
    module.training = False


@contextmanager
def _drawing_modules(device: torch.device) -> Iterator[list[nn.Module]]:
    """Collect the modules that draw random numbers themselves, not in a module of theirs."""
    running: list[nn.Module] = []
    noisy: list[nn.Module] = []
    last = _random_state(device)

    def look() -> None:
        nonlocal last
        state = _random_state(device)
        if running and not torch.equal(state, last):
            noisy.append(running[-1])
        last = state

    def enter(module: nn.Module, _: object) -> None:
        look()
        running.append(module)

    def leave(*_: object) -> None:
        look()
        running.pop()

    with ExitStack() as stack:
        stack.callback(register_module_forward_pre_hook(enter).remove)
        stack.callback(register_module_forward_hook(leave).remove)
        yield noisy


def _random_state(device: torch.device) -> Tensor:
    states = [torch.get_rng_state()]
    if device.type == "cuda":
        states.append(torch.cuda.get_rng_state(device))
    return torch.cat(states)


def _distance(found: Tensor, expected: Tensor) -> float:
    """Return the largest difference; infinite where only one of both is a number."""
    difference = (found - expected).abs().max() if len(found) else found.new_zeros(())
    return float(difference.nan_to_num(nan=torch.inf))
