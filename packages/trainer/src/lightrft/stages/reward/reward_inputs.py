"""Inputs of a reward model's training: options and rows, checked first, then built."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from transformers import AutoModel, AutoModelForSequenceClassification

from lightrft.config import ConfigError, RewardModelOptions, RowRunOptions, TrainConfig
from lightrft.datasets.files import Row, read_sources
from lightrft.datasets.judged_rows import JudgementKind
from lightrft.datasets.preference_rows import PreferenceReader, load_preferences
from lightrft.datasets.ranked_rows import ANSWERS, RANKED, RankedAnswers, ranking_reader
from lightrft.datasets.row_data import RowData, RowMediaReader
from lightrft.datasets.scored_rows import RESPONSE, SCORED, ScoredAnswer
from lightrft.datasets.step_rows import LABELLED_STEPS, STEPS, LabelledSteps
from lightrft.models import RewardModel
from lightrft.models.loading import is_reward_model, load_config
from lightrft.models.reward_model import ONE_SCORE, LoraRewardModel, has_classifier
from lightrft.models.score_heads import LAST_TOKEN, pooling_of, score_weights
from lightrft.stages.models import configure_trained, trained_model
from lightrft.stages.reward.comparisons import Judgement
from lightrft.stages.reward.reward_objective import (
    Counts,
    RewardObjective,
    build_losses,
    config_of,
)
from lightrft.stages.reward.score_proofs import prove_pooling
from lightrft.stages.rows.row_inputs import (
    RowInputs,
    check_auditable,
    read_rows,
    require_options,
)
from lightrft.stages.rows.row_stage import RowStage
from lightrft.stages.stage import TrainedModels
from lightrft.strategy.backend import Backend
from lightrft.strategy.model_training import ModelTraining

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Kinds by a column of the first row; all other rows are preferences.
_Kind = JudgementKind[RankedAnswers] | JudgementKind[LabelledSteps] | JudgementKind[ScoredAnswer]
_KINDS: Mapping[str, _Kind] = {RESPONSE: SCORED, STEPS: LABELLED_STEPS, ANSWERS: RANKED}
# Values of open options that a reward model does not use: it has no logits and a new head.
_UNUSED = {"fused_linear_logprob": False, "meta_init": False}


@dataclass(frozen=True, slots=True)
class RewardInputs(RowInputs[Judgement, Counts]):
    """Judgements of a run; see `RowInputs`."""

    @property
    def item_name(self) -> str:
        """Plural word for a judgement."""
        return "judgements"

    def decided(self, config: TrainConfig, backend: Backend) -> TrainConfig:
        """Return the configuration with the machine's choices made."""
        # `super` does not see a dataclass with slots.
        decided = RowInputs.decided(self, config.replaced(_UNUSED), backend)
        return decided.replaced(dict.fromkeys(_UNUSED))

    def introduce(self, say: Callable[[str], None]) -> None:
        """Print what the model states, and doubts about the data."""
        self.reading.statements.say(say)
        for text in doubts(self.data.rows):
            say(f"warning: {text}")

    def load(
        self, config: RowRunOptions, training: ModelTraining, num_steps: int
    ) -> tuple[TrainedModels, RewardObjective]:
        """Load the reward model, and build the objective."""
        model = load_reward_model(config)
        if not model.is_beside:
            model.model.config.pad_token_id = padding_id(self.reading.tokenizer, self.data.rows)
        configure_trained(model, config, training.context)
        ready = training.prepare_reward_model(model, num_steps)
        trained = trained_model("actor", ready)
        objective = RewardObjective.of(config, trained.model, is_paired=self.data.is_paired)
        return TrainedModels((trained,)), objective

    def prove(self, stage: RowStage[Judgement, Counts]) -> None:
        """Prove that scores do not depend on padding, and print where they are read."""
        model, context = stage.models.main.model, stage.strategy.context
        change = prove_pooling(model, stage.data.rows, context)
        is_last = pooling_of(config_of(model)) == LAST_TOKEN
        context.print(
            f"scores are {'read at the last token' if is_last else 'pooled over all tokens'} of a "
            f"row: another last token changes them by at least {change:.2g}, and padding does not"
        )


