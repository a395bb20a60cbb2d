"""Files, functions and models that decide the numbers of a run, and which of them changed."""

from __future__ import annotations

import ast
import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from lightrft.config import TrainConfig
from lightrft.config.files import (
    FileError,
    file_sha256,
    read_object,
    regular_file,
    sealed,
    typed,
    unsealed,
)
from lightrft.config.parts.data import split_sources
from lightrft.config.registry import REGISTRIES, split_kind, split_reference
from lightrft.config.toml import write_whole
from lightrft.datasets.files import local_files
from lightrft.datasets.row_origin import origin_of
from lightrft.engines.media.file_facts import SETTLED_SECONDS, FileFacts, FileFactsByPath, keeping
from lightrft.reporting.files import cache_folder, package_versions
from lightrft.run.provenance import describe_models, named_paths, own_functions

# Name of the images, videos and sounds of rows, beside the paths of files.
MEDIA = "media of prompt_data"


@dataclass(frozen=True, slots=True)
class Change:
    """A difference between the run on disk and the command that continues it.

    Args:
        name: Name of the option, or path of an input file.
        before, after: Values as the user sees them.
        is_free: Whether the continued run is as exact as an uninterrupted one.
    """

    name: str
    before: str
    after: str
    is_free: bool

    def __str__(self) -> str:
        """Return one line: the change, its old and new value."""
        return f"{self.name}: {self.before} -> {self.after}"


def media_sha256(digests: Iterable[bytes]) -> str:
    """Return one hash of all media of a run's rows, in order; "" without media."""
    joined = b"\n".join(digests)
    return hashlib.sha256(joined).hexdigest() if joined else ""


@contextmanager
def remembered_media(
    config: TrainConfig, *, writes: bool, settled_seconds: float = SETTLED_SECONDS
) -> Iterator[None]:
    """Reuse an earlier run's facts about media files of the same data, instead of reading them.

    A file of `$XDG_CACHE_HOME/lightrft/media` (`~/.cache`) holds them. It is read at the beginning
    and written at the end, also after an error; if that fails nothing is remembered.

    Args:
        config: Options that name the data.
        writes: Whether this rank writes the file; one does.
        settled_seconds: See `FileFactsByPath`.
    """
    versions = package_versions(("lightrft-engines", "pillow"))
    data = [config.prompt_data, config.eval_data, config.pretrain_data]
    name = hashlib.sha256(json.dumps([str(Path.cwd()), data, versions]).encode()).hexdigest()
    known: dict[str, FileFacts] = {}
    with suppress(RuntimeError, OSError, FileError):
        held = unsealed(read_object(cache_folder("media") / name), name)
        known = typed(dict[str, FileFacts], held["files"], name)
    facts, before = FileFactsByPath(known, settled_seconds=settled_seconds), repr(known)
    try:
        with keeping(facts):
            yield
    finally:
        if writes and repr(facts.by_path) != before:
            files = {path: asdict(each) for path, each in facts.by_path.items()}
            with suppress(RuntimeError, OSError):
                folder = cache_folder("media")
                folder.mkdir(parents=True, exist_ok=True)
                write_whole(folder / name, sealed({"files": files}))


def describe_inputs(config: TrainConfig, media: str = "") -> dict[str, Mapping[str, object]]:
    """Return hash and time of the files that decide a run's numbers, by path; hashes of functions.

    For rows that were made of another run's samples, `origin` and `run` name that run.

    Args:
        config: Options that name the files.
        media: Hash of the media of the rows, for the entry `MEDIA`; "" without.
    """
    inputs: dict[str, Mapping[str, object]] = {}
    for path in input_files(config):
        digest = file_sha256(path)
        modified_ns = path.stat().st_mtime_ns
        inputs[str(path)] = {
            "sha256": digest,
            "modified_ns": modified_ns,
            **origin_of(path, digest),
        }
    hashes = own_functions(config) | ({MEDIA: media} if media else {})
    return inputs | {name: {"sha256": digest} for name, digest in hashes.items()}


def changed_media(start: Mapping[str, object], media: str) -> list[Change]:
    """Return the change of media, if rows have others than at the start of the run."""
    recorded = start.get("inputs")
    old = recorded.get(MEDIA) if isinstance(recorded, Mapping) else None
    return _difference(MEDIA, "contents", old.get("sha256"), media) if isinstance(old, dict) else []


