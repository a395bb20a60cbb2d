"""Whole runs for tests: inputs and options of a small one, ranks that carry it out, its records.

A test writes inputs, says what is different in its run, and looks at what the run left:

    inputs = write_inputs(tmp_path)
    train(rollout_options(inputs, "run", init_kl_coef=0.1))
    assert steps(tmp_path / "run")[-1]["kl"] > 0
"""

import hashlib
import json
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, replace
from unittest.mock import patch

import pytest
from tests.ranks import run_multiprocess
from transformers import AutoTokenizer

from lightrft.config import TrainConfig
from lightrft.datasets.pass_rates import PassRate, write_rates
from lightrft.datasets.types import Prompt
from lightrft.rewards.types import RewardResult
from lightrft.rollout.sampler import training_params
from lightrft.run.assembly import run_training
from lightrft.run.loop import Loop
from lightrft.tools.model_presets import write_tiny_model

# Depends on the response alone, is never the same for a whole group, and needs no label.
REWARD = """
def score(responses, **columns):
    return [sum(ord(c) % 2 for c in text) / max(len(text), 1) for text in responses]
"""
# Sizes of the smallest step.
FEW = {"rollout_batch_size": 2, "n_samples_per_prompt": 2, "train_batch_size": 4}
# Options of a run of functions and rows in memory.
SMALL = {
    "fsdp": True,
    "engine_type": "hf",
    "rollout_batch_size": 4,
    "n_samples_per_prompt": 2,
    "train_batch_size": 8,
    "prompt_max_len": 64,
    "generate_max_len": 4,
}
# Shows the names of tools, calls and answers to a model whose turns `calling` has read as calls.
TEMPLATE = """\
{%- for x in tools or [] %}{{- '<|system|>' + x.function.name }}{%- endfor %}\
{%- for m in messages %}\
{%- if m.role == 'tool' %}{{- '<|user|>' + m.content }}\
{%- else %}{{- '<|' + m.role + '|>' + m.content }}{%- for k in m.tool_calls or [] %}\
{{- k.function | tojson }}{%- endfor %}\
{%- if m.role == 'assistant' %}{{- eos_token }}{%- endif %}{%- endif %}{%- endfor %}\
{%- if add_generation_prompt %}{{- '<|assistant|>' }}{%- endif %}"""
# Metrics that follow from the clock or the machine.
OF_THE_MACHINE = ("second", "memory/", "mfu", "tflops")


class Interrupted(Exception):
    """A test ends a run here, in the middle of a step."""


def tiny_models(folder, *names):
    """Write a tiny model of each name, with random weights of its own; return the folder."""
    for seed, name in enumerate(names, start=1):
        write_tiny_model(folder / name, "tiny-qwen3", seed=seed)
    return folder


class TextReward:
    """Scores the text of each response by a function, in the process of the trainer.

    Args:
        of: Returns a number, a `RewardResult`, or None where it decides nothing.
    """

    name, needs_labels = "text", False

    def __init__(self, of):
        self.of = of

    def score(self, prompts, responses, labels, columns):
        scores = map(self.of, responses)
        return [RewardResult(float(s)) if isinstance(s, int | float) else s for s in scores]

    def close(self):
        pass


def write(path, rows):
    """Write rows as a file of JSON lines; return its path."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def say_rows(count, **columns):
    """Return prompts of three lengths; a further column is a function of the row's number."""
    return [
        {
            "prompt": f"say {'aeiou'[number % 5] * (1 + number % 3)}",
            **{name: value(number) for name, value in columns.items()},
        }
        for number in range(count)
    ]


def write_inputs(folder, rows=None, *, reward=REWARD, files=None):
    """Write what `rollout_options` names, but for the model; return the folder.

    Args:
        folder: Gets `train.jsonl`, `reward.py` and the further files.
        rows: Prompts; 32 of `say_rows` if None.
        reward: Source of `score`.
        files: Text of each further file.
    """
    write(folder / "train.jsonl", say_rows(32) if rows is None else rows)
    for name, text in {"reward.py": reward, **(files or {})}.items():
        (folder / name).write_text(text)
    return folder


def rate_prompts(folder, texts):
    """Write rates.jsonl, with pass rates of 0, 1/2 and 1 in turn; return the prompts."""
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    prompts = [Prompt(n, t, tuple(tokenizer(t)["input_ids"])) for n, t in enumerate(texts)]
    rates = [PassRate(number % 3, 2) for number in range(len(prompts))]
    write_rates(folder / "rates.jsonl", prompts, rates)
    return prompts


def rollout_options(folder, name="run", **changes):
    """Return options of two steps of reinforcement with four prompts and four samples of each."""
    return {
        "pretrain": str(folder / "model"),
        "prompt_data": str(folder / "train.jsonl"),
        "input_key": "prompt",
        "reward_fn": (f"{folder / 'reward.py'}:score",),
        "output_dir": str(folder / name),
        "fsdp": True,
        "bf16": False,
        "engine_type": "hf",
        "rollout_batch_size": 4,
        "n_samples_per_prompt": 4,
        "train_batch_size": 8,
        "micro_train_batch_size": 2,
        "generate_max_len": 8,
        "prompt_max_len": 32,
        "init_kl_coef": 0.0,
        "actor_learning_rate": 1e-3,
        "lr_warmup_ratio": 0.0,
        "max_steps": 2,
        **changes,
    }


