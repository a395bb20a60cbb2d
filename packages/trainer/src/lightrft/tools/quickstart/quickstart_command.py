"""`lightrft quickstart`: the whole chain on a laptop, from an untrained model to a better one."""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, TextIO, cast

from lightrft.cli.errors import ExitCode, UsageError
from lightrft.cli.launch import (
    become_only_process,
    hide_progress_bars,
    is_worker,
    share_processors,
)
from lightrft.cli.options import Parser
from lightrft.config import TrainConfig
from lightrft.config.files import read_object
from lightrft.config.options import did_you_mean
from lightrft.reporting.files import SUMMARY_FILE, package_versions
from lightrft.tools.commands import parser_of
from lightrft.tools.init_model_command import make_folder, require_empty
from lightrft.tools.quickstart.task import (
    ADDITION,
    HELD_OUT_SEED,
    HERE,
    Task,
    in_folder,
    load_example,
    write_exercises,
)

if TYPE_CHECKING:
    from lightrft.run.assembly import RunSummary


# Other tasks than additions among the examples, by their flags.
TASKS = {
    "environment": "calculator.py:CALCULATOR",
    "agent": "calculator.py:CALCULATOR_AGENT",
    "vision": "colours.py:SHAPES",
    "audio": "tones.py:TONES",
}
DEFAULT_DIRECTORY = "lightrft_quickstart"
# Width of a line below a heading, on a terminal of 80 columns.
LINE_WIDTH = 78

SAMPLES_PER_STEP = 128
WARMUP_STEPS = 5
ESTIMATORS = {"grpo": "group_norm", "ppo": "gae", "reinforce++": "reinforce++"}
STRATEGIES = ("fsdp", "deepspeed")


@dataclass(frozen=True, slots=True)
class Recipe:
    """Choices of a quick start.

    Args:
        task: Task that is taught.
        algorithm: Key of `ESTIMATORS`.
        strategy: Name in `STRATEGIES`.
        seed: Seed of the model, the demonstrations, the prompts and the samples.
        num_steps: Steps of reinforcement; each samples `SAMPLES_PER_STEP` responses.
        num_warm_start_steps: Steps of imitation.
        num_eval_prompts: Held-out prompts.
        num_threads: CPU threads; None chooses them by the size of the model's operations.
        is_pipeline: Whether all stages are run.
    """

    task: Task = ADDITION
    algorithm: str = "grpo"
    strategy: str = "fsdp"
    seed: int = 0
    num_steps: int = 30
    num_warm_start_steps: int = 300
    num_eval_prompts: int = 512
    num_threads: int | None = None
    is_pipeline: bool = False

    @property
    def group_size(self) -> int:
        """Samples per prompt: only GRPO compares several."""
        return 8 if self.algorithm == "grpo" else 1

    @property
    def num_prompts(self) -> int:
        """Training prompts, each used once."""
        return self.num_steps * SAMPLES_PER_STEP // self.group_size


def training_config(recipe: Recipe, directory: Path) -> TrainConfig:
    """Return the configuration of the run in `directory`, whose model and data are written."""
    usual = TrainConfig.load(HERE / "recipe.toml")
    usual = replace(
        usual,
        pretrain=str(directory / "warm_start"),
        prompt_data=str(directory / "data" / "train.jsonl"),
        eval_data=str(directory / "data" / "eval.jsonl"),
        max_eval_samples=recipe.num_eval_prompts,
        reward_fn=(f"{directory / 'reward.py'}:score",),
        fsdp=recipe.strategy == "fsdp",
        advantage_estimator=ESTIMATORS[recipe.algorithm],
        rollout_batch_size=usual.train_batch_size // recipe.group_size,
        n_samples_per_prompt=recipe.group_size,
        lr_warmup_ratio=min(1.0, WARMUP_STEPS / recipe.num_steps),
        num_threads=recipe.num_threads,
        seed=recipe.seed,
        output_dir=str(directory),
    )
    if recipe.algorithm == "ppo":
        usual = replace(usual, lambd=1.0, value_clip=0.0, critic_learning_rate=1e-3)
    return usual.replaced(in_folder(recipe.task.options, directory))


