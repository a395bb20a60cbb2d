"""Every documented flag exists and acts, or is refused with the name of what replaces it."""

from __future__ import annotations

import ast
import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from lightrft.cli.main import main
from lightrft.cli.options import available_fields
from lightrft.cli.unavailable import UNAVAILABLE
from lightrft.config import TrainConfig
from lightrft.strategy import get_fake_strategy
from lightrft.strategy.engine.session import engine_config
from lightrft.trainer.runs.assembly import first_rank_loggers, pretrain_mix, run_options
from lightrft.trainer.runs.models import build_models
from lightrft.trainer.training import algorithm
from lightrft.trainer.training.state import initial_state

TESTS = Path(__file__).parents[1]

# The flags that LightRFT's library, its examples and its documents name.
DOCUMENTED = [
    "engine_tp_size",
    "engine_mem_util",
    "enable_engine_sleep",
    "packing_samples",
    "sp_size",
    "fsdp",
    "use_mp_opt",
    "fsdp_cpu_offload",
    "log_dir",
    "plot_every",
    "rm_use_engine",
    "rm_engine_cudagraph",
    "mixed_mm_data",
    "fused_linear_logprob",
    "chunk_size",
    "engine_type",
    "text_only",
    "save_path",
    "save_steps",
    "save_hf_ckpt",
    "disable_ds_ckpt",
    "save_trajectories",
    "num_trajectories_to_save",
    "mark_high_entropy_tokens",
    "trajectory_analysis",
    "print_replay_buffer_stats",
    "logging_steps",
    "eval_steps",
    "ckpt_path",
    "max_ckpt_num",
    "max_ckpt_mem",
    "load_checkpoint",
    "dynamic_sampling",
    "overlong_buffer",
    "overlong_buffer_len",
    "overlong_buffer_penalty_factor",
    "num_episodes",
    "rollout_batch_size",
    "micro_rollout_batch_size",
    "max_epochs",
    "prompt_max_len",
    "generate_max_len",
    "max_len",
    "max_samples",
    "max_norm",
    "l2",
    "ptx_coef",
    "eps_clip",
    "loss_agg_mode",
    "use_gspo",
    "normalize_advantages",
    "use_sequence_rewards",
    "value_clip",
    "lambd",
    "gamma",
    "micro_train_batch_size",
    "train_batch_size",
    "normalize_reward_for_critic",
    "top_p",
    "temperature",
    "use_fire",
    "first_token_temperature",
    "freeze_prefix",
    "freezing_actor_steps",
    "n_samples_per_prompt",
    "save_value_network",
    "actor_learning_rate",
    "critic_learning_rate",
    "lr_warmup_ratio",
    "kl_target",
    "init_kl_coef",
    "kl_estimator",
    "adam_betas",
    "reward_running_norm",
    "reward_running_norm_minus_mean",
    "reward_clip",
    "advantages_norm",
    "advantage_clip",
    "seed",
    "local_rank",
    "zero_stage",
    "gradient_checkpointing",
    "bf16",
    "enable_ema",
    "zpg",
    "adam_offload",
    "actor_init_on_gpu",
    "flash_attn",
    "aux_loss_coef",
    "grad_accum_dtype",
    "overlap_comm",
    "gradient_checkpointing_use_reentrant",
    "disable_fast_tokenizer",
    "disable_logprobs_flashattn",
    "no_shard_vit",
    "meta_init",
    "initial_model_shard_size",
    "advantage_estimator",
    "use_kl_loss",
    "use_cpg_loss",
    "high_entropy_token_ratio",
    "load_in_4bit",
    "lora_rank",
    "lora_alpha",
    "target_modules",
    "lora_dropout",
    "pretrain",
    "reward_pretrain",
    "remote_rm_url",
    "critic_pretrain",
    "value_head_prefix",
    "prompt_data",
    "prompt_data_probs",
    "prompt_split",
    "eval_data",
    "eval_split",
    "max_eval_samples",
    "pretrain_data",
    "pretrain_data_probs",
    "pretrain_split",
    "input_key",
    "images_key",
    "reference_key",
    "label_key",
    "input_template",
    "apply_chat_template",
    "system_prompt",
    "limit_mm_image_per_prompt",
    "use_wandb",
    "wandb_org",
    "wandb_group",
    "wandb_project",
    "wandb_run_name",
    "use_tensorboard",
    "use_ms",
    "fps",
    "max_pixels",
    "limit_mm_video_per_prompt",
    "system_prompt_path",
    "ckpt_path_local",
    "train_data",
    "task_instruction",
    "loss_type",
    "margin",
    "pooling_method",
    "scale_for_train",
    "probing_layer",
    "heads_types",
    "gspo_alpha",
    "clip_range",
    "clip_range_higher",
    "clip_range_lower",
    "mirror_tau",
    "use_length_penalty",
    "length_penalty_coef",
    "use_clip_higher",
    "baseline_type",
    "normalize_reward",
    "save_interval",
    "processor",
]

