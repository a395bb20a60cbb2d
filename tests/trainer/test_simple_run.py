"""`lightrft.trainer.train`: a run of functions and rows in memory."""

import json
from functools import partial
from itertools import count
from pathlib import Path

import datasets
import peft
import pytest
from tests.runs import SMALL
from transformers.utils import logging

from lightrft.config import ConfigError, TrainConfig
from lightrft.config.registry import POLICY_LOSSES, REWARDS
from lightrft.datasets.types import DataError
from lightrft.reporting.files import JsonLines
from lightrft.trainer import Callback, distill, prefer, reward, run_training, sft, train

ROWS = [{"input": f"Say {n}.", "label": str(n)} for n in range(8)]


def length(completions, **columns):
    return [len(text) / 10 for text in completions]


class Rows(list):
    """Iterates as a `datasets.Dataset` does."""


class Watcher(Callback):
    """Notes the calls; asks to stop after a step."""

    def __init__(self, *, stop_after=99):
        self.calls, self.stop_after = [], stop_after

    def begin_step(self, step):
        self.calls.append(("begin", step))

    def end_step(self, step, metrics):
        self.calls.append(("end", step))
        return {"own/double": 2 * metrics["reward"]} if "reward" in metrics else {}

    def wants_stop(self):
        return self.calls[-1][1] >= self.stop_after


def lines_of(folder):
    return dict(JsonLines(Path(folder) / "metrics.jsonl"))


@pytest.fixture
def folder(tmp_path):
    return str(tmp_path / "run")


@pytest.fixture
def policy(tiny_model, folder):
    """`policy(rows, rewards, **options)`: a small run."""

    def run(rows=ROWS, rewards=length, **options):
        return train(tiny_model, rows, rewards, **{"output_dir": folder, **SMALL, **options})

    return run


@pytest.fixture
def supervised(tiny_model, folder):
    """`supervised(rows, **options)`: one step."""

    def run(rows=PROMPTED, **options):
        return sft(tiny_model, rows, **{"output_dir": folder, **OF_ROWS, **options})

    return run


@pytest.mark.full
def test_a_function_and_rows_are_enough(folder, policy):
    watcher = Watcher()
    rewards = [length, lambda responses, labels: [float(label) for label in labels]]
    summary = policy(rewards=rewards, eval_data=Rows(ROWS[:2]), callbacks=[watcher], max_steps=2)
    assert summary.num_steps == 2
    assert watcher.calls == [("begin", 1), ("end", 1), ("begin", 2), ("end", 2)]
    last = lines_of(folder)[2]
    assert last["own/double"] == pytest.approx(2 * last["reward"])
    assert last["reward"] == pytest.approx(last["reward/length"] + last["reward/function"])
    kept = sorted((Path(folder) / "inputs").iterdir())
    assert [json.loads(line) for line in kept[1].read_text().splitlines()] == ROWS
    assert [path.name.split("-")[0] for path in kept] == ["eval", "prompt"]


def test_names_are_known_during_the_run_only(folder, policy):
    before = [*REWARDS], [*POLICY_LOSSES]
    with pytest.raises(ConfigError, match="rollout_batch_size"):
        policy(rollout_batch_size=0)
    assert ([*REWARDS], [*POLICY_LOSSES]) == before
    assert not Path(folder).exists()


def test_a_callback_ends_the_run_with_its_files(capsys, policy):
    options = {"num_episodes": 4, "train_batch_size": 4, "eval_data": ROWS[:2]}
    summary = policy(callbacks=[Watcher(stop_after=1)], **options)
    assert "group_norm, ppo loss, 2 updates per rollout" in capsys.readouterr().out
    assert summary.num_steps == 1
    assert "eval/reward" in summary.last_eval
    assert Path(summary.model_dir, "model.safetensors").is_file()
    assert policy(**options).num_steps == 1


def test_an_overlap_is_what_it_sets(policy):
    summary = policy(overlap="stream", max_steps=2)
    saved = TrainConfig.load(Path(summary.output_dir, "config.toml"))
    assert (saved.overlap, saved.stream_chunk) == ("stream", 1)
    first = summary.last_metrics
    assert first["staleness/max"] >= 1
    # The same call is the same run, of which nothing is left to do.
    assert policy(overlap="stream", max_steps=2).num_steps == 2
    assert policy(overlap="stream", max_steps=3, load_checkpoint=True).num_resumed_steps == 2


