"""Losses beside the policy's: other texts and balanced experts, exact however the batch is cut."""

import json

import numpy as np
import pytest
import torch
from tests.models.batches import copies
from tests.models.tiny import tiny_model
from tests.update_inputs import TablePolicy, one_update, random_experience

from lightrft.config import TrainConfig
from lightrft.datasets.row_data import SupervisedRow
from lightrft.datasets.supervised_rows import load_supervised
from lightrft.datasets.types import DataError
from lightrft.models import Actor
from lightrft.records.batch import ExperienceBatch, PolicyOutputs
from lightrft.stages.metrics import StepMetrics
from lightrft.stages.policy.pretrain_mix import PretrainMix, load_mixed_rows
from lightrft.strategy import get_fake_strategy

VOCAB = 131


class Rank:
    """One rank of several, as far as mixing looks at it."""

    def __init__(self, rank, world_size):
        self.data_rank, self.num_data_ranks = rank, world_size
        self.device = torch.device("cpu")


def random_texts(count=11):
    """Rows of which the first token, and of some more, is not trained."""
    generator = np.random.default_rng(2)
    rows = []
    for length in generator.integers(2, 9, count):
        is_trained = np.arange(length) >= generator.integers(1, length)
        rows.append(
            SupervisedRow(generator.integers(VOCAB, size=length, dtype=np.int32), is_trained)
        )
    return rows


@pytest.mark.parametrize("world_size, micro", [(1, 1), (1, 5), (1, 99), (2, 2), (4, 1), (3, 2)])
def test_mixed_texts_are_the_mean_over_all_their_tokens(world_size, micro):
    texts, policy = random_texts(), TablePolicy(VOCAB)
    mix = PretrainMix(texts, coef=0.3, batch_size=5, seed=7)
    rows = mix.rows(4)
    ids = [torch.from_numpy(texts[row].token_ids).long() for row in rows]
    places = [np.flatnonzero(texts[row].is_trained) for row in rows]
    logits = [policy.table[own[at - 1]] for own, at in zip(ids, places, strict=True)]
    targets = [own[at] for own, at in zip(ids, places, strict=True)]
    expected = torch.nn.functional.cross_entropy(torch.cat(logits), torch.cat(targets))
    (gradient,) = torch.autograd.grad(0.3 * expected, policy.table)
    losses, counts = [], []
    for rank in range(world_size):
        metrics = StepMetrics()
        config = TrainConfig(micro_train_batch_size=micro)
        shares = mix.shares(policy, 4, Rank(rank, world_size), config, metrics)
        counts.append(len(shares))
        for share in shares:
            share().backward()
        losses.append(float(metrics._metrics["ptx_loss"].local()[0]))
    assert len(set(counts)) == 1
    torch.testing.assert_close(policy.table.grad, gradient, rtol=1e-12, atol=1e-14)
    assert sum(losses) == pytest.approx(float(expected), rel=1e-12)


def test_every_text_comes_once_in_each_pass_and_the_order_depends_on_the_position_only():
    mix = PretrainMix(random_texts(6), coef=1.0, batch_size=4, seed=7)
    seen = [row for position in range(3) for row in mix.rows(position)]
    assert sorted(seen[:6]) == sorted(seen[6:]) == list(range(6))
    assert seen[:6] != seen[6:]
    assert mix.rows(1) == mix.rows(1)
    assert PretrainMix(random_texts(6), 1.0, 4, seed=8).rows(0) != mix.rows(0)
    with pytest.raises(ValueError, match="positive weight"):
        PretrainMix(random_texts(6), 0.0, 4)


def test_texts_are_cut_and_their_end_is_marked(tmp_path, tokenizer):
    file = tmp_path / "texts.jsonl"
    file.write_text('{"text": "abc"}\n{"text": "abcdefgh"}\n')
    end = tokenizer.eos_token_id
    config = TrainConfig(prompt_max_len=2, generate_max_len=4, apply_chat_template=True)
    found = load_mixed_rows(str(file), tokenizer, config)
    assert [row.token_ids.tolist() for row in found] == [
        [97, 98, 99, end],
        [97, 98, 99, 100, 101, 102],
    ]
    assert [row.is_trained.tolist() for row in found] == [[False] + [True] * n for n in (3, 5)]
    with pytest.raises(DataError, match="expected a text in column 'body'"):
        load_mixed_rows(str(file), tokenizer, config.replaced({"pretrain_column": "body"}))


