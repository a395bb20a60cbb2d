"""Stages of the table of rules, the kinds of its cells, and what a stage reads of a row."""

from collections.abc import Callable

from tests.datasets.row_files import written

from lightrft.config import TrainConfig
from lightrft.datasets.types import DataError

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


def reader_of(stage):
    """The function by which a stage on rows reads its file."""
    from lightrft.datasets.preference_rows import load_preferences
    from lightrft.datasets.supervised_rows import load_supervised
    from lightrft.stages.reward.reward_inputs import load_rows

    return {"prefer": load_preferences, "reward": load_rows}.get(stage, load_supervised)


def load(
    stage: str, path: str, tokenizer: object, config: TrainConfig
) -> tuple[list[tuple[list[int], list[bool]]], str]:
    """Read a file as a stage does: of each row token ids and which are trained; and the summary.

    Raises:
        DataError: The stage does not take a row.
    """
    if stage in OF_ROWS:
        data = reader_of(stage)(path, tokenizer, config, max_samples=99, split="train")
        rows = [getattr(item, "rows", (item,))[0] for item in data.rows]
        assert not any(row.is_trained[0] for row in rows)
        return [(row.token_ids.tolist(), row.is_trained.tolist()) for row in rows], data.summary
    if stage == "data check":
        from lightrft.datasets.files import scan_rows
        from lightrft.tools.data.row_checks import check_prompts

        checked = check_prompts(list(scan_rows(path)), tokenizer, config)
        if checked.problems:
            raise DataError(checked.problems[0])
        prompts, summary = checked.made, str(checked)
    else:
        from lightrft.datasets import load_prompts
        from lightrft.rollout.environments.specs import ToolTokenizer

        shown = ToolTokenizer(tokenizer, []) if config.has_episodes else tokenizer
        loaded = load_prompts(path, shown, config)
        prompts, summary = loaded.prompts, loaded.report.summary()
        for prompt in prompts:  # what an environment's reset is given
            assert "None" not in str(prompt.row.get("prompt", ""))
    return [([*each.token_ids], [False] * len(each.token_ids)) for each in prompts], summary


def read(stage, columns, tokenizer, folder):
    """Token ids of the only row or prompt of a stage, and which of them are trained."""
    (row,), _ = load(stage, written(folder, [columns]), tokenizer, TrainConfig())
    return row


def answered(stage, prompt, answer, **columns):
    """The columns of a prompt and its answer; of stages that sample, the answer is left out."""
    if stage in ("train", "eval", "data check"):
        return {"input": prompt, **columns}
    if stage in ("prefer", "reward"):
        return {"prompt": prompt, "chosen": answer, "rejected": "worse", **columns}
    return {"prompt": prompt, "completion": answer, **columns}
