"""The actor equals the transformers model it wraps, whichever head it uses."""

import pytest
import torch
from tests.models.batches import plain_and_fused, relative_norm
from tests.models.tiny import tiny_model

from lightrft.models import Actor, load_causal_lm


def make_batch(num_rows=3, width=11, seed=0, vocab=256):
    generator = torch.Generator().manual_seed(seed)
    token_ids = torch.randint(1, vocab, (num_rows, width), generator=generator)
    lengths = torch.tensor([width, width - 4, 2])[:num_rows]
    attention_mask = torch.arange(width) < lengths[:, None]
    upstream = torch.randn(2, num_rows, width, generator=generator)
    return token_ids.masked_fill(~attention_mask, 0), attention_mask, upstream


def slow_logprobs(model, token_ids, attention_mask, temperature):
    """float64 log_softmax of transformers' own logits, row by row and without padding."""
    logprobs = torch.zeros(token_ids.shape, dtype=torch.float64)
    entropy = torch.zeros(token_ids.shape, dtype=torch.float64)
    for row, length in enumerate(attention_mask.sum(1).tolist()):
        tokens = token_ids[row : row + 1, :length]
        log_p = torch.log_softmax(model(tokens).logits[0, :-1].double() / temperature, -1)
        logprobs[row, 1:length] = log_p.gather(1, tokens[0, 1:, None])[:, 0]
        entropy[row, 1:length] = -(log_p.exp() * log_p).sum(1)
    return logprobs, entropy


def gradients(module, outputs, upstream):
    loss = sum((o.double() * g).sum() for o, g in zip(outputs, upstream, strict=True))
    named = dict(module.named_parameters())
    return dict(zip(named, torch.autograd.grad(loss, named.values()), strict=True))


@plain_and_fused
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_values_and_gradients_equal_transformers(checkpoint, is_fused, temperature):
    token_ids, attention_mask, upstream = make_batch()
    actor = Actor.from_pretrained(checkpoint, fused_linear_logprob=is_fused, chunk_size=100)
    output = actor(token_ids, attention_mask, temperature=temperature, entropy="grad")
    model = load_causal_lm(checkpoint)
    expected = slow_logprobs(model, token_ids, attention_mask, temperature)
    assert output.logprobs.dtype == torch.float32
    assert (output.logprobs - expected[0]).abs().max() < 2e-5
    assert (output.entropy - expected[1]).abs().max() < 2e-5
    got = gradients(actor.model, (output.logprobs, output.entropy), upstream)
    want = gradients(model, expected, upstream)
    assert set(got) == set(want)
    assert relative_norm(got, want) < 2e-6


@plain_and_fused
def test_scored_mask_selects_and_zeroes(checkpoint, is_fused):
    token_ids, attention_mask, upstream = make_batch()
    actor = Actor.from_pretrained(checkpoint, fused_linear_logprob=is_fused)
    everything = actor(token_ids, attention_mask, entropy="grad")
    scored = attention_mask.clone()
    scored[:, :3] = False
    output = actor(token_ids, attention_mask, scored_mask=scored, entropy="grad")
    assert torch.allclose(output.logprobs, everything.logprobs * scored, atol=2e-6)
    assert not output.logprobs[~scored].any()
    assert not output.entropy[~scored].any()
    masked = [g * scored for g in upstream]
    got = gradients(actor, (output.logprobs, output.entropy), upstream)
    want = gradients(actor, (everything.logprobs, everything.entropy), masked)
    assert relative_norm(got, want) < 2e-6


@plain_and_fused
def test_nothing_to_score_still_gives_every_parameter_a_zero_gradient(checkpoint, is_fused):
    # Ranks without tokens must reach the same collectives in the backward pass as the others.
    token_ids, attention_mask, _ = make_batch()
    actor = Actor.from_pretrained(checkpoint, fused_linear_logprob=is_fused)
    for mask in (attention_mask, torch.zeros_like(attention_mask)):
        output = actor(token_ids, mask, scored_mask=torch.zeros_like(mask), entropy="grad")
        actor.zero_grad()
        (output.logprobs.sum() + output.entropy.sum()).backward()
        for name, parameter in actor.named_parameters():
            assert parameter.grad is not None, name
            assert not parameter.grad.any(), name


def test_entropy_modes(checkpoint):
    token_ids, attention_mask, _ = make_batch()
    actor = Actor.from_pretrained(checkpoint)
    assert actor(token_ids, attention_mask).entropy is None
    value = actor(token_ids, attention_mask, entropy="value").entropy
    assert not value.requires_grad
    assert torch.equal(value, actor(token_ids, attention_mask, entropy="grad").entropy)


def test_gradient_checkpointing_changes_no_gradient(checkpoint):
    token_ids, attention_mask, upstream = make_batch()
    actor = Actor.from_pretrained(checkpoint).train()
    want = gradients(actor, [actor(token_ids, attention_mask).logprobs], upstream[:1])
    actor.gradient_checkpointing_enable()
    got = gradients(actor, [actor(token_ids, attention_mask).logprobs], upstream[:1])
    assert relative_norm(got, want) < 1e-6


def test_other_heads_are_refused():
    actor = Actor(tiny_model("gemma2"))
    with pytest.raises(ValueError, match="linear output projection: got LinearLogprobHead"):
        Actor(actor.model)


def test_bfloat16_scores_in_float32(checkpoint):
    token_ids, attention_mask, _ = make_batch()
    actor = Actor.from_pretrained(checkpoint, dtype="bfloat16")
    output = actor(token_ids, attention_mask)
    assert output.logprobs.dtype == torch.float32
    wide = Actor.from_pretrained(checkpoint)(token_ids, attention_mask)
    assert (output.logprobs - wide.logprobs).abs().max() < 0.2
