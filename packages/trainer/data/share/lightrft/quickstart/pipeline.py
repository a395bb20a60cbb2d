"""Every stage of post-training in one go: imitation, preferences, reinforcement, a student."""

from __future__ import annotations

import json
import random
import shutil
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import islice
from pathlib import Path

from lightrft.cli.launch import become_only_process, hide_progress_bars
from lightrft.config import TrainConfig
from lightrft.config.files import file_sha256, lines_of, parse_object
from lightrft.config.toml import write_whole
from lightrft.datasets.row_origin import write_origin
from lightrft.reporting.files import EVAL_FILE, read_json
from lightrft.run.provenance import run_of_model
from lightrft.tools.model_presets import END
from lightrft.tools.quickstart.quickstart_command import Recipe, quietly, training_config
from lightrft.tools.quickstart.task import HELD_OUT_SEED, in_folder, write_exercises

# File with the recipe of the stages in a folder.
BEGUN_FILE = "pipeline.json"
SAMPLED_PROMPTS, TAUGHT_PROMPTS = 3072, 4096
SAMPLES_PER_PROMPT, PAIRS_PER_PROMPT = 8, 4
# At 1 nearly all wrong answers forget a carry. What the later stages learnt from such pairs was
# worse than the imitator.
TEMPERATURE = 1.5
STUDENT_WIDTH = 28
_TABLES = tomllib.loads(Path(__file__).with_name("pipeline.toml").read_text("utf-8"))


@dataclass(frozen=True, slots=True)
class Outcome:
    """A line of the table.

    Args:
        stage: Name of the stage.
        accuracy: Share of right greedy answers to the held-out prompts; for a reward model, of
            held-out pairs whose better answer scores higher.
        seconds: Seconds of training alone.
        folder: Folder of its run.
    """

    stage: str
    accuracy: float
    seconds: float
    folder: Path


class Pipeline:
    """The stages of a quick start, each an ordinary run in a separate folder.

    Args:
        recipe: Recipe, whose task has texts alone.
        directory: Empty folder, or one in which the same recipe has begun: finished parts are not
            made again.
    """

    def __init__(self, recipe: Recipe, directory: Path) -> None:
        self.recipe, self.directory = recipe, directory
        self.outcomes: list[Outcome] = []
        self._data = directory / "data"

    def run(self) -> list[Outcome]:
        """Run all stages, and return the lines of the table."""
        hide_progress_bars()
        become_only_process()
        self._prepare()
        self._write("demonstrations", self._demonstrations())
        self._train("sft", TEMPERATURE)
        self._prompts("sampled", SAMPLED_PROMPTS, self.recipe.seed + 1)
        self._evaluate("samples", "sft/model", "sampled", TEMPERATURE)
        for name, folder in (("pairs", "samples"), ("held_out_pairs", "sft_eval")):
            self._write(name, pairs(self._responses(folder)), run="sft")
        for stage in ("reward", "prefer", "policy"):
            self._train(stage)
        self._prompts("taught", TAUGHT_PROMPTS, self.recipe.seed + 2)
        self._evaluate("answers", "grpo/model", "taught")
        right = (each for each in self._responses("answers") if each["accuracy"] == 1.0)
        rows = ({"prompt": each["prompt"], "completion": each["response"]} for each in right)
        self._write("answers", rows, run="grpo")
        self._train("divergence")
        return self.outcomes

    def _prepare(self) -> None:
        """Write untrained models, held-out prompts and the reward function."""
        import torch

        from lightrft.tools.quickstart.warm_start import build_student

        torch.set_num_threads(self.recipe.num_threads or 1)
        task, seed = self.recipe.task, self.recipe.seed
        write_whole(self.directory / BEGUN_FILE, json.dumps(_numbers(self.recipe)) + "\n")
        self._data.mkdir(exist_ok=True)
        task.copy_files(self.directory)
        self._prompts("train", self.recipe.num_prompts, seed)
        self._prompts("eval", self.recipe.num_eval_prompts, HELD_OUT_SEED, held_out=True)
        sample = "".join(task.whole_tokens) + END
        build_student(task, seed=seed).save(self.directory / "untrained", sample)
        small = build_student(task, seed=seed + 1, width=STUDENT_WIDTH)
        small.save(self.directory / "student", sample)

    def _demonstrations(self) -> Iterator[Mapping[str, object]]:
        """Yield what the careless teacher shows."""
        rng = random.Random(self.recipe.seed)
        count = self.recipe.num_warm_start_steps * _TABLES["rows"]["train_batch_size"]
        for each in islice(self.recipe.task.draw(rng, False), count):
            talk = each.demonstration(rng)
            yield {"messages": [{"role": role, "content": text} for role, text in talk]}

    def _train(self, stage: str, temperature: float = 0.0) -> None:
        """Run one stage and add its line; a temperature also draws held-out samples."""
        from lightrft.run.assembly import run_training

        options = in_folder(_TABLES["stages"][stage], self.directory)
        if stage == "policy":
            config = training_config(self.recipe, self.directory)
            config = config.replaced({"eval_data": None, **options})
        else:
            numbers = {"num_threads": self.recipe.num_threads or 1, "seed": self.recipe.seed}
            rows = in_folder(_TABLES["rows"], self.directory)
            config = TrainConfig.from_args({**rows, **numbers, **options})
        folder = Path(config.output_dir)
        with quietly(self.directory):
            summary = run_training(config, stage=stage)
        if stage == "reward":
            accuracy = summary.last_eval["eval/accuracy"]
        else:
            accuracy = self._evaluate(
                f"{folder.name}_eval", f"{folder.name}/model", "eval", temperature
            )
        self.outcomes.append(Outcome(folder.name, accuracy, summary.seconds, folder))
        print(f"  {folder.name:8}  {accuracy:.3f}", flush=True)

    def _evaluate(self, name: str, model: str, prompts: str, temperature: float = 0.0) -> float:
        """Return the share of right greedy answers; a temperature draws samples beside them."""
        from lightrft.tools.evaluation.evaluation_run import EvalSettings, run_evaluation

        folder = self.directory / name
        before = read_json(folder / EVAL_FILE).get("metrics")
        if isinstance(before, dict):
            return float(before["greedy/accuracy"])
        shutil.rmtree(folder, ignore_errors=True)  # left by an interrupted one
        config = replace(
            training_config(self.recipe, self.directory),
            pretrain=str(self.directory / model),
            prompt_data=None,
            eval_data=str(self._data / f"{prompts}.jsonl"),
            max_eval_samples=max(TAUGHT_PROMPTS, self.recipe.num_eval_prompts),
            temperature=temperature or 1.0,
            train_batch_size=1,
            micro_train_batch_size=1,
            output_dir=str(folder),
        )
        settings = EvalSettings(SAMPLES_PER_PROMPT if temperature else 0)
        with quietly(self.directory):
            return run_evaluation(config, settings).metrics["greedy/accuracy"]

    def _prompts(self, name: str, count: int, seed: int, *, held_out: bool = False) -> None:
        path = self._data / f"{name}.jsonl"
        write_exercises(path, self.recipe.task, count, seed=seed, held_out=held_out)

    def _responses(self, folder: str) -> Iterable[Mapping[str, object]]:
        from lightrft.tools.evaluation.evaluation_run import RESPONSES_FILE

        path = self.directory / folder / RESPONSES_FILE
        yield from map(parse_object, lines_of(path))

    def _write(self, name: str, rows: Iterable[Mapping[str, object]], run: str = "") -> None:
        """Write rows, and the run that their samples come from."""
        path = self._data / f"{name}.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        if run:
            model = self.directory / run / "model"
            of_model = run_of_model(model)
            facts = {
                "run": run,
                "run_path": of_model.get("path"),
                "run_sha256": of_model.get("run_sha256"),
                "stage": of_model.get("stage"),
                "model": str(model),
                "rows_sha256": file_sha256(path),
                "tokens": {},
            }
            write_origin(path, facts)


