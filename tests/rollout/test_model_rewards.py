"""Reward models in the step: equal calls on every rank, one model on the device at a time."""

import pytest
import torch
from tests.models.tiny import SHAPE
from tokenizers.processors import TemplateProcessing
from transformers import AutoConfig, AutoModelForSequenceClassification

from lightrft.config import ConfigError, TrainConfig
from lightrft.datasets.types import Prompt
from lightrft.engines.types import Completion
from lightrft.models import RewardModel
from lightrft.records.rollout import Rollout
from lightrft.rewards.types import RewardError, RewardRecipes, RewardResult
from lightrft.rollout.model_rewards import HOST, ModelRewards, OwnTexts, ScoringModel
from lightrft.rollout.scoring import score_rollouts
from lightrft.stages.policy.rewards import tokenizers_of_scorers
from lightrft.tools.model_presets import CHAT_TEMPLATE, byte_level_tokenizer


class SumOfIds(torch.nn.Module):
    """The sum of the ids of a row, times a factor."""

    def __init__(self, log, factor=1.0):
        super().__init__()
        self.log, self.factor = log, factor

    def forward(self, token_ids, attention_mask):
        self.log.append(("call", self.factor, token_ids.shape[0]))
        return (token_ids * attention_mask).sum(dim=1).float() * self.factor


class OneOfTwoRanks:
    """The other rank has `others` rows more or less."""

    device = torch.device("cpu", 0)

    def __init__(self, log, others):
        self.log, self.others = log, others

    def gather_objects(self, count):
        return [count, self.others]

    @property
    def context(self):
        return self

    def move_model(self, model, device):
        name = "offload" if device is HOST else "reload"
        self.log.append((name, getattr(model, "factor", None)))


def rollout(i, response, *, task="a", finish="stop", messages=()):
    prompt = Prompt(i, "ab", (97, 98), columns={"task": task}, messages=messages)
    text = bytes(response).decode()
    completion = Completion(
        request_id=i,
        sample_index=0,
        prompt_token_ids=(97, 98),
        output_token_ids=tuple(response),
        output_logprobs=(0.0,) * len(response),
        logprobs_mode="temperature",
        finish_reason=finish,
        weights_version=0,
    )
    return Rollout(prompt, completion, i, i, text)


def rollouts():
    return [rollout(0, [99, 99, 99]), rollout(1, [100]), rollout(2, [101, 101], task="b")]


def test_scores_keep_their_rows_and_calls_do_not_depend_on_a_ranks_own_rows():
    log = []
    backend = OneOfTwoRanks(log, others=3)
    models = [
        ScoringModel("first", SumOfIds(log), weight=2.0),
        ScoringModel("second", SumOfIds(log, -1.0)),
    ]
    rewards = ModelRewards(backend, models, micro_batch_size=2)
    assert log == [("offload", 1.0), ("offload", -1.0)]
    log.clear()
    results = rewards.score(rollouts())
    sums = [195 + 297, 195 + 100, 195 + 202]
    assert [r.reward for r in results] == [2.0 * s - s for s in sums]
    assert results[1].components == {"first": 295.0, "second": -295.0}
    # Two batches of own rows, and one more because the other rank has three.
    calls = [("call", 1.0, 2), ("call", 1.0, 1), ("call", 1.0, 1)]
    assert log[:5] == [("reload", 1.0), *calls, ("offload", 1.0)]
    log.clear()
    assert rewards.score([]) == []
    assert sum(entry[0] == "call" for entry in log) == 6


def test_recipes_choose_rows_and_weights():
    log = []
    recipes = RewardRecipes("task", {"a": {"first": 0.5}, "b": {"rule": 1.0}})
    rewards = ModelRewards(
        OneOfTwoRanks(log, 0),
        [ScoringModel("first", SumOfIds(log))],
        micro_batch_size=8,
        recipes=recipes,
    )
    log.clear()
    found = rewards.score(rollouts())
    assert [r.reward for r in found] == [246.0, 147.5, 0.0]
    assert found[2].components == {}
    assert ("call", 1.0, 2) in log


def test_another_tokenizer_reads_the_text_and_the_end_of_finished_responses():
    log = []
    tokenizer = byte_level_tokenizer()
    rewards = ModelRewards(
        OneOfTwoRanks(log, 0), [ScoringModel("m", SumOfIds(log), tokenizer)], micro_batch_size=1
    )
    finished, cut = rewards.score([rollout(0, [99]), rollout(0, [99], finish="length")])
    assert cut.reward == 97 + 98 + 99
    assert finished.reward == cut.reward + tokenizer.eos_token_id


