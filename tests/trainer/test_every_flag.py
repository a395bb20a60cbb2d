"""Every documented flag exists and acts, or is refused with the name of what replaces it."""

import ast
import json
import re
from contextlib import ExitStack, redirect_stdout
from io import StringIO
from pathlib import Path

import pytest
import torch

from lightrft.cli.main import main
from lightrft.cli.options import NAMES_OF_COMMANDS, UNAVAILABLE, available_options
from lightrft.config import TrainConfig
from lightrft.config.other_names import SWITCHES
from lightrft.engines.media.media import MEDIA_KINDS
from lightrft.rollout.sampler import training_params
from lightrft.rollout.scoring import overlong_penalty
from lightrft.run.assembly import open_console
from lightrft.stages.policy.algorithm import build_policy_loss
from lightrft.stages.policy.inputs import build_models, pretrain_mix
from lightrft.strategy import get_fake_strategy
from lightrft.strategy.engine.session import engine_config

PACKAGES = Path(__file__).parents[2] / "packages"

# The flags that LightRFT's library, its examples and its documents name.
FLAGS = """
engine_tp_size engine_mem_util enable_engine_sleep packing_samples sp_size fsdp use_mp_opt
fsdp_cpu_offload log_dir plot_every rm_use_engine rm_engine_cudagraph mixed_mm_data
fused_linear_logprob chunk_size engine_type text_only save_path save_steps save_hf_ckpt
disable_ds_ckpt save_trajectories num_trajectories_to_save mark_high_entropy_tokens
trajectory_analysis print_replay_buffer_stats logging_steps eval_steps ckpt_path max_ckpt_num
max_ckpt_mem load_checkpoint dynamic_sampling overlong_buffer overlong_buffer_len
overlong_buffer_penalty_factor num_episodes rollout_batch_size micro_rollout_batch_size max_epochs
prompt_max_len generate_max_len max_len max_samples max_norm l2 ptx_coef eps_clip loss_agg_mode
use_gspo normalize_advantages use_sequence_rewards value_clip lambd gamma micro_train_batch_size
train_batch_size normalize_reward_for_critic top_p temperature use_fire first_token_temperature
freeze_prefix freezing_actor_steps n_samples_per_prompt save_value_network actor_learning_rate
critic_learning_rate lr_warmup_ratio kl_target init_kl_coef kl_estimator adam_betas
reward_running_norm reward_running_norm_minus_mean reward_clip advantages_norm advantage_clip seed
local_rank zero_stage gradient_checkpointing bf16 enable_ema zpg adam_offload actor_init_on_gpu
flash_attn aux_loss_coef grad_accum_dtype overlap_comm gradient_checkpointing_use_reentrant
disable_fast_tokenizer disable_logprobs_flashattn no_shard_vit meta_init initial_model_shard_size
advantage_estimator use_kl_loss use_cpg_loss high_entropy_token_ratio load_in_4bit lora_rank
lora_alpha target_modules lora_dropout pretrain reward_pretrain remote_rm_url critic_pretrain
value_head_prefix prompt_data prompt_data_probs prompt_split eval_data eval_split max_eval_samples
pretrain_data pretrain_data_probs pretrain_split input_key images_key reference_key label_key
input_template apply_chat_template system_prompt limit_mm_image_per_prompt use_wandb wandb_org
wandb_group wandb_project wandb_run_name use_tensorboard use_ms fps max_pixels
limit_mm_video_per_prompt system_prompt_path ckpt_path_local train_data task_instruction loss_type
margin pooling_method scale_for_train probing_layer heads_types gspo_alpha clip_range
clip_range_higher clip_range_lower mirror_tau use_length_penalty length_penalty_coef
use_clip_higher baseline_type normalize_reward save_interval processor
"""
DOCUMENTED = FLAGS.split()


def micro_tokens(config):
    return config.max_micro_tokens(config.micro_train_batch_size)