def test_other_rows_have_the_masks_of_supervised_training(tmp_path, tokenizer):
    file = tmp_path / "rows.jsonl"
    answer = {"prompt": "ab", "completion": "cd"}
    file.write_text(json.dumps(answer) + "\n" + json.dumps(answer | {"prompt": "a" * 50}) + "\n")
    config = TrainConfig(prompt_max_len=4, generate_max_len=4)
    given = {"max_samples": 9, "split": "train"}
    expected = load_supervised(str(file), tokenizer, config, **given).rows
    (found,) = load_mixed_rows(str(file), tokenizer, config)
    assert found.token_ids.tolist() == expected[0].token_ids.tolist()
    assert found.is_trained.tolist() == expected[0].is_trained.tolist() == [False] * 2 + [True] * 3
    with pytest.raises(DataError, match="all 2 rows of pretrain_data are longer than"):
        load_mixed_rows(
            str(file), tokenizer, config.replaced({"generate_max_len": 1, "prompt_max_len": 1})
        )


def tiny_experts():
    return tiny_model(
        "qwen3_moe",
        vocab_size=VOCAB,
        intermediate_size=64,
        moe_intermediate_size=32,
        num_experts=4,
        num_experts_per_tok=2,
        max_position_embeddings=64,
    )


def reference_balance(model, rollouts):
    """Float64, expert by expert, over all real tokens and both layers."""
    output = model(
        input_ids=rollouts.token_ids,
        attention_mask=rollouts.attention_mask.long(),
        output_router_logits=True,
    )
    mask = rollouts.attention_mask.reshape(-1)
    probabilities = torch.cat([x[mask].double().softmax(-1) for x in output.router_logits])
    chosen = probabilities.topk(2, dim=-1).indices
    total = 0.0
    for expert in range(4):
        load = float((chosen == expert).any(dim=-1).double().mean())
        total = total + load * probabilities[:, expert].mean()
    return 4 * total, output.aux_loss


@pytest.mark.parametrize("layout", ["padded", "packed", "shared"])
@pytest.mark.parametrize("micro", [1, 4, 6])
def test_balancing_experts_is_exact_for_any_micro_batch(micro, layout):
    rollouts = random_experience(3, rows=6, seq=10, vocab=VOCAB).rollouts
    rollouts.token_ids[1:3, :4] = rollouts.token_ids[0, :4]
    rollouts.token_ids[3, :3] = rollouts.token_ids[0, :3]
    model = tiny_experts()
    expected, theirs = reference_balance(model, rollouts)
    assert float(expected.detach()) == pytest.approx(float(theirs), rel=1e-6)
    names = [name for name, _ in model.named_parameters()]
    gradients = torch.autograd.grad(expected, list(model.parameters()), allow_unused=True)
    actor = Actor(tiny_experts())
    actor.enable_router_sums()
    actor.pack_samples(layout != "padded")
    actor.share_prefixes(2 if layout == "shared" else None)
    before = copies(actor.model)
    options = {"train_batch_size": 6, "max_norm": 0.0, "bf16": False}
    training = get_fake_strategy(options).training
    zeros = torch.zeros_like(rollouts.rollout_logprobs)
    batch = ExperienceBatch(rollouts, PolicyOutputs(None, None, None, None), zeros, zeros)
    config = TrainConfig(
        loss_agg_mode="token-mean", micro_train_batch_size=micro, aux_loss_coef=0.5
    )
    metrics = one_update(actor, batch, config, training=training, rate=1.0)
    assert metrics["aux_loss"] == pytest.approx(float(expected), rel=1e-6)
    found = [before[n] - p.detach() for n, p in actor.model.named_parameters()]
    assert [n for n, _ in actor.model.named_parameters()] == names
    wanted = [
        torch.zeros_like(f) if g is None else 0.5 * g for f, g in zip(found, gradients, strict=True)
    ]
    whole = torch.cat([w.reshape(-1) for w in wanted]).norm()
    assert whole > 1e-3
    difference = torch.cat([(f - w).reshape(-1) for f, w in zip(found, wanted, strict=True)])
    # Weights near 0.1 lose 1e-8 when a step of SGD is read back from them.
    assert difference.norm() <= 2e-5 * whole + 1e-6


def test_a_model_without_experts_is_refused(tiny_model):
    with pytest.raises(ValueError, match="without them"):
        Actor.from_pretrained(tiny_model).enable_router_sums()