@contextlib.contextmanager
def quietly(directory: Path) -> Iterator[None]:
    """Send what runs print to `run.log` of a folder."""
    with (
        (directory / "run.log").open("a", encoding="utf-8") as log,
        contextlib.redirect_stdout(log),
    ):
        yield


def run(argv: Sequence[str]) -> int:
    """Run the command; see `lightrft quickstart --help`.

    Raises:
        UsageError: Arguments that cannot be used.
    """
    recipe, directory = parse(argv)
    share_processors()
    make_folder(directory)
    if recipe.is_pipeline:
        run_pipeline = load_example("pipeline.py:run_pipeline")
        cast("Callable[[Recipe, Path], None]", run_pipeline)(recipe, directory)
        return ExitCode.OK
    seconds = {}
    print(
        f"[1/3] imitation: {recipe.num_warm_start_steps} steps of {recipe.task.lesson}", flush=True
    )
    started = time.perf_counter()
    from lightrft.reporting.console import bar_below

    with bar_below("imitation"):
        prepare(recipe, directory)
    show(recipe.task.flaw)
    seconds["warm_start"] = time.perf_counter() - started

    print(f"[2/3] reinforcement: {recipe.num_steps} steps of {recipe.algorithm}", flush=True)
    started = time.perf_counter()
    show(recipe.task.outlook)
    with bar_below("reinforcement"):
        outcome = reinforce(recipe, directory)
    seconds["reinforcement"] = time.perf_counter() - started

    summary = summarise(recipe, directory, outcome, seconds)
    from lightrft.tools.report.page import write_report

    report = write_report(directory)
    files = [directory / name for name in recipe.task.files]
    print(f"[3/3] {closing_words(summary, directory, report, files)}")
    return ExitCode.OK


def parse(argv: Sequence[str]) -> tuple[Recipe, Path]:
    """Return the recipe and the folder of the run, which is new, empty or of the same pipeline.

    Raises:
        UsageError: A name is unknown, or the folder holds something else.
    """
    options = build_parser().parse_args(argv)
    for flag, name, known in (
        ("--algorithm", options.algorithm, ESTIMATORS),
        ("--strategy", options.strategy, STRATEGIES),
    ):
        if name not in known:
            raise UsageError(f"{flag}: got {name!r}{did_you_mean(name, known)}")
    if is_worker():
        raise UsageError("quickstart runs in one process: start it without torchrun")
    place = options.output_dir
    if options.is_pipeline and (options.algorithm, options.strategy) != ("grpo", "fsdp"):
        raise UsageError("--pipeline takes grpo and fsdp: leave --algorithm and --strategy out")
    chosen = [example for flag, example in TASKS.items() if vars(options).pop(flag)]
    task = cast("Task", load_example(chosen[0])) if chosen else ADDITION
    del options.output_dir
    chosen_values = {name: value for name, value in vars(options).items() if value is not None}
    recipe = Recipe(task=task, **{**task.numbers, **chosen_values})
    directory = Path(place) if place else unused_directory(recipe)
    if not goes_on(recipe, directory):
        require_empty(directory)
    return recipe, directory


def build_parser() -> Parser:
    """Return the parser of `lightrft quickstart`."""
    algorithms, strategies = ", ".join(ESTIMATORS), ", ".join(STRATEGIES)
    return parser_of("quickstart", algorithms=algorithms, strategies=strategies)


def goes_on(recipe: Recipe, directory: Path) -> bool:
    """Return whether a folder holds stages of this recipe, so that only the rest is left to do."""
    if not recipe.is_pipeline:
        return False
    has_begun = load_example("pipeline.py:has_begun")
    return cast("Callable[[Recipe, Path], bool]", has_begun)(recipe, directory)


def unused_directory(recipe: Recipe) -> Path:
    """Return the default folder, numbered if it holds a run that is another or complete."""
    names = (DEFAULT_DIRECTORY, *(f"{DEFAULT_DIRECTORY}_{number}" for number in range(2, 1000)))
    places = (
        place
        for place in map(Path, names)
        if not place.exists() or (not (place / SUMMARY_FILE).exists() and goes_on(recipe, place))
    )
    return next(places, Path(names[0]))


