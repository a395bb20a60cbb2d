"""Heads of reward models: pooling, several scores, where they load, and what is refused."""

import math
import random

import pytest
import torch
from tests.runs import row_options, steps, train_on_ranks, write
from tests.stages.reward.reward_world import PAIRS, build_stage, run, tiny_classifier
from tests.stages.stage_world import distance, row, step_of
from transformers import AutoModel, AutoModelForSequenceClassification, AutoTokenizer

from lightrft.config import ConfigError, TrainConfig
from lightrft.datasets.ranked_rows import RankedAnswers
from lightrft.models import RewardModel
from lightrft.models.score_heads import AttentionHead, describe_head, initialise
from lightrft.stages.reward.reward_inputs import plan_scores

NAMES = {"taste": 1.0, "truth": 0.5}
PACKED = {"micro_train_batch_size": 4, "packing_samples": True, "max_row_tokens": 110}
# The third row has no ranking by truth, and one by taste is a tie.
NAMED = (
    RankedAnswers(
        tuple(row(length, 1, seed=length) for length in (20, 77, 9)),
        by_name={"taste": (2.0, 1.0, 2.0), "truth": (3.0, 1.0, 2.0)},
    ),
    RankedAnswers((row(5, 1, seed=8), row(33, 1, seed=9)), by_name={"truth": (7.0, 3.0)}),
    RankedAnswers((row(12, 1, seed=3), row(40, 1, seed=4)), by_name={"taste": (1.0, 2.0)}),
)


def scorer(pooling, weights):
    """A reward model of random numbers, and its float64 copy."""
    config = tiny_classifier().config
    torch.manual_seed(0)
    if pooling == "attention":
        trunk = AutoModel.from_config(config, dtype=torch.float32)
        describe_head(trunk.config, pooling, weights)
        made = RewardModel(trunk, AttentionHead(config.hidden_size, len(weights)))
    else:
        config.num_labels = len(weights)
        describe_head(config, pooling, weights)
        made = RewardModel(AutoModelForSequenceClassification.from_config(config))
    initialise(made.head, seed=4)
    with torch.no_grad():
        for name, value in made.head.named_parameters():
            if name.endswith(("bias", "norm.weight")):
                value.add_(torch.linspace(-0.5, 0.5, value.numel()))
    return made


def slow_pool(pool, hidden):
    """The score of one text [tokens, hidden] from the formula, token by token."""
    width = pool.query.shape[1]
    mean = []
    for head, query in enumerate(pool.query):
        part = slice(head * width, (head + 1) * width)
        weights = [math.e ** (query @ (pool.keys.weight @ h)[part] / width**0.5) for h in hidden]
        values = [(pool.values.weight @ h)[part] for h in hidden]
        mean.append(sum(w * v for w, v in zip(weights, values, strict=True)) / sum(weights))
    mixed = pool.mix.weight @ torch.cat(mean)
    normed = mixed / (mixed.square().mean() + 1e-6).sqrt() * pool.norm.weight
    return (pool.output.weight @ (normed * normed.sigmoid()) + pool.output.bias)[0]


def slow_all(made, token_ids):
    """[names] float64 of one row alone, by transformers' trunk."""
    hidden = made.pretrained(torch.from_numpy(token_ids).long()[None]).last_hidden_state[0]
    if isinstance(made.head, AttentionHead):
        return torch.stack([slow_pool(pool, hidden) for pool in made.head.pools])
    return made.head.weight @ hidden[-1]


def slow_loss(made, judgements, *, losses):
    """Loss in float64 of named rankings, weighed and averaged by name."""
    total = 0.0
    for place, (name, weight) in enumerate(NAMES.items()):
        own = [each for each in judgements if name in each.by_name]
        for each in own:
            scores = [slow_all(made, answer.token_ids)[place] for answer in each.rows]
            ranks, found = each.by_name[name], []
            for i in range(len(ranks)):
                for j in range(len(ranks)):
                    if ranks[i] < ranks[j]:
                        scale = 1 / 0.07 if losses[place] == "hps" else 1.0
                        found.append(-(scale * (scores[i] - scores[j])).sigmoid().log())
                    elif i < j and ranks[i] == ranks[j]:
                        found.append(0.01 * (scores[i] - scores[j]).abs())
            total = total + weight * sum(found) / len(found) / len(own)
    return total


def named_step(pooling, **changes):
    """Return gradient and metrics of a step on rankings by name of a model of random numbers."""
    changes = {"reward_head_losses": ("bradley_terry", "hps"), **changes}
    made = scorer(pooling, NAMES)
    return step_of(build_stage, NAMED, model=made, reward_heads=tuple(NAMES), **changes)


@pytest.mark.parametrize("pooling", ["last", "attention"])
def test_several_scores_have_their_losses_and_gradients(pooling):
    found, metrics = named_step(pooling)
    made = scorer(pooling, NAMES).double()
    if pooling == "last":
        made.head.weight.data = made.head.weight.data.double()
    loss = slow_loss(made, NAMED, losses=("bradley_terry", "hps"))
    loss.backward()
    expected = {name: value.grad for name, value in made.named_parameters()}
    expected = {name: value for name, value in expected.items() if value is not None}
    assert distance({n: found[n] for n in expected}, expected) <= 1e-5
    assert metrics["loss"] == pytest.approx(loss.item(), rel=1e-6)
    assert {"head_accuracy/taste", "head_accuracy/truth", "accuracy"} <= metrics.keys()
    again, others = named_step(pooling, **PACKED)
    assert distance(again, found) <= 1e-6
    for name, value in metrics.items():
        assert others[name] == pytest.approx(value, rel=1e-5, abs=1e-6), name


