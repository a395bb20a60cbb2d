"""Options of TRL 1.16, verl 0.9 and OpenRLHF 0.11, with their names here."""

import importlib.util
import os
import re
import sys
from collections.abc import Collection, Mapping
from functools import cache
from pathlib import Path

from lightrft.config.files import read_text
from lightrft.config.options import ConfigError, did_you_mean

# Not options of a run, but of the commands that start it.
PROCESSES = "nproc_per_node"
# For TOML files, after the name of something that is not an option.
TABLE_HINT = ": it is a table; options have none: put its lines at the top level"
# Former switches, each of which is now a value of an option.
SWITCHES = {"use_gspo": ("policy_loss", "gspo"), "use_cpg_loss": ("policy_loss", "cpgd")}
# The first word is our option; the rest is another unit or what else it needs.
OTHER_NAMES: dict[str, str] = {
    # TRL, with what it has from transformers
    "adam_beta1": "adam_betas, both numbers",
    "adam_beta2": "adam_betas, both numbers",
    "chat_template_kwargs": "chat_template_args",
    "beta": "init_kl_coef, with use_kl_loss and kl_estimator k3",
    "dataset_name": "prompt_data",
    "delta": "dual_clip",
    "dtype": "bf16, true for bfloat16 and false for float32",
    "dataset_config": "prompt_data, OWNER/NAME:CONFIGURATION",
    "dataset_test_split": "eval_split",
    "dataset_train_split": "prompt_split",
    "deepspeed": "zero_stage, without a file; or fsdp",
    "fp16": "bf16, true or false: there is no float16",
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
    "max_prompt_length": "prompt_max_len, above which prompts are left out",
    "max_tool_calling_iterations": "max_turns, which counts the answer after the last call, too",
    "model": "pretrain",
    "model_name_or_path": "pretrain",
    "num_generations": "n_samples_per_prompt",
    "num_iterations": "max_epochs",
    "num_train_epochs": "num_episodes",
    "train_dataset": "prompt_data",
    "eval_dataset": "eval_data",
    "optim": "adam_8bit, for adamw_8bit; without it AdamW",
    "peft_config": "lora_rank, with lora_alpha, lora_dropout and target_modules",
    "per_device_eval_batch_size": "micro_rollout_batch_size, in samples of one forward pass",
    "per_device_train_batch_size": "micro_train_batch_size, with train_batch_size for an update",
    "report_to": "use_wandb, use_tensorboard or loggers",
    "run_name": "wandb_run_name",
    "resume_from_checkpoint": "load_checkpoint, of what is in output_dir",
    "reward_funcs": "reward_fn",
    "router_aux_loss_coef": "aux_loss_coef",
    "save_total_limit": "max_ckpt_num",
    "scale_rewards": "advantage_estimator, group_norm, group_mean_batch_std or dr_grpo",
    "top_entropy_quantile": "high_entropy_token_ratio",
    "use_peft": "lora_rank, above 0",
    "use_vllm": "engine_type, vllm",
    "vllm_enable_sleep_mode": "enable_engine_sleep",
    "vllm_gpu_memory_utilization": "engine_mem_util",
    "vllm_importance_sampling_correction": "off_policy_correction, a name such as tis",
    "vllm_tensor_parallel_size": "engine_tp_size",
    "warmup_ratio": "lr_warmup_ratio",
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
    # LightRFT before
    **{name: ", ".join(place) for name, place in SWITCHES.items()},
    # OpenRLHF
    "agent_func_path": "environment, FILE.py:CLASS",
    "algo.advantage.estimator": "advantage_estimator",
    "algo.kl.estimator": "kl_estimator",
    "algo.kl.horizon": "kl_horizon",
    "algo.kl.init_coef": "init_kl_coef",
    "algo.kl.target": "kl_target",
    "algo.kl.use_loss": "use_kl_loss",
    "async_enable": "rollout_lag, 1",
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
    "epochs": "max_epochs",
    "max_completion_length": "max_row_tokens, of prompt and answer together",
    "max_prompt_length": "max_row_tokens, of prompt and answer together",
    "max_length": "max_row_tokens, above which rows are left out",
    "max_seq_length": "max_row_tokens, above which rows are left out",
    "num_epochs": "max_epochs",
    "num_train_epochs": "max_epochs",
    "packing": "packing_samples, which packs micro-batches: batches count rows",
    "padding_free": "packing_samples",
    "per_device_eval_batch_size": "micro_train_batch_size, which evaluations take, too",
    "total_epochs": "max_epochs",
}
_PREFERENCE_VALUES = ("beta", "label_smoothing", "desirable_weight", "undesirable_weight")
# Names that mean something else, or exist only, beside a command's trainer in TRL: SFTTrainer,
# DPOTrainer with KTO, CPO and ORPO, RewardTrainer, DistillationTrainer with GKD.
NAMES_OF_COMMANDS: dict[str, dict[str, str]] = {
    "train": {"loss_type": "loss_agg_mode, or policy_loss for cispo and sapo"},
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
        "packing": "packing_samples, which packs micro-batches: batches count rows",
        "teacher_model_name_or_path": "teacher",
        "teacher_model_server_url": "teacher",
    },
}


