"""Export of a run's final model as a Hugging Face checkpoint, read back and compared."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lightrft.cli.errors import CommandError, ExitCode, PreflightError
from lightrft.cli.preflight import HUB_ID
from lightrft.config import TrainConfig
from lightrft.config.options import options_of
from lightrft.config.toml import read_toml
from lightrft.models.adapter_files import FACTORS, PREFIX, WEIGHTS_FILE, read_adapters
from lightrft.models.loading import (
    has_processor,
    is_classifier,
    is_reward_model,
    load_causal_lm,
    load_config,
    load_processor,
    load_tokenizer,
    save_pretrained,
)
from lightrft.models.reward_model import RewardModel
from lightrft.reporting.files import CONFIG_FILE, SAMPLES_FILE, JsonLines
from lightrft.strategy.distributed.collectives import ALONE, nonfinite_names, require_finite
from lightrft.tools.report.run_data import NotARunError, RunData, read_run

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

PROMPT = "The quick brown fox"
MAX_PROMPT_TOKENS = 256
LANGUAGE_MODEL, CLASSIFIER = "AutoModelForCausalLM", "AutoModelForSequenceClassification"
SHOWN_GROUPS = ("algorithm", "rollout", "training")  # groups of options in the README


class ExportError(CommandError):
    """An exported model that differs from the trained one; the message says where."""

    code = ExitCode.VERIFICATION


def export_model(run: Path, directory: Path) -> str:
    """Write the run's final model, read it back, and compare weights and logits.

    The directory appears only after the comparison.

    Args:
        run: Folder of the run.
        directory: Target directory; must not exist, or be empty.

    Returns:
        Sentence on what was written, and on the comparison.

    Raises:
        NotARunError: The folder holds no run, or no final model.
        ModelLoadError: The final model cannot be read.
        ExportError: The exported model differs, or equals the model before training.
        NonFiniteError: The final model is not finite.
        PreflightError: The directory cannot be written.
    """
    options = read_toml(run / CONFIG_FILE) if (run / CONFIG_FILE).is_file() else {}
    saved = options.get("save_path")
    source_path = Path(saved) if isinstance(saved, str) else run / "model"
    data = read_run(run)
    if not source_path.is_dir():
        raise NotARunError(
            f"{run} has no final model at {source_path}: it is written when the run ends; "
            "continue the run with --load_checkpoint"
        )
    base_model, is_local = _base_model(options, run)
    partial = directory.with_name(directory.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        partial.mkdir(parents=True)
    except OSError as error:
        raise PreflightError(
            f"{directory} cannot be written ({error.strerror}): choose another directory"
        ) from error
    try:
        what, difference = _write_and_compare(source_path, partial, _prompt(run))
        parts = _trained_parts(source_path / "adapter", options.get("lora_path"))
        _require_trained(partial, base_model, parts)
        card = model_card(data, base_model=base_model, is_local=is_local, loader=_loader(partial))
        (partial / "README.md").write_text(card, encoding="utf-8")
        if directory.is_dir():
            directory.rmdir()
        partial.replace(directory)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return (
        f"wrote {what} to {directory}; read back: weights equal, logits of one prompt within "
        f"{difference:.2g}"
    )


def _write_and_compare(source_path: Path, target: Path, prompt: str) -> tuple[str, float]:
    """Write a checkpoint; return what it holds, and the largest difference of a logit read back."""
    dtype = _dtype_name(source_path)
    tokenizer = load_tokenizer(str(source_path))
    source = load_exported(source_path, dtype).eval()
    require_finite(nonfinite_names(source.named_parameters()), what="weights are", group=ALONE)
    if isinstance(source, RewardModel):
        source.save_pretrained(target)
        tokenizer.save_pretrained(target)
    else:
        save_pretrained(source, tokenizer, target)
    if has_processor(source_path):
        load_processor(str(source_path)).save_pretrained(target)
    exported = load_exported(target, _dtype_name(target)).eval()
    difference = compare_models(source, exported, load_tokenizer(str(target)), prompt)
    # Tied parameters count once.
    num_parameters = sum(value.numel() for value in source.parameters())
    return f"{num_parameters} {dtype} parameters", difference


def load_exported(path: str | Path, dtype: str) -> PreTrainedModel | RewardModel:
    """Return the model of a checkpoint: a reward model or a language model."""
    if is_reward_model(str(path)):
        return RewardModel.from_pretrained(str(path), dtype=dtype)
    return load_causal_lm(str(path), dtype=dtype)


def _loader(path: Path) -> str:
    """Return the name of the class that reads an exported model."""
    if not is_reward_model(str(path)):
        return LANGUAGE_MODEL
    return CLASSIFIER if is_classifier(load_config(str(path))) else "RewardModel"


def compare_models(
    source: PreTrainedModel | RewardModel,
    exported: PreTrainedModel | RewardModel,
    tokenizer: PreTrainedTokenizerBase,
    prompt: str,
) -> float:
    """Return the largest difference of the logits of two models that must be equal.

    Raises:
        ExportError: A tensor differs in any bit, or a logit by more than rounding.
    """
    differing = differing_tensors(source.state_dict(), exported.state_dict())
    if differing:
        raise ExportError(
            f"{len(differing)} tensors of the exported model differ from the trained one, first "
            f"{differing[0]}: nothing was exported"
        )
    token_ids = tokenizer(prompt, add_special_tokens=False)["input_ids"][:MAX_PROMPT_TOKENS]
    expected, actual = (_logits(each, torch.tensor([token_ids])) for each in (source, exported))
    if isinstance(exported, RewardModel) and not exported.is_beside:
        # transformers reads the model this way.
        with torch.no_grad():
            actual = exported.model(input_ids=torch.tensor([token_ids])).logits[0].float()
    difference = float((expected - actual).abs().max())
    # Equal weights at another memory address may be summed in another order.
    dtype = next(source.parameters()).dtype
    allowed = 32 * torch.finfo(dtype).eps * max(1.0, float(expected.abs().max()))
    if not difference <= allowed:
        raise ExportError(
            f"logits of the exported model differ from the trained one by {difference:.3g}, "
            f"allowed {allowed:.3g}: nothing was exported"
        )
    return difference


def differing_tensors(first: Mapping[str, Tensor], second: Mapping[str, Tensor]) -> list[str]:
    """Return the names of tensors that only one side has, or whose dtype or values differ."""
    shared = first.keys() & second.keys()
    unequal = {
        name
        for name in shared
        if first[name].dtype != second[name].dtype or not torch.equal(first[name], second[name])
    }
    return sorted((first.keys() ^ second.keys()) | unequal)


def _trained_parts(adapters: Path, start: object) -> tuple[str, ...]:
    """Return ends of the names of weights that can show a change.

    Beside adapters that did not change these are the parts that are trained whole: a base of 4 bits
    differs from its file without training.

    Args:
        adapters: Folder of the trained adapters; there may be none.
        start: Folder of those that the run started from; None is new ones, whose B is 0.
    """
    if not (adapters / WEIGHTS_FILE).is_file():
        return ("",)
    trained = read_adapters(adapters)
    first = {name: 0 * value for name, value in trained.items() if FACTORS[1] in name}
    if start is not None:
        file = Path(str(start)) / WEIGHTS_FILE
        first = read_adapters(file.parent) if file.is_file() else {}
    if not first or any(not torch.equal(trained[n], value.float()) for n, value in first.items()):
        return ("",)
    others = trained.keys() - first.keys()
    return tuple(name.removeprefix(PREFIX) for name in others if FACTORS[0] not in name)


def _require_trained(target: Path, base_model: str | None, parts: tuple[str, ...]) -> None:
    """Raise an ExportError if training has changed nothing.

    Args:
        target: Folder of the exported model.
        base_model: Path or hub id of the model that the run started from, or None.
        parts: See `_trained_parts`.
    """
    differing = [*parts]
    if base_model is not None and Path(base_model).is_dir():
        if is_reward_model(base_model) or not is_reward_model(str(target)):
            models = (load_exported(each, _dtype_name(target)) for each in (target, base_model))
            differing = differing_tensors(*(each.state_dict() for each in models))
        else:  # a head of scores, which is new on another model, is no sign of training
            differing = [part for part in parts if not part]
    if not any(name.endswith(parts) for name in differing):
        raise ExportError(
            f"the final model is that with which the run started ({base_model}): nothing was "
            "learned, nothing was exported"
        )


def _base_model(options: Mapping[str, object], run: Path) -> tuple[str | None, bool]:
    """Return the model that the run started from, and whether it is a path."""
    base, output_dir = options.get("pretrain"), options.get("output_dir")
    if not isinstance(base, str):
        return None, False
    if isinstance(output_dir, str) and Path(base).is_relative_to(output_dir):
        # The run may have been moved since its start.
        return str(run / Path(base).relative_to(output_dir)), True
    return base, Path(base).is_dir()


def _dtype_name(path: Path) -> str:
    dtype = load_config(str(path)).dtype
    return "float32" if dtype is None else str(dtype).removeprefix("torch.")


def _prompt(run: Path) -> str:
    """Return the first prompt that the run logged, or `PROMPT`."""
    for _, entry in JsonLines(run / SAMPLES_FILE):
        prompt = entry.get("prompt")
        if isinstance(prompt, str) and prompt:
            return prompt
    return PROMPT


@torch.no_grad()
def _logits(model: PreTrainedModel | RewardModel, token_ids: Tensor) -> Tensor:
    """Return logits, [seq, vocab] float32, or [scores] of a reward model."""
    if isinstance(model, RewardModel):
        mask = torch.ones_like(token_ids, dtype=torch.bool)
        scores: Tensor = model(token_ids, mask, by_name=True)[0]
        return scores
    logits: Tensor = model(input_ids=token_ids).logits[0].float()
    return logits


def model_card(
    run: RunData, *, base_model: str | None, is_local: bool, loader: str = LANGUAGE_MODEL
) -> str:
    """Return Markdown with the metadata that model hubs read, without paths of this machine.

    Args:
        run: Data of the run.
        base_model: Path or hub id of the model that the run started from.
        is_local: Whether it is a path.
        loader: Name of the class that reads the model.
    """
    title, task = "Model fine-tuned by reinforcement learning", "text-generation"
    tag, package = "reinforcement-learning", "transformers"
    if loader != LANGUAGE_MODEL:
        title, task, tag = "Reward model", "text-classification", "reward-model"
        package = package if loader == CLASSIFIER else "lightrft.models"
    head = ["library_name: transformers", f"pipeline_tag: {task}"]
    if base_model is not None and not is_local and HUB_ID.match(base_model):
        head.append(f"base_model: {json.dumps(base_model)}")
    head += ["tags:", f"- {tag}", "- lightrft"]
    known = options_of(TrainConfig)
    options = [
        f"| `{option.name}` | `{option.value}` |"
        for option in run.options
        if option.name in known
        and known[option.name][1].group in SHOWN_GROUPS
        and (known[option.name][1].common or not option.is_default)
    ]
    versions = [f"| {name} | {text} |" for name, text in run.versions.items()]
    return "\n".join(
        [
            "---",
            *head,
            "---",
            "",
            f"# {title}",
            "",
            f"Trained with lightrft for {run.last_step} steps.",
            *(_sentences(run)),
            "",
            "```python",
            *(
                ["from transformers import AutoTokenizer", f"from {package} import {loader}"]
                if package != "transformers"
                else [f"from transformers import {loader}, AutoTokenizer"]
            ),
            "",
            f'model = {loader}.from_pretrained("this directory")',
            'tokenizer = AutoTokenizer.from_pretrained("this directory")',
            "```",
            *_table(("option", "value"), options),
            *_table(("package", "version"), versions),
            "",
        ]
    )


def _sentences(run: RunData) -> list[str]:
    """Return sentences with the first and last reward of the evaluation and of training."""
    sentences = []
    for name, words in (("eval/reward", "evaluation reward"), ("reward", "training reward")):
        values = run.values(name)
        if values:
            sentences.append(f"Mean {words}: {values[0]:.3f} at first, {values[-1]:.3f} at last.")
    return sentences


def _table(head: tuple[str, str], rows: list[str]) -> list[str]:
    return ["", f"| {head[0]} | {head[1]} |", "|---|---|", *rows] if rows else []