def read_inputs(config: TrainConfig) -> RewardInputs:
    """Check the options, then read tokenizer and rows.

    Raises:
        ConfigError: Options that cannot be run.
        DataError: Rows that cannot be used.
        ModelLoadError: A tokenizer that cannot be read.
    """
    require_options(config, "reward")
    plan = plan_scores(config)
    names = plan.names
    is_classifier = has_classifier(load_config(str(config.pretrain)))
    kind = AutoModelForSequenceClassification if is_classifier else AutoModel
    reading, data, held_out = read_rows(config, load_rows, kind)
    build_losses(config, plan.weights, is_paired=data.is_paired)
    firsts = (data.rows[0], *held_out[:1])
    has_steps = any(isinstance(each, LabelledSteps) for each in firsts)
    if has_steps and plan.pooling != LAST_TOKEN:
        raise ConfigError(
            f"reward_pooling {plan.pooling} scores whole rows, and the data hold labelled "
            f"steps: use {LAST_TOKEN}"
        )
    if names and not all(isinstance(each, RankedAnswers) for each in firsts):
        raise ConfigError(
            f"reward_heads {' '.join(names)} need rankings (prompt, answers, and ranks by name): "
            "give other rows, or leave it out"
        )
    check_auditable(config, (row for each in data.rows for row in each.rows))
    if held_out and (len(held_out[0].rows) > 1) != data.is_paired:
        raise ConfigError(
            "prompt_data and eval_data must be of one kind: got labelled answers in one of "
            "them alone"
        )
    return RewardInputs(reading, data, held_out)


@dataclass(frozen=True, slots=True)
class ScorePlan:
    """Scores of a reward model.

    Args:
        pooling: Name of the pooling in its registry.
        weights: Weight of each score by name; a single score has the name "".
    """

    pooling: str
    weights: Mapping[str, float]

    @property
    def names(self) -> tuple[str, ...]:
        """Names of several scores; () for one."""
        return tuple(filter(None, self.weights))


def plan_scores(config: RowRunOptions) -> ScorePlan:
    """Return the scores that the options ask for, or those of the reward model in `pretrain`.

    Raises:
        ConfigError: Options contradict each other or the model, or cannot be run.
        ModelLoadError: The model's configuration cannot be read.
    """
    _check_heads(config)
    heads, path = config.reward_heads, str(config.pretrain)
    weights = config.reward_head_weights or (1.0,) * len(heads)
    plan = ScorePlan(
        config.reward_pooling or LAST_TOKEN,
        dict(zip(heads, weights, strict=True)) if heads else ONE_SCORE,
    )
    if is_reward_model(path):
        stored = load_config(path)
        saved = ScorePlan(pooling_of(stored), score_weights(stored))
        is_other = bool(heads) and (plan != saved or plan.names != saved.names)
        if is_other or config.reward_pooling not in (None, saved.pooling):
            raise ConfigError(
                f"pretrain: {path} is a reward model with pooling {saved.pooling} and scores "
                f"{dict(saved.weights)}: leave reward_pooling and reward_heads out, or give a "
                "language model"
            )
        plan = saved
    if config.audit_every and (plan.pooling != LAST_TOKEN or plan.names):
        raise ConfigError(
            "audit_every recomputes one score at the last token: leave it out with reward_heads "
            f"and reward_pooling {plan.pooling}"
        )
    if plan.pooling != LAST_TOKEN and config.sp_size > 1:
        raise ConfigError(
            f"reward_pooling {plan.pooling} reads whole rows, which sp_size {config.sp_size} cuts: "
            f"use {LAST_TOKEN}, or sp_size 1"
        )
    return plan


