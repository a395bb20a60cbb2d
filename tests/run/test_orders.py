"""Orders in whole runs: every sampler in every form of sampling, resumed and over ranks."""

import pytest
from tests.ranks import run_multiprocess
from tests.runs import (
    continued,
    digest,
    interrupted,
    lines,
    rate_prompts,
    rollout_options,
    row_options,
    say_rows,
    steps,
    tiny_models,
    train,
    train_on_ranks,
    write,
    write_inputs,
)
from tests.stages.row_stages import write_rows
from tests.trainer.test_random_kills import become_launcher, finish

from lightrft.config import ConfigError, TrainConfig
from lightrft.run import loop
from lightrft.run.assembly import run_training

# Follows results: the prompt of the largest reward comes again at once.
OWN = """
class Greedy:
    def __init__(self, rows, *, shift: int = 1):
        self.rows, self.shift, self.state = rows, shift, {"at": 0, "best": None, "seen": 0}

    def draw(self, n):
        first = self.state["at"]
        self.state["at"] = first + n
        places = [(first + i * self.shift) % self.rows.num_rows for i in range(n)]
        if self.state["best"] is not None:
            places[0] = self.state["best"]
        return places

    def observe(self, results):
        best = max(results, key=lambda each: (sum(each.rewards), -each.place))
        self.state["best"], self.state["seen"] = best.place, self.state["seen"] + len(results)
"""
# Mean accuracies of groups are 0, 1 or between: pools send some prompts to rest.
REWARD = """
def score(responses):
    return [float(len(text) % 3 > 0) for text in responses]
"""
SAMPLERS = {
    "in_order": {"shuffle": False},
    "weighted": {"prompt_weight": "w"},
    "pools": {"prompt_sampler": "pools", "prompt_sampler_args": {"readmit_steps": 3}},
    "own": {"prompt_sampler": "own.py:Greedy"},
}
FORMS = {
    "whole steps": {},
    "streaming": {"stream_chunk": 3},
    "lag": {"rollout_lag": 2},
    "dynamic": {"dynamic_sampling": True, "max_num_gen_batches": 3},
    "streaming dynamic lag": {
        "stream_chunk": 3,
        "rollout_lag": 1,
        "dynamic_sampling": True,
        "max_num_gen_batches": 3,
    },
}


def write_all(folder):
    """Write models, prompts, rows, reward and sampler; return the folder."""
    tiny_models(folder, "model", "teacher")
    rows = say_rows(13, w=lambda number: number % 4)
    write_inputs(folder, rows, reward=REWARD, files={"own.py": OWN})
    write_rows(folder, count=9)
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_all(tmp_path_factory.mktemp("orders"))


def options(folder, name, sampler, **changes):
    order = dict(SAMPLERS[sampler])
    if sampler == "own":
        order["prompt_sampler"] = f"{folder}/{order['prompt_sampler']}"
    settings = {
        "max_steps": 5,
        "num_episodes": 3,
        "save_rollouts": True,
        "save_steps": 1,
        "generate_max_len": 6,
        **order,
        **changes,
    }
    return rollout_options(folder, name, **settings)


def draws(folder):
    """Prompts of each step, in order."""
    found = {}
    for each in lines(folder / "rollouts.jsonl"):
        found.setdefault(each["step"], {})[each["group_id"]] = tuple(each["prompt_ids"])
    return found


class Trained:
    """The class of a stage, as `continued` calls it."""

    def __init__(self, config):
        self.config = config

    def train(self):
        return run_training(self.config)


@pytest.mark.full
@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize("form", FORMS)
def test_a_run_goes_on_with_the_same_prompts(folder, tmp_path, sampler, form):
    def settings(run):
        return options(folder, "unused", sampler, output_dir=str(run), **FORMS[form])

    continued(Trained, tmp_path, settings, 3)
    assert draws(tmp_path / "parts") == draws(tmp_path / "whole")


