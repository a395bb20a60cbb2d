"""Proof at load: a prepared model computes the same as its unmodified forward pass.

A few ragged rows of random tokens run in the run's dtype through everything that a strategy has put
around the model. The logprobs of each token are compared with the model's plain forward pass on
that row alone; models without logits compare projections of hidden states. The plain pass uses the
attention that the model's authors wrote ("eager").

The model itself shows how large rounding is: the plain pass is repeated with every layer's output
changed by one unit in the last place, up or down at random. The limit between two ways of
computing a pass is `FACTOR` times the effect of that. If the same hidden states are computed in the
same way twice (two heads over them, rows beside other ones), the limit is once the effect. To both,
`FLOOR` roundings of the largest logit in float32 are added.
"""

from __future__ import annotations

import re
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import starmap
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)
from torch.nn.utils.rnn import pad_sequence

from lightrft.config import ConfigError
from lightrft.engines.hf.attention import set_text_attention, unfused_layers
from lightrft.engines.nf4 import NF4Linear
from lightrft.kernels.names import first_line
from lightrft.models.actor import Actor
from lightrft.models.attention import (
    PACKED,
    MissingBoundsError,
    check_packable,
    trunk_of,
)
from lightrft.models.layout import TokenLayout
from lightrft.models.loading import ModelLoadError
from lightrft.models.sequence_model import SequenceModel, trunk_output
from lightrft.models.shared_prefix import MIN_SHARED_TOKENS
from lightrft.models.types import LayoutRefusedError
from lightrft.strategy.backend import inner_module
from lightrft.strategy.checkpoints.gathered_model import BASE_LAYER
from lightrft.strategy.distributed.process_end import PeerFailedError
from lightrft.strategy.weight_sync.parameter_source import reshard_modules, tied_parameter_names

if TYPE_CHECKING:
    from lightrft.strategy.distributed.context import DistributedContext

LENGTHS = (12, 4, 7)
# Tokens at the end of the first row that are exchanged.
NUM_CHANGED = 4
# Ids that every vocabulary has.
MAX_TOKEN = 4096
EAGER = "eager"
FACTOR, FLOOR, FURTHER_DRAWS = 8.0, 64.0, 4


