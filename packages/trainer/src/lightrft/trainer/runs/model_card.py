"""The README of an exported model."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING

from lightrft.config import TrainConfig
from lightrft.config.options import options_of
from lightrft.trainer.reporting.inputs import RunData


SHOWN_GROUPS = ("algorithm", "rollout", "training")
HUB_ID = re.compile(r"[\w.-]+/[\w.-]+\Z")


def model_card(run: RunData, *, base_model: str | None, is_local: bool) -> str:
    """Markdown with the metadata that model hubs read; it holds no path of this machine.

    Args:
        run: What is known about the run.
        base_model: Path or hub id of the model that the run started from.
        is_local: It is a path.
    """
    head = ["library_name: transformers", "pipeline_tag: text-generation"]
    if base_model is not None and not is_local and HUB_ID.match(base_model):
        head.append(f"base_model: {json.dumps(base_model)}")
    head += ["tags:", "- reinforcement-learning", "- lightrft"]
    known = options_of(TrainConfig)
    options = [
        f"| `{option.name}` | `{option.value}` |"
        for option in run.options
        if option.name in known and known[option.name][1].group in SHOWN_GROUPS
        and (known[option.name][1].common or not option.is_default)
    ]  # fmt: skip
    versions = [f"| {name} | {text} |" for name, text in run.versions.items()]
    return "\n".join(
        [
            "---",
            *head,
            "---",
            "",
            "# Model fine-tuned by reinforcement learning",
            "",
            f"Trained with lightrft for {run.last_step} steps.",
            *(_sentences(run)),
            "",
            "```python",
            "from transformers import AutoModelForCausalLM, AutoTokenizer",
            "",
            'model = AutoModelForCausalLM.from_pretrained("this directory")',
            'tokenizer = AutoTokenizer.from_pretrained("this directory")',
            "```",
            *_table(("option", "value"), options),
            *_table(("package", "version"), versions),
            "",
        ]
    )


def _sentences(run: RunData) -> list[str]:
    """First and last value of the evaluation and of the training reward."""
    sentences = []
    for name, words in (("eval/reward", "evaluation reward"), ("reward", "training reward")):
        values = [value for _, value in run.points(name) if value is not None]
        if values:
            sentences.append(f"Mean {words}: {values[0]:.3f} at first, {values[-1]:.3f} at last.")
    return sentences


def _table(head: tuple[str, str], rows: list[str]) -> list[str]:
    return ["", f"| {head[0]} | {head[1]} |", "|---|---|", *rows] if rows else []
