"""Provenance: hashes that identify a run, its data and the models that it came from."""

from __future__ import annotations

import hashlib
import inspect
import json
import shlex
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from types import CodeType

from lightrft.config import TrainConfig
from lightrft.config.files import (
    FileError,
    file_sha256,
    read_object,
    regular_file,
    sealed,
    unsealed,
)
from lightrft.config.registry import REGISTRIES
from lightrft.config.toml import write_whole

PROVENANCE_FILE = "provenance.json"
WEIGHT_FILES = ("*.safetensors", "pytorch_model*.bin")
# Also chat templates, and files that make features of media.
TOKENIZER_FILES = (
    "*token*.json",
    "vocab*",
    "merges.txt",
    "*.model",
    "*.tiktoken",
    "chat_template*",
    "*processor_config.json",
)
_BLOCK_BYTES, _NUM_BLOCKS = 1 << 20, 64


def fingerprint(folder: Path) -> str:
    """Return the hash of the weights in a folder: names, sizes and contents of their files.

    Of a file of more than 64 MiB 64 blocks of 1 MiB count, spread evenly from its first byte, which
    holds the names and shapes, to its last one. Training changes them all, and reading all of a
    large model would take minutes.

    Args:
        folder: Folder of a model.

    Returns:
        Hex digits; "" without weights.
    """
    files = _found(folder, WEIGHT_FILES)
    weights_hash = hashlib.sha256()
    for path in files:
        size = path.stat().st_size
        weights_hash.update(f"{path.name} {size}\n".encode())
        last = max(0, size - _BLOCK_BYTES)
        with regular_file(path).open("rb") as stream:
            if size <= _BLOCK_BYTES * _NUM_BLOCKS:
                weights_hash.update(stream.read())
                continue
            for place in range(_NUM_BLOCKS):
                stream.seek(last * place // (_NUM_BLOCKS - 1))
                weights_hash.update(stream.read(_BLOCK_BYTES))
    return weights_hash.hexdigest() if files else ""


def tokenizer_hash(folder: Path) -> str:
    """Return the hash of names and contents of a folder's tokenizer files; "" without any."""
    files = _found(folder, TOKENIZER_FILES)
    text = "".join(f"{path.name} {file_sha256(path)}\n" for path in files)
    return hashlib.sha256(text.encode()).hexdigest() if files else ""


def describe_models(
    config: TrainConfig, known: Mapping[str, object] | None = None
) -> dict[str, dict[str, object]]:
    """Return path, hashes and run of each model that a run starts from, by its option.

    Several reward models are `reward_pretrain`, `reward_pretrain 2` and so on, teachers by row
    `teacher NAME`. Names of the hub and addresses have a path alone.

    Args:
        config: Options that name the models.
        known: Earlier result for the same run: weight files that were not written since are not
            read again.
    """
    paths: dict[str, str | None] = {"pretrain": config.pretrain}
    paths |= {f"teacher {name}".rstrip(): path for name, path in config.teacher_places.items()}
    if isinstance(config.critic_pretrain, str):
        paths["critic_pretrain"] = config.critic_pretrain
    paths["lora_path"] = config.lora_path
    for number, scorer in enumerate(config.reward_pretrain, start=1):
        paths["reward_pretrain" if number == 1 else f"reward_pretrain {number}"] = scorer
    return {
        role: _described(path, (known or {}).get(role))
        for role, path in paths.items()
        if path is not None
    }


def _described(path: str, known: object) -> dict[str, object]:
    folder = Path(path)
    if not folder.is_dir():
        return {"path": path}
    files = _found(folder, WEIGHT_FILES)
    times: dict[str, object] = {
        "path": str(folder.resolve()),
        "modified_ns": max((file.stat().st_mtime_ns for file in files), default=0),
        "num_bytes": sum(file.stat().st_size for file in files),
    }
    old = known if isinstance(known, Mapping) else {}
    is_untouched = all(old.get(name) == value for name, value in times.items())
    weights = str(old["weights_sha256"]) if is_untouched else fingerprint(folder)
    entry: dict[str, object] = {
        **times,
        "weights_sha256": weights,
        "tokenizer_sha256": tokenizer_hash(folder),
    }
    if origin := run_of_model(folder):
        # Weights that were changed since are no result of that run.
        is_same = origin.pop("weights_sha256", None) == weights
        entry["run"] = {**origin, "is_unchanged": is_same}
    return entry


def _found(folder: Path, patterns: Iterable[str]) -> list[Path]:
    paths = {path for pattern in patterns for path in folder.glob(pattern)}
    return sorted(path for path in paths if path.is_file())


def run_hash(config_sha256: str, inputs: Mapping[str, object], models: Mapping[str, object]) -> str:
    """Return the hash of a run: of its options, its input files and the models it starts from."""
    files = {
        path: entry.get("sha256") for path, entry in inputs.items() if isinstance(entry, Mapping)
    }
    hashes = {
        role: [entry.get("weights_sha256", entry.get("path")), entry.get("tokenizer_sha256")]
        for role, entry in models.items()
        if isinstance(entry, Mapping)
    }
    text = json.dumps([config_sha256, files, hashes], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def write_model_run(model: Path, run: Path, *, run_sha256: str, stage: str) -> None:
    """Write into the folder of a trained model which run made it."""
    if model.is_dir():
        facts: dict[str, object] = {
            "path": str(run.resolve()),
            "run_sha256": run_sha256,
            "stage": stage,
            "weights_sha256": fingerprint(model),
        }
        write_whole(model / PROVENANCE_FILE, sealed(facts) + "\n")


def run_of_model(model: Path) -> dict[str, object]:
    """Return path, hash and stage of the run that made a model; {} if that is not known."""
    try:
        return unsealed(read_object(model / PROVENANCE_FILE), model)
    except FileError:
        return {}


def own_functions(config: TrainConfig) -> dict[str, str]:
    """Return hashes of the chosen functions and classes that live in this process alone.

    Comments and places do not count, and neither do the values of globals. An object without code
    is left out.

    Returns:
        Hash by "OPTION NAME".
    """
    hashes = {}
    for option, registry in REGISTRIES.items():
        chosen = config.__dict__[option] or ()
        for name in (chosen,) if isinstance(chosen, str) else chosen:
            if name not in [*registry] or registry.is_packaged(name):
                continue
            if parts := [*_parts(registry.load(name))]:
                digest = hashlib.sha256("\n".join(parts).encode())
                hashes[f"{option} {name}"] = digest.hexdigest()
    return hashes


def _parts(entry: object) -> Iterator[str]:
    """Yield the parts of an object: names, constants and instructions of its code."""
    if isinstance(entry, partial):
        yield repr((entry.args, sorted(entry.keywords.items())))
        entry = entry.func
    entry = inspect.unwrap(entry) if callable(entry) else entry
    code = getattr(getattr(entry, "__func__", entry), "__code__", None)
    if isinstance(code, CodeType):
        yield from _code_parts(code)
        return
    owner = entry if isinstance(entry, type) else type(entry)
    for name, member in sorted(vars(owner).items()):
        member_code = getattr(member, "__code__", None)
        if isinstance(member_code, CodeType):
            yield name
            yield from _code_parts(member_code)


def _code_parts(code: CodeType) -> Iterator[str]:
    yield repr((code.co_code, code.co_names, code.co_varnames, code.co_freevars))
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _code_parts(constant)
        else:
            yield repr(sorted(map(repr, constant)) if isinstance(constant, frozenset) else constant)


def named_paths(command: str) -> list[Path]:
    """Return files and folders that words of a command name."""
    return [Path(word).absolute() for word in shlex.split(command) if Path(word).exists()]
