"""Origins of files of rows with token ids: the run that made them, and its tokens."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from lightrft.config.files import FileError, read_object, sealed, unsealed
from lightrft.config.options import short
from lightrft.config.parts.data import split_sources
from lightrft.config.toml import write_whole
from lightrft.datasets.types import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_TOKEN_ID = re.compile("0|[1-9][0-9]{0,8}")


def origin_path(path: Path) -> Path:
    """Return the file with the origin of the rows of `path`."""
    return path.with_name(f"{path.name}.origin.json")


def write_origin(path: Path, facts: Mapping[str, object]) -> None:
    """Write the origin of a file of rows beside it.

    Args:
        path: File of rows.
        facts: `run` (its name), `run_path`, `run_sha256`, `model`, `rows_sha256` (of the file),
            `tokens` (see `tokens_of`; {} for rows without ids), and any further facts.
    """
    write_whole(origin_path(path), sealed(facts) + "\n")


def origin_of(path: Path, sha256: str) -> dict[str, object]:
    """Return the run that a file's rows come from: in words as `origin`, with hash as `run`.

    Args:
        path: File of rows.
        sha256: Hash of its content; an origin with another hash is ignored.

    Returns:
        Facts by name; {} without a known origin.
    """
    try:
        origin = unsealed(read_object(origin_path(path)), path)
    except FileError:
        return {}
    if origin.get("rows_sha256") != sha256:
        return {}
    hashes = [
        f"{what} {str(origin[f'{what}_sha256'])[:12]}"
        for what in ("config", "rollouts")
        if f"{what}_sha256" in origin
    ]
    known = f" ({', '.join(hashes)})" if hashes else ""
    facts: dict[str, object] = {"origin": f"{origin.get('run')} of {origin.get('model')}{known}"}
    if "run_path" in origin:
        facts["run"] = {
            "path": origin["run_path"],
            "run_sha256": origin.get("run_sha256"),
            "stage": origin.get("stage"),
        }
    return facts


def tokens_of(tokenizer: PreTrainedTokenizerBase, token_ids: Iterable[int]) -> dict[str, str]:
    """Return the token of each id, by the id as JSON key; "" where the tokenizer has none."""
    ids = sorted(set(token_ids))
    tokens: list[str | None] = tokenizer.convert_ids_to_tokens(ids)
    return {str(i): token or "" for i, token in zip(ids, tokens, strict=True)}


def check_tokens(sources: str, tokenizer: PreTrainedTokenizerBase) -> None:
    """Compare the tokens of ids in files of rows with those of the tokenizer.

    Args:
        sources: Sources like `prompt_data`; files without an origin are skipped.
        tokenizer: Tokenizer of the trained model.

    Raises:
        DataError: An id stands for another token, or an origin is damaged.
    """
    for source in split_sources(sources):
        path = origin_path(Path(source))
        if not path.is_file():
            continue
        try:
            origin = unsealed(read_object(path), path)
        except FileError as error:
            raise DataError(f"{error}; write the rows again, or remove it") from error
        meant = origin.get("tokens")
        if not isinstance(meant, dict) or not all(map(_TOKEN_ID.fullmatch, meant)):
            raise DataError(f"{path}: expected tokens by their ids; write the rows again")
        actual = tokens_of(tokenizer, map(int, meant))
        for key, token in meant.items():
            if actual[key] != token:
                raise DataError(
                    f"{source}: id {key} is {short(token)} in the rows and {actual[key]!r} in the "
                    f"tokenizer of the model: train one with the tokenizer of {origin.get('model')}"
                )