def changed_inputs(start: Mapping[str, object], config: TrainConfig) -> list[Change]:
    """Return files and functions whose contents changed since a run started.

    Args:
        start: Record of the start.
        config: Options of the command that continues it.
    """
    recorded = start.get("inputs")
    if not isinstance(recorded, Mapping):
        return []
    changes = []
    deciding = input_files(config, held_out=False)
    for path in input_files(config):
        old = recorded.get(str(path))
        if not isinstance(old, Mapping) or old.get("modified_ns") == path.stat().st_mtime_ns:
            continue
        # Held-out rows may change, as the option that names them may.
        differences = _difference(str(path), "contents", old.get("sha256"), file_sha256(path))
        changes += [replace(each, is_free=path not in deciding) for each in differences]
    for name, digest in own_functions(config).items():
        old = recorded.get(name)
        if isinstance(old, Mapping):
            changes += _difference(name, "code", old.get("sha256"), digest)
    return changes


def changed_models(start: Mapping[str, object], config: TrainConfig) -> list[Change]:
    """Return models whose weights or tokenizers changed since the start; see `changed_inputs`.

    This includes the trained model: it is the reference, and readers of the run's record look for
    its weights there.
    """
    recorded = start.get("models")
    known = recorded if isinstance(recorded, Mapping) else {}
    changes = []
    for role, entry in describe_models(config, known).items():
        old = known.get(role)
        # Another place counts as a changed option.
        if isinstance(old, Mapping) and old.get("path") == entry["path"]:
            name = f"{role} {entry['path']}"
            for what in ("weights", "tokenizer"):
                key = f"{what}_sha256"
                if what == "weights" or key in old:  # older versions recorded no tokenizer
                    changes += _difference(
                        name, what, old.get(key) or "", str(entry.get(key) or "")
                    )
    return changes


def _difference(name: str, what: str, before: object, after: str) -> list[Change]:
    if before == after:
        return []
    old, new = (f"{what} {str(digest)[:12] or 'none'}" for digest in (before, after))
    return [Change(name, old, new, is_free=False)]


def input_files(config: TrainConfig, *, held_out: bool = True) -> list[Path]:
    """Return local files of data, templates and stored numbers, user code, and its imports.

    Args:
        config: Options that name them.
        held_out: Whether to include the rows of evaluations.
    """
    names: list[str | Path] = []
    sources = (
        (config.prompt_data, config.prompt_split),
        (config.eval_data if held_out else None, config.eval_split),
        (config.pretrain_data, "train"),
    )
    for text, split in sources:
        for source in split_sources(text) if text is not None else ():
            names += local_files(source, split)
    chosen = [config.environment, config.agent, *config.tools]
    for name in REGISTRIES:
        value = config.__dict__[name] or ()
        chosen += (value,) if isinstance(value, str) else value
    code_files = [
        Path((split_reference(split_kind(item or "")[1]) or ("", ""))[0]) for item in chosen
    ]
    names += [file for path in code_files if path.is_file() for file in (path, *files_beside(path))]
    names += named_paths(config.agent_command or "")
    names += filter(
        None,
        (config.ref_logprobs, config.chat_template, config.judge_template, config.judge_rubric),
    )
    return [path for path in dict.fromkeys(map(Path, names)) if path.is_file()]


def files_beside(plugin: Path) -> list[Path]:
    """Return files of its folder that a plug-in imports, directly or indirectly."""
    files: list[Path] = []
    remaining = [plugin]
    while remaining:
        path = remaining.pop()
        try:
            tree = ast.parse(regular_file(path).read_bytes())
        except (OSError, SyntaxError, ValueError, RecursionError):
            continue  # loading it raises the error
        for module in _imported(tree, path, plugin.parent):
            for file in (module.with_suffix(".py"), module / "__init__.py"):
                if file.is_file() and file not in (plugin, *files):
                    files.append(file)
                    remaining.append(file)
    return files


def _imported(tree: ast.Module, path: Path, folder: Path) -> Iterator[Path]:
    """Yield paths that imports lead to, if below `folder`; relative ones start at `path`."""
    for node in ast.walk(tree):
        names = [alias.name for alias in getattr(node, "names", ()) if isinstance(alias, ast.alias)]
        start = folder
        if isinstance(node, ast.ImportFrom):
            above = path.absolute().parents
            start = above[min(node.level, len(above)) - 1] if node.level else folder
            names = [node.module or "", *(f"{node.module or ''}.{name}" for name in names)]
        for name in names if isinstance(node, ast.Import | ast.ImportFrom) else ():
            parts = [part for part in name.split(".") if part.isidentifier()]
            # `import a.b` runs a, too.
            yield from (start.joinpath(*parts[:count]) for count in range(1, len(parts) + 1))