# Where the effect of flags is tested: file, function, flags.
EVIDENCE = {
    "algorithms/test_returns.py": {
        "test_gae_and_returns_equal_a_loop_over_the_sampled_tokens": "gamma lambd",
    },
    "cli/test_options.py": {
        "test_shares_of_sources_may_be_separated_by_commas": "prompt_data_probs prompt_split",
    },
    "cli/test_stop_and_resume.py": {
        "test_a_stopped_and_a_killed_run_are_continued_by_the_same_command": "save_steps",
    },
    "cli/test_wrong_inputs.py": {
        "test_options_without_effect_are_only_errors_under_strict": "strict",
    },
    "contracts/test_seed_004.py": {
        "test_schedules_warm_up_and_fall_to_a_tenth": (
            "critic_pretrain actor_learning_rate critic_learning_rate lr_warmup_ratio"
        ),
        "test_a_reward_model_is_prepared_as_a_triple": "adam_betas",
    },
    "datasets/test_prompts.py": {
        "test_gsm8k_with_its_own_column_names": "input_key label_key",
        "test_the_chat_template_writes_the_special_tokens": "apply_chat_template system_prompt",
        "test_the_template_slot_is_not_the_braces_of_boxed": "input_template",
        "test_max_samples_keeps_the_first_that_fit_and_reads_no_further": "max_samples",
    },
    "experience/test_assemble.py": {
        "test_kl_in_the_reward_is_a_return_to_go": "kl_estimator",
        "test_advantages_are_clipped_and_must_be_finite": "advantage_clip",
    },
    "experience/test_partial.py": {
        "test_a_long_response_is_carried_until_it_would_become_too_old": "max_staleness",
    },
    "integration/test_gsm8k.py": {
        "test_three_steps_on_real_questions": "prompt_data eval_data max_eval_samples",
    },
    "integration/test_recipes.py": {
        "test_the_recipe_trains_on_four_processes": "fsdp_cpu_offload",
    },
    "trainer/test_throughput.py": {
        "test_utilisation_is_the_share_of_all_devices_peak": "peak_tflops",
    },
    "trainer/test_best_model.py": {"test_the_best_model_stays": "best_metric"},
    "invariance/test_step.py": {
        "test_a_cover_of_all_pairs_of_options_gives_the_reference": "sp_size",
    },
    "models/test_actor.py": {
        "test_values_and_gradients_equal_transformers": "fused_linear_logprob chunk_size",
    },
    "models/test_lora.py": {
        "test_a_target_that_binds_to_nothing_is_an_error": "target_modules",
    },
    "rewards/test_build.py": {
        "test_wrong_choices": "reward_fn",
    },
    "strategy/test_checkpoint_saver.py": {
        "test_the_files_are_those_of_a_direct_save": "async_save",
    },
    "strategy/test_deepspeed.py": {
        "test_stage_0_is_refused_where_deepspeed_gets_it_wrong": "adam_offload",
        "test_every_option_reaches_deepspeed": "zpg grad_accum_dtype overlap_comm",
    },
    "strategy/test_engine_interface.py": {
        "test_engine_never_sleeps_when_sleep_is_disabled": "enable_engine_sleep",
        "test_engine_settings_come_from_the_arguments": "engine_args",
        "test_lengths_are_written_at_the_interval": "log_dir plot_every",
    },
    "strategy/test_fsdp2.py": {
        "test_bfloat16_trains_close_to_float32_and_resumes_exactly": "bf16 use_mp_opt",
        "test_every_rank_reads_its_own_rows_of_a_model_without_memory": "meta_init",
        "test_compiled_blocks_train_like_others": "compile_backend",
    },
    "strategy/test_optimizers.py": {
        "test_the_floor_of_the_cosine_is_an_option_and_the_others_have_none": "min_lr_ratio",
        "test_clipping_is_by_the_global_norm": "max_norm",
        "test_adam_settings": "l2",
    },
    "strategy/test_distributed_context.py": {
        "test_sizes_that_do_not_divide_name_the_legal_ones": "local_rank engine_tp_size",
    },
    "trainer/test_assembly.py": {
        "test_a_run_leaves_its_files_and_a_broken_one_is_continued": (
            "pretrain engine_type output_dir load_checkpoint"
        ),
        "test_deepspeed_and_fsdp_give_the_same_run": "fsdp zero_stage",
    },
    "trainer/test_every_flag.py": {
        "test_the_number_and_size_of_checkpoints_are_limited": "max_ckpt_num max_ckpt_mem",
    },
    "trainer/test_fit.py": {
        "test_a_stopped_and_resumed_run_ends_like_an_unbroken_one": "reward_running_norm",
        "test_evaluation_leaves_training_as_it_was": "eval_steps",
        "test_arguments_of_fit_replace_those_of_construction": "ckpt_path",
    },
    "trainer/test_further_losses.py": {
        "test_balancing_experts_is_exact_for_any_micro_batch": "aux_loss_coef",
    },
    "trainer/test_every_choice.py": {
        "test_every_choice_is_accepted_and_gives_another_update": "cpgd_weighting",
    },
    "trainer/test_parity.py": {
        "test_a_fault_that_leaves_the_layers_equal_is_told_apart": "verify_weight_sync",
        "test_the_comparison_follows_its_schedule": "parity_check_steps",
        "test_a_wider_limit_lets_the_fault_pass": "parity_limit",
    },
    "trainer/test_partial_rollout.py": {
        "test_every_token_has_the_logprob_and_version_of_the_weights_that_sampled_it": (
            "partial_rollout partial_rollout_prompts partial_rollout_tokens"
        ),
        "test_old_logprobs_of_the_engine_save_a_pass_and_change_nothing": "use_rollout_logprobs",
    },
    "trainer/test_progress.py": {
        "test_a_terminal_gets_a_block_and_a_file_gets_lines": "heartbeat_seconds",
    },
    "trainer/test_prompts.py": {
        "test_length_of_a_run": (
            "rollout_batch_size max_epochs train_batch_size num_episodes max_steps"
        ),
    },
    "trainer/test_options_over_ranks.py": {
        "test_two_processes_agree_with_one": (
            "pretrain_data ptx_coef ptx_batch_size reward_pretrain reward_recipe lora_rank"
        ),
    },
    "trainer/test_run_options.py": {
        "test_a_whole_run_with_a_service_an_average_and_trajectories": (
            "remote_rm_url reward_weights init_kl_coef enable_ema save_trajectories "
            "num_trajectories_to_save"
        ),
        "test_overlong_punishment_and_clip_show_in_the_reward": (
            "reward_clip overlong_buffer overlong_buffer_len"
        ),
        "test_the_kl_weight_adapts": "kl_target kl_horizon",
        "test_the_actor_is_frozen_at_first_while_the_critic_learns": "freezing_actor_steps",
        "test_the_average_follows_the_actor": "ema_beta",
        "test_learning_rate_schedules_differ": "lr_scheduler",
        "test_an_alarm_warns_and_stops_only_if_told_to": "stop_on_alarm",
    },
    "trainer/test_run_plan.py": {
        "test_a_change_that_breaks_exactness_is_refused_with_a_diff": "allow_changes",
    },
    "trainer/test_sampling_options.py": {
        "test_constant_groups_are_replaced_by_further_prompts": "dynamic_sampling",
        "test_after_the_last_batch_fewer_groups_are_trained_on": "max_num_gen_batches",
        "test_fire_changes_the_first_token_and_is_trained_on": "use_fire first_token_temperature",
        "test_fire_with_a_correction_weighs_the_first_token": "off_policy_correction",
    },
    "trainer/test_spmd_ppo_trainer.py": {
        "test_options_without_effect_are_named_and_long_prompts_refused": "prompt_max_len",
        "test_the_step_does_not_depend_on_the_micro_batch_size": (
            "micro_rollout_batch_size micro_train_batch_size use_kl_loss"
        ),
        "test_every_estimator_trains": "advantage_estimator",
        "test_use_gspo_is_the_policy_loss_of_that_name": "use_gspo",
        "test_a_wrong_share_would_be_noticed": "loss_agg_mode",
    },
    "trainer/test_token_budget.py": {
        "test_the_budget_sets_the_number_of_backward_passes": "micro_batch_tokens",
    },
    "trainer/test_token_weights.py": {
        "test_aliases_of_policy_losses": "policy_loss use_cpg_loss",
        "test_the_dual_clip_acts": "dual_clip",
        "test_the_mask_leaves_the_denominator_alone": "high_entropy_token_ratio",
        "test_a_correction_with_equal_policies_changes_nothing_and_is_measured": "correction_low",
        "test_truncated_importance_weights_are_the_capped_ratio_of_trainer_to_engine": (
            "correction_high"
        ),
    },
    "trainer/test_trackers.py": {
        "test_tensorboard_gets_every_finite_number": "use_tensorboard",
        "test_wandb_gets_the_options_without_secrets_and_one_id_for_all_parts": (
            "use_wandb wandb_org wandb_group wandb_project wandb_run_name"
        ),
    },
    "trainer/test_updates.py": {
        "test_value_gradient_equals_the_definition": "value_clip",
        "test_gradient_and_loss_equal_the_definition_for_any_split": "entropy_coef",
    },
}
TESTED = {
    flag: (file, function)
    for file, functions in EVIDENCE.items()
    for function, flags in functions.items()
    for flag in flags.split()
}


