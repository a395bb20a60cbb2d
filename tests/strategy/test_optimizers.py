import itertools
import json
import math

import pytest
import torch
from torch import nn

from lightrft.strategy.config import StrategyConfig
from lightrft.strategy.optimizers import (
    AdamSettings,
    clip_gradients,
    gradient_norm,
    learning_rate_schedule,
    parameter_groups,
)


def cosine(step, num_warmup, max_steps):
    progress = min(1.0, (step - num_warmup) / max(1e-9, max_steps - num_warmup))
    progress = 1.0 if step >= max_steps else progress
    return 0.25 + 0.75 * (1 + math.cos(math.pi * progress)) / 2


def linear(step, num_warmup, max_steps):
    return max(0.0, (max_steps - step) / max(1, max_steps - num_warmup))


def constant(step, num_warmup, max_steps):
    del step, num_warmup, max_steps
    return 1.0


def new_schedule(name, max_steps, *, warmup=0.0):
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=2.0)
    config = StrategyConfig(lr_scheduler=name, lr_warmup_ratio=warmup, min_lr_ratio=0.25)
    return learning_rate_schedule(config, optimizer, max_steps=max_steps)


def rates_of(schedule, num_steps):
    """The rates of the next optimizer steps."""
    rates = []
    for _ in range(num_steps):
        rates.append(schedule.optimizer.param_groups[0]["lr"])
        schedule.optimizer.step()
        schedule.step()
    return rates


@pytest.mark.parametrize("max_steps, ratio", [(10, 0.11), (100, 0.03), (7, 0.0), (1, 1.0)])
@pytest.mark.parametrize(
    "name, after_rise",
    [("cosine_with_min_lr", cosine), ("linear", linear), ("constant", constant)],
)
def test_schedule_of_an_optimizer_at_every_step(name, after_rise, max_steps, ratio):
    num_warmup = math.ceil(max_steps * ratio)
    expected = [
        (step + 1) / (num_warmup + 1)
        if step < num_warmup
        else after_rise(step, num_warmup, max_steps)
        for step in range(max_steps + 3)
    ]
    assert expected[0] > 0
    schedule = new_schedule(name, max_steps, warmup=ratio)
    assert rates_of(schedule, len(expected)) == pytest.approx([2.0 * rate for rate in expected])


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(5, 3)
        self.norm1 = nn.LayerNorm(3)
        self.ln_q = nn.RMSNorm(3)
        self.proj = nn.Linear(3, 5)
        self.frozen = nn.Linear(3, 3)
        self.frozen.requires_grad_(False)
        self.proj.weight = self.embed.weight


def test_matrices_are_decayed_once_and_vectors_are_not():
    block = Block()
    decayed, exempt = parameter_groups(block.named_parameters(remove_duplicate=False), 0.1)
    assert decayed["weight_decay"] == 0.1
    assert exempt["weight_decay"] == 0.0
    assert [p is block.embed.weight for p in decayed["params"]] == [True]
    names = {"norm1.weight", "norm1.bias", "ln_q.weight", "proj.bias"}
    expected = {id(p) for n, p in block.named_parameters() if n in names}
    assert {id(p) for p in exempt["params"]} == expected


def test_nothing_to_train_is_an_error():
    with pytest.raises(ValueError, match="requires gradients"):
        parameter_groups(nn.Linear(2, 2).requires_grad_(False).named_parameters(), 0.0)


@pytest.mark.parametrize("max_norm", [0.0, 0.5, 1e6])
def test_clipping_is_by_the_global_norm(max_norm):
    torch.manual_seed(0)
    parameters = [nn.Parameter(torch.zeros(4, 3)), nn.Parameter(torch.zeros(5))]
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)

    def gradient():
        return torch.cat([p.grad.reshape(-1).double() for p in parameters])

    before = gradient()
    norm = gradient_norm(parameters)
    clip_gradients(parameters, norm, max_norm)
    expected = before.norm()
    assert norm == pytest.approx(expected.item(), rel=1e-6)
    scale = min(1.0, max_norm / expected.item()) if max_norm else 1.0
    torch.testing.assert_close(gradient(), before * scale, rtol=1e-5, atol=0)


def test_adam_settings():
    config = StrategyConfig(actor_learning_rate=3e-4, l2=0.2)
    assert AdamSettings.read({}, config) == AdamSettings(3e-4, (0.9, 0.95), 1e-8, 0.2)
    found = AdamSettings.read({"lr": 1, "betas": [0, 0.5], "weight_decay": 0}, config)
    assert found == AdamSettings(1.0, (0.0, 0.5), 1e-8, 0.0)
    with pytest.raises(TypeError, match="learning_rate"):
        AdamSettings.read({"learning_rate": 1.0}, config)


def continued(schedule, name, max_steps, *, warmup=0.0):
    """A schedule of another length that goes on as after a checkpoint: optimizer, then schedule."""
    after = new_schedule(name, max_steps, warmup=warmup)
    after.optimizer.load_state_dict(schedule.optimizer.state_dict())
    after.load_state_dict(json.loads(json.dumps(schedule.state_dict())))
    return after


@pytest.mark.parametrize("name", ["cosine_with_min_lr", "linear", "constant"])
def test_a_longer_run_leaves_the_end_of_the_old_schedule_without_a_jump(name):
    first = new_schedule(name, 40, warmup=0.1)
    before = rates_of(first, 40)
    after = continued(first, name, 80, warmup=0.1)
    assert ("planned for 40" in after.change, "now for 80" in after.change) == (True, True)
    rates = [*before, *rates_of(after, 40)]
    steps = [abs(a - b) for a, b in itertools.pairwise(rates)]
    assert max(steps) <= 2.0 / 5 + 1e-9  # never faster than the warm-up
    assert min(rates) > 0
    planned = rates_of(new_schedule(name, 80, warmup=0.1), 80)
    assert rates[48:] == pytest.approx(planned[48:])


def test_a_continued_run_of_the_same_length_has_the_same_rates():
    whole = rates_of(new_schedule("cosine_with_min_lr", 9, warmup=0.3), 9)
    first = new_schedule("cosine_with_min_lr", 9, warmup=0.3)
    rates = rates_of(first, 4)
    after = continued(first, "cosine_with_min_lr", 9, warmup=0.3)
    assert after.change == ""
    assert [*rates, *rates_of(after, 5)] == whole


def test_a_continued_run_takes_another_schedule_of_the_same_length():
    first = new_schedule("constant", 12)
    rates_of(first, 4)
    after = continued(first, "linear", 12)
    assert after.change.startswith("another schedule: goes on from 2 with")
    assert rates_of(after, 8)[2:] == pytest.approx(rates_of(new_schedule("linear", 12), 12)[6:])


def test_an_extended_run_that_is_killed_goes_on_where_it_was():
    first = new_schedule("linear", 4)
    rates_of(first, 4)
    whole = rates_of(continued(first, "linear", 12, warmup=0.25), 8)
    second = continued(first, "linear", 12, warmup=0.25)
    rates = rates_of(second, 2)
    third = continued(second, "linear", 12, warmup=0.25)
    assert third.change == ""
    assert [*rates, *rates_of(third, 6)] == whole