# Documented options that this version does not implement, with a replacement. They are refused:
# an option that is accepted and ignored would silently change nothing.
_METRICS = "metrics go to OUTPUT_DIR/metrics.jsonl"
_REWARD_MODELS = "reward models run in the trainer's processes"
_TRACE = "use --save_trajectories, which writes trajectories.jsonl"
_FILES = "--pretrain_data takes one source, of which the split train is used"

UNAVAILABLE: dict[str, str] = {
    "disable_ds_ckpt": "checkpoints are written every --save_steps; -1 writes none on the way",
    "save_hf_ckpt": "the final model is always written in Hugging Face format",
    "mark_high_entropy_tokens": _TRACE,
    "trajectory_analysis": _TRACE,
    "print_replay_buffer_stats": _METRICS,
    "pretrain_data_probs": _FILES,
    "pretrain_split": _FILES,
    "normalize_advantages": "--policy_loss gspo always works this way",
    "use_sequence_rewards": "--policy_loss gspo always works this way",
    "normalize_reward_for_critic": "scale the reward in your reward function",
    "save_value_network": "the critic is part of every checkpoint",
    "actor_init_on_gpu": "weights are loaded on the device they are trained on",
    "flash_attn": "attention is torch's scaled_dot_product_attention",
    "gradient_checkpointing_use_reentrant": "checkpointing is never re-entrant",
    "disable_fast_tokenizer": "the tokenizer saved with the model is used",
    "disable_logprobs_flashattn": "attention is torch's scaled_dot_product_attention",
    "no_shard_vit": "--mixed_mm_data keeps the vision tower in FSDP2's root unit",
    "initial_model_shard_size": "the reference model is sharded over all processes",
    "load_in_4bit": "weights are never quantised in training",
    "rm_use_engine": _REWARD_MODELS,
    "rm_engine_cudagraph": _REWARD_MODELS,
    "value_head_prefix": "the critic's head is always called value_head",
    "reference_key": "use --label_key; other columns reach the reward function by name",
    "fps": 'videos bring their own: {"frames": [...], "fps": 2}',
    "processor": "the processor that was saved with the model is used",
    "system_prompt_path": "give the text itself by --system_prompt, or in a --config file",
    "ckpt_path_local": "use --ckpt_path",
    "train_data": "use --prompt_data",
    "task_instruction": "use --system_prompt",
    "loss_type": "use --reward_loss of lightrft reward",
    "margin": "give lightrft reward rows with a column margin",
    "pooling_method": "use --reward_pooling last or attention (for attn) of lightrft reward",
    "scale_for_train": "use --reward_loss hps of lightrft reward",
    "probing_layer": "lightrft reward reads the last layer",
    "heads_types": "use --reward_heads of lightrft reward",
    "gspo_alpha": "use --eps_clip_low and --eps_clip_high with --policy_loss gspo",
    "clip_range": "use --eps_clip",
    "clip_range_lower": "use --eps_clip_low",
    "clip_range_higher": "use --eps_clip_high",
    "use_clip_higher": "use --eps_clip_high",
    "mirror_tau": "use --init_kl_coef with --use_kl_loss",
    "use_length_penalty": "use --overlong_buffer",
    "length_penalty_coef": "use --overlong_buffer_penalty_factor",
    "baseline_type": "use --advantage_estimator",
    "normalize_reward": "use --reward_running_norm",
    "save_interval": "use --save_steps",
    "use_ms": "models and data are read from local paths",
    # Of TRL and transformers.
    "attn_implementation": "attention is chosen by model and device, and proved at the start",
    "dataset_num_proc": "rows are read by one process",
    "dataset_text_field": "texts stand in the column text: rename the column of your rows",
    "device": "the GPUs of CUDA_VISIBLE_DEVICES are used, the CPU where there is none",
    "device_map": "models are divided over the processes of --nproc_per_node",
    "model_init_kwargs": "a model is what its folder says, in float32 or --bf16",
    "neftune_noise_alpha": "no noise is added to embeddings",
    "no_cuda": "set CUDA_VISIBLE_DEVICES to nothing to train on a CPU",
    "processing_class": "the tokenizer saved with the model is used",
    "push_to_hub": "lightrft export writes a folder, hf upload sends it",
    "ref_model": "the reference is the model that the run begins with",
    "tokenizer": "the tokenizer saved with the model is used",
    "torch_compile": "use --compile_backend",
    "torch_dtype": "use --bf16, or --no_bf16 for float32",
    "use_cpu": "set CUDA_VISIBLE_DEVICES to nothing to train on a CPU",
    "use_liger_kernel": "use --fused_linear_logprob",
}


