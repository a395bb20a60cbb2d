"""Inputs of the output layer, its program in float64, and checks of a result against that."""

import math

import torch

from lightrft.kernels import linear_logprob, linear_policy_loss


def make_inputs(
    num_tokens, vocab, *, size=24, dtype=torch.float32, spread=3.0, has_bias=True, device="cpu"
):
    """Return hidden states, weight and bias as leaves, targets, and a gradient of each output."""
    generator = torch.Generator(device).manual_seed(0)
    drawn = {"generator": generator, "device": device}
    leaves = [
        torch.randn(num_tokens, size, **drawn),
        torch.randn(vocab, size, **drawn) * (spread / math.sqrt(size)),
        torch.randn(vocab, **drawn),
    ]
    targets = torch.randint(0, vocab, (num_tokens,), **drawn)
    upstream = torch.randn(2, num_tokens, **drawn)
    kept = leaves if has_bias else leaves[:2]
    return [leaf.to(dtype).requires_grad_() for leaf in kept], targets, upstream


def float64_program(leaves, targets, *, temperature=1.0, softcap=None, num_tokens=None):
    """Return log-probabilities and entropies of whole rows, the leaves, and the largest logit.

    A bias of minus infinity takes a token out, rows of target -100 have zeros.
    """
    doubles = [leaf.detach().double().requires_grad_() for leaf in leaves]
    hidden, weight, *bias = doubles
    logits = hidden @ weight.T + (bias[0] if bias else 0.0)
    is_out = logits == -torch.inf
    is_out[:, num_tokens or is_out.shape[1] :] = True
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    logits = (logits / temperature).masked_fill(is_out, -torch.inf)
    law = logits.log_softmax(1)
    entropies = -(law.exp() * law.masked_fill(is_out, 0.0)).sum(1)
    logprobs = law.gather(1, targets.clamp(min=0)[:, None]).squeeze(1)
    is_ignored = targets == -100
    values = [each.masked_fill(is_ignored, 0.0) for each in (logprobs, entropies)]
    finite = logits.detach()[~is_out]
    return values, doubles, float(finite.abs().max()) if len(finite) else 0.0


def weighted(outputs, upstream):
    """Return the loss in which the outputs have these gradients."""
    return sum((o.double() * g).sum() for o, g in zip(outputs, upstream, strict=False))


def weighted_tokens(upstream):
    """Return that loss as a function of some rows, with its gradients."""

    def token_loss(logprobs, entropy, rows):
        first, second = upstream[:, rows].to(logprobs.dtype)
        if entropy is None or not second.any():
            return (first * logprobs).sum(), first, None
        return (first * logprobs + second * entropy).sum(), first, second

    return token_loss


def relative_error(value, expected):
    """Return the norm of the difference over that of what is expected, if that is not 0."""
    difference = float((value.detach().double() - expected.detach().double()).norm())
    scale = float(expected.detach().double().norm())
    return difference / scale if scale > 1e-30 else difference


def compare(outputs, leaves, targets, upstream, *, value, gradient, loss=None, **program):
    """Check outputs, and gradients of a loss of theirs, against the float64 program.

    A float32 logit of size z is off by about z * 2^-24, and so is what is computed from it: the
    bounds are those of logits up to 50. A pair of bounds is that of log-probabilities and of
    entropies.
    """
    expected, doubles, size = float64_program(leaves, targets, **program)
    scale = max(1.0, size / 50)
    bounds = value if isinstance(value, tuple) else (value, value)
    for result, exact, bound in zip(outputs, expected, bounds, strict=False):
        assert result.dtype in (torch.float32, torch.float64)
        error = (result.double() - exact).abs()
        assert (error <= bound * scale).all()
        assert not len(error) or error.mean() <= max(1e-5, bound / 5) * scale
    loss = weighted(outputs, upstream) if loss is None else loss
    results = torch.autograd.grad(loss, leaves)
    wanted = torch.autograd.grad(weighted(expected, upstream), doubles)
    for result, exact, leaf in zip(results, wanted, leaves, strict=True):
        assert result.dtype == leaf.dtype
        assert relative_error(result, exact) < gradient * scale


def check_logprob(
    leaves, targets, upstream, *, value=1e-5, gradient=2e-6, impl="auto", workspace=None, **program
):
    """Check `linear_logprob` against the float64 program; return its output."""
    hidden, weight, *bias = leaves
    output = linear_logprob(
        hidden,
        weight,
        targets,
        bias=bias[0] if bias else None,
        entropy="grad",
        impl=impl,
        workspace=workspace,
        **program,
    )
    outputs = (output.logprobs, output.entropy)
    compare(outputs, leaves, targets, upstream, value=value, gradient=gradient, **program)
    return output


def check_loss(leaves, targets, upstream, *, value=1e-5, gradient=5e-6, how=None, **program):
    """Check a loss inside the output layer against the float64 program; return its output.

    Args:
        how: Options that change no number.
    """
    hidden, weight, *bias = leaves
    output = linear_policy_loss(
        hidden,
        weight,
        targets,
        weighted_tokens(upstream),
        bias=bias[0] if bias else None,
        **program,
        **(how or {}),
    )
    outputs = [output.logprobs] if output.entropy is None else [output.logprobs, output.entropy]
    compare(
        outputs,
        leaves,
        targets,
        upstream,
        value=value,
        gradient=gradient,
        loss=output.loss,
        **program,
    )
    return output