def test_model_scores_are_added_to_the_rules_and_must_be_finite():
    items = rollouts()[:2]
    rules = [RewardResult(1.0, {"rule": 1.0})] * 2
    scored = score_rollouts(
        items,
        rules,
        model_results=[RewardResult(0.5, {"model": 5.0}), RewardResult(-2.0, {"model": -20.0})],
    )
    assert [s.reward for s in scored] == [1.5, -1.0]
    assert scored[0].components == {"rule": 1.0, "model": 5.0}
    assert scored[0].accuracy == 1.5
    with pytest.raises(RewardError, match="prompt 1"):
        score_rollouts(items, rules, model_results=[RewardResult(0.0), RewardResult(float("nan"))])


TEMPLATE = (
    "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}"
    "{% if m['role'] == 'assistant' %}{{ eos_token }}\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


def begun_tokenizer(template=None):
    """A tokenizer that writes a beginning before a text, as those of Llama and Gemma do."""
    tokenizer = byte_level_tokenizer()
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<|system|> $A", special_tokens=[("<|system|>", 260)]
    )
    tokenizer.chat_template = template
    return tokenizer


def classifier(folder, tokenizer):
    """A reward model of a folder."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        "llama", **SHAPE | {"vocab_size": 261}, num_labels=1, pad_token_id=256
    )
    AutoModelForSequenceClassification.from_config(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


@torch.no_grad()
def test_a_reward_model_scores_the_tokens_that_transformers_gives_it(tmp_path):
    tokenizer = begun_tokenizer(TEMPLATE)
    path = classifier(tmp_path, tokenizer)
    own = AutoModelForSequenceClassification.from_pretrained(path)
    rewards = ModelRewards(
        OneOfTwoRanks([], 0),
        [ScoringModel("m", RewardModel.from_pretrained(path), tokenizer)],
        micro_batch_size=2,
    )
    asked = ({"role": "user", "content": "2?"},)
    chat = tokenizer.apply_chat_template(
        [*asked, {"role": "assistant", "content": "cc"}], tokenize=False
    )
    wanted = (tokenizer("abcc<|end|>"), tokenizer(chat.rstrip(), add_special_tokens=False))
    found = rewards.score([rollout(0, [99, 99]), rollout(1, [99, 99], messages=asked)])
    for result, encoded in zip(found, wanted, strict=True):
        score = own(torch.tensor([encoded["input_ids"]])).logits.item()
        assert result.reward == pytest.approx(score, abs=1e-5)
    # A response that was cut has no end.
    read = OwnTexts(tokenizer)
    cut = [rollout(0, [99], finish="length"), rollout(0, [99], finish="length", messages=asked)]
    assert [list(read(each))[-1] for each in cut] == [99, 99]


@pytest.mark.parametrize(
    "template, options, reads_anew",
    [
        (CHAT_TEMPLATE, {"apply_chat_template": True}, False),
        (None, {"apply_chat_template": True}, False),
        (TEMPLATE, {"apply_chat_template": True}, True),
        (CHAT_TEMPLATE, {}, True),
    ],
)
def test_a_reward_model_reads_sampled_ids_only_where_it_would_read_the_same(
    tmp_path, template, options, reads_anew
):
    path = classifier(tmp_path, begun_tokenizer(template))
    config = TrainConfig(pretrain="policy", reward_pretrain=(path,), **options)
    (found,) = tokenizers_of_scorers(config, byte_level_tokenizer())
    assert (found is not None) == reads_anew


def test_what_a_reward_model_cannot_read_is_refused(tmp_path):
    tokenizer = begun_tokenizer()
    tokenizer.add_tokens(["<x>"])
    path = classifier(tmp_path, tokenizer)
    config = TrainConfig(pretrain="policy", reward_pretrain=(path,), apply_chat_template=True)
    with pytest.raises(ConfigError, match="has ids up to 261"):
        tokenizers_of_scorers(config, byte_level_tokenizer())
    classifier(tmp_path, begun_tokenizer())
    other = byte_level_tokenizer()
    other.add_tokens(["<x>"])
    with pytest.raises(ConfigError, match="it has no chat template for the messages"):
        tokenizers_of_scorers(config, other)
