"""Supervised steps in the words of reinforcement: REINFORCE with an advantage of 1 a token."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from transformers import AutoTokenizer

from lightrft.config import TrainConfig
from lightrft.tools.audit.corrections import Pair
from lightrft.tools.audit.replay import Numbers, Step

STAGE = "sft"
# The mean that each loss is taken in.
AGGREGATIONS = {
    "token-mean": "token-mean",
    "seq-mean-token-mean": "seq-mean-token-mean",
    "dft": "token-mean",
}


def as_reinforcement(config: TrainConfig) -> TrainConfig:
    """Options by which a step is one optimizer step on rows that nobody else answered."""
    tokens = config.micro_batch_tokens
    if tokens is None and config.packing_samples:
        tokens = config.micro_train_batch_size * config.max_row_tokens
    return config.replaced(
        {
            "policy_loss": "reinforce",
            "loss_agg_mode": AGGREGATIONS[config.sft_loss],
            "rollout_batch_size": config.train_batch_size,
            "n_samples_per_prompt": 1,
            "max_epochs": 1,
            "micro_batch_tokens": tokens,
        }
    )


def supervised_advantages(step: Step, numbers: Numbers) -> tuple[Pair, float]:
    """What -log p of each token is multiplied with, and its rounding: 1, or p of dft."""
    if step.config.sft_loss != "dft":
        ones = np.ones(step.rows.mask.shape)
        return Pair(ones, ones), 0.0
    return numbers.old.map(np.exp), step.unit


def check_ends(step: Step) -> None:
    """Each run of trained tokens ends in a special token, at which a generation can stop."""
    config, name = step.config, "ends of trained turns"
    if config.train_on == "all" or config.train_on_regex is not None:
        step.found.skip(name, "the options do not train turns")
        return
    try:
        tokenizer = AutoTokenizer.from_pretrained(str(config.pretrain), local_files_only=True)
    except (OSError, ValueError):
        step.found.skip(name, f"no tokenizer in {Path(str(config.pretrain))}")
        return
    added = tokenizer.added_tokens_decoder.items()
    special = [*tokenizer.all_special_ids, *(i for i, each in added if each.special)]
    mask = step.rows.mask
    is_end = mask & ~np.pad(mask, ((0, 0), (0, 1)))[:, 1:]
    is_special = np.isin(step.rows.ids, special)
    step.found.exact(name, is_end & is_special, is_end)
