"""Inputs of a reward model's training: options and rows, checked first, then built."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING

from lightrft.config import ConfigError, TrainConfig
from lightrft.datasets.files import read_sources
from lightrft.datasets.preference_rows import load_preferences
from lightrft.datasets.ranked_rows import ANSWERS, load_ranked
from lightrft.datasets.scored_rows import RESPONSE, load_scored
from lightrft.datasets.step_rows import STEPS, load_steps
from lightrft.models import RewardModel
from lightrft.models.loading import load_config
from lightrft.models.lora import LoraRewardModel
from lightrft.models.reward_model import is_classifier
from lightrft.models.sequence_model import freeze
from lightrft.stages.policy.models import (
    configure_model,
    decide_by_machine,
    read_model_facts,
    trained_model,
)
from lightrft.stages.reward.comparisons import JudgedData, Judgement
from lightrft.stages.reward.reward_stage import RewardStage, build_loss, prove_pooling
from lightrft.stages.stage import TrainedModels
from lightrft.stages.supervised.supervised_inputs import option_problems, read_rows
from lightrft.stages.supervised.supervised_stage import planned_updates
from lightrft.strategy.distributed.deadlines import phase
from lightrft.strategy.strategy_base import StrategyBase

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Of options whose choice a reward model leaves open: it has no logits, and its head is in no file.
_UNUSED = {"fused_linear_logprob": False, "meta_init": False}


@dataclass(frozen=True, slots=True)
class RewardInputs:
    """Preferences of a run; see `StageInputs`."""

    tokenizer: PreTrainedTokenizerBase
    data: JudgedData
    held_out: tuple[Judgement, ...] = ()

    def decided(self, config: TrainConfig, strategy: StrategyBase) -> TrainConfig:
        """See `StageInputs`."""
        facts = read_model_facts(config, strategy)
        strategy.check_model_size(facts.num_weights)
        config = decide_by_machine(config.replaced(_UNUSED), strategy, facts=facts)
        return config.replaced(dict.fromkeys(_UNUSED))

    def build(self, config: TrainConfig, strategy: StrategyBase) -> RewardStage:
        """See `StageInputs`."""
        num_steps = planned_updates(self.data, config, strategy)
        strategy.print(self.data.summary)
        for text in doubts(self.data.rows, self.held_out):
            strategy.print(f"warning: {text}")
        strategy.print(f"{num_steps} steps of {config.train_batch_size} judgements")
        with phase("load the model", timedelta(minutes=config.timeout_minutes)):
            model = load_reward_model(config)
            model.model.config.pad_token_id = padding_id(self.tokenizer, self.data.rows)
            configure_model(model, config)
            freeze(model, config.freeze_prefix)
            ready = strategy.prepare_reward_model(model, config, num_steps)
        models = TrainedModels((trained_model("actor", ready),))
        stage = RewardStage(config, strategy, models, self.data, self.held_out)
        stage.text_part = self.tokenizer
        change = prove_pooling(stage)
        strategy.print(
            "scores are read at the last token of a row: another token changes them by at least "
            f"{change:.2g}, and padding does not"
        )
        return stage

    def close(self) -> None:
        """See `StageInputs`."""


def read_inputs(config: TrainConfig) -> RewardInputs:
    """Checks the options, then reads tokenizer and rows.

    Raises:
        ConfigError: Options that cannot be run.
        DataError: Rows that cannot be used.
        ModelLoadError: A tokenizer that cannot be read.
    """
    problems = option_problems(config, int(os.environ.get("WORLD_SIZE", "1")), "reward")
    if problems:
        raise ConfigError("\n".join(problems))
    tokenizer, data, held_out = read_rows(config, load_rows)
    build_loss(config, is_paired=data.is_paired)
    if held_out is None:
        return RewardInputs(tokenizer, data)
    if held_out.is_paired != data.is_paired:
        raise ConfigError(
            "prompt_data and eval_data must be of one kind: got labelled answers in one of "
            "them alone"
        )
    return RewardInputs(tokenizer, data, held_out.rows)


def load_rows(
    path: str,
    tokenizer: PreTrainedTokenizerBase,
    config: TrainConfig,
    *,
    max_samples: int,
    split: str,
    probabilities: Sequence[float] = (),
    vocab_size: int,
) -> JudgedData:
    """Rankings, steps, scores, or what `load_preferences` reads, by columns of the first row."""
    read = read_sources(path, split=split, probabilities=probabilities, seed=config.seed)
    load: Callable[..., JudgedData] = partial(load_preferences, vocab_size=vocab_size)
    others: dict[str, Callable[..., JudgedData]] = {
        ANSWERS: load_ranked,
        STEPS: load_steps,
        RESPONSE: partial(load_scored, vocab_size=vocab_size),
    }
    for name, other in others.items():
        load = load if read[0].columns.get(name) is None else other
    return load(
        path,
        tokenizer,
        config,
        max_samples=max_samples,
        split=split,
        probabilities=probabilities,
    )


def load_reward_model(config: TrainConfig) -> RewardModel:
    """The model to train: a reward model as it is, any other text model with a new head.

    Raises:
        ModelLoadError: It cannot be read, or its head has several outputs.
    """
    path, new = str(config.pretrain), config.allow_new_weights
    if is_classifier(load_config(path)):
        model = RewardModel.from_pretrained(path, allow_new_weights=new)
    else:
        model = RewardModel.with_new_head(path, seed=config.seed, allow_new_weights=new)
    return LoraRewardModel(model.model, config) if config.lora_rank else model


def padding_id(tokenizer: PreTrainedTokenizerBase, judgements: Sequence[Judgement]) -> int | None:
    """The padding token of the saved classifier: None where rows end in the tokenizer's.

    transformers takes the last token that is no padding for the last one of a row. Where padding
    is the end of a text, that is a wrong one; without padding it reads row by row, and refuses
    others.
    """
    found: int | None = tokenizer.pad_token_id
    ends = {int(row.token_ids[-1]) for each in judgements for row in each.rows}
    return None if found in ends else found


def doubts(judgements: Sequence[Judgement], held_out: Sequence[Judgement]) -> list[str]:
    """One sentence for each thing that is odd about the data."""

    def keys(of: Sequence[Judgement]) -> list[tuple[bytes, ...]]:
        return [tuple(row.token_ids.tobytes() for row in each.rows) for each in of]

    found, seen, texts = keys(judgements), set(keys(judgements)), []
    num_reversed = sum(len(key) == 2 and key[::-1] in seen for key in found)
    if num_reversed:
        texts.append(f"{num_reversed} pairs stand in the data with the other answer chosen, too")
    num_shared = sum(key in seen for key in keys(held_out))
    if num_shared:
        texts.append(f"{num_shared} held-out rows are among those that are trained on")
    return texts
