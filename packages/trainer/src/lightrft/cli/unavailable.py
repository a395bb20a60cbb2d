"""Documented options that this version does not implement, with what to do instead.

They are refused: an option that were accepted and ignored would change nothing without a word.
"""

_METRICS = "metrics go to OUTPUT_DIR/metrics.jsonl"
_REWARD_MODELS = "reward models run in the trainer's processes"
_TRACE = "use --save_trajectories, which writes trajectories.jsonl"
_NO_REWARD_TRAINING = "reward models are used (--reward_pretrain), not trained"
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
    "loss_type": _NO_REWARD_TRAINING,
    "margin": _NO_REWARD_TRAINING,
    "pooling_method": _NO_REWARD_TRAINING,
    "scale_for_train": _NO_REWARD_TRAINING,
    "probing_layer": _NO_REWARD_TRAINING,
    "heads_types": _NO_REWARD_TRAINING,
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
}