def prepare(recipe: Recipe, directory: Path) -> None:
    """Write the data, the reward function and the warm-started model into `directory`."""
    import torch

    from lightrft.run.threads import decide_threads, max_micro_batch_tokens
    from lightrft.strategy.distributed.context import report_progress
    from lightrft.tools.model_presets import END
    from lightrft.tools.quickstart.warm_start import build_student, imitate

    hide_progress_bars()
    data, task, seed = directory / "data", recipe.task, recipe.seed
    data.mkdir()
    for name, count, split_seed, held_out in (
        ("train.jsonl", recipe.num_prompts, seed, False),
        ("eval.jsonl", recipe.num_eval_prompts, HELD_OUT_SEED, True),
    ):
        write_exercises(data / name, task, count, seed=split_seed, held_out=held_out)
    task.copy_files(directory)

    student = build_student(task, seed=seed)
    chosen, why = recipe.num_threads, "as asked"
    if chosen is None:
        tokens = max_micro_batch_tokens(training_config(recipe, directory))
        chosen, why = decide_threads(student.model.config.get_text_config().to_dict(), tokens)
    show([f"CPU threads: {chosen} ({why})"])
    torch.set_num_threads(chosen)
    num_steps = recipe.num_warm_start_steps

    def on_step(step: int, loss: float) -> None:
        report_progress("steps", step, 0 if step == num_steps else num_steps)
        if step % 100 == 0:
            print(f"  imitation step {step:>4}  loss {loss:.4f}", flush=True)

    imitate(student, task, on_step, num_steps=num_steps, seed=seed)
    student.save(directory / "warm_start", sample="".join(task.whole_tokens) + END)


def show(lines: Sequence[str]) -> None:
    """Print lines below a heading."""
    print("\n".join(f"  {line}" for line in lines), flush=True)


def reinforce(recipe: Recipe, directory: Path) -> RunSummary:
    """Train in `directory` on the path of `lightrft train`, whose lines go to `run.log`."""
    from lightrft.run.assembly import run_training

    become_only_process()
    live = LiveReward(sys.stdout, num_steps=recipe.num_steps)
    with quietly(directory):
        return run_training(training_config(recipe, directory), loggers=[live])


def summarise(
    recipe: Recipe, directory: Path, outcome: RunSummary, seconds: dict[str, float]
) -> dict[str, object]:
    """Add what the quick start knows to the run's `summary.json`, and return all of it."""
    path = directory / "summary.json"
    summary = read_object(path)
    summary |= {
        "algorithm": recipe.algorithm,
        "strategy": recipe.strategy,
        "seed": recipe.seed,
        "accuracy_before": outcome.first_eval["eval/reward"],
        "accuracy_after": outcome.last_eval["eval/reward"],
        "seconds": {**seconds, "total": sum(seconds.values())},
        "versions": package_versions(("lightrft-trainer", "torch", "transformers", "deepspeed")),
    }
    path.write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
    return summary


def closing_words(
    summary: dict[str, object], directory: Path, report: Path, files: Sequence[Path]
) -> str:
    """Return the result, and the next commands."""
    return (
        f"held-out accuracy {summary['accuracy_before']:.3f} -> {summary['accuracy_after']:.3f}\n"
        f"  model {directory / 'model'}, numbers {directory / 'summary.json'}\n"
        f"  open {report} in a browser\n"
        f"  next: edit {' or '.join(map(str, files))}, then\n"
        f"  lightrft train --config {directory / 'config.toml'} --output_dir another_run"
    )


class LiveReward:
    """Logger of a line a step, as `lightrft train` shows it, with the calls of episodes.

    Args:
        stream: Output stream; what the run itself prints goes elsewhere.
        num_steps: Steps of the whole run.
    """

    def __init__(self, stream: TextIO, *, num_steps: int) -> None:
        self._stream = stream
        self._num_steps = num_steps
        self._started = time.monotonic()

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write the line of a step."""
        from lightrft.reporting.console import step_line

        left: float | None = None
        if step == 0:
            self._started = time.monotonic()
        else:
            left = (time.monotonic() - self._started) / step * (self._num_steps - step)
        calls = metrics.get("episode/calls")
        more = "" if calls is None else f"  calls {calls:.2f}"
        width = LINE_WIDTH - len(more)
        line = step_line(step, self._num_steps, metrics, seconds_left=left, width=width) + more
        self._stream.write(f"  {line}\n")
        self._stream.flush()

    def close(self) -> None:
        """Do nothing: nothing is pending."""