class Proof:
    """Passes of one model over the rows; collective.

    Args:
        model: Prepared model; its modes, layout and attention are restored after each pass.
        context: Ranks, which all pass the same rows and agree on every distance.
    """

    def __init__(self, model: nn.Module, context: DistributedContext) -> None:
        self.model, self.context = model, context
        self.inner = cast("SequenceModel", inner_module(model))
        self.name = type(self.inner.pretrained).__name__
        self.rows = self._drawn_rows()
        # Inputs of the model's own forward pass beside tokens.
        self.own_inputs: dict[str, Tensor] = {}
        self._largest, self._draws = 1.0, 0
        self.expected = self.values_alone(self.rows)
        # Rounding of a layer, and of sums of logits in float32.
        self.unit, self.floor = 0.0, 0.0
        self.measure_rounding(self.rows[:1], 1)

    def _drawn_rows(self) -> list[Tensor]:
        return random_rows(self.inner, self.context.device)

    def measure_rounding(self, rows: Sequence[Tensor], num_draws: int) -> None:
        """Measure rounding by further draws on the first rows; the largest change counts."""
        changes = [0.0]
        with self._attending(EAGER):
            for _ in range(num_draws):
                self._draws += 1
                with _rounded_otherwise(self._draws):
                    pairs = zip(rows, self.expected, strict=False)
                    changes += [_distance(self._own(row), expected) for row, expected in pairs]
        self.unit = max(self.unit, self.largest_of_ranks(max(changes)))
        self.floor = self.largest_of_ranks(FLOOR * torch.finfo(torch.float32).eps * self._largest)

    def beyond_rounding(self, distance: float, *, is_same_way: bool = False) -> str:
        """Return a text of a distance that is more than rounding, else ""; close calls try again.

        Args:
            distance: Distance to judge.
            is_same_way: Whether hidden states were computed in the same way twice.
        """
        factor = 1.0 if is_same_way else FACTOR
        # Written so that NaN is beyond.
        if not distance <= factor * self.unit + self.floor and self._draws == 1:
            # On all rows: in some of them rounding may send a token to another expert.
            self.measure_rounding(self.rows, FURTHER_DRAWS)
        limit = factor * self.unit + self.floor
        if distance <= limit:
            return ""
        what = "d log p" if isinstance(self.inner, Actor) else "d of hidden states"
        return f"max |{what}| = {distance:.2g}, at most {limit:.2g} is rounding"

    @property
    def is_finite(self) -> bool:
        """Return whether the model's plain pass gives finite numbers, which a proof needs."""
        is_finite = all(bool(row.isfinite().all()) for row in self.expected)
        return self.largest_of_ranks(0.0 if is_finite else 1.0) == 0.0

    def distances_of_parts(self) -> tuple[float, float]:
        """Return the distances of head and attention from the model's and the authors'."""
        plain = self._own(self.rows[0])
        head = _distance(self._as_run(self.rows[:1])[0], plain)
        return self.largest_of_ranks(head), self.largest_of_ranks(
            _distance(plain, self.expected[0])
        )

    def distance_of_layout(self, *, is_training: bool = False) -> float:
        """Return the distance of rows in one pass from rows alone, in training mode or not."""
        together = self._as_run(self.rows, is_training=is_training)
        pairs = zip(together, self.expected, strict=True)
        return self.largest_of_ranks(max(_distance(*pair) for pair in pairs))

    def distance_of_endings(self) -> float:
        """Return the distance of a row's first logprobs from those if later tokens are others."""
        row = self.rows[0]
        start = len(row) - NUM_CHANGED
        with self._attending(EAGER):
            changed = self._own(torch.cat([row[:start], row[start:].flip(0)]), like=row)
        # The last of them scores the first exchanged token, which its logits may not see.
        pair = changed[: start + 1], self.expected[0][: start + 1]
        return self.largest_of_ranks(_distance(*pair))

    def mixing(self, rows: Sequence[Tensor], expected: Sequence[Tensor], other: Tensor) -> str:
        """Return how far values of rows in one pass are from those alone; "" if only rounded.

        They may not change either when another row takes the place of the first.

        Args:
            rows: Rows, [tokens] int64 each.
            expected: [tokens] values of each row alone.
            other: Row with which the others are computed once more.
        """
        together, after = self._as_run(rows), self._as_run([other, *rows[1:]])
        pairs = zip(together[1:], after[1:], strict=True), zip(together, expected, strict=True)
        for is_same_way, each in zip((True, False), pairs, strict=True):
            distance = self.largest_of_ranks(max(starmap(_distance, each)))
            if numbers := self.beyond_rounding(distance, is_same_way=is_same_way):
                return numbers
        return ""

    def values_alone(self, rows: Sequence[Tensor]) -> list[Tensor]:
        """Return the [tokens] values of rows by the authors' attention, one pass a row."""
        with self._attending(EAGER):
            return [self._own(row) for row in rows]

    def hold_noise(self) -> float:
        """Return the distance in training mode, with modules that draw noise kept in evaluation.

        They stay so for good: ratios to another pass would compare two random models.
        """
        with _drawing_modules(self.context.device) as noisy:
            distance = self.distance_of_layout(is_training=True)
        if not self.largest_of_ranks(float(len(noisy))):
            return distance
        for module in noisy:
            module.register_forward_pre_hook(_evaluate)
        self.context.print(
            f"{', '.join(sorted({type(module).__name__ for module in noisy}))} of {self.name} "
            "would draw random numbers in training mode, and computes as in evaluation mode"
        )
        return self.distance_of_layout(is_training=True)

    def uncalled_adapters(self) -> tuple[list[str], list[str]]:
        """Return language layers with adapters that no row calls, and targets that rows do call.

        Numbers in names of layers are `*`; targets are last names.
        """
        # Imported here: models without adapters need no layers of 4 bits.
        from lightrft.strategy.nf4 import is_product

        trunk, called, names = self.inner.language_model, set[str](), set[str]()
        with ExitStack() as stack:
            for name, module in trunk.named_modules():
                layer, is_factor, _ = name.partition(".lora_A.")
                is_plain = ".lora_" not in name and not name.endswith(BASE_LAYER)
                if is_factor or (
                    is_plain and (is_product(module) or isinstance(module, NF4Linear))
                ):
                    kind = re.sub(r"\b\d+\b", "*", layer)
                    names |= {kind} if is_factor else set()
                    hook = module.register_forward_pre_hook(lambda *_, kind=kind: called.add(kind))
                    stack.callback(hook.remove)
            if names:
                self._as_run(self.rows)
        uncalled = names - called
        last_names = ({name.rpartition(".")[2] for name in each} for each in (called, uncalled))
        return sorted(uncalled), sorted(set.difference(*last_names))

    def separate_rows(self) -> None:
        """Let layers that mix the sequences of a stream be called once for each; print them."""
        names = separate_rows(self.inner, self.rows, self._through)
        kinds = {type(self.inner.language_model.get_submodule(name)).__name__ for name in names}
        if names:
            self.context.print(
                f"{len(names)} layers of {self.name} ({', '.join(sorted(kinds))}) are called once "
                "per packed sequence"
            )

    def largest_of_ranks(self, distance: float) -> float:
        """Return the largest distance of all ranks; collective."""
        return float(self.context.all_reduce(distance, "max"))

    def _own(self, row: Tensor, *, like: Tensor | None = None) -> Tensor:
        """Return [tokens] values of a row by the unmodified forward pass; the first is 0.

        Args:
            row: Tokens.
            like: Row of the proof whose tokens are scored, and whose media it has, if not its own.
        """
        return self._through(self._own_values, row[None], (row if like is None else like)[None])

    def _own_values(self, token_ids: Tensor, scored_ids: Tensor) -> Tensor:
        if not isinstance(self.inner, Actor):
            output = self.inner.pretrained(input_ids=token_ids, use_cache=False, **self.own_inputs)
            values = projected(output.last_hidden_state[0, :-1])
        else:
            logprobs = self._own_logits(token_ids).log_softmax(-1)
            # Marks of media may have no row in the output projection; nothing scores them.
            scored = scored_ids[0, 1:, None].clamp(max=logprobs.shape[-1] - 1)
            values = logprobs[0, :-1].gather(-1, scored).squeeze(-1)
        return torch.cat([values.new_zeros(1), values])

    def _own_logits(self, token_ids: Tensor) -> Tensor:
        """Return [1, tokens, vocab] float32 logits, -inf for tokens that are never sampled."""
        actor = cast("Actor", self.inner)
        head = actor.head
        with head.in_float32():
            output = actor.model(input_ids=token_ids, use_cache=False, **self.own_inputs)
            logits: Tensor = output.logits.float()
        self._largest = max(self._largest, float(logits.abs().max()))
        never = logits.new_tensor(head.forbidden_ids).long()
        return logits.index_fill(-1, never, -torch.inf)[..., : head.num_tokens]

    def _as_run(self, rows: Sequence[Tensor], *, is_training: bool = False) -> list[Tensor]:
        """Return the [tokens] values of each row as the run computes them, all in one pass."""
        token_ids, mask = _padded(rows)
        function = None if isinstance(self.inner, Actor) else self._projections
        values = self._through(function, token_ids, mask, is_training=is_training)
        return [value[is_real] for value, is_real in zip(values, mask, strict=True)]

    def _projections(self, token_ids: Tensor, attention_mask: Tensor) -> Tensor:
        layout = self.inner.lay_out(token_ids, attention_mask)
        hidden: Tensor = trunk_output(
            self.inner.pretrained, layout, family=self.inner.family
        ).last_hidden_state
        return layout.scatter(projected(layout.select(hidden)))

    @torch.no_grad()
    def _through(
        self,
        function: Callable[..., Tensor] | None,
        *inputs: Tensor,
        is_training: bool = False,
    ) -> Tensor:
        """Call a function of the inner model through everything that wraps it.

        Args:
            function: Replacement for the model's `forward`; None takes the logprobs of `forward`.
            inputs: Arguments.
            is_training: Whether to run in training mode.
        """
        modes = [(module, module.training) for module in self.model.modules()]
        self.model.train(is_training)
        if function is not None:
            self.inner.forward = function
        try:
            # Compiled code would keep the hooks of `_rounded_otherwise`.
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
        """Run the model in the body with another attention, and without packing."""
        before = self.inner.config.get_text_config()._attn_implementation
        with ExitStack() as stack:
            stack.callback(set_text_attention, self.inner.pretrained, before)
            set_text_attention(self.inner.pretrained, name)
            yield


