"""The audit recomputes which rows a step draws: clean runs pass, and faults of order are named."""

import json

import pytest
from tests.run.test_orders import Trained
from tests.runs import (
    interrupted,
    rate_prompts,
    rollout_options,
    row_options,
    say_rows,
    tiny_models,
    train,
    write,
    write_inputs,
)
from tests.tools.audit.faults import calls, instead, results

from lightrft.config import TrainConfig
from lightrft.datasets.prompt_sampler import CheckedSampler, Drawn, SampledStream, Shuffle
from lightrft.datasets.samplers.pools import Pools
from lightrft.datasets.samplers.weighted import Weighted
from lightrft.stages.policy.updates import PolicyUpdate
from lightrft.tools.audit.findings import DIFFERS, EQUAL, NOT_AUDITED
from lightrft.tools.audit.report import audit_step

# Some groups are always right, some never, and some are mixed.
REWARD = """
def score(prompts, responses):
    rest = {0: 1.0, 1: 0.0}
    return [rest.get(len(p) % 3, float(len(r) % 2)) for p, r in zip(prompts, responses)]


def alike(responses):
    return [0.5] * len(responses)
"""
NAME = "rows of the data"
POOLS = {"prompt_sampler": "pools", "prompt_sampler_args": {"rest_weight": 0.2}}
WEIGHTED = {"prompt_weight": "w"}
IMPORTANCE = {**WEIGHTED, "prompt_importance": True, "loss_agg_mode": "seq-mean-token-mean"}
RATED = {"prompt_sampler": "weighted", "prompt_rates": "rates.jsonl"}
KEPT = {"prompt_rates": "rates.jsonl", "prompt_pass_rate": "0.3:1", "num_episodes": 4}
DYNAMIC = {"dynamic_sampling": True, "max_num_gen_batches": 3}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("orders")
    tiny_models(path, "model")
    rows = say_rows(9, w=lambda number: 1 + number % 4)
    rate_prompts(path, [row["prompt"] for row in rows])
    return write_inputs(path, rows, reward=REWARD)


def options(folder, run, **changes):
    settings = {
        "max_steps": 4,
        "num_episodes": 3,
        "audit_every": 1,
        "generate_max_len": 4,
        "rollout_batch_size": 4,
        "n_samples_per_prompt": 2,
        "train_batch_size": 8,
        "save_steps": 1,
        "num_threads": 1,
        **changes,
    }
    if "prompt_rates" in changes:
        settings["prompt_rates"] = str(folder / changes["prompt_rates"])
    return rollout_options(folder, "unused", output_dir=str(run), **settings)


def finding(run, step, name=NAME):
    report = audit_step(run, step)
    return report, next(row for row in report.rows if row.quantity == name)


CLEAN = {
    "shuffle": {},
    "in order": {"shuffle": False},
    "weighted": WEIGHTED,
    "importance": IMPORTANCE,
    "pools": POOLS,
    "pools, lag": {**POOLS, "rollout_lag": 1},
    "dynamic": DYNAMIC,
    "by rates": RATED,
    "kept by rates": KEPT,
}


@pytest.mark.full
@pytest.mark.parametrize("way", CLEAN)
def test_the_order_of_a_right_run_is_recomputed(folder, tmp_path, way):
    train(options(folder, tmp_path / "run", **CLEAN[way]))
    for step in (1, 4):
        report, order = finding(tmp_path / "run", step)
        assert order.verdict == EQUAL
        assert report.first_difference is None, report.first_difference


@pytest.mark.full
def test_steps_that_no_sample_trains_are_recomputed(folder, tmp_path):
    reward = (f"{folder / 'reward.py'}:alike",)
    train(options(folder, tmp_path / "run", **DYNAMIC, reward_fn=reward, max_steps=2))
    for step in (1, 2):
        report, order = finding(tmp_path / "run", step)
        assert (order.verdict, report.first_difference) == (EQUAL, None)


def test_what_cannot_be_recomputed_is_named(folder, tmp_path):
    train(options(folder, tmp_path / "run", stream_chunk=2, max_steps=1))
    _, order = finding(tmp_path / "run", 1)
    assert (order.verdict, order.note[:9]) == (NOT_AUDITED, "streaming")


@pytest.mark.full
def test_rates_are_taken_for_their_prompts_alone(folder, tmp_path):
    rates = tmp_path / "rates.jsonl"
    rates.write_text((folder / "rates.jsonl").read_text())
    train(options(folder, tmp_path / "run", **{**RATED, "prompt_rates": rates}, max_steps=1))
    assert finding(tmp_path / "run", 1)[1].verdict == EQUAL
    for lines in (rates.read_text().splitlines()[::-1], [json.dumps({"prompt": [1]})] * 9):
        rates.write_text("\n".join(lines))
        _, order = finding(tmp_path / "run", 1)
        assert (order.verdict, order.note[:17]) == (NOT_AUDITED, "the file of rates")