def policy_loss(config):
    """Losses of tokens whose ratios lie far out on both sides."""
    generator = torch.Generator().manual_seed(0)
    old, new, advantage = torch.randn(3, 4, 8, generator=generator)
    loss = build_policy_loss(config)
    return loss(new, old, advantage, torch.ones(4, 8, dtype=torch.bool)).loss.tolist()


def engine(config):
    return engine_config(config, "vllm", has_gpu=False, module=None)


def deadline(config):
    with get_fake_strategy(config) as strategy:
        return strategy.context.timeout


def console(config):
    """Return whether the first step gets a line."""
    with redirect_stdout(StringIO()) as text, ExitStack() as stack:
        open_console(config, stack).log(1, {"reward": 1.0})
    return text.getvalue().count("reward")


def texts(config):
    return [row.key for row in pretrain_mix(config, _tokenizer(config)).texts]


def _tokenizer(config):
    from lightrft.models import load_tokenizer

    return load_tokenizer(config.pretrain)


def eval_prompts(config):
    from lightrft.stages.policy.inputs import load_run_prompts

    prompts = load_run_prompts(config, _tokenizer(config), for_evaluation=True).prompts
    return [prompt.text for prompt in prompts]


def recipes(config):
    from lightrft.stages.policy.rewards import reward_recipes

    return reward_recipes(config, []).column


def reward_deadline(config):
    from lightrft.stages.policy.inputs import read_inputs

    reward = read_inputs(config).reward
    reward.close()
    return reward.functions[0].seconds


def built_actor(config):
    with get_fake_strategy(config) as strategy:
        actor = strategy.unwrap_model(build_models(config, strategy.training, 10)[0].main.model)
        layers = (type(part).__name__ + str(vars(part).get("scaling")) for part in actor.modules())
        dropouts = [str(p) for p in actor.modules() if isinstance(p, torch.nn.Dropout)]
        return actor.model.is_gradient_checkpointing, sorted(set(layers)), dropouts


def bucket(config):
    """Bytes of the buckets in which an engine of its own storage gets the weights."""
    with get_fake_strategy(config) as strategy:
        actor = build_models(config, strategy.training, 10)[0].main.model
        strategy.setup_inference_engine(config, "hf", actor=actor)
        return strategy.broadcast_manager.bucket_bytes


def longest(config):
    """What is added to the reward of a response that ends at the limit."""
    return overlong_penalty(config)(config.generate_max_len)


# Another value, what shows its effect, and what else has to be set.
OBSERVED = {
    "seed": (7, training_params, {}),
    "temperature": (0.5, training_params, {}),
    "top_p": (0.5, training_params, {}),
    "top_k": (5, training_params, {}),
    "min_p": (0.1, training_params, {}),
    "stop": (("\n",), training_params, {}),
    "n_samples_per_prompt": (4, training_params, {}),
    "generate_max_len": (9, training_params, {}),
    "packing_samples": (True, micro_tokens, {}),
    "overlong_buffer_penalty_factor": (
        0.5,
        longest,
        {"overlong_buffer": True, "overlong_buffer_len": 1000},
    ),
    "eps_clip": (0.3, policy_loss, {}),
    "eps_clip_low": (0.3, policy_loss, {}),
    "eps_clip_high": (0.3, policy_loss, {}),
    "engine_mem_util": (0.3, engine, {}),
    "max_len": (99, engine, {"prompt_max_len": 64, "generate_max_len": 8}),
    "weight_bucket_mb": (3, bucket, {}),
    "timeout_minutes": (3.0, deadline, {}),
    "logging_steps": (2, console, {}),
    "save_path": ("elsewhere", lambda config: config.model_dir, {}),
    "gradient_checkpointing": (True, built_actor, {}),
    "lora_alpha": (4.0, built_actor, {"lora_rank": 4}),
    "lora_dropout": (0.5, built_actor, {"lora_rank": 4}),
    "pretrain_column": ("other", texts, {"pretrain_data": "texts.jsonl", "ptx_coef": 0.1}),
    "eval_split": ("train", eval_prompts, {"eval_data": "parts"}),
    "reward_recipe_column": ("kind", recipes, {"reward_recipe": "recipes.toml"}),
    "reward_timeout_seconds": (5.0, reward_deadline, {}),
}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rows = [{"input": f"{n}?", "text": "a b", "other": "c d e"} for n in range(4)]
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (tmp_path / "parts").mkdir()
    for name in ("train.jsonl", "texts.jsonl", "parts/train.jsonl"):
        (tmp_path / name).write_text(text)
    (tmp_path / "parts/test.jsonl").write_text('{"input": "held out"}\n')
    (tmp_path / "r.py").write_text("def f(responses):\n    return [0.0 for _ in responses]\n")
    (tmp_path / "recipes.toml").write_text("[a]\nf = 1\n")
    return tmp_path


