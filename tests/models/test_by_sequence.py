"""Layers besides attention in which tokens see each other, in packed rows."""

from copy import deepcopy

import pytest
import torch
from tests.models.all_types import types
from tests.models.tiny import tiny_config
from torch import nn
from transformers import Qwen3ForCausalLM
from transformers.models.lfm2.modeling_lfm2 import Lfm2ShortConv
from transformers.models.qwen3_5 import modeling_qwen3_5

from lightrft.engines.media.families import language_model_class
from lightrft.models import Actor
from lightrft.models.by_sequence import BySequence
from lightrft.models.proof import pack_rows, prove_model
from lightrft.models.types import LayoutRefusedError
from lightrft.strategy import get_fake_strategy

ROWS = torch.arange(5, 5 + 3 * 14).view(3, 14)
MASK = torch.arange(14) < torch.tensor([14, 9, 4])[:, None]


def proved(model):
    """Return an actor and its proof; a string is a type of a tiny model."""
    actor = Actor(types.tiny_model(model).train() if isinstance(model, str) else model)
    return actor, prove_model(actor, get_fake_strategy({}).context, is_random=False)


def packed(model):
    """Return an actor that packs, as a stage makes it."""
    actor, proof = proved(model)
    pack_rows(proof)
    return actor


def called_by_sequence(model):
    return {type(layer).__name__ for layer in model.modules() if isinstance(layer, BySequence)}


def step(actor, rows=ROWS, mask=MASK):
    """Return logprobs and gradients of a batch, ragged if no other."""
    actor.zero_grad()
    logprobs = actor(rows, mask).logprobs
    (logprobs * torch.linspace(-1, 1, logprobs.numel()).view_as(logprobs)).sum().backward()
    gradients = [p.grad for p in actor.parameters() if p.grad is not None]
    return logprobs.detach(), torch.cat([gradient.flatten() for gradient in gradients])


def assert_close(step, expected):
    for ours, theirs in zip(step, expected, strict=True):
        assert (ours - theirs).norm() < 1e-5 * theirs.norm()


@pytest.mark.parametrize("recomputes", [False, True])
@pytest.mark.parametrize(
    "model_type, layers",
    [
        ("qwen3_5_text", {"Qwen3_5GatedDeltaNet"}),
        ("nemotron_h", {"NemotronHMamba2Mixer"}),
        ("lfm2", {"Lfm2ShortConv"}),
        # A convolution before a recurrence.
        ("recurrent_gemma", {"RecurrentGemmaRecurrentBlock"}),
    ],
)
def test_recurrences_and_convolutions_compute_each_packed_row_alone(
    model_type, layers, recomputes, capsys
):
    plain = Actor(types.tiny_model(model_type).train())
    actor = packed(model_type)
    assert called_by_sequence(actor) == layers
    assert f"({', '.join(layers)}) are called once per packed sequence" in capsys.readouterr().out
    if recomputes:
        actor.gradient_checkpointing_enable()
    assert_close(step(actor), step(plain))
    # Rows of other numbers, and padded ones.
    actor.pack_samples(False)
    assert (step(actor)[0] - step(plain)[0]).abs().max() < 2e-5


def raising(*_, **__):
    raise ValueError("install causal-conv1d")


def test_layers_that_raise_at_borders_are_called_by_sequence(monkeypatch):
    """As in newer transformers without the kernels that read borders."""
    plain = step(Actor(types.tiny_model("qwen3_5_text").train()))
    compute = modeling_qwen3_5.causal_conv1d_fn

    def convolve(*args, seq_idx=None, **options):
        return compute(*args, **options) if seq_idx is None else raising()

    monkeypatch.setattr(modeling_qwen3_5, "causal_conv1d_fn", convolve)
    actor = packed("qwen3_5_text")
    assert called_by_sequence(actor) == {"Qwen3_5GatedDeltaNet"}
    assert_close(step(actor), plain)


def test_layers_that_raise_nevertheless_refuse_packed_rows(monkeypatch):
    _, proof = proved("lfm2")
    monkeypatch.setattr(Lfm2ShortConv, "forward", raising)
    with pytest.raises(LayoutRefusedError, match=r"over packed rows: install causal-conv1d$"):
        pack_rows(proof)


@pytest.mark.parametrize("model_type", ["lfm2", "nemotron_h", "qwen3_5_moe", "recurrent_gemma"])
def test_layers_whose_part_in_a_sum_is_below_rounding_are_seen_to_mix(model_type):
    """As in new models in bfloat16, where the proof of whole rows could not see it."""
    torch.manual_seed(0)
    config = types.tiny_config(model_type)
    model = language_model_class(config).from_config(config).to(torch.bfloat16)
    for name, value in model.state_dict().items():
        if "out" in name:
            value.mul_(0.1)
    assert called_by_sequence(packed(model))


