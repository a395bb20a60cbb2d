"""Planted faults of a model's computation are found before the first step of every stage."""

import pytest
import torch
from tests.engines.altered_engines import no_convolution
from tests.models.planted_prefixes import SEEN
from tests.models.tiny import SHAPE
from tests.runs import FEW
from tests.stages.reward import reward_world
from tests.stages.stage_world import STILL
from tests.stages.test_equal_steps import CASES, PREFER
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.helium.modeling_helium import HeliumMLP

from lightrft.cli.main import main
from lightrft.config import ConfigError
from lightrft.config.registry import STAGES
from lightrft.models import actor as actor_module, attention, loading, proof, reward_model
from lightrft.models.head import HeadTransform
from lightrft.models.loading import ModelLoadError
from lightrft.models.sequence_model import trunk_output
from lightrft.models.shared_prefix import MIN_SHARED_TOKENS
from lightrft.strategy import get_fake_strategy
from lightrft.strategy.weight_sync.verification import WeightSyncError
from lightrft.tools.model_presets import byte_level_tokenizer, random_model, save_checked
from lightrft.trainer import train

QUICK = {"sft": "sft", "prefer": "prefer dpo", "reward": "reward", "divergence": "divergence"}
POLICY = {
    "fsdp": True,
    "engine_type": "hf",
    **FEW,
    "generate_max_len": 4,
    "check_memory": False,
    "max_steps": 1,
}


def forget_transform(monkeypatch):
    monkeypatch.setattr(actor_module, "read_head_transform", lambda _: HeadTransform())


def leak_a_token(monkeypatch):
    """The last token of a row is seen by the next one in the stream."""
    attend = attention.attend_each

    def leaking(qkv, bounds, options):
        whole = attend(qkv, bounds, options)
        q, k, v = qkv
        for start, stop in zip(bounds.offsets[1:], bounds.offsets[2:], strict=False):
            begin = max(start - 1, 0)
            part = torch.nn.functional.scaled_dot_product_attention(
                q[:, :, begin:stop],
                k[:, :, begin:stop],
                v[:, :, begin:stop],
                is_causal=True,
                scale=options.get("scaling"),
                enable_gqa=True,
            )
            whole[:, :, start:stop] = part[:, :, 1:]
        return whole

    monkeypatch.setattr(attention, "attend_each", leaking)


def show_padding(monkeypatch):
    """Tokens see the padding of their row."""

    def mixing(trunk, layout, *args, **options):
        output = trunk_output(trunk, layout, *args, **options)
        hidden = output.last_hidden_state
        padding = ~layout.attention_mask[..., None]
        output.last_hidden_state = hidden + (hidden * padding).mean(dim=1, keepdim=True)
        return output

    for module in (actor_module, proof, reward_model):
        monkeypatch.setattr(module, "trunk_output", mixing)


HEADS = "the head computes other log-probabilities than"
# Model, options, what is planted, the error and its words.
FAULTS = {
    "forgotten scale": ("cohere", {"logit_scale": 0.25}, forget_transform, ModelLoadError, HEADS),
    "forgotten soft cap": (
        "gemma2",
        {"final_logit_softcapping": 2.0},
        forget_transform,
        ModelLoadError,
        HEADS,
    ),
    "leak of a token": ("qwen3", {}, leak_a_token, ConfigError, "mixes packed sequences"),
    "padding that matters": ("qwen3", {}, show_padding, ModelLoadError, "padded rows are not"),
}


def tiny(family, options):
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **{**SHAPE, "pad_token_id": 0, **options})
    return AutoModelForCausalLM.from_config(config)


def build(stage, fault):
    family, changes, *_ = FAULTS[fault]
    builder, items, options = CASES[QUICK[stage]]
    options = dict(options)
    if stage != "reward":
        options["model"] = tiny(family, changes)
    if builder is PREFER:
        options["reference"] = tiny(family, changes)
    packs = {"packing_samples": True} if fault.startswith("leak") else {}
    return builder(get_fake_strategy(STILL), items, **{**options, **packs})


def test_every_stage_is_tried():
    assert {*QUICK, "policy"} == set(STAGES)


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("stage", QUICK)
def test_a_planted_fault_is_refused_with_the_number(stage, fault, monkeypatch):
    if stage == "reward" and fault.startswith("forgotten"):
        assert not reward_world.tiny_classifier().get_output_embeddings()
        return  # it has no logits
    build(stage, fault)
    *_, plant, error, words = FAULTS[fault]
    plant(monkeypatch)
    with pytest.raises(error, match=rf"{words}.*max .d .*. = \d.*, at most \d.*is rounding"):
        build(stage, fault)


def saved(folder, family, changes):
    tokenizer = byte_level_tokenizer()
    shape = {**SHAPE, "vocab_size": len(tokenizer), **changes}
    save_checked(
        random_model(AutoConfig.for_model(family, **shape), tokenizer, 0),
        tokenizer,
        folder / "model",
        sample="a b",
    )
    return str(folder / "model")