def test_every_documented_flag_is_an_option_or_refused():
    options = set(available_options())
    assert [name for name in DOCUMENTED if name not in options | {*UNAVAILABLE, *SWITCHES}] == []
    assert options.isdisjoint(UNAVAILABLE)


def names_of_kinds(text):
    """Options that a loop over the kinds of media reads by an f-string."""
    return {
        text[2:-1].replace("{kind.plural}", row.plural).replace("{kind}", kind)
        for kind, row in MEDIA_KINDS.items()
    }


@pytest.mark.full
def test_every_option_is_read_by_the_code_that_carries_it_out():
    """Outside of the record and its rules: as an attribute or by its name."""
    found = set()
    for path in PACKAGES.glob("*/src/lightrft/**/*.py"):
        if path.name not in ("train_config.py", "strategy_config.py", "unavailable.py"):
            tree = ast.parse(path.read_text())
            if path.parent.name == "parts":  # options and rules, and what reads the options
                members = [item for each in tree.body for item in getattr(each, "body", ())]
                tree.body = [item for item in members if isinstance(item, ast.FunctionDef)]
            for node in ast.walk(tree):
                if isinstance(node, ast.Attribute):
                    found.add(node.attr)
                elif isinstance(node, ast.JoinedStr):
                    found |= names_of_kinds(ast.unparse(node))
                elif isinstance(node, ast.Constant) and path.parent.name != "config":
                    found.add(node.value)
    assert set(available_options("config")) - found == set()


@pytest.mark.parametrize("name", OBSERVED)
def test_another_value_has_another_effect(folder, tiny_model, name):
    value, observe, needed = OBSERVED[name]
    base = {
        "pretrain": tiny_model,
        "prompt_data": "train.jsonl",
        "reward_fn": ("r.py:f",),
        "rollout_batch_size": 4,
        "train_batch_size": 8,
        "generate_max_len": 1000,
        "init_kl_coef": 0.0,
        "output_dir": "run",
        "micro_train_batch_size": 1,
        **needed,
    }
    before, again = observe(TrainConfig(**base)), observe(TrainConfig(**base))
    assert before == again  # what is observed depends on nothing else
    assert observe(TrainConfig(**{**base, name: value})) != before


def test_refused_flags_name_what_replaces_them(folder, capsys):
    # What a name means in TRL's trainer of the same stage comes first.
    known = NAMES_OF_COMMANDS["train"]
    refused = [name for name in DOCUMENTED if name in UNAVAILABLE and name not in known]
    assert len(refused) > 40
    words = [word for name in refused for word in (f"--{name}", "1")]
    assert main(["train", "--pretrain", "x", *words, "--loss_type", "dapo"]) == 2
    text = capsys.readouterr().err
    assert f"'loss_type'; here it is {known['loss_type']}\n" in text
    for name in refused:
        assert f"lightrft: {name} is not available: {UNAVAILABLE[name]}\n" in text
    options = {name for command in ("train", "reward") for name in available_options(command)}
    for name in refused:
        named = re.findall(r"--(\w+)", UNAVAILABLE[name])
        assert set(named) <= {*options, "config"}, name