def test_rows_that_begin_alike_fork_the_state_of_their_prefix():
    ids = torch.cat([ROWS[:1, :9].expand(3, -1), ROWS[:, 9:]], dim=1)
    for model_type in ("qwen3_5_text", "lfm2"):
        found = []
        for is_shared in (False, True):
            actor = packed(model_type)
            actor.share_prefixes(2 if is_shared else None)
            layout = actor.lay_out(ids, torch.ones_like(ids, dtype=torch.bool))
            assert layout.input_ids.shape[1] == (9 + 3 * 5 if is_shared else ids.numel())
            found.append(step(actor, ids, torch.ones_like(ids)))
        (expected, gradient), (logprobs, shared) = found
        assert torch.allclose(logprobs, expected, rtol=0, atol=1e-5)
        assert (shared - gradient).norm() <= 1e-6 * gradient.norm()


def test_a_copy_runs_its_own_layers():
    actor = packed("lfm2")
    copied = deepcopy(actor)
    before = actor(ROWS, MASK).logprobs
    with torch.no_grad():
        for value in copied.parameters():
            value.mul_(0.5)
    assert (copied(ROWS, MASK).logprobs - before).abs().max() > 0.01
    assert torch.equal(actor(ROWS, MASK).logprobs, before)


def convolution_by_index(slow):
    def run(hidden, *others, seq_idx, **options):
        pieces = hidden.split(seq_idx[0].bincount().tolist(), 2)
        return torch.cat([slow(piece, *others, **options) for piece in pieces], 2)

    return run


def rule_by_borders(slow):
    def run(*tensors, g, beta, cu_seqlens, seq_idx=None, **options):
        lengths = cu_seqlens.diff().tolist()
        pieces = zip(*(each.split(lengths, 1) for each in (*tensors, g, beta)), strict=True)
        outputs = [slow(*rest, g=g, beta=beta, **options)[0] for *rest, g, beta in pieces]
        return torch.cat(outputs, 1), None

    return run


def test_kernels_that_know_the_borders_read_the_stream_at_once(monkeypatch):
    expected = step(Actor(types.tiny_model("qwen3_5_text").train()))
    actor, proof = proved("qwen3_5_text")
    torch_rule = "torch_chunk_gated_delta_rule"
    kernels = {"causal_conv1d_fn": convolution_by_index, torch_rule: rule_by_borders}
    for name, aware in kernels.items():
        monkeypatch.setattr(modeling_qwen3_5, name, aware(getattr(modeling_qwen3_5, name)))
    pack_rows(proof)
    assert called_by_sequence(actor) == set()
    assert_close(step(actor), expected)


class Blurred(nn.Module):
    """Layer of nobody's: each token sees a thousandth of the one before it."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, hidden):
        before = nn.functional.pad(hidden, (0, 0, 1, 0))[:, :-1]
        return self.layer(hidden + 1e-3 * before)


def stranger(place):
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(tiny_config("qwen3", pad_token_id=0))
    if place == "layer":
        model.model.layers[1].mlp = Blurred(model.model.layers[1].mlp)
    else:
        model.model.norm = Blurred(model.model.norm)
    return model


def test_a_layer_that_nobody_knows_is_called_by_sequence():
    actor, plain = packed(stranger("layer").train()), Actor(stranger("layer").train())
    assert called_by_sequence(actor) == {"Blurred"}
    assert_close(step(actor), step(plain))


def test_a_leak_of_one_token_that_no_layer_causes_is_refused_with_the_number():
    with pytest.raises(LayoutRefusedError, match=r"mixes packed sequences: max .d log p. = .*e-0"):
        packed(stranger("trunk"))


def test_weights_that_are_gathered_at_each_call_are_refused():
    actor, proof = proved("lfm2")
    for value in actor.parameters():
        value.ds_id = 0
    with pytest.raises(LayoutRefusedError, match=r"Lfm2ShortConv .layers.0.conv. .* ZeRO"):
        pack_rows(proof)


def test_a_model_is_not_packed_before_its_layers_were_tried():
    with pytest.raises(LayoutRefusedError, match="Lfm2ForCausalLM may have layers that mix"):
        Actor(types.tiny_model("lfm2")).pack_samples()


def test_a_state_of_earlier_tokens_cannot_be_shared_by_ranks():
    actor = packed("lfm2")
    with pytest.raises(
        LayoutRefusedError, match="a state of the tokens before, which ranks do not"
    ):
        actor.share_sequences(object())