@pytest.mark.full
def test_rows_without_an_end_are_read_as_far_as_they_are_used(policy):
    numbers = count()
    endless = ({"input": f"Say {n}.", "label": str(n)} for n in numbers)
    held_out = ({"input": f"Say {n}."} for n in count())
    limits = {"max_samples": 8, "max_eval_samples": 2, "max_steps": 1}
    summary = policy(endless, eval_data=held_out, **limits)
    assert summary.num_steps == 1
    assert next(numbers) == 8
    assert summary.last_eval["eval/num_prompts"] == 2


@pytest.mark.full
def test_a_run_does_not_go_on_with_another_function(policy):
    def reward(responses, *, bonus=1.0):
        return [bonus + len(text) for text in responses]

    policy(rewards=reward, max_steps=1)
    same = {"max_steps": 2, "load_checkpoint": True}

    def reward(responses, *, bonus=1.0):
        return [bonus - len(text) for text in responses]

    with pytest.raises(ConfigError, match=r"reward_fn reward: code .* -> code"):
        policy(rewards=reward, **same)
    summary = policy(rewards=reward, allow_changes=True, **same)
    assert (summary.num_steps, summary.num_resumed_steps) == (2, 1)


def test_a_comment_is_no_change(policy):
    first, second = {}, {}
    body = "    return [1.0 * len(text) for text in responses]\n"
    exec(f"def reward(responses):\n{body}", first)
    exec(f"# words\n\n\ndef reward(responses):\n    # words\n{body}", second)
    policy(rewards=first["reward"], max_steps=1)
    same = {"max_steps": 2, "load_checkpoint": True}
    assert policy(rewards=second["reward"], **same).num_steps == 2


@pytest.mark.full
def test_other_rows_are_another_run(folder, policy):
    policy(max_steps=1)
    with pytest.raises(ConfigError, match="prompt_data"):
        policy(ROWS[::-1], max_steps=1)
    assert len([*(Path(folder) / "inputs").iterdir()]) == 1


@pytest.mark.parametrize(
    "rows, message",
    [
        ([], "prompt holds no rows"),
        (["Say 5."], "row 1: expected a mapping"),
        ([ROWS[0], {"input": "x", "image": object()}], "row 2: column 'image' cannot be kept"),
        ([{"input": "x", "label": float("inf")}], "row 1: column 'label'"),
    ],
)
def test_rows_that_cannot_be_kept(folder, rows, message, policy):
    with pytest.raises(DataError, match=message):
        policy(rows)
    assert not Path(folder).exists()


def test_wrong_arguments_are_named(tiny_model, folder, policy):
    with pytest.raises(TypeError, match=r"no option 'beta'; here it is init_kl_coef"):
        policy(beta=0.04)
    with pytest.raises(DataError, match=r"prompt: expected rows .* a file, got int"):
        train(tiny_model, 3, length)
    with pytest.raises(ConfigError, match="model: expected a folder or a name, got object"):
        train(object(), ROWS, length, output_dir=folder)
    with pytest.raises(ConfigError, match="two choices of the name 'length'"):
        policy(rewards=[length, partial(length), length])


def test_a_metric_that_is_there_already_is_refused(policy):
    class Overwrites(Callback):
        def end_step(self, step, metrics):
            return {"reward": 1.0}

    with pytest.raises(ValueError, match=r"Overwrites\.end_step: metric 'reward' is there"):
        policy(callbacks=[Overwrites()], max_steps=1)


PROMPTED = [{"prompt": f"{n}=", "completion": str(n)} for n in range(8)]
PAIRS = [{"prompt": f"{n}=", "chosen": str(n), "rejected": "no"} for n in range(8)]
OF_ROWS = {"fsdp": True, "train_batch_size": 4, "micro_train_batch_size": 2, "max_steps": 1}


