"""The proof at load: real families whose head, attention or packing goes wrong, and those right."""

from contextlib import nullcontext
from copy import deepcopy

import pytest
import torch
from tests.models.tiny import SHAPE, tiny_config
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    AutoConfig,
    AutoModelForCausalLM,
    Qwen3ForCausalLM,
)
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from lightrft.engines.hf.attention import GROUPED, use_attention
from lightrft.engines.hf.forward import ModelTraits
from lightrft.models import Actor, Critic
from lightrft.models.attention import SHORT, SequenceBounds, packed_attention, use_short_attention
from lightrft.models.loading import ModelLoadError
from lightrft.models.proof import pack_rows, prove_model, require_packing
from lightrft.models.types import LayoutRefusedError
from lightrft.stages.models import turn_off_dropout
from lightrft.strategy import get_fake_strategy

LOW_RANK = {
    "num_key_value_heads": 2,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 32,
    "head_dim": 16,
}
MINICPM3 = {**LOW_RANK, "dim_model_base": 16}
# As a whole tensor of these types may be sent to other experts by a rounding, two choose all.
EXPERTS = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2}
MAMBA = {
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_n_groups": 1,
    "mamba_d_state": 16,
    "mamba_chunk_size": 16,
}
WINDOWS = {"sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"]}
PER_LAYER = {"vocab_size_per_layer_input": 131, "hidden_size_per_layer_input": 16}
LATENT = {
    **LOW_RANK,
    "n_routed_experts": 4,
    "moe_intermediate_size": 48,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
# Families whose heads, layers or positions are built in different ways, and what each needs.
PACKING = {
    "gpt2": {},
    "opt": {"ffn_dim": 96, "word_embed_proj_dim": 64},
    "gemma3n_text": {
        **PER_LAYER,
        **WINDOWS,
        "num_kv_shared_layers": 0,
        "activation_sparsity_pattern": [0.0, 0.0],
        "laurel_rank": 8,
    },
    "gemma4_text": {**PER_LAYER, **WINDOWS, "global_head_dim": 32, "final_logit_softcapping": 30.0},
    "cohere2": WINDOWS,
    "diffllama": {"num_key_value_heads": 2},
    "deepseek_v3": LATENT,
    "jetmoe": {"kv_channels": 32},
    "phimoe": {},
    "minicpm3": MINICPM3,
    "gpt_oss": WINDOWS,
    "bamba": {**MAMBA, "attn_layer_indices": [1]},
    "qwen3_next": {
        "layer_types": ["linear_attention", "full_attention"],
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
        "moe_intermediate_size": 48,
        "shared_expert_intermediate_size": 48,
    },
}
PADDED = {
    "mamba2": {"num_heads": 8, "head_dim": 16, "state_size": 16, "n_groups": 1, "chunk_size": 16},
    "bloom": {},
    "llama4_text": {
        "intermediate_size_mlp": 96,
        "layer_types": ["chunked_attention", "full_attention"],
        "attention_chunk_size": 8,
    },
}


def tiny(family, *, seed=0, **changes):
    torch.manual_seed(seed)
    config = AutoConfig.for_model(family, **{**SHAPE, "pad_token_id": 0, **changes})
    model = AutoModelForCausalLM.from_config(config)
    use_short_attention(model)
    return model


def prove(model, *, dtype=torch.float32):
    return prove_model(model.to(dtype), get_fake_strategy({}).context, is_random=False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", ["qwen2", "qwen3", "llama", "gemma3_text", "mixtral"])
def test_a_model_that_is_computed_right_passes_and_packs(family, dtype):
    actor = Actor(tiny(family, **EXPERTS))
    attention = actor.config._attn_implementation
    context = get_fake_strategy({}).context
    before = torch.get_rng_state()
    proof = prove_model(actor.to(dtype), context, is_random=False)
    # Head, hidden states and random numbers are as before.
    assert proof.distances_of_parts()[0] <= proof.floor
    assert actor.config._attn_implementation == attention
    assert torch.equal(torch.get_rng_state(), before)
    assert actor.training
    assert "forward" not in vars(actor)
    pack_rows(proof)


@pytest.mark.parametrize("family", [*PACKING, *PADDED])
def test_families_of_all_kinds_pass_and_pack_or_say_why_not(family):
    model = tiny(family, **{**EXPERTS, **PACKING.get(family, {}), **PADDED.get(family, {})})
    actor = Actor(model)
    turn_off_dropout(actor, keeps_adapters=False)
    proof = prove(actor)
    with (
        nullcontext()
        if family in PACKING
        else pytest.raises(LayoutRefusedError, match="which would mix packed")
    ):
        pack_rows(proof)


def test_noise_of_training_mode_is_held_and_said(capsys):
    model = tiny("phimoe", **EXPERTS)
    with torch.no_grad():
        for layer in model.model.layers:
            # Experts are equal to it, and in training mode it would draw some.
            layer.mlp.router.weight.zero_()
    actor = Actor(model)
    turn_off_dropout(actor, keeps_adapters=False)
    prove(actor)
    assert "PhimoeTopKRouter of PhimoeForCausalLM would draw random" in capsys.readouterr().out
    ids = torch.arange(12)[None]
    passes = [actor.train(mode)(ids, torch.ones_like(ids)).logprobs for mode in (True, False, True)]
    assert torch.equal(passes[0], passes[1])
    assert torch.equal(passes[0], passes[2])
    copied = deepcopy(actor).train()
    assert torch.equal(copied(ids, torch.ones_like(ids)).logprobs, passes[0])


class ScaledByToken(Qwen3ForCausalLM):
    """Model whose factor depends on the token: no probe of its head shows it."""

    def forward(self, input_ids=None, **options):
        output = super().forward(input_ids, **options)
        output.logits = output.logits * (1 + 0.5 * (input_ids > 60)[..., None])
        return output


def test_a_head_that_computes_otherwise_is_refused_with_the_number():
    torch.manual_seed(0)
    actor = Actor(ScaledByToken(tiny_config("qwen3", pad_token_id=0)))
    with pytest.raises(ModelLoadError, match="other log-probabilities than") as error:
        prove(actor)
    found, limit = (
        float(text.split(" ")[0].rstrip(","))
        for text in str(error.value).split("= ")[1].split("at most ")
    )
    assert found > 0.1
    assert limit < 1e-3


def test_a_model_whose_tokens_see_later_ones_is_refused():
    model = tiny("helium", head_dim=32)
    model.model.norm.register_forward_hook(lambda *a: a[-1] + 1e-3 * a[-1].roll(-1, 1))
    with pytest.raises(
        ModelLoadError, match=r"tokens see later .* HeliumForCausalLM: max .d log p"
    ):
        prove(Actor(model))
    # A critic's values may be of whole texts.
    assert prove(Critic(tiny("helium", head_dim=32).base_model)) is not None


def exhausted(ids):
    raise torch.OutOfMemoryError


@pytest.mark.parametrize(
    "fails, error",
    [
        (lambda ids: ids.image_outputs, ModelLoadError),
        (lambda ids: ids @ ids[:, 1:].T, ModelLoadError),
        (exhausted, torch.OutOfMemoryError),
        (torch.distributed.all_reduce, ValueError),
    ],
)
def test_an_error_is_a_line_if_it_is_of_the_model_s_code(fails, error):
    actor = Actor(tiny("qwen3"))
    trunk = actor.model.base_model
    trunk.register_forward_pre_hook(lambda *a: fails(a[-1]["input_ids"]), with_kwargs=True)
    words = "^Qwen3ForCausalLM fails on text in " if error is ModelLoadError else None
    with pytest.raises(error, match=words):
        prove(actor)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_recurrent_layer_mixes_packed_rows_and_is_refused(dtype):
    actor = Actor(tiny("recurrent_gemma"))
    proof = prove(actor, dtype=dtype)
    actor.pack_samples()
    with pytest.raises(LayoutRefusedError, match=r"mixes packed sequences: max .d log p. ="):
        require_packing(proof)


def test_a_token_that_a_rounding_sends_to_another_expert_is_no_fault():
    changes = {"num_local_experts": 4, "num_experts_per_tok": 1, "initializer_range": 0.1}
    actor = Actor(tiny("mixtral", seed=4, **changes))
    assert prove(actor, dtype=torch.bfloat16) is not None


def test_a_critic_is_proved_by_its_hidden_states():
    critic = Critic(tiny("recurrent_gemma").base_model)
    proof = prove(critic)
    critic.pack_samples()
    with pytest.raises(LayoutRefusedError, match="d of hidden states"):
        require_packing(proof)


CAPLESS = "ignores_caps"


def capless_attention(*inputs, softcap=None, **options):
    return sdpa_attention_forward(*inputs, **options)


AttentionInterface.register(CAPLESS, capless_attention)
AttentionMaskInterface.register(CAPLESS, sdpa_mask)


@pytest.mark.parametrize("cap", [2.0, 50.0])
def test_caps_of_attention_act_in_trainer_and_engine(cap, capsys, monkeypatch):
    model = tiny("gemma2", attn_logit_softcapping=cap, initializer_range=0.3).eval()
    # Which transformers 5.24 denies.
    monkeypatch.setattr(type(model), "_supports_sdpa", True)
    ids = torch.arange(40)[None] % 131
    found = {}
    with torch.no_grad():
        for name in ("eager", SHORT, CAPLESS):
            model.set_attn_implementation(name)
            found[name] = model(ids).logits
        use_attention(model, None)
        assert model.config._attn_implementation == GROUPED
        cached = model(ids[:, :-1], use_cache=True)
        cache = {ModelTraits(model).cache_argument: cached.past_key_values}
        last = model(ids[:, -1:], **cache).logits
    torch.testing.assert_close(found[SHORT], found["eager"], rtol=0, atol=1e-4)
    torch.testing.assert_close(last[:, -1], found["eager"][:, -1], rtol=0, atol=1e-4)
    # Only then does the cap matter.
    assert (found[CAPLESS] - found["eager"]).abs().max() > 1e-2
    model.set_attn_implementation(SHORT)
    actor = Actor(model)
    proof = prove(actor)
    assert "attention of Gemma2ForCausalLM is transformers' eager one" in capsys.readouterr().out
    pack_rows(proof)
    bounds = SequenceBounds((0, 2), torch.tensor([0, 2]), group=object())
    with pytest.raises(LayoutRefusedError, match="a softcap or sinks over several ranks"):
        packed_attention(
            model, *[torch.ones(1, 1, 2, 4)] * 3, None, sequence_bounds=bounds, softcap=cap
        )


def test_attention_that_ignores_what_is_asked_for_falls_to_the_eager_one(capsys):
    model = tiny("gemma2", attn_logit_softcapping=1.0, initializer_range=0.3)
    model.set_attn_implementation(CAPLESS)
    actor = Actor(model)
    prove(actor)
    assert actor.config._attn_implementation == "eager"
    assert "torch's fused one computes others, max |d log p| = " in capsys.readouterr().out


def test_weights_that_are_no_numbers_are_left_to_what_looks_for_them():
    actor = Actor(tiny("qwen3"))
    with torch.no_grad():
        actor.head.weight.fill_(torch.nan)
    assert prove(actor) is None