def _numbers(recipe: Recipe) -> dict[str, object]:
    """Return the choices of a recipe, without its task."""
    return {each.name: getattr(recipe, each.name) for each in fields(recipe) if each.name != "task"}


def has_begun(recipe: Recipe, directory: Path) -> bool:
    """Return whether a folder holds the stages of this recipe, finished or not."""
    return read_json(directory / BEGUN_FILE) == _numbers(recipe)


def pairs(responses: Iterable[Mapping[str, object]]) -> list[dict[str, object]]:
    """Return right and wrong samples of one prompt, `PAIRS_PER_PROMPT` at most, none twice."""
    by_prompt: dict[object, tuple[dict[object, None], dict[object, None]]] = {}
    for each in responses:
        if each["pass"] == "sampled" and each["response"] and not each["truncated"]:
            wrong, right = by_prompt.setdefault(each["prompt"], ({}, {}))
            (right if each["accuracy"] == 1.0 else wrong)[each["response"]] = None
    return [
        {"prompt": prompt, "chosen": chosen, "rejected": rejected}
        for prompt, (wrong, right) in by_prompt.items()
        for chosen, rejected in islice(zip(right, wrong, strict=False), PAIRS_PER_PROMPT)
    ]


def table(outcomes: Sequence[Outcome]) -> str:
    """Return the outcomes in columns."""
    return "\n".join(
        [
            "stage     held-out  seconds  folder",
            *(
                f"{each.stage:8}  {each.accuracy:8.3f}  {each.seconds:7.1f}  {each.folder}"
                for each in outcomes
            ),
            "held-out of reward: pairs whose better answer scores higher",
        ]
    )


def run_pipeline(recipe: Recipe, directory: Path) -> None:
    """Run all stages; print the table and write `summary.json` and the reports."""
    from lightrft.tools.report.page import write_report
    from lightrft.tools.report.report_command import FILE, write_comparison

    outcomes = Pipeline(recipe, directory).run()
    for each in outcomes:
        write_report(each.folder)
    write_comparison([each.folder for each in outcomes], directory / FILE)
    entries = {
        each.stage: {"accuracy": each.accuracy, "seconds": each.seconds} for each in outcomes
    }
    path = directory / "summary.json"
    path.write_text(json.dumps({"seed": recipe.seed, "stages": entries}, indent=2) + "\n")
    print(table(outcomes))
    print(f"  open {directory / FILE} in a browser")