# Remedies where a command lacks an input that it cannot do without.
A_MODEL = "give a model directory, see lightrft init-model"
A_DATA_FILE = "give a JSONL, JSON, Parquet or CSV file, or the name of a data set"
A_REWARD = "give boxed_math, gsm8k or FILE.py:FUNCTION"


_ENTRY = re.compile(r"(\w+), (\w+)=\.\.\.")


def _meaning(name: str, command: str) -> str:
    """Return what a name means here: an option, with its other needs after a comma; or ""."""
    last = name.rpartition(".")[2]
    by_command = NAMES_OF_COMMANDS.get(command, {})
    return by_command.get(last) or OTHER_NAMES.get(name) or OTHER_NAMES.get(last) or ""


def same_option(name: str, command: str) -> tuple[str, str] | None:
    """Return the option that a name of another library is, with its entry ("" for all of it).

    None means that the name stands for something else here, has another unit, or is unknown.
    """
    there = _meaning(name, command)
    if (entry := _ENTRY.fullmatch(there)) is not None:
        return entry[1], entry[2]
    is_whole = "." not in name or name in OTHER_NAMES
    return (there, "") if is_whole and there.isidentifier() else None


def taken_as(name: str, option: str, entry: str) -> str:
    """Return how the line about names of other libraries shows one of them."""
    return f"{name} is {option}{entry and f' {entry}=...'}"


def without_switches(values: Mapping[str, object]) -> dict[str, object]:
    """Return the values with former switches replaced by the values that they stand for.

    Raises:
        ConfigError: A switch contradicts the option that it is a value of.
    """
    ours = {name: value for name, value in values.items() if name not in SWITCHES}
    for name in filter(values.get, SWITCHES):
        option, value = SWITCHES[name]
        if ours.get(option) not in (None, value):
            raise ConfigError(f"{name} is {option} {value}, and {option} is {ours[option]}")
        ours[option] = value
    return ours


@cache
def said_once(text: str, *, by_workers: bool = False) -> None:
    """Print a line on the first process of a run, once.

    Args:
        text: The line.
        by_workers: Whether processes from a launcher of lightrft print it, too.
    """
    is_said = "LIGHTRFT_LAUNCHED" in os.environ and not by_workers
    if os.environ.get("RANK", "0") == "0" and not is_said:
        print(f"lightrft: {text}", file=sys.stderr, flush=True)  # noqa: T201


def with_our_names(
    values: Mapping[str, object], known: Collection[str], command: str = "train"
) -> tuple[dict[str, object], list[str]]:
    """Return values by the names of our options, and a line for each option set twice.

    Names of other libraries that mean the same are accepted; one printed line says so.

    Args:
        values: Values by name.
        known: Options that the command takes.
        command: Command that takes them.
    """
    values = without_switches(values)
    places = {name: same_option(name, command) for name in values if name not in known}
    same = {n: place for n, place in places.items() if place is not None and place[0] in known}
    ours = {name: value for name, value in values.items() if name not in same}
    problems, taken = [], []
    for name, (option, entry) in same.items():
        taken.append(taken_as(name, option, entry))
        before = ours.get(option)
        entries = before if entry and isinstance(before, Mapping) else {}
        if before is not None and (entry in entries or not entries):
            problems.append(f"{name} and {option} are one option: give one of them")
        ours[option] = {**entries, entry: values[name]} if entry else values[name]
    if taken:
        said_once(f"names of other libraries: {', '.join(taken)}")
    return ours, problems


def _is_of_transformers(name: str) -> bool:
    """Return whether transformers' TrainingArguments have this name; nothing is imported."""
    spec = importlib.util.find_spec("transformers")
    places = [] if spec is None else spec.submodule_search_locations or []
    files = [Path(place) / "training_args.py" for place in places]
    texts = [read_text(file) for file in files if file.is_file()]
    return any(re.search(rf"^    {re.escape(name)}: ", text, re.MULTILINE) for text in texts)


def option_hint(name: str, known: Collection[str], command: str = "train") -> str:
    """Return the end of a sentence about an unknown option: its name here, or the nearest known.

    Args:
        name: Name as typed; groups before a dot may clarify it.
        known: Options that could have been typed.
        command: Command that received the name.
    """
    there = _meaning(name, command) or name.rpartition(".")[2]
    first = there.split()[0].rstrip(",")
    if there != name and (first in known or first == PROCESSES):
        return f"; here it is {there}"
    if name in UNAVAILABLE:
        return f": {UNAVAILABLE[name]}"
    if there != name or _is_of_transformers(name):
        return f": nothing in lightrft {command} corresponds to it"
    flag = "--help_all" if command in NAMES_OF_COMMANDS else "--help"
    near, knows_none, _ = did_you_mean(name, known).partition("; known")
    return f"; lightrft {command} {flag} lists all" if knows_none else near