def maker(config):
    return algorithm.maker_settings(run_options(config), pad_token_id=0)


def advantages(config):
    return replace(
        algorithm.advantage_settings(run_options(config), kl_coef=0.1),
        estimator=None,  # holds functions, which do not compare
    )


def policy_loss(config):
    """Losses of tokens whose ratios lie far out on both sides."""
    generator = torch.Generator().manual_seed(0)
    old, new, advantage = torch.randn(3, 4, 8, generator=generator)
    loss = algorithm.policy_loss_of(run_options(config))
    return loss(new, old, advantage, torch.ones(4, 8, dtype=torch.bool)).loss.tolist()


def weighting(config):
    return algorithm.build_token_weighting(run_options(config))


def alarms(config):
    metrics = {"kl": 1.0, "entropy": 1.0, "response_length": 10.0, "reward_std": 0.1}
    return algorithm.alarms_of(run_options(config)).check(metrics)


def moments(config):
    return initial_state(run_options(config)).shaping


def engine(config):
    return engine_config(config, "vllm", has_gpu=False, module=None)


def deadline(config):
    with get_fake_strategy(config) as strategy:
        return strategy.ranks.timeout


def console(config):
    """Whether the first step gets a line."""
    lines = []
    with get_fake_strategy(config) as strategy:
        strategy.print = lines.append
        loggers = first_rank_loggers(config, strategy, 4)
        loggers[0].log(1, {"reward": 1.0})
        loggers[0].close()
    return len(lines)


