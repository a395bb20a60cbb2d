# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
# ruff: noqa: ANN001, ANN002, ANN202
"""`linear_logprob` as operators of torch: what compilers, checkpoints and autograd see of it.

They are opaque: below autograd and autocast they choose an implementation, select rows and look at
values. The shapes of their outputs follow from those of their inputs. Tensors without an element
stand for results not asked for. The types of their arguments are in the schemas.
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
from lightrft.kernels.logprob.selection import Request, choose_engine
from lightrft.kernels.logprob.types import LogitsTransform, OutputLayer, accumulation_dtype

_OPTIONS = (
    "float temperature, float? softcap, int ignore_index, str entropy, str impl, str precision, "
    "str deterministic, int chunk_columns, int start, int vocab_size, str? group"
)
_INPUTS = "Tensor hidden, Tensor weight, Tensor? bias, Tensor targets"
_FORWARD = f"({_INPUTS}, Tensor? weight_total, {_OPTIONS}) -> (Tensor, Tensor, Tensor, Tensor)"
_SAVED = (
    f"Tensor? grad_logprobs, Tensor? grad_entropies, {_INPUTS}, "
    "Tensor logprobs, Tensor entropies, Tensor maximum, Tensor log_sum, bool[] needs"
)
_BACKWARD = f"({_SAVED}, {_OPTIONS}) -> (Tensor, Tensor, Tensor)"
_BACKWARD_INTO = f"(Tensor(a!) weight_total, {_SAVED}, {_OPTIONS}) -> (Tensor, Tensor)"
_LIBRARY = torch.library.Library("lightrft", "FRAGMENT")
_TAGS = (torch.Tag.pt2_compliant_tag,)
# Arguments before the options.
NUM_TENSORS = 5
NUM_SAVED = 11


def _forward(hidden, weight, bias, targets, weight_total, *options):
    """(logprobs, entropies, maximum, log_sum), see `RowResults`."""
    del weight_total
    with torch.autocast(hidden.device.type, enabled=False):
        passes, layer = _prepare(hidden, weight, bias, options)
        results = statistics_of_rows(hidden, layer, targets, passes)
    return results.logprobs, results.entropies, results.maximum, results.log_sum


def _fake_forward(hidden, weight, bias, targets, weight_total, *options):
    del weight_total
    dtype = accumulation_dtype(hidden, weight, bias)
    rows = targets.new_empty(targets.shape, dtype=dtype)
    entropy = options[3]
    entropies = rows.new_empty(0) if entropy == "none" else torch.empty_like(rows)
    return rows, entropies, torch.empty_like(rows), torch.empty_like(rows)


def _backward(*arguments):
    """(dL/dhidden, dL/dweight, dL/dbias); `needs` says which."""
    return _gradients(None, *arguments)


def _backward_into(weight_total, *arguments):
    """(dL/dhidden, dL/dbias); dL/dweight is added to `weight_total`."""
    grad_hidden, _, grad_bias = _gradients(weight_total, *arguments)
    return grad_hidden, grad_bias


def _fake_backward(*arguments):
    _, _, hidden, weight, bias = arguments[:5]
    return _memory(hidden, weight, bias, arguments[NUM_SAVED - 1])


def _fake_backward_into(weight_total, *arguments):
    del weight_total
    grad_hidden, _, grad_bias = _fake_backward(*arguments)
    return grad_hidden, grad_bias


def _gradients(weight_total, *arguments):
    grad_logprobs, grad_entropies, hidden, weight, bias, targets, *results, needs = arguments[
        :NUM_SAVED
    ]
    options = arguments[NUM_SAVED:]
    needs_hidden, needs_weight, needs_bias = needs
    needs = (needs_hidden, needs_weight and weight_total is None, needs_bias)
    grads = _memory(hidden, weight, bias, needs)
    with torch.autocast(hidden.device.type, enabled=False):
        passes, layer = _prepare(hidden, weight, bias, options)
        num_rows = len(layer.weight)
        total = weight_total if needs_weight else None
        sink = GradientSink(
            needs_hidden=needs_hidden,
            weight=_rows_to_write(grads[1], num_rows),
            weight_total=None if total is None else total[:num_rows],
            bias=_rows_to_write(grads[2], num_rows),
        )
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


def _prepare(hidden, weight, bias, options):
    """How the options are carried out: (PassOptions, OutputLayer)."""
    (
        temperature,
        softcap,
        ignore_index,
        entropy,
        impl,
        precision,
        deterministic,
        chunk_columns,
        start,
        vocab_size,
        group,
    ) = options
    request = Request.of(
        impl,
        precision,
        deterministic,
        entropy,
        temperature=temperature,
        has_bias=bias is not None,
        has_softcap=softcap is not None,
        chunk_columns=chunk_columns,
    )
    num_rows = max(0, vocab_size - start)  # rows beyond pad the vocabulary
    columns = weight if weight.stride(1) == 1 else weight.contiguous()
    bias = None if bias is None else bias[:num_rows]
    layer = OutputLayer(columns[:num_rows], bias, LogitsTransform(temperature, softcap))
    passes = PassOptions(
        engine=choose_engine(request, hidden, layer),
        needs_entropy=request.needs_entropy,
        ignore_index=ignore_index,
        start=start,
        vocab_size=vocab_size,
        group=group,
    )
    return passes, layer


def _memory(hidden, weight, bias, needs):
    """Of the three gradients; none where a gradient is not needed."""

    def memory(like, is_needed):
        if not is_needed:
            return hidden.new_empty(0)
        return torch.empty_like(like, memory_format=torch.contiguous_format)

    return tuple(memory(*pair) for pair in zip((hidden, weight, bias), needs, strict=True))


def _rows_to_write(grad, num_rows):
    """The rows that are not padding, whose gradient is 0; None where there is no gradient."""
    if grad.numel() == 0:
        return None
    grad[num_rows:] = 0
    return grad[:num_rows]


def _save(ctx, inputs, output):
    hidden, weight, bias, targets, weight_total, *options = inputs
    _, entropies, maximum, log_sum = output
    constants = [maximum, log_sum]
    if options[3] != "grad":
        constants.append(entropies)
    ctx.mark_non_differentiable(*constants)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(hidden, weight, bias, targets, *output)
    # Not saved: every backward pass adds to it, and a saved tensor must not change.
    ctx.weight_total = weight_total
    ctx.options = options


def _differentiate(ctx, grad_logprobs, grad_entropies, *_):
    hidden, weight, bias, targets, *results = ctx.saved_tensors
    needs = list(ctx.needs_input_grad[:3])
    nothing = (None,) * (NUM_TENSORS - 3 + len(ctx.options))
    if grad_logprobs is None and grad_entropies is None:
        return (None, None, None, *nothing)
    arguments = (
        grad_logprobs,
        grad_entropies,
        hidden,
        weight,
        bias,
        targets,
        *results,
        needs,
        *ctx.options,
    )
    if ctx.weight_total is None:
        grads = logprob_backward(*arguments)
    else:
        grad_hidden, grad_bias = logprob_backward_into(ctx.weight_total, *arguments)
        grads, needs[1] = [grad_hidden, None, grad_bias], False
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
    ("linear_logprob_backward_into", _BACKWARD_INTO, _backward_into, _fake_backward_into),
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
logprob_backward_into = torch.ops.lightrft.linear_logprob_backward_into.default
