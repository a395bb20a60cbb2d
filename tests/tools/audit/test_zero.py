"""What is exactly 0 in truth and rounding in the run is no alarm; what is more than that is one."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from tests.tools.audit import world

from lightrft.experience import maker
from lightrft.tools.audit import report as reports
from lightrft.tools.audit.findings import DIFFERS, NOT_AUDITED

BASE = {"max_epochs": 1, "train_batch_size": 16, "l2": 0.0}
KL_LOSS = {"init_kl_coef": 0.2, "use_kl_loss": True}


def equal_rewards(samples):
    return world.with_each(samples, lambda _, item: replace(item, reward=0.7, unshaped_reward=0.7))


def round_scores(patch):
    """Scores of the run get an error of up to eight roundings of float32, drawn once."""

    def rounded(values):
        if values is None:
            return None
        draw = torch.Generator().manual_seed(5)
        signs = torch.randint(-8, 9, values.shape, generator=draw)
        return torch.where(values == 0, values, values * (1 + signs * 2.0**-24))

    original = maker.compute_outputs

    def compute(*args, **kwargs):
        found = original(*args, **kwargs)
        names = ("old_logprobs", "ref_logprobs", "values")
        return replace(found, **{name: rounded(getattr(found, name)) for name in names})

    patch.setattr(maker, "compute_outputs", compute)


# All rewards are equal and the policy is its reference: there is nothing to learn.
CASES = {
    "kl loss k1": {**KL_LOSS, "kl_estimator": "k1"},
    "kl loss k2": {**KL_LOSS, "kl_estimator": "k2"},
    "kl loss k3": {**KL_LOSS, "kl_estimator": "k3"},
    "kl loss abs": {**KL_LOSS, "kl_estimator": "abs"},
    "group_norm": {},
    "rloo": {"advantage_estimator": "rloo"},
    "whitened rewards": {"advantage_estimator": "reinforce++", "gamma": 1.0},
    "kl reward": {
        "advantage_estimator": "reinforce++",
        "init_kl_coef": 0.2,
        "kl_estimator": "k1",
        "gamma": 1.0,
    },
    "running norm": {
        "advantage_estimator": "reinforce",
        "reward_running_norm": True,
        "reward_running_norm_minus_mean": True,
    },
    "correction": {"off_policy_correction": "tis"},
    "adam": {**KL_LOSS, "kl_estimator": "k3"},
}


@pytest.mark.parametrize("name", CASES)
def test_rounding_of_zero_is_no_alarm(name, audited, monkeypatch):
    round_scores(monkeypatch)
    report = audited({**BASE, **CASES[name]}, shape=equal_rewards, sgd=name != "adam")
    assert [row for row in report.rows if row.verdict == DIFFERS] == []
    assert sum(row.verdict != NOT_AUDITED for row in report.rows) > 10


def with_update(change):
    def alter(record):
        updates = [change(update) for update in record.facts.updates]
        return replace(record, facts=replace(record.facts, updates=updates))

    return alter


def with_loss(name, by):
    return with_update(
        lambda update: replace(update, losses={**update.losses, name: update.losses[name] + by})
    )


def with_values(name, by):
    def alter(record):
        values = getattr(record.values, name)
        moved = np.where(record.values.response_mask, values + by, values).astype(values.dtype)
        return replace(record, values=replace(record.values, **{name: moved}))

    return alter


# A thousandth of what each is where it is not 0: advantages, ratios and weights are about 1,
# distances of log-probabilities about a tenth.
FAULTS = {
    "returns": ("group_norm", with_values("returns", 1e-3)),
    "advantages": ("group_norm", with_values("advantages", 1e-3)),
    "policy loss": ("group_norm", with_loss("policy", 1e-3)),
    "kl loss k1": ("kl loss k1", with_loss("kl", 1e-4)),
    "kl loss k3": ("kl loss k3", with_loss("kl", 1e-5)),
    "gradient norm": (
        "group_norm",
        with_update(lambda update: replace(update, grad_norm=update.grad_norm + 1e-3)),
    ),
    "reference logprobs": ("kl loss k3", with_values("ref_logprobs", 1e-3)),
    "rewards": ("running norm", None),
}


@pytest.mark.parametrize("quantity", FAULTS)
def test_a_thousandth_of_the_usual_size_is_an_alarm(quantity, audited, monkeypatch):
    case, alter = FAULTS[quantity]
    original = reports.read_record

    def altered(*args):
        record = original(*args)
        if alter is None:
            values = replace(record.values, rewards=record.values.rewards + 1e-3)
            return replace(record, values=values)
        return alter(record)

    monkeypatch.setattr(reports, "read_record", altered)
    report = audited({**BASE, **CASES[case]}, shape=equal_rewards, sgd=True)
    first = report.first_difference
    assert first is not None
    assert first.quantity.startswith(quantity.split(" k")[0])


def test_weights_that_move_without_a_gradient_are_an_alarm(audited, monkeypatch):
    original = torch.optim.SGD.step

    def step(self, closure=None):
        original(self, closure)
        with torch.no_grad():
            for group in self.param_groups:
                for parameter in group["params"]:
                    parameter.mul_(1 + 1e-3 * group["lr"])

    monkeypatch.setattr(torch.optim.SGD, "step", step)
    report = audited({**BASE, **CASES["kl loss k3"]}, shape=equal_rewards, sgd=True)
    assert report.first_difference.quantity == "actor weights after (change)"
