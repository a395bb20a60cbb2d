"""Files of rows for tests."""

import json
from pathlib import Path

from tests.datasets import chat_families
from tokenizers.pre_tokenizers import ByteLevel

from lightrft.config import TrainConfig
from lightrft.datasets import read_rows

CHAT = [
    {"role": "user", "content": "hello"},
    {"role": "assistant", "content": "ok."},
    {"role": "user", "content": "more"},
    {"role": "assistant", "content": "all"},
]


def family_tokenizer(family="Qwen2.5", *, use_regex=False):
    pre_tokenizer = ByteLevel(add_prefix_space=False, use_regex=use_regex)
    return chat_families.family_tokenizer(family, pre_tokenizer=pre_tokenizer)


def load(read, folder, rows, *, tokenizer=None, vocab_size=None, **options):
    """Write rows, and return what a stage reads of them."""
    return read(
        written(folder, rows),
        tokenizer or family_tokenizer(),
        TrainConfig(**options),
        max_samples=100,
        split="train",
        vocab_size=vocab_size,
    )


def written(folder, rows, name="rows.jsonl"):
    """Write rows as JSON lines, or as Parquet with one form of all; return the path."""
    path = Path(folder) / name
    if name.endswith(".parquet"):
        import pyarrow
        from pyarrow import parquet

        parquet.write_table(pyarrow.Table.from_pylist(list(rows)), path)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def inputs(path, **options):
    """Return the column `input` of rows that are read."""
    return [row.columns["input"] for row in read_rows(path, **options)]


def prompts_of(config, folder, rows, reader, **options):
    """Write rows, and return the prompts that a run reads of them."""
    from lightrft.datasets.prompts import load_prompts

    path = written(folder, rows, "train.jsonl")
    return load_prompts(path, reader, config.replaced(options)).prompts
