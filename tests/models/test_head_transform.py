"""What a model does around its output projection is measured on its own code, or refused."""

import pytest
import torch
from tests.models.batches import relative_norm
from tests.models.test_actor import gradients, make_batch, slow_logprobs
from tests.models.test_proof import EXPERTS, MAMBA, MINICPM3
from tests.models.tiny import tiny_config
from torch import nn
from transformers import AutoModelForCausalLM, Qwen3ForCausalLM
from transformers.modeling_outputs import CausalLMOutput

from lightrft.models import Actor
from lightrft.models.head import HeadRefusedError, HeadTransform, read_head_transform

# Families whose numbers stand in fields, properties, or in the code alone.
CHANGED = {
    "gemma2": ({"final_logit_softcapping": 1.5}, HeadTransform(softcap=1.5)),
    "nanochat": ({"final_logit_softcapping": 1.5}, HeadTransform(softcap=1.5)),
    # Its cache counts tokens by a layer of attention, the third of three.
    "recurrent_gemma": (
        {"logits_soft_cap": 1.5, "num_hidden_layers": 3},
        HeadTransform(softcap=1.5),
    ),
    "cohere": ({"logit_scale": 0.25}, HeadTransform(0.25)),
    "granite": ({"logits_scaling": 3.0}, HeadTransform(1 / 3)),
    "hyperclovax": ({"logits_scaling": 3.0}, HeadTransform(3.0)),
    "falcon_h1": ({**MAMBA, "mamba_d_ssm": 128, "lm_head_multiplier": 0.5}, HeadTransform(0.5)),
    "granitemoehybrid": (
        {**MAMBA, **EXPERTS, "logits_scaling": 3.0, "layer_types": ["mamba", "attention"]},
        HeadTransform(1 / 3),
    ),
    "minicpm3": (MINICPM3, HeadTransform(0.25)),
}


class ChangedLogits(Qwen3ForCausalLM):
    """Model with changes of hidden states and logits in its code, where no option names them."""

    before = after = staticmethod(lambda values: values)

    def forward(self, input_ids=None, **options):
        hidden = self.model(input_ids, **options).last_hidden_state
        logits = self.after(self.lm_head(self.before(hidden)))
        return CausalLMOutput(logits=logits)


def model_with(before=None, after=None, *, bias=False):
    torch.manual_seed(0)
    model = ChangedLogits(tiny_config("qwen3", pad_token_id=0)).eval()
    if bias:
        model.lm_head = nn.Linear(64, 131)
    model.before = before or model.before
    model.after = after or model.after
    return model


def assert_scores_equal(model, *, is_fused):
    token_ids, attention_mask, upstream = make_batch(vocab=120)
    expected = slow_logprobs(model, token_ids, attention_mask, 0.7)
    want = gradients(model, expected, upstream)
    actor = Actor(model, fused_linear_logprob=is_fused)
    output = actor(token_ids, attention_mask, temperature=0.7, entropy="grad")
    assert (output.logprobs - expected[0]).abs().max() < 2e-5
    assert (output.entropy - expected[1]).abs().max() < 2e-5
    got = gradients(actor.model, (output.logprobs, output.entropy), upstream)
    assert relative_norm(got, want) < 5e-6


@pytest.mark.parametrize("is_fused", [False, True], ids=["plain", "fused"])
@pytest.mark.parametrize("family", CHANGED)
def test_families_that_change_their_logits_score_as_transformers(family, is_fused):
    changes, transform = CHANGED[family]
    config = tiny_config(family, pad_token_id=0, **changes)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    assert read_head_transform(model) == transform
    assert_scores_equal(model, is_fused=is_fused)


def cut(logits):
    return logits[..., :121]


def forbid(logits):
    logits = logits.clone()
    logits[..., 7] = torch.finfo(logits.dtype).min
    return logits


UNNAMED = {
    "factor of hidden states": (lambda h: h / 3, None, HeadTransform(1 / 3)),
    "factor before the cap": (
        None,
        lambda z: 2 * torch.tanh(0.3 * z / 2),
        HeadTransform(0.3, softcap=2.0),
    ),
    "factor after the cap": (None, lambda z: 3 * torch.tanh(z / 6), HeadTransform(0.5, softcap=3)),
    "fewer columns": (None, cut, HeadTransform(num_columns=121)),
    "a column that is never sampled": (None, forbid, HeadTransform(forbidden=(7,))),
}


@pytest.mark.parametrize("change", UNNAMED)
def test_what_only_the_code_says_is_measured(change):
    before, after, transform = UNNAMED[change]
    measured = read_head_transform(model_with(before, after))
    assert measured.softcap == transform.softcap
    assert measured.scale == pytest.approx(transform.scale, rel=1e-14)
    assert (measured.num_columns, measured.forbidden) == (
        transform.num_columns,
        transform.forbidden,
    )


@pytest.mark.parametrize("change", sorted(set(UNNAMED) - {"a column that is never sampled"}))
def test_what_only_the_code_says_is_scored(change):
    before, after, _ = UNNAMED[change]
    assert_scores_equal(model_with(before, after), is_fused=True)


COLUMN = torch.linspace(0.9, 1.1, 131)
REFUSED = {
    "another factor for each token": (None, lambda z: z * COLUMN, False, "a factor and a cap"),
    "a constant on one token": (None, lambda z: z + (COLUMN > 1.099), False, "a factor and a cap"),
    "another cap": (None, lambda z: z / (1 + z.abs()), False, "a factor and a cap"),
    "hidden states through a function": (torch.tanh, None, False, "more than a factor"),
    "a factor for each hidden state": (lambda h: h * COLUMN[:64], None, False, "than a factor"),
    "a factor before a bias": (lambda h: h / 3, None, True, "by 0.333333, or logits"),
    "a factor before a cap and behind a bias": (
        None,
        lambda z: 2 * torch.tanh(0.3 * z / 2),
        True,
        "before a cap by 0.3",
    ),
}


@pytest.mark.parametrize("change", REFUSED)
def test_more_than_a_factor_and_a_cap_is_refused(change):
    before, after, bias, words = REFUSED[change]
    with pytest.raises(HeadRefusedError, match=f"^ChangedLogits.*{words}.*cannot be trained"):
        read_head_transform(model_with(before, after, bias=bias))


def test_no_weight_is_read_and_the_model_is_as_before():
    with torch.device("meta"):
        model = model_with(lambda h: h / 4)
        assert read_head_transform(model) == HeadTransform(0.25)
    parts = [model, *model.modules()]
    assert not any("forward" in vars(part) for part in parts)


def test_a_head_with_weights_of_its_own_is_refused_where_there_are_none():
    def needs_weights(hidden):
        return hidden + model.model.embed_tokens.weight[0].double()

    with torch.device("meta"):
        model = model_with(needs_weights)
    with pytest.raises(HeadRefusedError, match=r"^ChangedLogits computes more .* \(.*device"):
        read_head_transform(model)