def texts(config):
    return pretrain_mix(config, _tokenizer(config)).texts


def _tokenizer(config):
    from lightrft.models import load_tokenizer

    return load_tokenizer(config.pretrain)


def eval_prompts(config):
    from lightrft.trainer.runs.assembly import load_run_prompts

    prompts = load_run_prompts(config, _tokenizer(config), for_evaluation=True).prompts
    return [prompt.text for prompt in prompts]


def recipes(config):
    from lightrft.trainer.runs.rewards import reward_recipes

    return reward_recipes(config, []).column


def reward_deadline(config):
    from lightrft.trainer.runs.assembly import read_inputs

    reward = read_inputs(config).reward
    reward.close()
    return reward._functions[0]._seconds


def built_actor(config):
    with get_fake_strategy(config) as strategy:
        actor = strategy.unwrap_model(build_models(config, strategy, 10).actor.model)
        layers = (type(part).__name__ + str(vars(part).get("scaling")) for part in actor.modules())
        dropouts = [str(p) for p in actor.modules() if isinstance(p, torch.nn.Dropout)]
        return actor.model.is_gradient_checkpointing, sorted(set(layers)), dropouts


def bucket(config):
    """Bytes of the buckets in which an engine of its own storage gets the weights."""
    with get_fake_strategy(config) as strategy:
        actor = build_models(config, strategy, 10).actor
        strategy.setup_inference_engine(config, "hf", actor=actor)
        return strategy.broadcast_manager.bucket_bytes


def sampling(config):
    return algorithm.sampling_params(run_options(config))