@pytest.mark.full
@pytest.mark.parametrize("sampler", ["pools", "own"])
def test_results_are_observed_in_the_order_of_steps_on_any_ranks(folder, tmp_path, sampler):
    exact = {"rollout_lag": 1, "max_steps": 6, "engine_args": {"rows_at_once": "1"}}
    names = ("one", "two", "split")
    runs = [
        options(folder, "unused", sampler, output_dir=str(tmp_path / n), **exact) for n in names
    ]
    train(runs[0])
    train_on_ranks(2, [runs[1]])
    run_multiprocess(split, 1, timeout_seconds=240, args=(runs[2] | {"rollout_ranks": 1},))
    one, two, three = (draws(tmp_path / name) for name in names)
    assert one == three
    assert one.keys() == two.keys()
    # Two ranks round gradients otherwise; the first steps do not depend on them.
    assert [one[n] for n in (1, 2)] == [two[n] for n in (1, 2)]


def split(rank, world_size, run):
    become_launcher()
    finish(run, 2)


@pytest.mark.parametrize("stage", ["sft", "prefer", "reward", "divergence"])
def test_given_rows_have_orders_too(folder, tmp_path, stage):
    rows = [{**row, "w": n % 3} for n, row in enumerate(lines(folder / "rows.jsonl"))]
    path = write(tmp_path / "weighed.jsonl", rows)
    teacher = {"teacher": str(folder / "teacher"), "teacher_form": "forward"}
    settings = {
        "stage": stage,
        "bf16": False,
        "fsdp": True,
        "max_row_tokens": 64,
        "save_steps": 1,
        **(teacher if stage == "divergence" else {}),
    }
    ends = {}
    for name, order in {"shuffled": {}, "in order": SAMPLERS["in_order"]}.items():
        run = row_options(folder / "model", path, tmp_path / name, **settings, **order)
        train(run)
        ends[name] = digest(tmp_path / name)
    assert len(set(ends.values())) == 2

    class Stage(Trained):
        def train(self):
            return run_training(self.config, stage=stage)

    def weighed(run):
        given = row_options(folder / "model", path, run, **settings, prompt_weight="w")
        return {name: value for name, value in given.items() if name != "stage"}

    continued(Stage, tmp_path, weighed, 4)


@pytest.mark.parametrize("stage", ["sft", "prefer", "reward", "divergence"])
def test_what_needs_rewards_is_refused_on_given_rows(folder, tmp_path, stage):
    teacher = {"teacher": str(folder / "teacher"), "teacher_form": "forward"}
    run = row_options(
        folder / "model",
        folder / "rows.jsonl",
        tmp_path / "run",
        stage=stage,
        fsdp=True,
        **(teacher if stage == "divergence" else {}),
    )
    with pytest.raises(ConfigError, match="follows rewards of samples, and this stage has none"):
        train(run | {"prompt_sampler": "pools"})
    with pytest.raises(ConfigError, match="prompt_importance is an option of lightrft train"):
        train(run | {"prompt_importance": True})
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def test_a_run_keeps_prompts_by_their_rates(folder, tmp_path, capfd):
    prompts = rate_prompts(folder, [row["prompt"] for row in lines(folder / "train.jsonl")])
    run = options(
        folder,
        "unused",
        "in_order",
        output_dir=str(tmp_path / "run"),
        prompt_rates=str(folder / "rates.jsonl"),
        prompt_pass_rate="0.3:0.7",
        max_steps=1,
    )
    train(run)
    said = capfd.readouterr().out
    assert "kept 4 of 13 prompts with a pass rate from 0.3 to 0.7; 5 are below, 4 above" in said
    kept = [prompts[n].token_ids for n in (1, 4, 7, 10)]
    assert [*draws(tmp_path / "run")[1].values()] == kept


def test_a_checkpoint_without_a_sampler_is_continued(folder, tmp_path):
    """Older versions wrote the position alone."""
    common = options(folder, "unused", "in_order", rollout_lag=1, shuffle=True)
    whole, parts = (
        TrainConfig(**common | {"output_dir": str(tmp_path / name)}) for name in ("whole", "parts")
    )
    Trained(whole).train()
    written = loop.LoopState.to_client_state
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            loop.LoopState,
            "to_client_state",
            lambda self: {n: v for n, v in written(self).items() if n != "sampler"},
        )
        interrupted(Trained, parts, 3)
    Trained(parts).train()
    assert steps(tmp_path / "parts") == steps(tmp_path / "whole")
    assert draws(tmp_path / "parts") == draws(tmp_path / "whole")
