"""Options of TRL 1.16, verl 0.9 and OpenRLHF 0.11, and what they are called here."""

from collections.abc import Collection

from lightrft.config.options import did_you_mean

# No option of a run, but of the commands that start it.
PROCESSES = "nproc_per_node"
# Of a TOML file, after the name of what is no option.
TABLE_HINT = ": it is a table; options have none: put its lines at the top level"
# The first word is our option; what follows is another unit or what else it needs.
OTHER_NAMES: dict[str, str] = {
    # TRL, with what it has from transformers
    "adam_beta1": "adam_betas, both numbers",
    "adam_beta2": "adam_betas, both numbers",
    "beta": "init_kl_coef",
    "dataset_name": "prompt_data",
    "delta": "dual_clip",
    "dtype": "bf16",
    "epsilon": "eps_clip",
    "epsilon_high": "eps_clip_high",
    "generation_batch_size": "rollout_batch_size, in prompts",
    "gradient_accumulation_steps": "train_batch_size, in samples of all processes",
    "importance_sampling_level": "policy_loss, gspo for sequences",
    "learning_rate": "actor_learning_rate",
    "lora_r": "lora_rank",
    "lora_target_modules": "target_modules",
    "lr_scheduler_type": "lr_scheduler",
    "mask_truncated_completions": "mask_truncated",
    "max_completion_length": "generate_max_len",
    "max_new_tokens": "generate_max_len",
    "max_grad_norm": "max_norm",
    "max_prompt_length": "prompt_max_len",
    "max_tool_calling_iterations": "max_turns",
    "model": "pretrain",
    "model_name_or_path": "pretrain",
    "num_generations": "n_samples_per_prompt",
    "num_iterations": "max_epochs",
    "num_train_epochs": "num_episodes",
    "train_dataset": "prompt_data",
    "eval_dataset": "eval_data",
    "optim": "adam_8bit, for adamw_8bit; without it AdamW",
    "per_device_eval_batch_size": "micro_rollout_batch_size",
    "per_device_train_batch_size": "micro_train_batch_size",
    "report_to": "use_wandb, use_tensorboard or loggers",
    "resume_from_checkpoint": "load_checkpoint",
    "reward_funcs": "reward_fn",
    "router_aux_loss_coef": "aux_loss_coef",
    "save_total_limit": "max_ckpt_num",
    "scale_rewards": "advantage_estimator",
    "top_entropy_quantile": "high_entropy_token_ratio",
    "use_peft": "lora_rank",
    "use_vllm": "engine_type, vllm",
    "vllm_enable_sleep_mode": "enable_engine_sleep",
    "vllm_gpu_memory_utilization": "engine_mem_util",
    "vllm_importance_sampling_correction": "off_policy_correction",
    "vllm_tensor_parallel_size": "engine_tp_size",
    "warmup_steps": "lr_warmup_ratio, a share of all steps",
    "weight_decay": "l2",
    # verl
    "adv_estimator": "advantage_estimator",
    "clip_ratio": "eps_clip",
    "clip_ratio_c": "dual_clip",
    "clip_ratio_high": "eps_clip_high",
    "clip_ratio_low": "eps_clip_low",
    "data.train_batch_size": "rollout_batch_size",
    "gpu_memory_utilization": "engine_mem_util",
    "grad_clip": "max_norm",
    "kl_coef": "init_kl_coef",
    "kl_loss_coef": "init_kl_coef, with use_kl_loss",
    "kl_loss_type": "kl_estimator",
    "lam": "lambd",
    "lr": "actor_learning_rate",
    "max_response_length": "generate_max_len",
    "actor_rollout_ref.model.path": "pretrain",
    "actor_rollout_ref.rollout.n": "n_samples_per_prompt",
    "actor_rollout_ref.rollout.name": "engine_type",
    "critic.model.path": "critic_pretrain",
    "critic.optim.lr": "critic_learning_rate",
    "custom_reward_function.path": "reward_fn, FILE.py:FUNCTION",
    "default_local_dir": "output_dir",
    "entropy_coeff": "entropy_coef",
    "n_gpus_per_node": PROCESSES,
    "ppo_epochs": "max_epochs",
    "ppo_max_token_len_per_gpu": "micro_batch_tokens",
    "ppo_micro_batch_size_per_gpu": "micro_train_batch_size",
    "ppo_mini_batch_size": "train_batch_size, in samples of all processes",
    "prompt_key": "input_key",
    "save_freq": "save_steps",
    "tensor_model_parallel_size": "engine_tp_size",
    "test_freq": "eval_steps",
    "total_epochs": "num_episodes",
    "total_training_steps": "max_steps",
    "train_files": "prompt_data",
    "ulysses_sequence_parallel_size": "sp_size",
    "use_remove_padding": "packing_samples",
    "val_files": "eval_data",
    # Of no one in particular
    "data": "prompt_data",
    "dataset": "prompt_data",
    "epochs": "num_episodes",
    "gpus": PROCESSES,
    "num_epochs": "num_episodes",
    "num_gpus": PROCESSES,
    # OpenRLHF
    "agent_func_path": "environment",
    "algo.advantage.estimator": "advantage_estimator",
    "algo.kl.estimator": "kl_estimator",
    "algo.kl.horizon": "kl_horizon",
    "algo.kl.init_coef": "init_kl_coef",
    "algo.kl.target": "kl_target",
    "algo.kl.use_loss": "use_kl_loss",
    "async_enable": "rollout_lag",
    "ckpt.load_enable": "load_checkpoint",
    "ckpt.max_mem": "max_ckpt_mem",
    "ckpt.max_num": "max_ckpt_num",
    "ckpt.path": "ckpt_path",
    "critic.adam.lr": "critic_learning_rate",
    "critic.model_name_or_path": "critic_pretrain",
    "data.prompt_dataset": "prompt_data",
    "ds.lora.alpha": "lora_alpha",
    "ds.lora.dropout": "lora_dropout",
    "ds.lora.rank": "lora_rank",
    "eps_clip_low_high": "eps_clip_low, and eps_clip_high",
    "enable_sleep": "enable_engine_sleep",
    "eval.dataset": "eval_data",
    "eval.split": "eval_split",
    "eval.steps": "eval_steps",
    "gradient_checkpointing_enable": "gradient_checkpointing",
    "max_tokens_per_gpu": "micro_batch_tokens",
    "num_gpus_per_node": PROCESSES,
    "overlong_penalty_factor": "overlong_buffer_penalty_factor",
    "policy_loss_type": "policy_loss",
    "reward.clip_range": "reward_clip",
    "reward.model_name_or_path": "reward_pretrain",
    "reward.remote_url": "remote_rm_url",
    "ring_attn_size": "sp_size",
    "actor.freezing_steps": "freezing_actor_steps",
    "rollout.batch_size": "rollout_batch_size",
    "rollout.micro_batch_size": "micro_rollout_batch_size",
    "tensor_parallel_size": "engine_tp_size",
    "train.batch_size": "train_batch_size",
    "train.micro_batch_size": "micro_train_batch_size",
}
_ROWS = {
    "max_length": "max_row_tokens, above which rows are left out",
    "max_seq_length": "max_row_tokens, above which rows are left out",
    "num_train_epochs": "max_epochs",
    "packing": "packing_samples",
    "padding_free": "packing_samples",
    "per_device_eval_batch_size": "micro_train_batch_size",
    "total_epochs": "max_epochs",
}
_PREFERENCE_VALUES = ("beta", "label_smoothing", "desirable_weight", "undesirable_weight")
# Names that mean another thing, or only are one, beside a command's trainer in TRL: SFTTrainer,
# DPOTrainer with KTO, CPO and ORPO, RewardTrainer, DistillationTrainer with GKD.
NAMES_OF_COMMANDS: dict[str, dict[str, str]] = {
    "sft": {
        **_ROWS,
        "assistant_only_loss": "train_on, assistant",
        "completion_only_loss": "train_on, completion",
        "loss_type": "sft_loss",
    },
    "prefer": {
        **_ROWS,
        **{name: f"preference_args, {name}=..." for name in _PREFERENCE_VALUES},
        "cpo_alpha": "preference_args, alpha=...",
        "discopop_tau": "preference_args, tau=...",
        "loss_type": "preference_loss",
        "loss_weights": "preference_weights",
        "precompute_ref_log_probs": "ref_logprobs, the file they are written to",
        "rpo_alpha": "preference_loss, dpo sft, with preference_weights",
        "simpo_gamma": "preference_args, gamma=...",
    },
    "reward": {
        **_ROWS,
        "center_rewards_coefficient": "centering_coef",
        "loss_type": "reward_loss",
    },
    "distill": {
        "beta": "teacher_beta, with teacher_form jsd",
        "lmbda": "offpolicy_fraction, which is 1 - lmbda",
        "loss_top_k": "teacher_top_k",
        "max_length": "max_row_tokens, above which rows are left out",
        "max_new_tokens": "generate_max_len",
        "num_train_epochs": "num_episodes, or max_epochs on given rows",
        "packing": "packing_samples",
        "teacher_model_name_or_path": "teacher",
        "teacher_model_server_url": "teacher, an address",
    },
}


# Remedies where a command lacks what it cannot do without.
A_MODEL = "give a model directory, see lightrft init-model"
A_DATA_FILE = "give a JSONL, JSON or Parquet file, or the name of a data set"
A_REWARD = "give boxed_math, gsm8k or FILE.py:FUNCTION"


def option_hint(name: str, known: Collection[str], command: str = "train") -> str:
    """The end of a sentence about an unknown option: its name here, or the nearest known ones.

    Args:
        name: As it was given; groups before a dot may say more.
        known: Options that could have been given.
        command: It was given to.
    """
    last = name.rpartition(".")[2]
    own = NAMES_OF_COMMANDS.get(command, {})
    there = own.get(last) or OTHER_NAMES.get(name) or OTHER_NAMES.get(last) or last
    first = there.split()[0].rstrip(",")
    if there != name and (first in known or first == PROCESSES):
        return f"; here it is {there}"
    return did_you_mean(name, known)