def reinforce(model, folder, reward=lambda responses: [0.0 for _ in responses], **changes):
    """Train one step on four prompts; return the summary of the run."""
    rows = [{"input": f"Say {n}."} for n in range(4)]
    return train(model, rows, reward, output_dir=str(folder / "run"), **POLICY | changes)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_refused_by_reinforcement(fault, monkeypatch, tmp_path):
    family, changes, plant, error, words = FAULTS[fault]
    model = saved(tmp_path, family, changes)
    plant(monkeypatch)
    packs = {"packing_samples": True} if fault.startswith("leak") else {}
    with pytest.raises(error, match=rf"{words}.*at most \d.*is rounding"):
        reinforce(model, tmp_path, **packs)


def error_of_a_run(model, folder, capsys, *options):
    """Standard error of a supervised run that is refused in one line."""
    rows = folder / "rows.jsonl"
    rows.write_text('{"prompt": "a", "completion": "b"}\n' * 4)
    fixed = ["--train_batch_size", "4", "--output_dir", str(folder / "run"), "--fsdp"]
    code = main(["sft", "--pretrain", model, "--prompt_data", str(rows), *fixed, *options])
    text = capsys.readouterr().err
    assert code == 2, text
    assert "Traceback" not in text
    return text


def test_a_tied_head_that_would_be_exported_twice_is_refused(monkeypatch, tmp_path, capsys):
    model = saved(tmp_path, "helium", {"tie_word_embeddings": True, "head_dim": 32})

    def untie(read):
        read.lm_head.weight = torch.nn.Parameter(read.lm_head.weight.detach().clone())

    monkeypatch.setattr(loading, "declare_ties", untie)
    text = error_of_a_run(model, tmp_path, capsys)
    assert "HeliumForCausalLM shares lm_head.weight and model.embed_tokens.weight and" in text


def read_the_weight(monkeypatch):
    """A kernel computes with the weight of a layer, whose adapter it does not see."""

    def forward(self, hidden):
        inner = self.act_fn(self.gate_proj(hidden)) * self.up_proj(hidden)
        return torch.nn.functional.linear(inner, self.down_proj.weight)

    monkeypatch.setattr(HeliumMLP, "forward", forward)


@pytest.mark.parametrize(
    "plant, targets, words",
    [
        (lambda _: None, "qkv_proj", "no linear layer is called qkv_proj; the model has down_p"),
        (
            read_the_weight,
            "all-linear",
            "adapters on layers.*.mlp.down_proj have no effect: HeliumForCausalLM reads the "
            "weights there without calling the layers; give --target_modules gate_proj k_proj "
            "o_proj q_proj up_proj v_proj",
        ),
        (
            read_the_weight,
            "down_proj",
            "layers; give --target_modules gate_proj k_proj o_proj q_proj up_proj v_proj",
        ),
    ],
)
def test_an_adapter_that_binds_to_nothing_is_refused(
    plant, targets, words, monkeypatch, tmp_path, capsys
):
    model = saved(tmp_path, "helium", {"head_dim": 32})
    plant(monkeypatch)
    adapters = ["--lora_rank", "2", "--target_modules", targets]
    assert words in error_of_a_run(model, tmp_path, capsys, *adapters)


def test_packing_by_the_machine_is_switched_off_and_said_in_a_line(capsys, monkeypatch):
    builder, items, options = CASES["sft"]
    strategy = get_fake_strategy(STILL)
    model = tiny("qwen3", {})
    leak_a_token(monkeypatch)
    with pytest.raises(ConfigError, match="packing_samples: Qwen3ForCausalLM mixes"):
        builder(strategy, items, model=model, packing_samples=True, **options)
    strategy.context.chosen_options = {"packing_samples": "one kernel"}
    stage = builder(strategy, items, model=model, packing_samples=True, **options)
    assert stage.config.packing_samples is False
    assert not strategy.unwrap_model(stage.models.main.model).layout_policy.is_packed
    line = "packing_samples = false: Qwen3ForCausalLM mixes packed sequences: max |d log p|"
    assert line in capsys.readouterr().out


@pytest.mark.parametrize("fault", SEEN)
def test_prefixes_are_not_shared_where_rows_would_be_mixed(fault, capsys, monkeypatch):
    builder, items, options = CASES["sft"]
    options = {**options, "packing_samples": True, "shared_prefix": "auto"}
    strategy = get_fake_strategy(STILL)

    def policy():
        stage = builder(strategy, items, model=tiny("qwen3", {}), **options)
        return strategy.unwrap_model(stage.models.main.model).layout_policy

    assert policy().min_shared_tokens == MIN_SHARED_TOKENS
    assert "shared_prefix" not in capsys.readouterr().out
    SEEN[fault](monkeypatch)
    refused = policy()
    assert refused.is_packed
    assert refused.min_shared_tokens is None
    line = "shared_prefix = off: Qwen3ForCausalLM mixes rows that begin alike: max |d log p|"
    assert capsys.readouterr().out.count(line) == 1
    options["packing_samples"] = False
    assert policy().min_shared_tokens is None
    assert "off: it needs packed samples; add --packing_samples" in capsys.readouterr().out


def test_a_cache_that_loses_its_convolution_is_refused_before_the_first_step(
    monkeypatch, tmp_path, capsys
):
    model = saved(tmp_path, "lfm2", {"layer_types": ["conv", "full_attention"]})
    no_convolution(monkeypatch)
    with pytest.raises(WeightSyncError, match=r"cache of Lfm2ForCausalLM .* differ by 0"):
        reinforce(model, tmp_path)
    assert "step 1" not in capsys.readouterr().out
