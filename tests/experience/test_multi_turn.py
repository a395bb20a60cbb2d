"""Observations between turns are context: they enter no loss, no denominator and no statistic."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from tests.experience.multi_turn import VOCAB, Program, in_float64, random_step
from tests.models.tiny import tiny_model

from lightrft.config import TrainConfig
from lightrft.engines.types import Completion
from lightrft.experience.maker import AdvantageSettings, Delivery, ForwardModels, make_experience
from lightrft.models import Actor, Critic
from lightrft.records.batch import collate
from lightrft.records.table import row_table, tabulate
from lightrft.reporting.trajectories import spans
from lightrft.rewards.types import RewardResult
from lightrft.rollout.scoring import overlong_penalty, score_rollouts
from lightrft.rollout.source import Samples
from lightrft.stages.metrics import StepMetrics
from lightrft.stages.policy.algorithm import decide
from lightrft.stages.policy.step_metrics import table_metrics
from lightrft.stages.policy.updates import PolicyUpdate, TrainedModel
from lightrft.strategy import get_fake_strategy
from lightrft.strategy.distributed.deadlines import StepTimer
from lightrft.tools.report.sample_page import token_sample

CPU = torch.device("cpu")


def flags(rollout):
    return list(rollout.completion.is_sampled)


def test_a_completion_says_which_of_its_tokens_were_sampled():
    base = {
        "request_id": 0,
        "sample_index": 0,
        "prompt_token_ids": (1,),
        "output_token_ids": (2, 3, 4),
        "output_logprobs": (-1.0, 0.0, -2.0),
        "logprobs_mode": "temperature",
        "finish_reason": "stop",
    }
    assert Completion(**base).is_sampled == (True, True, True)
    assert Completion(**base).sampled_token_ids == (2, 3, 4)
    mixed = Completion(**base, sampled=(True, False, True))
    assert mixed.sampled_token_ids == (2, 4)
    with pytest.raises(ValueError, match="3 tokens, 3 logprobs and 2 flags"):
        Completion(**base, sampled=(True, False))


@pytest.mark.parametrize("seed", range(8))
def test_table_and_batch_hold_what_each_row_holds(seed):
    items = random_step(seed, num_rows=12)
    items[5] = replace(items[5], is_masked=True)
    table = tabulate(items)
    assert table.sampled_lengths.tolist() == [sum(flags(i.rollout)) for i in items]
    order = np.random.default_rng(seed).permutation(12)
    taken = table.take(order)
    batch = collate(taken, temperature=1.0, device=CPU, version=2)
    for row, place in enumerate(order.tolist()):
        completion = items[place].rollout.completion
        width, start = batch.token_ids.shape[1], len(completion.prompt_token_ids)
        ids = [*completion.prompt_token_ids, *completion.output_token_ids]
        mask = [False] * start + flags(items[place].rollout) + [False] * (width - len(ids))
        logprobs = [0.0] * start + list(completion.output_logprobs)
        assert batch.token_ids[row, : len(ids)].tolist() == ids
        assert batch.attention_mask[row].tolist() == [i < len(ids) for i in range(width)]
        is_masked = items[place].is_masked
        assert batch.response_mask[row].tolist() == [flag and not is_masked for flag in mask]
        assert batch.compared_mask[row].tolist() == batch.response_mask[row].tolist()
        kept = torch.zeros(width) if is_masked else torch.tensor(logprobs + [0.0] * width)[:width]
        assert torch.equal(batch.rollout_logprobs[row], kept)


def test_statistics_of_lengths_count_sampled_tokens():
    items = random_step(3, num_rows=8, num_turns=3)
    table = tabulate(items)
    lengths = np.array([sum(flags(item.rollout)) for item in items])
    assert (lengths < table.response_lengths).all()
    metrics = table_metrics(table)
    assert metrics["response_length"] == lengths.mean()
    assert metrics["response_length_max"] == lengths.max()
    assert metrics["response_length_std"] == pytest.approx(lengths.std())


def test_the_length_penalty_looks_at_the_longest_turn():
    item = random_step(0, num_rows=1, num_turns=3)[0].rollout
    sampled = (True,) * 4 + (False,) * 3 + (True,) * 6 + (False,) * 9 + (True,) * 2
    completion = replace(
        item.completion, output_token_ids=(1,) * 24, output_logprobs=(0.0,) * 24, sampled=sampled
    )
    config = TrainConfig(
        overlong_buffer=True,
        overlong_buffer_len=4,
        overlong_buffer_penalty_factor=1.0,
        generate_max_len=8,
    )
    scored = score_rollouts(
        [replace(item, completion=completion)],
        [RewardResult(0.0, {})],
        overlong_penalty=overlong_penalty(config),
    )
    assert scored[0].reward == -0.5  # 6 tokens: 2 into the buffer of 4


def test_the_report_tells_observations_from_sampled_tokens():
    assert spans([True, True, False, True]) == [(0, 2), (3, 4)]
    assert spans([False]) == []
    entry = {"tokens": ["a", "b", "c", "d"], "sampled_spans": [[0, 2], [3, 4]], "reward": 1.0}
    assert token_sample(entry)["observed"] == [False, False, True, False]
    # A file may hold anything.
    for wrong in (None, 3, [[0]], [["a", "b"]], [[-5, 99]]):
        assert len(token_sample({**entry, "sampled_spans": wrong})["observed"]) == 4


def tiny_llama(seed):
    return tiny_model(
        "llama", vocab_size=VOCAB, hidden_size=32, intermediate_size=48, head_dim=16, seed=seed
    ).eval()


def models(seed=0):
    """Plain models in float64 for the program, and the same as we train them."""
    policy, reference, trunk = tiny_llama(seed), tiny_llama(seed + 1), tiny_llama(seed + 2)
    critic = Critic(trunk.model)
    with torch.no_grad():
        torch.nn.init.normal_(critic.value_head.weight, std=0.3)
    plain_policy, plain_reference, plain_critic = (
        in_float64(model) for model in (policy, reference, critic)
    )

    def logits_of(model):
        return lambda ids: model(input_ids=ids, use_cache=False).logits

    def values(ids):
        hidden = plain_critic.trunk(input_ids=ids, use_cache=False).last_hidden_state
        head = plain_critic.value_head
        return torch.nn.functional.linear(hidden, head.weight, head.bias).squeeze(-1)

    plain = (plain_policy, plain_reference, plain_critic)
    trained = (Actor(policy), Actor(reference), critic)
    return plain, (logits_of(plain_policy), logits_of(plain_reference), values), trained


OPTIONS = {
    "bf16": False,
    "temperature": 0.8,
    "gamma": 0.9,
    "lambd": 0.7,
    "init_kl_coef": 0.3,
    "entropy_coef": 0.02,
    "loss_agg_mode": "token-mean",
    "train_batch_size": 8,
    "max_norm": 1e9,
    "rollout_batch_size": 2,
    "n_samples_per_prompt": 4,
    "value_clip": 0.0,
    "kl_estimator": "k1",
}


def gradients_of(optimizer, run):
    found = []
    optimizer.register_step_pre_hook(
        lambda *_: found.append(
            [p.grad.detach().clone() for g in optimizer.param_groups for p in g["params"]]
        )
    )
    run()
    assert len(found) == 1
    return found[0]


def deviation(found, expected):
    """||found - expected|| / ||expected|| over all parameters."""
    difference = sum(
        float((a.double() - b).square().sum()) for a, b in zip(found, expected, strict=True)
    )
    return (difference / sum(float(b.square().sum()) for b in expected)) ** 0.5


def take_step(items, trained, *, is_packed, micro_batch_size, **options):
    """Return the gradients of actor and critic of our own step, and its batch."""
    actor, reference, critic = trained
    for model in trained:
        model.pack_samples(is_packed)
    config = TrainConfig(
        **{**OPTIONS, **options},
        packing_samples=is_packed,
        micro_train_batch_size=micro_batch_size,
        micro_rollout_batch_size=micro_batch_size,
        micro_batch_tokens=40 if is_packed else None,
    )
    config, algorithm = decide(config)
    strategy = get_fake_strategy(config)
    has_critic = algorithm.estimator_traits.needs_critic
    kl_coef = config.init_kl_coef
    step = make_experience(
        Samples(items, row_table(items), 2),
        ForwardModels(actor, reference, critic if has_critic else None),
        delivery=Delivery(strategy.context),
        engine=None,
        settings=AdvantageSettings(
            config, algorithm.estimator, kl_coef=0.0 if config.use_kl_loss else kl_coef
        ),
        step=0,
        timer=StepTimer(),
    )
    update = PolicyUpdate(
        config,
        algorithm.policy_loss,
        strategy.training,
        StepMetrics(),
        kl_coef=kl_coef if config.use_kl_loss else 0.0,
    )
    slices = step.plan.micro_slices(
        step.table.lengths, index=0, rank=0, micro_batch_size=micro_batch_size, config=config
    )
    found = []
    for name, model in (("actor", actor), ("critic", critic)):
        if name == "critic" and not has_critic:
            continue
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        run = TrainedModel(name, model, optimizer, None)
        advance = update.policy_step if name == "actor" else update.value_step
        found.append(
            gradients_of(optimizer, lambda a=advance, r=run: a(step.batch, r, slices=slices))
        )
    return found, step


@pytest.mark.parametrize(
    ("is_packed", "micro_batch_size", "turn_credit"),
    [(False, 8, "last"), (False, 2, "last"), (True, 2, "last"), (True, 2, "discounted")],
)
@pytest.mark.parametrize("estimator", ["group_norm", "gae"])
def test_loss_and_gradient_equal_a_float64_program(
    estimator, is_packed, micro_batch_size, turn_credit
):
    items = random_step(5)
    plain, functions, trained = models()
    program = Program(
        *functions, has_gae=estimator == "gae", counts_turns=turn_credit == "discounted"
    )
    options = {
        "advantage_estimator": estimator,
        "use_kl_loss": estimator != "gae",
        "turn_credit": turn_credit,
    }
    if estimator != "gae":
        options["kl_estimator"] = "k3"
    found, step = take_step(
        items, trained, is_packed=is_packed, micro_batch_size=micro_batch_size, **options
    )
    loss = program.policy_loss(items)
    loss.backward()
    names = dict(plain[0].named_parameters())
    expected = [
        names[name.removeprefix("model.")].grad for name, _ in trained[0].named_parameters()
    ]
    assert deviation(found[0], expected) < 2e-6
    num_sampled = sum(sum(flags(i.rollout)) for i in items)
    assert int(step.batch.rollouts.response_mask.sum()) == num_sampled
    if estimator == "gae":
        program.value_loss(items).backward()
        names = dict(plain[2].named_parameters())
        expected = [names[name].grad for name, _ in trained[2].named_parameters()]
        assert deviation(found[1], expected) < 2e-6
    # Positive control: one observation token more or less in the loss is seen.
    planted = items[0].rollout.completion
    first = next((i for i, flag in enumerate(planted.is_sampled) if not flag), 0)
    wrong = tuple(f != (i == first) for i, f in enumerate(planted.is_sampled))
    other = replace(items[0].rollout, completion=replace(planted, sampled=wrong))
    moved, _ = take_step(
        [replace(items[0], rollout=other), *items[1:]],
        trained,
        is_packed=is_packed,
        micro_batch_size=micro_batch_size,
        **options,
    )
    assert deviation(moved[0], [g.double() for g in found[0]]) > 1e-3
