"""Files of rows for tests."""

import json
from pathlib import Path


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


def prompts_of(config, folder, rows, reader, **options):
    """Write rows, and return the prompts that a run reads of them."""
    from lightrft.datasets.prompts import load_prompts

    path = written(folder, rows, "train.jsonl")
    return load_prompts(path, reader, config.replaced(options)).prompts
