"""A packed stream gives what padded rows give, and keeps its sequences apart."""

import copy

import pytest
import torch
from tests.models.batches import (
    forget_window,
    gradients,
    make_batch,
    plain_and_fused,
    relative_norm,
    sliding_model,
)
from transformers import AutoModelForCausalLM

from lightrft.engines.media.media import EncodedPrompt, RowMedia
from lightrft.models import Actor, TokenLayout
from lightrft.models.attention import PACKED


def actor_results(actor):
    token_ids, attention_mask, scored_mask, upstream = make_batch()
    actor.zero_grad()
    output = actor(
        token_ids, attention_mask, scored_mask=scored_mask, entropy="grad", temperature=0.7
    )
    ((output.logprobs - 0.3 * output.entropy) * upstream).sum().backward()
    return output.logprobs.detach(), output.entropy.detach(), gradients(actor)


def test_the_stream_has_the_real_tokens_and_positions_that_start_anew():
    token_ids = torch.tensor([[5, 6, 7, 0], [8, 9, 0, 0], [0, 0, 0, 0]])
    scored = torch.tensor([[0, 0, 1, 0], [0, 1, 0, 0], [0, 0, 0, 0]], dtype=torch.bool)
    layout = TokenLayout.packed(token_ids, token_ids > 0, scored)
    assert layout.input_ids.tolist() == [[5, 6, 7, 8, 9]]
    assert layout.position_ids.tolist() == [[0, 1, 2, 0, 1]]
    assert layout.bounds.offsets == (0, 3, 5)
    assert layout.targets.tolist() == [7, 9]
    hidden = torch.arange(5.0).view(1, 5, 1)
    selected = layout.select(hidden).squeeze(1)
    assert selected.tolist() == [1.0, 3.0]
    assert layout.scatter(selected).tolist() == [[0, 0, 1, 0], [0, 3, 0, 0], [0, 0, 0, 0]]


def test_left_padding_and_empty_batches_can_be_packed():
    token_ids = torch.tensor([[0, 0, 5, 6], [7, 8, 0, 0]])
    layout = TokenLayout.packed(token_ids, token_ids > 0)
    assert layout.input_ids.tolist() == [[5, 6, 7, 8]]
    assert layout.targets.tolist() == [6, 8]
    assert layout.sources.tolist() == [0, 2]
    empty = TokenLayout.packed(token_ids, torch.zeros_like(token_ids, dtype=torch.bool))
    assert empty.input_ids.shape == (1, 1)
    assert not empty.scatter(torch.zeros(0)).any()


@plain_and_fused
def test_packed_logprobs_entropies_and_gradients_equal_padded_ones(checkpoint, is_fused):
    actor = Actor.from_pretrained(checkpoint, fused_linear_logprob=is_fused, chunk_size=100)
    logprobs, entropy, expected = actor_results(actor)
    actor.pack_samples()
    packed_logprobs, packed_entropy, packed_gradients = actor_results(actor)
    assert torch.allclose(packed_logprobs, logprobs, rtol=0, atol=1e-5)
    assert torch.allclose(packed_entropy, entropy, rtol=0, atol=1e-5)
    assert relative_norm(packed_gradients, expected) <= 1e-6
    actor.pack_samples(False)
    assert torch.equal(actor_results(actor)[0], logprobs)


def test_a_sliding_window_holds_inside_each_sequence():
    actor = Actor(sliding_model())
    logprobs, _, expected = actor_results(actor)
    actor.pack_samples()
    packed, _, packed_gradients = actor_results(actor)
    assert torch.allclose(packed, logprobs, rtol=0, atol=1e-5)
    assert relative_norm(packed_gradients, expected) <= 1e-6
    forget_window(actor.model)
    assert (actor_results(actor)[0] - logprobs).abs().max() > 0.01


def test_a_packed_model_called_past_its_actor_refuses(checkpoint):
    actor = Actor.from_pretrained(checkpoint)
    actor.pack_samples()
    with pytest.raises(ValueError, match="call it through its actor"):
        actor.model(input_ids=torch.tensor([[1, 2, 3]]))
    token_ids, mask, *_ = make_batch()
    prompt = EncodedPrompt((1,), (1,), None, {"pixel_values": torch.zeros(1)}, frozenset({"image"}))
    with pytest.raises(ValueError, match=r"text only.*--text_only"):
        actor(token_ids, mask, media=RowMedia((prompt,) * len(token_ids)))


def test_models_that_would_mix_sequences_are_refused(checkpoint):
    model = AutoModelForCausalLM.from_pretrained(checkpoint)
    config = copy.deepcopy(model.config)
    config.layer_types = ["full_attention", "chunked_attention"]
    model.config = config
    with pytest.raises(ValueError, match="chunked_attention"):
        Actor(model).pack_samples()
    assert config._attn_implementation != PACKED
