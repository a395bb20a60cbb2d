"""Stages of the table of rules, the kinds of its cells, and what a stage reads of a row."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
from tests.datasets.row_files import written

from lightrft.config import TrainConfig

STAGES = (
    "sft",
    "prefer",
    "reward",
    "distill on rows",
    "distill on samples",
    "train",
    "environments",
    "tools",
    "agents",
    "judge and reward models",
    "eval",
    "serve",
    "rows",
    "data check",
)
# Stages that train on the answers of rows, and stages that sample answers to prompts of rows.
OF_ROWS = "sft, prefer, reward, distill on rows"
OF_PROMPTS = "train, eval, data check"
# A test, which takes fixtures and its stage by their names, or the reason why none applies.
Cell = Callable[..., None] | str
PENDING = "pending"


def cells(*parts):
    """The row of a rule: by a stage, or by several with commas between them, a test or a reason.

    Stages that have neither are pending.
    """
    row: dict[str, Cell] = dict.fromkeys(STAGES, PENDING)
    for names, cell in (item for part in parts for item in part.items()):
        for name in names.split(", "):
            assert row[name] == PENDING, f"{name} has two cells"
            row[name] = cell
    return row


def model_folder(folder, tokenizer, **changes):
    """A folder of a tiny model without its weights; a reader of rows needs none."""
    from tests.models.tiny import tiny_config

    path = folder / "model"
    tiny_config("llama", **{"vocab_size": len(tokenizer), **changes}).save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


def read(
    stage: str, columns: dict[str, object], tokenizer: object, folder: Path, **options: object
) -> tuple[list[int], list[bool]]:
    """Token ids of the only row or prompt of a stage, and which of them are trained.

    Args:
        stage: A stage that reads rows.
        columns: Columns of the row, as the stage wants them.
        tokenizer: Tokenizer of the model.
        folder: An empty folder.
        options: Options of the run.
    """
    path = written(folder, [columns])
    if stage in ("train", "eval"):
        from lightrft.datasets import load_prompts

        (prompt,) = load_prompts(path, tokenizer, TrainConfig(**options)).prompts
        return [*prompt.token_ids], [False] * len(prompt.token_ids)
    if stage == "data check":
        from lightrft.datasets.files import scan_rows
        from lightrft.tools.data.row_checks import check_prompts

        found = check_prompts(list(scan_rows(path)), tokenizer, TrainConfig(**options))
        assert not found.problems
        return [*found.made[0].token_ids], [False] * len(found.made[0].token_ids)
    from lightrft.datasets.preference_rows import load_preferences
    from lightrft.datasets.supervised_rows import load_supervised
    from lightrft.stages.reward.reward_inputs import load_rows

    load = {"prefer": load_preferences, "reward": load_rows}.get(stage, load_supervised)
    (item,) = load(
        path, tokenizer, TrainConfig(**options), max_samples=9, split="train", vocab_size=None
    ).rows
    row = getattr(item, "rows", (item,))[0]
    assert not np.array(row.is_trained[:1]).any()
    return row.token_ids.tolist(), row.is_trained.tolist()


def answered(stage, prompt, answer, **columns):
    """The columns of a prompt and its answer; of stages that sample, the answer is left out."""
    if stage in ("train", "eval", "data check"):
        return {"input": prompt, **columns}
    if stage in ("prefer", "reward"):
        return {"prompt": prompt, "chosen": answer, "rejected": "worse", **columns}
    return {"prompt": prompt, "completion": answer, **columns}
