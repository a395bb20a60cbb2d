"""Layers that would mix the sequences of a stream: found by trying, called once per sequence.

Packed attention knows the borders of sequences. Other layers in which tokens see each other, such
as recurrences and convolutions, may know them, too: they are passed `cu_seq_lens_q` and `seq_idx`,
which kernels of flash-linear-attention and causal-conv1d read. Whether a layer keeps to the borders
is measured: one sequence is changed, and no token of a later one may change.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from itertools import pairwise
from typing import cast

import torch
from torch import Tensor, nn

from lightrft.models.attention import SequenceBounds, attends_packed
from lightrft.models.types import LayoutRefusedError

# Inputs that tell the borders of sequences to a layer.
BORDERS = ("sequence_bounds", "cu_seq_lens_q", "cu_seq_lens_k", "seq_idx")
# Change of a token's output, in norms of it and units of its dtype, that other tokens may cause by
# the order of sums alone.
NOISE = 4
# Classes with one of the mixins below, by the class without.
_classes: dict[tuple[type[nn.Module], type[nn.Module]], type[nn.Module]] = {}


class BySequence(nn.Module):
    """Layer that is called once for each sequence of a stream; mixed into the layer's own class.

    Attributes:
        stream: Borders of the sequences of the stream that is read; None outside a stream.
    """

    stream: SequenceBounds | None = None

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def forward(self, *args: object, **kwargs: object) -> object:
        """Call the layer with the tokens of each sequence, and join its outputs."""
        stream, call = self.stream, super().forward
        if stream is None:
            return call(*args, **kwargs)
        others = {name: value for name, value in kwargs.items() if name not in BORDERS}
        if stream.shared is not None:
            read = functools.partial(stream.shared.read, dim=1)
            change = functools.partial(_changed_tokens, read, stream.offsets[-1])
            args = tuple(map(change, args))
            others = {name: change(value) for name, value in others.items()}
        outputs: list[object] = []
        for queries, keys in stream.spans():
            # A row whose prefix an earlier one holds is run through whole, for the state after it.
            tail, size = slice(queries.start - queries.stop, None), keys.stop - keys.start
            cut = functools.partial(_cut, keys, stream.key_offsets[-1])
            inputs = {name: cut(value) for name, value in others.items()}
            outputs.append(_cut(tail, size, call(*map(cut, args), **inputs)))
        return _joined(outputs, stream.offsets[-1])


def _cut(tokens: slice, num_tokens: int, value: object) -> object:
    """Return the part of an argument that belongs to some tokens of a stream."""
    return _changed_tokens(lambda tensor: tensor[:, tokens], num_tokens, value)


def _changed_tokens(change: Callable[[Tensor], Tensor], num_tokens: int, value: object) -> object:
    """Return a value with its tensors of all tokens of a stream changed."""
    if isinstance(value, tuple):
        return tuple(_changed_tokens(change, num_tokens, each) for each in value)
    if isinstance(value, Tensor) and value.shape[:2] == (1, num_tokens):
        return change(value)
    return value


def _joined(outputs: Sequence[object], num_tokens: int) -> object:
    """Return the outputs of the sequences joined along the tokens; what is of no token is left."""
    first = outputs[0]
    if isinstance(first, tuple):
        parts = zip(*cast("Sequence[tuple[object, ...]]", outputs), strict=True)
        return tuple(_joined(each, num_tokens) for each in parts)
    tensors = [each for each in outputs if isinstance(each, Tensor) and each.ndim > 1]
    if sum(each.shape[1] for each in tensors) != num_tokens:
        return first
    return torch.cat(tensors, dim=1)


class _PassesBorders(nn.Module):
    """Part that passes the borders of sequences on to its layers that are called by sequence.

    A hook would not do it: transformers 5.24 runs none where it computes a part a second time.
    """

    def forward(self, *args: object, **kwargs: object) -> object:
        """Call the part with its layers in the stream that is read."""
        _set_stream(self, cast("SequenceBounds | None", kwargs.get("sequence_bounds")))
        try:
            return super().forward(*args, **kwargs)
        finally:
            _set_stream(self, None)


def call_by_sequence(parent: nn.Module, layer: nn.Module) -> None:
    """Let a layer be called once for each sequence of a stream; it changes in place.

    Args:
        parent: Part around it that is passed the borders of the sequences as `sequence_bounds`.
        layer: Layer that mixes sequences otherwise.
    """
    for module, mixin in ((layer, BySequence), (parent, _PassesBorders)):
        if not isinstance(module, mixin):
            module.__class__ = _mixed(mixin, type(module))


def _mixed(mixin: type[nn.Module], kind: type[nn.Module]) -> type[nn.Module]:
    if (mixin, kind) not in _classes:
        module = {"__module__": kind.__module__}
        _classes[mixin, kind] = type(kind.__name__, (mixin, kind), module)
    return _classes[mixin, kind]


def _set_stream(parent: nn.Module, stream: SequenceBounds | None) -> None:
    for layer in parent.children():
        if isinstance(layer, BySequence):
            layer.stream = stream
        else:  # what lies in such a layer sees one sequence at a time
            _set_stream(layer, stream)


def separate_sequences(
    trunk: nn.Module, run: Callable[[], object], stream: SequenceBounds
) -> list[str]:
    """Let the layers of a trunk that mix sequences be called once per sequence.

    Args:
        trunk: Trunk of a text model, with packed attention; it changes in place.
        run: Function that runs it over a stream, always the same.
        stream: Borders of the stream's sequences; the first has several tokens.

    Returns:
        Names of the layers.

    Raises:
        LayoutRefusedError: The model has attention of its own, or weights of a layer are gathered
            at each call, and ranks have other numbers of sequences.
    """
    names = {module: name for name, module in trunk.named_modules()}
    passed, raising = _passed_borders(trunk, run)
    separated = {layer: names[layer] for layer in raising}
    # Without the sum to which a part adds its outputs, in which small changes would not show. If
    # attention, which has the borders, mixes nevertheless, the proof refuses the model.
    parents = {
        child: part for part in passed for child in part.children() if not attends_packed(child)
    }
    while True:
        mixing = _mixing(set(parents), run, stream)
        # Those without another in them, which mix by themselves.
        layers = {each for each in mixing if mixing.isdisjoint(set(each.modules()) - {each})}
        if layers <= separated.keys():
            break
        for layer in layers:
            call_by_sequence(parents[layer], layer)
            separated[layer] = names[layer]
    if not separated and not attends_packed(trunk):
        raise LayoutRefusedError(
            f"{type(trunk).__name__} has attention of its own, which would form a mask over all "
            "packed sequences: train without packing_samples and sp_size"
        )
    refuse_gathered_layers(trunk)
    return sorted(separated.values())


def refuse_gathered_layers(model: nn.Module) -> None:
    """Refuse layers whose weights all ranks gather at each call: ranks have other numbers of calls.

    Raises:
        LayoutRefusedError: DeepSpeed's stage 3 holds weights of layers called once per sequence.
    """
    for name, layer in model.named_modules():
        is_called = isinstance(layer, BySequence)
        if is_called and any("ds_id" in vars(weight) for weight in layer.parameters()):
            raise LayoutRefusedError(
                f"{type(layer).__name__} ({name}) is called once per packed sequence, and ZeRO "
                "stage 3 gathers its weights at each call: train without packing_samples, or with "
                "another strategy"
            )


def _passed_borders(
    trunk: nn.Module, run: Callable[[], object]
) -> tuple[set[nn.Module], set[nn.Module]]:
    """Return the parts of a trunk that are passed the borders of sequences, and layers that raise.

    Convolutions and recurrences of transformers raise an error at borders without the kernels that
    read them; they are called once per sequence from here on.

    Raises:
        LayoutRefusedError: A layer raises an error when it is called once per sequence, too.
    """
    passed: set[nn.Module] = set()
    raising: set[nn.Module] = set()
    running: list[nn.Module] = []
    parts = set(trunk.modules()) - {trunk}

    def enter(part: nn.Module, _: object, inputs: Mapping[str, object]) -> None:
        running.append(part)
        if inputs.get("sequence_bounds") is not None:
            passed.add(part)

    def leave(*_: object) -> None:  # not called for a part that raises
        running.pop()

    with ExitStack() as stack, _before_each(parts, enter):
        for part in parts:
            stack.callback(part.register_forward_hook(leave).remove)
        while True:
            running.clear()
            try:
                run()
                return passed, raising
            except (ValueError, TypeError, NotImplementedError) as error:
                pairs = [
                    (parent, layer)
                    for parent, layer in pairwise(running)
                    if parent in passed and layer not in raising and not attends_packed(layer)
                ]
                if not pairs:
                    raise LayoutRefusedError(
                        f"{type(trunk).__name__} does not run over packed rows: {error}"
                    ) from error
            kinds = tuple(map(type, pairs[-1]))
            for parent in parts:
                for layer in parent.children():
                    if (type(parent), type(layer)) == kinds:
                        call_by_sequence(parent, layer)
                        raising.add(layer)


def _mixing(
    parts: set[nn.Module], run: Callable[[], object], stream: SequenceBounds
) -> set[nn.Module]:
    """Return the parts in which tokens see others of another sequence."""
    mixing: set[nn.Module] = set()
    is_trying = False

    def look(part: nn.Module, args: tuple[object, ...], inputs: Mapping[str, object]) -> None:
        nonlocal is_trying
        if not is_trying:
            is_trying = True
            if _mixes(part, args, inputs, stream):
                mixing.add(part)
            is_trying = False

    with _before_each(parts, look):
        run()
    return mixing


def _mixes(
    part: nn.Module,
    args: tuple[object, ...],
    inputs: Mapping[str, object],
    stream: SequenceBounds,
) -> bool:
    """Return whether later tokens change if those of the first sequence do."""
    first, num_tokens = stream.offsets[1], stream.offsets[-1]

    def later(num_changed: int) -> Tensor | None:
        change = functools.partial(_changed, num_changed, num_tokens)
        others = {name: change(value) for name, value in inputs.items()}
        hidden = _hidden(part.forward(*map(change, args), **others), num_tokens)
        return None if hidden is None else hidden[0, first:]

    before, after = later(0), later(first)
    if before is None or after is None:
        return False
    shifts, sizes = (x.float().norm(dim=-1) for x in (after - before, before))
    return bool((shifts > NOISE * torch.finfo(before.dtype).eps * sizes).any())


def _hidden(value: object, num_tokens: int) -> Tensor | None:
    """Return the states of tokens, [1, tokens, hidden], of a value or output; None without."""
    first = value[0] if isinstance(value, tuple) and value else value
    if not isinstance(first, Tensor) or not first.is_floating_point() or first.ndim != 3:
        return None
    return first if first.shape[:2] == (1, num_tokens) else None


def _changed(num_changed: int, num_tokens: int, value: object) -> object:
    """Return an argument with other states of the first tokens."""
    hidden = None if isinstance(value, tuple) else _hidden(value, num_tokens)
    if hidden is None:
        return value
    # No change of sign, which a product of two projections would not show.
    return torch.cat([hidden[:, :num_changed].flip(-1), hidden[:, num_changed:]], dim=1)


@contextmanager
def _before_each(
    parts: Iterable[nn.Module],
    look: Callable[[nn.Module, tuple[object, ...], Mapping[str, object]], None],
) -> Iterator[None]:
    """Call a function with each part and its inputs before it runs."""
    with ExitStack() as stack:
        for part in parts:
            handle = part.register_forward_pre_hook(look, with_kwargs=True)
            stack.callback(handle.remove)
        yield