def prove_model(model: nn.Module, context: DistributedContext, *, is_random: bool) -> Proof | None:
    """Prove head, attention and padding of a prepared model; collective.

    Attention that ignores settings of the configuration is replaced by the authors' attention,
    which a printed line reports.

    Args:
        model: Sequence model with everything that a strategy has put around it.
        context: Ranks.
        is_random: Whether its dropout acts in training mode, or it is not trained; training mode is
            then not tried.

    Returns:
        Proof, for a test of packing; None if the model's plain pass gives no finite numbers.

    Raises:
        ModelLoadError: It computes something else than the model.
    """
    problem = "fails on text in transformers' own forward pass"
    with refusing(model, problem, "take another version of transformers"):
        proof = Proof(model, context)
    _require_ties(proof)
    if not proof.is_finite:
        return None
    name = proof.name
    require_causality(proof)
    if proof.inner.sequence_group is not None:
        if not is_random:
            proof.hold_noise()
        require_packing(proof)
        return proof
    head, attention = proof.distances_of_parts()
    if numbers := proof.beyond_rounding(attention):
        set_text_attention(proof.inner.pretrained, EAGER)
        context.print(
            f"attention of {name} is transformers' eager one: torch's fused one computes "
            f"others, {numbers}"
        )
        head, _ = proof.distances_of_parts()
    elif unfused_layers(proof.inner.pretrained):
        context.print(
            f"attention of {name} is transformers' eager one, which knows its caps and sinks; "
            "torch's fused one does not"
        )
    if numbers := proof.beyond_rounding(head, is_same_way=True):
        raise ModelLoadError(
            f"the head computes other log-probabilities than {name}: "
            f"{numbers}; it changes hidden states or logits around "
            "its output projection in a way that is not known here, and cannot be trained"
        )
    _require_padding(proof, is_random=is_random)
    _require_bound(proof)
    return proof


