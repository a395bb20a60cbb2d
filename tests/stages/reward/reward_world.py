"""Preferences and stages of reward models on a tiny model, for tests."""

import copy
import random

import numpy as np
import torch
from tests.models.tiny import SPECIAL, tiny_config
from tests.runs import row_options
from tests.stages.stage_world import configured, prepared, row
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from lightrft.config import TrainConfig
from lightrft.datasets.preference_rows import LabelledAnswer, PreferencePair
from lightrft.datasets.ranked_rows import RankedAnswers
from lightrft.datasets.row_data import RowData, SupervisedRow
from lightrft.datasets.step_rows import LabelledSteps
from lightrft.models import RewardModel
from lightrft.models.reward_model import LoraRewardModel
from lightrft.stages.reward.reward_objective import RewardObjective
from lightrft.stages.rows.row_stage import RowStage
from lightrft.trainer import RewardTrainer


def pair(first, second, *, margin=None, seed=0):
    """A pair of random answers of these lengths."""
    return PreferencePair(row(first, 1, seed=seed), row(second, 1, seed=seed + 50), margin)


# Lengths differ by a factor of 20, and two pairs have margins.
PAIRS = (
    pair(90, 7, margin=0.5),
    pair(5, 100, seed=1),
    pair(12, 12, margin=1.5, seed=2),
    pair(30, 61, seed=3),
)
LABELLED = tuple(
    LabelledAnswer(row(length, 1, seed=length), length % 2 == 0) for length in (90, 5, 31, 64)
)
RANKED = (
    RankedAnswers(tuple(row(length, 1, seed=length) for length in (20, 77, 9)), (2.0, 1.0, 2.0)),
    RankedAnswers((row(5, 1, seed=8), row(33, 1, seed=9)), (7.0, 3.0)),
)


def steps(ends, labels, *, seed=0):
    """An answer of random tokens in steps that end at these places."""
    whole = row(ends[-1] + 1, 1, seed=seed)
    return LabelledSteps(
        SupervisedRow(whole.token_ids, np.isin(np.arange(len(whole.token_ids)), ends)), labels
    )


# Numbers of steps differ: a mean over rows would be another one.
STEPS = (
    steps((3, 10, 11, 40, 90), (True, True, False, False, True)),
    steps((30,), (True,), seed=1),
)


def tiny_classifier(*, seed=0, **changes):
    """A sequence classifier with one label and random float32 weights of a seed."""
    torch.manual_seed(seed)
    config = tiny_config(num_labels=1, **{**SPECIAL, **changes})
    model = AutoModelForSequenceClassification.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        model.score.weight.normal_(std=0.3)
    return model


def build_stage(strategy, preferences, *, model=None, held_out=(), **changes):
    """A stage on judgements."""
    config = configured(preferences, **changes)
    model = copy.deepcopy(model or tiny_classifier())
    if not isinstance(model, RewardModel):
        model = LoraRewardModel(model, config) if config.lora_rank else RewardModel(model)
    models = prepared(strategy, model, config)
    data = RowData(preferences, "")
    objective = RewardObjective.of(config, models.main.model, is_paired=data.is_paired)
    return RowStage(config, strategy, models, data, held_out, objective)


def slow_scores(model, preferences):
    """Scores in float64, row by row, by transformers itself."""
    rows = [each for preference in preferences for each in preference.rows]
    ids = [torch.from_numpy(each.token_ids).long()[None] for each in rows]
    return torch.stack([model(each).logits[0, 0] for each in ids])


def slow_loss(model, preferences, *, centering=0.0):
    """Return the loss of pairs from the formula."""
    chosen, rejected = slow_scores(model, preferences).view(-1, 2).unbind(1)
    margins = torch.tensor([each.margin or 0.0 for each in preferences], dtype=torch.float64)
    losses = -(chosen - rejected - margins).sigmoid().log() + centering * (chosen + rejected) ** 2
    return losses.mean()


def pairs(num, *, seed=0, swapped=False, **columns):
    """Pairs of which the polite answer is better, whatever its length."""
    draw = random.Random(seed)
    found = []
    for number in range(num):
        answers = [f"word {draw.randrange(10 ** draw.randint(1, 8))}" for _ in range(2)]
        better, worse = f"{answers[0]} please", f"{answers[1]} at once"
        chosen, rejected = (worse, better) if swapped else (better, worse)
        row = {"prompt": f"name {number}: ", "chosen": chosen, "rejected": rejected}
        found.append(row | columns)
    return found


def answers_of(rows):
    """Return whole texts of the answers of pairs, each better one before the worse."""
    return [f"{row['prompt']}{row[name]}" for row in rows for name in ("chosen", "rejected")]


def scores_of(folder, texts):
    """Return scores of texts by a saved model; where transformers can read it, it must agree."""
    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="right")
    ends = [text + tokenizer.eos_token for text in texts]
    ids = tokenizer(ends, return_tensors="pt", padding=True)
    ours = RewardModel.from_pretrained(str(folder)).eval()
    with torch.no_grad():
        scores = ours(ids["input_ids"], ids["attention_mask"].bool())
        if not ours.is_beside:
            theirs = AutoModelForSequenceClassification.from_pretrained(folder).eval()
            torch.testing.assert_close(theirs(**ids).logits[:, 0], scores, rtol=0, atol=2e-5)
    return scores.double()


def run(model, rows, folder, **changes):
    settings = {"actor_learning_rate": 1e-3, "train_batch_size": 8, **changes}
    return RewardTrainer(TrainConfig(**row_options(model, rows, folder, **settings))).train()