def twice(drawn):
    return [drawn[0], *drawn[:-1]]


def uniformly(original, self, n):
    self._weights = self._weights * 0 + 1 / len(self._weights)
    return original(self, n)


def one_step_late(original, self, observed):
    held = getattr(self, "held", [])
    self.held = list(observed)
    original(self, held)


def swapped(original, self, observed):
    held = getattr(self, "held", None)
    self.held = observed
    if held is not None:
        original(self, observed)
        original(self, held)
        self.held = None


def of_the_others(original, self, item, drawn):
    return original(self, item, Drawn(drawn.place, 1 / 9))


def skips_a_batch(original, self):
    if self.num_consumed == 4:
        original(self)
    return original(self)


# What the audit names first, options, and what plants the fault.
FAULTS = {
    "a row is drawn twice, another never": (NAME, {}, results(CheckedSampler, "draw", twice)),
    "another order": (NAME, {}, results(Shuffle, "order_of", lambda order: order[::-1])),
    "the order of the next pass": (
        NAME,
        {},
        calls(Shuffle, "order_of", lambda original, self, n: original(self, n + 1)),
    ),
    "every pass has one order": (
        NAME,
        {},
        calls(Shuffle, "order_of", lambda original, self, n: original(self, 0)),
    ),
    "weights are ignored": (NAME, WEIGHTED, calls(Weighted, "draw", uniformly)),
    "results are not observed": (NAME, POOLS, instead(Pools, "observe", lambda *_: None)),
    "results are observed a step late": (NAME, POOLS, calls(Pools, "observe", one_step_late)),
    "results are observed out of order": (NAME, POOLS, calls(Pools, "observe", swapped)),
    "a batch is drawn and dropped": (NAME, {}, calls(SampledStream, "next_draw", skips_a_batch)),
    "importance weights are of other draws": (
        "importance weights",
        IMPORTANCE,
        calls(SampledStream, "marked", of_the_others),
    ),
    "importance weights are left out": (
        "gradient norm, actor update 1",
        IMPORTANCE,
        instead(PolicyUpdate, "row_weights", lambda *_: None),
    ),
    "a second batch is drawn for one": (
        NAME,
        DYNAMIC,
        calls(SampledStream, "next_draw", skips_a_batch),
    ),
}


@pytest.mark.parametrize(
    "fault",
    [
        pytest.param(name, marks=[] if number in (0, 6) else pytest.mark.full)
        for number, name in enumerate(FAULTS)
    ],
)
def test_a_fault_of_order_is_named(folder, tmp_path, fault):
    first, changes, plant = FAULTS[fault]
    with pytest.MonkeyPatch.context() as patch:
        plant(patch)
        train(options(folder, tmp_path / "run", **changes))
    found = (audit_step(tmp_path / "run", step).first_difference for step in (1, 2, 3, 4))
    assert next(each for each in found if each is not None).quantity == first


@pytest.mark.full
def test_a_state_that_is_lost_at_a_resume_is_named(folder, tmp_path):
    run = TrainConfig(**options(folder, tmp_path / "run", **WEIGHTED))
    interrupted(Trained, run, 3)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CheckedSampler, "state", property(lambda _: "{}", lambda *_: None))
        Trained(run).train()
    assert audit_step(tmp_path / "run", 2).first_difference is None
    found = audit_step(tmp_path / "run", 3).first_difference
    assert (found.quantity, found.verdict) == (NAME, DIFFERS)


@pytest.mark.full
@pytest.mark.parametrize("order", [{"shuffle": False}, WEIGHTED])
def test_given_rows_have_their_order_recomputed(folder, tmp_path, order):
    rows = [{"prompt": f"name {n}: ", "completion": f"{n}", "w": n % 3} for n in range(9)]
    path = write(tmp_path / "rows.jsonl", rows)

    def run(name):
        given = row_options(folder / "model", path, tmp_path / name, audit_every=1, fsdp=True)
        train(given | order | {"stage": "sft", "max_epochs": 2, "bf16": False})
        return [finding(tmp_path / name, step)[1].verdict for step in (1, 2, 3, 4)]

    assert run("right") == [EQUAL] * 4
    with pytest.MonkeyPatch.context() as patch:
        results(CheckedSampler, "draw", twice)(patch)
        assert DIFFERS in run("wrong")
