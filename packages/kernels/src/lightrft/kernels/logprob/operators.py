# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
# ruff: noqa: ANN001, ANN002, ANN202
"""`linear_logprob` as torch operators, for compilers, checkpoints and autograd.

They are opaque: below autograd and autocast they choose an implementation, select rows and read
values. Shapes of outputs depend only on shapes of inputs. Empty tensors stand for results that are
not requested. The schemas have the types of arguments.
"""

import torch

from lightrft.kernels.logprob.passes import (
    GradientSink,
    PassOptions,
    RowResults,
    Upstream,
    gradients_of_layer,
    statistics_of_rows,
)
from lightrft.kernels.logprob.selection import choose_engine
from lightrft.kernels.logprob.types import (
    LogitsTransform,
    OutputLayer,
    accumulation_dtype,
    leading,
)

_OPTIONS = (
    "float temperature, float? softcap, int ignore_index, str entropy, str impl, "
    "int chunk_columns, int? num_tokens"
)
_INPUTS = "Tensor hidden, Tensor weight, Tensor? bias, Tensor targets"
_FORWARD = f"({_INPUTS}, {_OPTIONS}) -> (Tensor, Tensor, Tensor, Tensor)"
_BACKWARD = (
    f"(Tensor? grad_logprobs, Tensor? grad_entropies, {_INPUTS}, Tensor logprobs, "
    f"Tensor entropies, Tensor maximum, Tensor log_sum, bool[] needs, {_OPTIONS}) "
    "-> (Tensor, Tensor, Tensor)"
)
_LIBRARY = torch.library.Library("lightrft", "FRAGMENT")
_TAGS = (torch.Tag.pt2_compliant_tag,)


def _forward(hidden, weight, bias, targets, *options):
    """Return (logprobs, entropies, maximum, log_sum), see `RowResults`."""
    with torch.autocast(hidden.device.type, enabled=False):
        passes, layer = _prepare(hidden, weight, bias, options)
        return tuple(statistics_of_rows(hidden, layer, targets, passes))


def _fake_forward(hidden, weight, bias, targets, *options):
    dtype = accumulation_dtype(hidden, weight, bias)
    rows = targets.new_empty(targets.shape, dtype=dtype)
    entropies = rows.new_empty(0) if options[3] == "none" else torch.empty_like(rows)
    return rows, entropies, torch.empty_like(rows), torch.empty_like(rows)


def _backward(*arguments):
    """Return (dL/dhidden, dL/dweight, dL/dbias); those that `needs` leaves out are empty."""
    grad_logprobs, grad_entropies, hidden, weight, bias, targets, *results, needs = arguments[:11]
    options = arguments[11:]
    grads = _memory(hidden, weight, bias, needs)
    with torch.autocast(hidden.device.type, enabled=False):
        passes, layer = _prepare(hidden, weight, bias, options)
        sink = GradientSink(
            needs_hidden=needs[0],
            weight=leading(grads[1], options[6]) if needs[1] else None,
            bias=leading(grads[2], options[6]) if needs[2] else None,
        )
        if options[6] is not None:  # rows that are no tokens
            for grad in grads[1:]:
                grad[options[6] :].zero_()
        grad_hidden = gradients_of_layer(
            hidden,
            layer,
            targets,
            RowResults(*results),
            Upstream(grad_logprobs, grad_entropies),
            sink,
            passes,
        )
    return grads[0] if grad_hidden is None else grad_hidden, grads[1], grads[2]


def _fake_backward(*arguments):
    _, _, hidden, weight, bias = arguments[:5]
    return _memory(hidden, weight, bias, arguments[10])


def _prepare(hidden, weight, bias, options):
    """Return (PassOptions, OutputLayer) for the options."""
    temperature, softcap, ignore_index, entropy, impl, chunk_columns, num_tokens = options
    weight, bias = leading(weight, num_tokens), leading(bias, num_tokens)
    columns = weight if weight.stride(1) == 1 else weight.contiguous()
    layer = OutputLayer(columns, bias, LogitsTransform(temperature, softcap))
    engine = choose_engine(impl, hidden, layer, entropy=entropy, chunk_columns=chunk_columns)
    return PassOptions(engine, entropy != "none", ignore_index), layer


def _memory(hidden, weight, bias, needs):
    """Allocate memory for the three gradients; an empty tensor if one is not needed."""

    def memory(like, is_needed):
        if not is_needed:
            return hidden.new_empty(0)
        return torch.empty_like(like, memory_format=torch.contiguous_format)

    return tuple(memory(*pair) for pair in zip((hidden, weight, bias), needs, strict=True))


def _save(ctx, inputs, output):
    hidden, weight, bias, targets, *options = inputs
    _, entropies, maximum, log_sum = output
    constants = [maximum, log_sum]
    if options[3] != "grad":
        constants.append(entropies)
    ctx.mark_non_differentiable(*constants)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(hidden, weight, bias, targets, *output)
    ctx.options = options


def _differentiate(ctx, grad_logprobs, grad_entropies, *_):
    needs = list(ctx.needs_input_grad[:3])
    nothing = (None,) * (1 + len(ctx.options))
    if grad_logprobs is None and grad_entropies is None:
        return (None, None, None, *nothing)
    saved = ctx.saved_tensors
    grads = logprob_backward(grad_logprobs, grad_entropies, *saved, needs, *ctx.options)
    return (
        *(grad if needed else None for grad, needed in zip(grads, needs, strict=True)),
        *nothing,
    )


def _refuse_second_derivative(ctx, *_):
    raise RuntimeError(
        "linear_logprob has no second derivative: expected a single backward pass through it, got "
        "a gradient of its gradient; use impl='reference', which autograd differentiates again"
    )


def _refuse_vmap(info, in_dims, *args):
    raise RuntimeError(
        f"linear_logprob does not run under vmap: got a batch of {info.batch_size}; expected "
        "tokens [tokens, hidden]: flatten the batch into them (hidden.flatten(0, 1))"
    )


for _name, _schema, _kernel, _fake in (
    ("linear_logprob", _FORWARD, _forward, _fake_forward),
    ("linear_logprob_backward", _BACKWARD, _backward, _fake_backward),
):
    _LIBRARY.define(_name + _schema, tags=_TAGS)
    _LIBRARY.impl(_name, _kernel, "CompositeExplicitAutograd")
    torch.library.register_fake(f"lightrft::{_name}", _fake, lib=_LIBRARY)
    torch.library.register_vmap(f"lightrft::{_name}", _refuse_vmap, lib=_LIBRARY)
torch.library.register_autograd(
    "lightrft::linear_logprob", _differentiate, setup_context=_save, lib=_LIBRARY
)
torch.library.register_autograd(
    "lightrft::linear_logprob_backward", _refuse_second_derivative, lib=_LIBRARY
)
logprob_forward = torch.ops.lightrft.linear_logprob.default
logprob_backward = torch.ops.lightrft.linear_logprob_backward.default
