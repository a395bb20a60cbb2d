"""The policy loss inside the output projection: the step and its metrics are those of the loss
after it, and what decides which of the two a run takes.
"""

import itertools
from dataclasses import replace

import pytest
import torch
from tests.models.batches import relative_norm

from lightrft.algorithms import policy_loss
from lightrft.algorithms.correction_terms import parse_correction
from lightrft.algorithms.interface import PolicyLossTraits, policy_loss_traits
from lightrft.config import TrainConfig
from lightrft.config.registry import POLICY_LOSSES
from lightrft.models import Actor
from lightrft.stages.machine_choices import decide_by_machine
from lightrft.stages.policy import objective
from lightrft.stages.policy.objective import why_loss_outside

FUSED = {"fused_linear_logprob": True}
# One optimizer batch a step: the policy's own logprobs are the old ones.
FIRST = {**FUSED, "train_batch_size": 16}
METRICS = (
    "policy_loss",
    "grad_norm",
    "ratio_mean",
    "ratio_max",
    "clip_fraction_low",
    "clip_fraction_high",
    "approx_kl",
    "clamped_share",
    "entropy",
    "logprob_diff_mean",
)


def step_of(world):
    before = world.weights()
    metrics = world.step()
    return metrics, {name: p - before[name] for name, p in world.weights().items()}


@pytest.mark.parametrize(
    "args, options",
    [
        (FUSED, {}),
        (FIRST, {"entropy_coef": 0.01, "policy_loss": "dapo"}),
        (
            FIRST,
            {
                "top_k": 20,
                "truncated_logprobs": "all",
                "loss_agg_mode": "seq-mean-token-sum-norm",
            },
        ),
        (FUSED, {"with_reference": True, "use_kl_loss": True, "kl_estimator": "k3_is"}),
        (
            {**FUSED, "packing_samples": True, "gradient_checkpointing": True},
            {"off_policy_correction": "tis", "high_entropy_token_ratio": 0.5},
        ),
        ({**FUSED, "max_epochs": 2}, {"policy_loss": "cpgd", "eps_clip": 1e-4}),
        ({**FUSED, "lora_rank": 4}, {"with_reference": True, "use_kl_loss": True}),
    ],
)
def test_a_step_equals_that_of_the_loss_after_the_head(build_world, monkeypatch, args, options):
    world = build_world(args=args, **options)
    found, moved = step_of(world)
    assert world.trainer.stage.computes_loss_inside
    monkeypatch.setattr(
        "lightrft.stages.policy.policy_stage.why_loss_outside", lambda *_: "for comparison"
    )
    world = build_world(args=args, **options)
    wanted, expected = step_of(world)
    assert not world.trainer.stage.computes_loss_inside
    assert set(found) == set(wanted)
    for name in METRICS:
        if name in wanted:
            assert found[name] == pytest.approx(wanted[name], rel=2e-5, abs=2e-6), name
    # AdamW: the first update of a weight is the sign of its gradient.
    assert relative_norm(moved, expected) <= 1e-3
    trained = {name for name, change in moved.items() if change.any()}
    assert all(".lora_" in name for name in trained) == ("lora_rank" in args)
    assert trained


def test_the_comparison_sees_a_loss_that_drops_its_weights(build_world, monkeypatch):
    """Positive control: inside, every token counts alike."""
    args = {**FUSED, "loss_agg_mode": "seq-mean-token-mean"}
    _, expected = step_of(build_world(args=args))

    def at(self, rows, columns):
        found = LOSS_TOKENS_AT(self, rows, columns)
        return replace(found, shares=torch.ones_like(found.shares))

    monkeypatch.setattr(objective.LossTokens, "at", at)
    _, moved = step_of(build_world(args=args))
    assert relative_norm(moved, expected) > 1e-2


LOSS_TOKENS_AT = objective.LossTokens.at


@pytest.mark.parametrize(
    "options, reason",
    [
        ({"policy_loss": "gspo"}, "policy_loss gspo couples the tokens of a row"),
        ({"policy_loss": "clip_cov"}, "policy_loss clip_cov couples the rows of a micro-batch"),
        ({"top_k": 20}, "truncated_logprobs kept reads no other tokens"),
    ],
)
def test_other_losses_are_computed_after_it_and_say_why(build_world, capsys, options, reason):
    world = build_world(args=FUSED, **options)
    assert f"the policy loss is computed after it: {reason}" in capsys.readouterr().out
    assert world.step()["grad_norm"] > 0


def test_reasons(tiny_model):
    config = TrainConfig(fused_linear_logprob=True)
    actor = Actor.from_pretrained(tiny_model)
    token_wise = PolicyLossTraits(is_token_wise=True)
    assert why_loss_outside(config, token_wise, actor) is None
    unfused = replace(config, fused_linear_logprob=False)
    assert why_loss_outside(unfused, token_wise, actor) == "fused_linear_logprob is off"
    moving, still = parse_correction("dppo"), parse_correction("tis")
    assert why_loss_outside(config, token_wise, actor, still) is None
    assert "policy of each forward pass" in str(why_loss_outside(config, token_wise, actor, moving))
    assert "got Linear" in str(why_loss_outside(config, token_wise, torch.nn.Linear(1, 1)))
    undeclared = policy_loss_traits(lambda *_: None)
    assert "is not declared is_token_wise" in str(why_loss_outside(config, undeclared, actor))

    @policy_loss(is_token_wise=True)
    def own(logprobs, old_logprobs, advantages, response_mask):
        return -advantages * logprobs

    assert why_loss_outside(config, policy_loss_traits(own), actor) is None


@pytest.mark.parametrize("name", sorted(POLICY_LOSSES))
def test_token_wise_losses_are_those_that_may_be_computed_token_by_token(name):
    function = POLICY_LOSSES.load(name)
    traits = policy_loss_traits(function)
    generator = torch.Generator().manual_seed(1)
    logprobs, advantages = torch.randn(2, 3, 5, generator=generator).unbind()
    old = logprobs + 0.3 * torch.randn(3, 5, generator=generator)
    mask = torch.ones(3, 5, dtype=torch.bool)
    tensors = (logprobs, old, advantages, mask)
    whole = function(*tensors).loss
    apart = torch.empty(3, 5)
    for row, column in itertools.product(range(3), range(5)):
        own = slice(row, row + 1), slice(column, column + 1)
        apart[row, column] = function(*(tensor[own] for tensor in tensors)).loss
    assert torch.allclose(whole, apart, atol=1e-6) == traits.is_token_wise


def test_a_head_that_is_not_fused_refuses_a_loss(tiny_model):
    actor = Actor.from_pretrained(tiny_model)
    ids = torch.randint(5, 20, (1, 4))
    with pytest.raises(ValueError, match="needs fused_linear_logprob"):
        actor(ids, ids > 0, token_loss=lambda lp, *_: lp.sum())


def test_the_machine_decides_and_a_given_value_stays(build_world, told):
    world = build_world()
    assert world.trainer.config.fused_linear_logprob is torch.cuda.is_available()
    chosen = str(torch.cuda.is_available()).lower()
    assert f"fused_linear_logprob = {chosen}: " in "".join(told)
    for given in (True, False):
        config = TrainConfig(fused_linear_logprob=given)
        assert decide_by_machine(config, world.strategy.context) is config
    assert TrainConfig().fuses_logprob(has_gpu=True)
    assert not TrainConfig().fuses_logprob(has_gpu=False)