def row_options(model, rows, folder, **changes):
    """Return options of a run over rows: three passes in steps of four."""
    return {
        "pretrain": str(model),
        "prompt_data": str(rows),
        "output_dir": str(folder),
        "train_batch_size": 4,
        "micro_train_batch_size": 2,
        "max_epochs": 3,
        "num_threads": 1,
        **changes,
    }


def words(options):
    """Return options as the words of a command line."""
    line = []
    for name, value in options.items():
        if isinstance(value, bool):
            line.append(f"--{name}" if value else f"--no_{name}")
        else:
            values = value if isinstance(value, (tuple, list)) else (value,)
            line += [f"--{name}", *map(str, values)]
    return line


def train(options):
    """Carry out a run in this process; return its summary.

    Args:
        options: As for `TrainConfig`, and `stage` where that is not "policy".
    """
    settings = {"stage": "policy", **options}
    stage = settings.pop("stage")
    return run_training(TrainConfig(**settings), stage=stage)


def with_stops(config, stops=range(90)):
    """Return how a run samples, but that these ids end a turn: random models seldom end one."""
    return replace(training_params(config), stop_token_ids=tuple(stops))


@contextmanager
def calling(*calls, choose=None, stops=range(90)):
    """Let a random model call tools in each turn and end its turns early.

    Args:
        calls: Tool calls that each turn is read as, or functions of its text that return one; the
            turns stay as they are if there are none.
        choose: In their stead, what chooses the parser of calls.
        stops: Ids that end a turn.
    """
    import lightrft.rollout.environments.specs as specs
    import lightrft.rollout.sampler as sampler

    def parse(text, *_):
        return [call(text) if callable(call) else call for call in calls]

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(sampler, "training_params", lambda config: with_stops(config, stops))
        if calls or choose:
            patched.setattr(specs, "choose_parser", choose or (lambda *_: parse))
        yield


def train_each(rank, world_size, runs, calls=None):
    """Carry out runs one after the other; return the summary of each as a dictionary."""
    from lightrft.strategy.distributed.process_groups import start_process_group

    # Kept over all runs: to end one and start the next at one address is a race.
    start_process_group(None)
    with nullcontext() if calls is None else calling(*calls):
        return [asdict(train(options)) for options in runs]


def train_on_ranks(world_size, runs, timeout_seconds=300.0, calls=None):
    """Carry out runs on new ranks; return for each rank the summary of each run.

    Args:
        world_size: Number of ranks.
        runs: Options of each run.
        timeout_seconds: For all of them.
        calls: What each turn is read as, see `calling`; None where models are left as they are.
    """
    return run_multiprocess(
        train_each, world_size, timeout_seconds=timeout_seconds, args=(list(runs), calls)
    )


def last_metrics(world_size, runs, **how):
    """Carry out runs on new ranks; return of each the metrics of its last step."""
    return [each["last_metrics"] for each in train_on_ranks(world_size, runs, **how)[0]]


def lines(path):
    """Read a file of JSON lines."""
    return [json.loads(line) for line in path.open()]


def compared(metrics):
    """Return metrics without what a clock or a machine says."""
    return {n: v for n, v in metrics.items() if not any(word in n for word in OF_THE_MACHINE)}


def steps(folder):
    """Return the metrics of every step that two equal runs share."""
    return [compared(each) for each in lines(folder / "metrics.jsonl")]


def assert_same(first, second, *, rel=1e-3, small=1e-6):
    """Check that metrics of two runs differ by rounding alone.

    Args:
        first: Metrics of one step.
        second: Metrics of the same step of the other run.
        rel: Largest relative difference.
        small: Differences below this do not count; a hundred times as much of extremes.
    """
    assert set(first) == set(second)
    for name, value in compared(first).items():
        if name == "engine_hash":  # rounding changes every hash
            continue
        is_extreme = any(w in name for w in ("max", "min", "diff", "log_ratio", "parity"))
        tolerance = 100 * small if is_extreme else small
        assert second[name] == pytest.approx(value, rel=rel, abs=tolerance), name


def digest(folder):
    """Return a hash of the trained weights."""
    return hashlib.sha256((folder / "model/model.safetensors").read_bytes()).hexdigest()


def interrupted(trainer, config, step):
    """End a run in the update of a step; what it has written stays."""
    original = Loop.update

    def update(self, batch, under_way):
        if under_way.number == step:
            raise Interrupted
        return original(self, batch, under_way)

    with patch.object(Loop, "update", update):
        try:
            trainer(config).train()
        except Interrupted:
            return
    raise AssertionError(f"the run ended before step {step}")


def continued(trainer, folder, settings, step):
    """Check that a run that ended in a step and went on equals a whole one; return its summary.

    Args:
        trainer: Class of the stage.
        folder: Gets both runs.
        settings: Function of the folder of a run.
        step: The step in which one ends.
    """
    whole, parts = (TrainConfig(**settings(folder / name)) for name in ("whole", "parts"))
    trainer(whole).train()
    interrupted(trainer, parts, step)
    summary = trainer(parts).train()
    assert steps(folder / "parts") == steps(folder / "whole")
    assert digest(folder / "parts") == digest(folder / "whole")
    return summary


def in_ranks(rank, world_size, name, runs, interrupted_at=None):
    """Return the summary of each run on this rank; one that is interrupted is continued."""
    import lightrft.trainer
    from lightrft.strategy.distributed.process_groups import start_process_group

    start_process_group(None)
    trainer, summaries = getattr(lightrft.trainer, name), []
    for settings in runs:
        config = TrainConfig(**settings)
        if interrupted_at is not None:
            interrupted(trainer, config, interrupted_at)
        summaries.append(asdict(trainer(config).train()))
    return summaries