@pytest.mark.parametrize(
    "call, rows",
    [
        (sft, PROMPTED),
        (sft, datasets.Dataset.from_list(PROMPTED)),
        (prefer, PAIRS),
        (reward, PAIRS),
        (distill, PROMPTED),
    ],
    ids=["sft", "sft_dataset", "prefer", "reward", "distill"],
)
def test_rows_train_in_one_call_of_every_stage(tiny_model, folder, call, rows):
    more = {"teacher": tiny_model, "teacher_form": "reverse"} if call is distill else {}
    watcher = Watcher()
    summary = call(
        tiny_model,
        data=rows,
        eval_data=[*rows][:2],
        callbacks=[watcher],
        output_dir=folder,
        learning_rate=1e-4,
        **OF_ROWS,
        **more,
    )
    assert summary.num_steps == 1
    assert watcher.calls == [("begin", 1), ("end", 1)]
    assert "actor_learning_rate = 0.0001" in (Path(folder) / "config.toml").read_text()
    kept = sorted(path.name.split("-")[0] for path in (Path(folder) / "inputs").iterdir())
    assert kept == ["eval", "prompt"]
    shown = summary._repr_html_()
    assert "<table>" in shown
    assert str(summary.model_dir) in shown


class OfTransformers:
    """As a TrainerCallback."""

    def on_step_end(self, args, state, control, **kwargs):
        return control


class HalfACallback:
    def end_step(self, step, metrics):
        return {}


@pytest.mark.parametrize(
    "callback, message",
    [
        (OfTransformers(), "OfTransformers is a callback of transformers: .*end_step"),
        (HalfACallback(), "HalfACallback lacks methods of a callback: subclass lightrft"),
        (Watcher, r"got the class Watcher: give Watcher\(\)"),
    ],
)
@pytest.mark.parametrize("call", [train, sft])
def test_what_is_no_callback_is_refused_before_anything(tmp_path, callback, message, call):
    with pytest.raises(ConfigError, match=message):
        call("no/model", ROWS, callbacks=[callback], output_dir=str(tmp_path / "run"))
    assert not (tmp_path / "run").exists()
    with pytest.raises(ConfigError, match=message):
        run_training(TrainConfig(), callbacks=[callback])


@pytest.mark.full
def test_a_cell_runs_again_in_a_folder_of_its_own(tiny_model, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    first = sft(tiny_model, PROMPTED, **OF_ROWS)
    second = sft(tiny_model, PROMPTED[::-1], **OF_ROWS)
    again = sft(tiny_model, PROMPTED[::-1], **OF_ROWS)
    folders = ["lightrft_run", "lightrft_run_2", "lightrft_run_3"]
    assert [each.output_dir for each in (first, second, again)] == folders
    assert "output_dir = lightrft_run_2: lightrft_run holds another run" in capsys.readouterr().out
    assert [path.parent.parent.name for path in sorted(tmp_path.glob("*/inputs/*"))] == folders


@pytest.mark.parametrize("is_used", [False, True])
def test_what_no_folder_mends_is_refused(tiny_model, tmp_path, monkeypatch, is_used):
    monkeypatch.chdir(tmp_path)
    if is_used:
        Path("lightrft_run").mkdir()
    with pytest.raises(ConfigError, match="best_metric: neither larger nor smaller"):
        sft(tiny_model, PROMPTED, eval_data=PROMPTED, best_metric="eval/response_length", **OF_ROWS)


def test_a_folder_that_is_named_is_kept(supervised):
    supervised()
    with pytest.raises(ConfigError, match="holds another run"):
        supervised(PROMPTED[::-1])


def test_an_adapter_configuration_of_peft_is_taken(folder, supervised):
    config = peft.LoraConfig(r=2, lora_alpha=4, target_modules=["q_proj"], task_type="CAUSAL_LM")
    supervised(peft_config=config)
    kept = TrainConfig.load(Path(folder) / "config.toml")
    assert (kept.lora_rank, kept.lora_alpha, kept.target_modules) == (2, 4, ("q_proj",))


@pytest.mark.parametrize(
    "config, more, message",
    [
        (peft.LoraConfig(use_dora=True), {}, "use_dora=True has no counterpart"),
        (peft.LoraConfig(r=2), {"lora_rank": 4}, "lora_rank is given as well"),
        (object(), {}, "expected a LoraConfig, got object: give lora_rank"),
    ],
)
def test_what_adapters_do_not_have_is_refused(folder, config, more, message, supervised):
    with pytest.raises(ConfigError, match=message):
        supervised(peft_config=config, **more)
    assert not Path(folder).exists()


def test_bars_of_transformers_are_hidden_during_a_run_only(supervised):
    seen = []

    class Looks(Callback):
        def begin_step(self, step):
            seen.append(logging.is_progress_bar_enabled())

    logging.enable_progress_bar()
    supervised(callbacks=[Looks()])
    assert seen == [False]
    assert logging.is_progress_bar_enabled()