def _check_heads(config: RewardModelOptions) -> None:
    heads = config.reward_heads
    if len(heads) == 1 or len(set(heads)) < len(heads) or not all(h.isidentifier() for h in heads):
        raise ConfigError(
            "reward_heads must be two different names or more, of letters, digits and _: got "
            f"{' '.join(heads)}; leave it out for one score"
        )
    for name in ("reward_head_weights", "reward_head_losses"):
        values = vars(config)[name]
        if values and len(values) != len(heads):
            raise ConfigError(
                f"{name} must be one for each of reward_heads: got {len(values)} for {len(heads)}"
            )


def load_rows(
    path: str,
    tokenizer: PreTrainedTokenizerBase,
    config: RowRunOptions,
    *,
    max_samples: int,
    split: str,
    probabilities: Sequence[float] = (),
    vocab_size: int | None = None,
    reader: RowMediaReader | None = None,
) -> RowData[Judgement]:
    """Return rankings, steps, scores, or preferences, by the columns of the first row."""
    read = read_sources(path, split=split, probabilities=probabilities, seed=config.seed)
    kind = _kind_of(read[0], config)
    if kind is not None:
        rows = read[:max_samples]
        return kind.of(rows, tokenizer, config, path=path, vocab_size=vocab_size, reader=reader)
    return load_preferences(
        path,
        tokenizer,
        config,
        max_samples=max_samples,
        split=split,
        probabilities=probabilities,
        vocab_size=vocab_size,
        reader=reader,
    )


def judgement_reader(
    tokenizer: PreTrainedTokenizerBase,
    config: RowRunOptions,
    first: Row,
    vocab_size: int | None,
    reader: RowMediaReader | None = None,
) -> Callable[[Row], Judgement]:
    """Return a reader of judgements for rows like the first; see `PreferenceReader`."""
    kind = _kind_of(first, config)
    build = PreferenceReader if kind is None else kind.build_reader
    return build(tokenizer, config, first, vocab_size, reader)


def _kind_of(first: Row, config: RowRunOptions) -> _Kind | None:
    """Return the kind of rows like the first; None for preferences."""
    kind = next(
        (kind for name, kind in _KINDS.items() if first.columns.get(name) is not None), None
    )
    if kind is not RANKED:
        return kind
    names = plan_scores(config).names
    return replace(RANKED, build_reader=partial(ranking_reader, names=names))


def load_reward_model(config: RowRunOptions) -> RewardModel:
    """Return the model to train: a reward model as it is, or another model with a new head.

    Raises:
        ModelLoadError: The model cannot be read.
    """
    path, new, plan = str(config.pretrain), config.allow_new_weights, plan_scores(config)
    if is_reward_model(path):
        model = RewardModel.from_pretrained(path, allow_new_weights=new)
    else:
        model = RewardModel.with_new_head(
            path,
            seed=config.seed,
            allow_new_weights=new,
            pooling=plan.pooling,
            weights=plan.weights,
        )
    if not config.lora_rank:
        return model
    return LoraRewardModel(model.model, config, model.head if model.is_beside else None)


def padding_id(tokenizer: PreTrainedTokenizerBase, judgements: Sequence[Judgement]) -> int | None:
    """Return the padding token of the saved classifier; None if rows end in the tokenizer's.

    transformers takes the last token that is not padding as the last one of a row. That is wrong
    where padding is also the end of a text. Without a padding token it reads single rows, and
    refuses batches.
    """
    pad_id: int | None = tokenizer.pad_token_id
    ends = {int(row.token_ids[-1]) for each in judgements for row in each.rows}
    return None if pad_id in ends else pad_id


def doubts(judgements: Sequence[Judgement]) -> list[str]:
    """Return one sentence for each suspicious finding in the data."""
    keys = [tuple(row.key for row in each.rows) for each in judgements]
    seen = set(keys)
    num_reversed = sum(len(key) == 2 and key[::-1] in seen for key in keys)
    line = f"{num_reversed} pairs stand in the data with the other answer chosen, too"
    return [line] * (num_reversed > 0)