# Another value, what shows its effect, and what else has to be set.
OBSERVED = {
    "seed": (7, sampling, {}),
    "temperature": (0.5, sampling, {}),
    "top_p": (0.5, sampling, {}),
    "top_k": (5, sampling, {}),
    "n_samples_per_prompt": (4, sampling, {}),
    "generate_max_len": (9, sampling, {}),
    "reward_failure": ("mask", maker, {}),
    "packing_samples": (True, maker, {}),
    "overlong_buffer_penalty_factor": (0.5, maker, {"overlong_buffer": True}),
    "advantages_norm": (True, advantages, {}),
    "reward_running_norm_minus_mean": (True, moments, {"reward_running_norm": True}),
    "eps_clip": (0.3, policy_loss, {}),
    "eps_clip_low": (0.3, policy_loss, {}),
    "eps_clip_high": (0.3, policy_loss, {}),
    "high_entropy_scope": ("sequence", weighting, {"high_entropy_token_ratio": 0.5}),
    "alarm_kl": (0.5, alarms, {}),
    "alarm_entropy": (2.0, alarms, {}),
    "alarm_length": (5.0, alarms, {}),
    "alarm_reward_std": (0.2, alarms, {}),
    "engine_mem_util": (0.3, engine, {}),
    "max_len": (99, engine, {}),
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
    (tmp_path / "parts" / "test.jsonl").write_text('{"input": "held out"}\n')
    (tmp_path / "r.py").write_text("def f(responses):\n    return [0.0 for _ in responses]\n")
    (tmp_path / "recipes.toml").write_text("[a]\nf = 1\n")
    return tmp_path


def test_every_documented_flag_is_an_option_or_refused():
    options = {entry.name for entry in available_fields()}
    assert [name for name in DOCUMENTED if name not in options | set(UNAVAILABLE)] == []
    assert options.isdisjoint(UNAVAILABLE)


def test_every_option_has_its_effect_tested():
    options = {entry.name for entry in available_fields()}
    assert set(TESTED).isdisjoint(OBSERVED)
    assert options - set(TESTED) - set(OBSERVED) == set()
    assert set(TESTED) | set(OBSERVED) <= options


@pytest.mark.parametrize("path", EVIDENCE)
def test_the_named_tests_exist_and_name_their_flags(path):
    source = (TESTS / path).read_text()
    functions = {node.name for node in ast.parse(source).body if isinstance(node, ast.FunctionDef)}
    assert set(EVIDENCE[path]) <= functions
    missing = [
        flag
        for flags in EVIDENCE[path].values()
        for flag in flags.split()
        if not re.search(rf"\b{flag}\b", source)
    ]
    assert missing == []


@pytest.mark.parametrize("name", OBSERVED)
def test_another_value_has_another_effect(folder, tiny_model, name):
    value, observe, needed = OBSERVED[name]
    base = {
        "pretrain": tiny_model, "prompt_data": "train.jsonl", "reward_fn": ("r.py:f",),
        "rollout_batch_size": 4, "train_batch_size": 8, "generate_max_len": 1024,
        "init_kl_coef": 0.0, "output_dir": "run", "micro_train_batch_size": 1, **needed,
    }  # fmt: skip
    before, again = observe(TrainConfig(**base)), observe(TrainConfig(**base))
    assert before == again  # what is observed depends on nothing else
    assert observe(TrainConfig(**{**base, name: value})) != before


def test_the_number_and_size_of_checkpoints_are_limited(build_world, tmp_path):
    limits = {"max_ckpt_num": {"max_ckpt_num": 1}, "max_ckpt_mem": {"max_ckpt_mem": 0.001}, "": {}}
    left = {}
    for name, limit in limits.items():
        world = build_world(ckpt_path=str(tmp_path / f"c{name}"), **limit)
        for step in (1, 2):
            world.trainer.state = replace(world.trainer.state, num_steps=step)
            world.trainer.save_checkpoint()
        left[name] = len(list((tmp_path / f"c{name}" / "_actor").glob("global_step*")))
    assert left == {"max_ckpt_num": 1, "max_ckpt_mem": 1, "": 2}


def test_refused_flags_name_what_replaces_them(folder, capsys):
    refused = [name for name in DOCUMENTED if name in UNAVAILABLE]
    assert len(refused) > 40
    words = [word for name in refused for word in (f"--{name}", "1")]
    assert main(["train", "--pretrain", "x", *words]) == 2
    text = capsys.readouterr().err
    for name in refused:
        assert f"lightrft: {name} is not available: {UNAVAILABLE[name]}\n" in text
    options = {entry.name for entry in available_fields()}
    for name in refused:
        named = re.findall(r"--(\w+)", UNAVAILABLE[name])
        assert set(named) <= {*options, "config"}, name