@contextmanager
def refusing(model: nn.Module, problem: str, remedy: str) -> Iterator[None]:
    """Raise a ModelLoadError that names the model for errors of its code in the body."""
    try:
        yield
    except (torch.OutOfMemoryError, PeerFailedError):
        raise
    except (AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        *_, (frame, _) = traceback.walk_tb(error.__traceback__)
        if str(frame.f_globals.get("__name__")).startswith("torch.distributed"):
            raise  # another rank's end, or a deadline
        name = type(cast("SequenceModel", inner_module(model)).pretrained).__name__
        raise ModelLoadError(f"{name} {problem}: {first_line(error)}; {remedy}") from error


def require_causality(proof: Proof) -> None:
    """Prove that a token's log-probability depends on no later token."""
    if not isinstance(proof.inner, Actor):
        return  # a score may depend on all of a text
    if numbers := proof.beyond_rounding(proof.distance_of_endings(), is_same_way=True):
        raise ModelLoadError(
            f"tokens see later ones in {proof.name}: {numbers} if a text ends otherwise; a model "
            "that is not causal cannot be trained (a decoder of an encoder's family has is_decoder "
            "= true in its config.json)"
        )


def _require_ties(proof: Proof) -> None:
    """Prove that shared weights are still one parameter: an export would write two."""
    model = proof.inner.pretrained
    first_names = tied_parameter_names(model)
    apart = [
        f"{second} and {first}"
        for second, first in model.all_tied_weights_keys.items()
        if first_names.get(second, second) != first_names.get(first, first)
    ]
    if apart:
        raise ModelLoadError(
            f"{proof.name} shares {apart[0]} and the prepared model has a parameter for each: both "
            "would be trained and exported; such a model cannot be trained"
        )


def _require_bound(proof: Proof) -> None:
    """Prove that layers with adapters are called: of others the forward pass reads the weight.

    Of experts, and of other repeated layers, one must be. Texts call no towers.
    """
    unbound, targets = proof.uncalled_adapters()
    if unbound:
        others = f"give --target_modules {' '.join(targets)}"
        raise ConfigError(
            f"target_modules: adapters on {', '.join(unbound)} have no effect: {proof.name} reads "
            f"the weights there without calling the layers; "
            f"{others if targets else 'train it whole (--lora_rank 0)'}"
        )


def _require_padding(proof: Proof, *, is_random: bool) -> None:
    """Prove that neither padding nor training mode changes results; see `prove_model`."""
    distance = proof.distance_of_layout() if is_random else proof.hold_noise()
    numbers = proof.beyond_rounding(distance)
    if not numbers:
        return
    if not is_random and not proof.beyond_rounding(proof.distance_of_layout()):
        raise ModelLoadError(
            f"in training mode {proof.name} computes otherwise than in evaluation mode: "
            f"{numbers}; ratios would be of two different models"
        )
    raise ModelLoadError(
        f"padded rows are not computed by {proof.name} as each row alone: "
        f"{numbers}; a model in which padding matters cannot be trained in batches"
    )


def pack_rows(proof: Proof) -> None:
    """Pack the rows of a proved model; collective.

    Layers besides attention that would mix rows are called once for each of them.

    Raises:
        LayoutRefusedError: See `require_packing`.
    """
    proof.separate_rows()
    proof.inner.pack_samples()
    require_packing(proof)


def require_packing(proof: Proof) -> None:
    """Prove that rows in one stream are computed as alone; collective.

    Args:
        proof: Proof of a model that packs already.

    Raises:
        LayoutRefusedError: Rows are mixed, or the model's attention cannot be packed.
    """
    rows = proof.rows
    try:
        numbers = proof.mixing(rows, proof.expected, rows[0].flip(0))
    except MissingBoundsError as error:
        raise _not_passed(proof.name) from error
    if numbers:
        raise LayoutRefusedError(
            f"{proof.name} mixes packed sequences: {numbers}; train without packing_samples and "
            "sp_size"
        )


def share_prefixes(proof: Proof) -> None:
    """Compute prefixes that rows share once, in a proved model that packs; collective.

    Raises:
        LayoutRefusedError: Its rows are then computed otherwise than alone, or may be.
    """
    model, rows = proof.inner, _siblings(proof.rows)
    expected = proof.values_alone(rows)
    model.share_prefixes(1)
    numbers = proof.mixing(rows, expected, torch.cat([rows[0][:8], rows[0][8:].flip(0)]))
    if numbers:
        raise LayoutRefusedError(f"{proof.name} mixes rows that begin alike: {numbers}")
    model.share_prefixes(MIN_SHARED_TOKENS)


def separate_rows(
    model: SequenceModel, rows: Sequence[Tensor], through: Callable[..., Tensor] | None = None
) -> list[str]:
    """Let layers of a model that mix the sequences of a stream be called once for each of them.

    Args:
        model: Model, which is changed in place.
        rows: Rows to try it with, [tokens] int64 each.
        through: Function that calls a function of the model, with its inputs, through what wraps
            the model; None calls it directly.

    Returns:
        Names of the layers in its language model.

    Raises:
        LayoutRefusedError: See `separate_sequences`.
    """
    from lightrft.models.by_sequence import separate_sequences

    check_packable(model.pretrained)
    trunk, layout = trunk_of(model.pretrained), TokenLayout.packed(*_padded(rows))
    assert layout.bounds is not None

    def run(_: Tensor) -> Tensor:
        hidden: Tensor = trunk_output(trunk, layout, family=model.family).last_hidden_state
        return hidden

    before = model.config.get_text_config()._attn_implementation
    set_text_attention(model.pretrained, PACKED)
    try:
        with torch.no_grad():
            call = partial(through, run) if through else run
            names = separate_sequences(
                model.language_model, partial(call, layout.input_ids), layout.bounds
            )
    except MissingBoundsError as error:
        raise _not_passed(type(model.pretrained).__name__) from error
    finally:
        set_text_attention(model.pretrained, before)
    model.is_separated = True
    return names


def _not_passed(name: str) -> LayoutRefusedError:
    return LayoutRefusedError(
        f"{name} does not pass the borders of packed sequences to its attention: train without "
        "packing_samples and sp_size"
    )


def _padded(rows: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Return token ids [rows, tokens], right-padded, and the bool mask of real tokens."""
    is_real = [torch.ones_like(row, dtype=torch.bool) for row in rows]
    return pad_sequence(list(rows), batch_first=True), pad_sequence(is_real, batch_first=True)


def _siblings(rows: Sequence[Tensor]) -> list[Tensor]:
    """Return rows, most with a common prefix, and one with only a common end; see `LENGTHS`."""
    first, second, third = rows
    branch = torch.cat([first[:8], third])
    twig = torch.cat([branch[:13], second.flip(0)])
    return [first, torch.cat([first[:8], second]), branch, twig, second]


def random_rows(model: SequenceModel, device: torch.device) -> list[Tensor]:
    """Return rows of `LENGTHS` random tokens that a text may have."""
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
    """Return [tokens] random projections of the directions of hidden states [tokens, hidden]."""
    generator = torch.Generator().manual_seed(0)
    direction = torch.randn(hidden.shape[-1], generator=generator).to(hidden.device)
    return nn.functional.normalize(hidden.float(), dim=-1) @ direction


@contextmanager
def _rounded_otherwise(seed: int) -> Iterator[None]:
    """Change the output of each layer without children by a unit in the last place."""
    generator = torch.Generator().manual_seed(seed)

    def move(module: nn.Module, _: object, output: object) -> Tensor | None:
        is_number = isinstance(output, Tensor) and output.is_floating_point()
        if not is_number or next(module.children(), None) is not None:
            return None
        values = cast("Tensor", output)
        signs = torch.randint(2, values.shape, generator=generator).to(values.device) * 2 - 1
        return values * (1 + signs * torch.finfo(values.dtype).eps).to(values.dtype)

    # The annotation allows no hook that returns something.
    handle = register_module_forward_hook(cast("Callable[..., None]", move))
    try:
        yield
    finally:
        handle.remove()


def _evaluate(module: nn.Module, _: object) -> None:
    module.training = False


@contextmanager
def _drawing_modules(device: torch.device) -> Iterator[list[nn.Module]]:
    """Collect the modules that draw random numbers, without their parents."""
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
    """Return the largest difference; infinite if only one of the two is a number."""
    difference = (found - expected).abs().max() if len(found) else found.new_zeros(())
    return float(difference.nan_to_num(nan=torch.inf))