def test_attention_reads_the_real_tokens_alone():
    made = scorer("attention", {"": 1.0})
    texts = [each.token_ids for pair in PAIRS for each in pair.rows]
    width = max(map(len, texts)) + 3
    ids = torch.full((len(texts), width), 7)
    mask = torch.zeros(len(texts), width, dtype=torch.bool)
    for place, text in enumerate(texts):
        # Padding to the left of every second row.
        start = width - len(text) if place % 2 else 0
        ids[place, start : start + len(text)] = torch.from_numpy(text).long()
        mask[place, start : start + len(text)] = True
    with torch.no_grad():
        found = made(ids, mask)
        expected = torch.stack([slow_all(made, text)[0] for text in texts])
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
        other = made(torch.where(mask, ids, 3), mask)
        torch.testing.assert_close(other, found, rtol=0, atol=1e-6)
        # Planted: what LightRFT's pooling sees, padding included, is another number.
        assert (made(ids, torch.ones_like(mask)) - found).abs().max() > 1e-3
        made.pack_samples()
        torch.testing.assert_close(made(ids, mask), found, rtol=0, atol=1e-5)
        with pytest.raises(ValueError, match="attention pooling reads whole rows"):
            made(ids, mask, is_read=mask)


def named_rankings(num):
    """Polite answers taste better, short ones are true."""
    draw, found = random.Random(2), []
    for number in range(num):
        answers = [
            f"word {draw.randrange(10 ** draw.randint(1, 8))} {end}" for end in ("please", "now")
        ]
        taste, truth = [1, 2], [len(answer) for answer in answers]
        ranks = {"taste": taste} if number % 4 == 0 else {"taste": taste, "truth": truth}
        found.append({"prompt": f"name {number}: ", "answers": answers, "ranks": ranks})
    return found


@pytest.mark.full
@pytest.mark.parametrize("pooling", ["last", "attention"])
def test_scores_load_where_rewards_are_read(tmp_path, model, pooling):
    path = write(tmp_path / "rows.jsonl", named_rankings(24))
    settings = {"reward_heads": tuple(NAMES), "reward_head_weights": tuple(NAMES.values())}
    settings |= {"reward_pooling": pooling, "eval_data": path}
    summary = run(model, path, tmp_path / "run", max_epochs=4, **settings)
    assert summary.last_eval["eval/head_accuracy/taste"] == 1.0
    assert summary.last_eval["eval/loss"] < summary.first_eval["eval/loss"]
    ours = RewardModel.from_pretrained(summary.model_dir).eval()
    tokenizer = AutoTokenizer.from_pretrained(summary.model_dir)
    ids = tokenizer("name 1: word 7 please", return_tensors="pt")["input_ids"]
    mask = torch.ones_like(ids, dtype=torch.bool)
    with torch.no_grad():
        both, joined = ours(ids, mask, by_name=True)[0], ours(ids, mask)[0]
        assert joined.item() == pytest.approx((both[0] + 0.5 * both[1]).item(), abs=1e-5)
        if pooling == "last":
            theirs = AutoModelForSequenceClassification.from_pretrained(summary.model_dir).eval()
            torch.testing.assert_close(theirs(ids).logits[0], both, rtol=0, atol=2e-5)
            assert theirs.config.id2label == {0: "taste", 1: "truth"}
    # Trained on from where it was, without naming anything again.
    second = run(str(summary.model_dir), path, tmp_path / "on", max_steps=1, eval_data=path)
    first = second.first_eval["eval/loss"]
    assert first == pytest.approx(summary.last_eval["eval/loss"], abs=1e-4)
    with pytest.raises(ConfigError, match="is a reward model with pooling"):
        other = {"reward_heads": ("a", "b")}
        run(str(summary.model_dir), path, tmp_path / "other", max_steps=1, **other)


def test_a_stream_that_ranks_share_is_not_pooled(model):
    with pytest.raises(ConfigError, match="reads whole rows, which sp_size 2 cuts"):
        plan_scores(TrainConfig(pretrain=model, reward_pooling="attention", sp_size=2))


@pytest.mark.slow
@pytest.mark.shard("strategies")
@pytest.mark.parametrize("changes", [{"fsdp": True}, {"zero_stage": 3}], ids=["fsdp2", "zero3"])
def test_two_ranks_train_the_heads_of_one(tmp_path, model, changes):
    path = write(tmp_path / "rows.jsonl", named_rankings(16))
    changes |= {"reward_heads": tuple(NAMES), "reward_pooling": "attention", "eval_data": path}
    changes |= {"actor_learning_rate": 1e-3, "train_batch_size": 8, "max_epochs": 2}
    run(model, path, tmp_path / "one", **{**changes, "fsdp": True, "zero_stage": 0})
    settings = row_options(model, path, tmp_path / "two", **changes)
    ranks = train_on_ranks(2, [{**settings, "stage": "reward"}], timeout_seconds=400)
    assert [summary["num_steps"] for (summary,) in ranks] == [4, 4]
    alone, shared = steps(tmp_path / "one"), steps(tmp_path / "two")
    for expected, found in zip(alone, shared, strict=True):
        for name in ("loss", "eval/loss", "accuracy", "head_accuracy/truth"):
            if name in expected:
                assert found[name] == pytest.approx(expected[name], rel=2e-3, abs=1e-4), name
    weights = [RewardModel.from_pretrained(str(tmp_path / n / "model")) for n in ("one", "two")]
    heads = [each.head.state_dict() for each in weights]
    assert all((heads[0][n] - heads[1][n]).abs().max() < 1e-3 for n in heads[0])
