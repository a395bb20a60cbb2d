"""Manifests of checkpoint folders."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import cast

from lightrft.strategy.checkpoints.errors import CheckpointError

logger = logging.getLogger(__name__)

FORMAT = "lightrft-checkpoint"
FORMAT_VERSION = 2
MANIFEST_NAME = "manifest.json"
CLIENT_STATE_NAME = "client_state"
# A checkpoint that is being replaced under the same tag; it counts until the new one is in place.
REPLACED_PREFIX = ".lightrft-old-"
# Beyond any manifest; what is larger is not read into memory.
_MAX_MANIFEST_BYTES = 2**28


@dataclass(frozen=True, slots=True)
class FileEntry:
    """One file of a checkpoint; `path` is relative to the checkpoint's folder."""

    path: str
    num_bytes: int
    sha256: str


@dataclass(frozen=True, slots=True)
class Manifest:
    """Contents of a complete checkpoint.

    Args:
        tag: Name of its folder.
        order: Greater than that of every checkpoint that was in the folder before.
        strategy: Name of the strategy class that wrote it.
        world_size: Number of ranks that wrote it.
        is_latest: A load without a tag may take it.
        details: What the strategy needs to know before it loads (for instance the ZeRO stage).
        files: Every file except the manifest.
    """

    tag: str
    order: int
    strategy: str
    world_size: int
    is_latest: bool = True
    details: dict[str, int | str] = field(default_factory=dict)
    files: tuple[FileEntry, ...] = ()

    @property
    def num_bytes(self) -> int:
        """Size of all files."""
        return sum(entry.num_bytes for entry in self.files)

    def to_json(self) -> str:
        """The text of the manifest file, which ends with a hash of all the rest."""
        values = {"format": FORMAT, "format_version": FORMAT_VERSION, **asdict(self)}
        return json.dumps({**values, "sha256": _digest(values)}, indent=1)

    @classmethod
    def from_json(cls, text: str) -> Manifest:
        """Parse a manifest.

        Raises:
            CheckpointError: The text is not a whole manifest of this format.
        """
        try:
            values = json.loads(text)
        # Bytes that are no JSON, numbers of thousands of digits, nesting without end.
        except (ValueError, RecursionError) as error:
            raise CheckpointError(f"not a checkpoint manifest: {error}") from error
        if not isinstance(values, dict):
            raise CheckpointError(f"not a checkpoint manifest: a JSON {type(values).__name__}")
        found = values.get("format"), values.get("format_version")
        if found != (FORMAT, FORMAT_VERSION):
            raise CheckpointError(
                f"unknown checkpoint format {str(found[0])[:40]!r} version {str(found[1])[:40]!r}: "
                f"expected {FORMAT!r} version {FORMAT_VERSION}"
            )
        written = values.pop("sha256", None)
        if written != _digest(values):
            raise CheckpointError("it does not match its own SHA-256")
        return cls._checked(values)

    @classmethod
    def _checked(cls, values: Mapping[str, object]) -> Manifest:
        """The record, if every value has its type and every path stays inside the folder."""
        files, details = values.get("files"), values.get("details")
        kinds = {"tag": str, "order": int, "strategy": str, "world_size": int, "is_latest": bool}
        odd = [name for name, kind in kinds.items() if type(values.get(name)) is not kind]
        if not isinstance(files, list) or not all(_is_file_entry(entry) for entry in files):
            odd.append("files")
        if not isinstance(details, dict) or not all(
            type(value) in (int, str) for value in details.values()
        ):
            odd.append("details")
        if odd or set(values) != {"format", "format_version", "files", "details", *kinds}:
            raise CheckpointError(f"not a checkpoint manifest: wrong or missing {odd or 'names'}")
        tag = str(values["tag"])
        if not is_plain_name(tag):
            raise CheckpointError(f"not a checkpoint manifest: tag {tag!r} is no folder name")
        return cls(
            tag=tag,
            order=cast("int", values["order"]),
            strategy=str(values["strategy"]),
            world_size=cast("int", values["world_size"]),
            is_latest=bool(values["is_latest"]),
            details=cast("dict[str, int | str]", details),
            files=tuple(FileEntry(**entry) for entry in cast("list[dict]", files)),  # type: ignore[type-arg]
        )


def _digest(values: Mapping[str, object]) -> str:
    text = json.dumps(values, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def is_plain_name(name: str) -> bool:
    """Whether it names one entry of a folder, visible and not the folder itself."""
    return bool(name) and not name.startswith(".") and not set("/\\\0") & set(name)


def _is_file_entry(entry: object) -> bool:
    """Whether it describes a file below the checkpoint's folder."""
    if not isinstance(entry, dict) or set(entry) != {"path", "num_bytes", "sha256"}:
        return False
    if [type(entry[name]) for name in ("path", "num_bytes", "sha256")] != [str, int, str]:
        return False
    parts: list[str] = entry["path"].split("/")
    return not set(parts) & {"", ".", ".."} and "\0" not in entry["path"]


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A complete checkpoint on disk."""

    path: Path
    manifest: Manifest

    def client_state(self) -> dict[str, object]:
        """Client state that the caller gave to `save_ckpt`."""
        # Imported here and below: finding checkpoints must not cost the import of torch.
        from lightrft.strategy.checkpoints.client_state import load_state

        return load_state(self.path / CLIENT_STATE_NAME)

    def require_strategy(self, name: str) -> None:
        """Raises a CheckpointError if another strategy wrote it."""
        written = self.manifest.strategy
        if written != name:
            raise CheckpointError(
                f"{self.path} was written by {written}, not by {name}: resume with the same "
                "backend, or start from a model written by save_model"
            )

    def require_world_size(self, world_size: int) -> None:
        """Raises a CheckpointError if another number of ranks wrote it."""
        written = self.manifest
        if written.world_size != world_size:
            raise CheckpointError(
                f"{self.path} was written by {written.world_size} ranks and can only be loaded by "
                f"as many with {written.strategy}: got {world_size}; start as many ranks, or start "
                "from a model written by save_model"
            )

    def require_details(self, details: Mapping[str, int | str]) -> None:
        """Check what the strategy noted when it saved.

        Raises:
            CheckpointError: A value differs; the message names it.
        """
        for name, wanted in details.items():
            found = self.manifest.details.get(name)
            if found != wanted:
                raise CheckpointError(
                    f"{self.path} was written with {name} {found}: got {wanted}; use the same, or "
                    "load only the weights (load_module_only=True)"
                )

    def restore_rng(self, rank: int) -> bool:
        """Set this process's generators to those of `rank`; False if there are none."""
        state_file = rng_file(self.path, rank)
        if not state_file.with_name(state_file.name + ".json").exists():
            return False
        from lightrft.strategy.checkpoints.client_state import load_state, restore_rng_state

        restore_rng_state(load_state(state_file))
        return True


def rng_file(folder: Path, rank: int) -> Path:
    """Path of the generators of one rank, without a suffix."""
    return folder / "rng" / f"rank_{rank:05d}"


def list_checkpoints(save_dir: Path) -> list[Checkpoint]:
    """Every folder below `save_dir` that holds a readable manifest, oldest first."""
    found, problems = scan_checkpoints(save_dir)
    for problem in problems:
        logger.warning("skipping %s", problem)
    return found


def scan_checkpoints(save_dir: Path) -> tuple[list[Checkpoint], list[str]]:
    """Every readable checkpoint below a folder, oldest first, and what is wrong with the others.

    A folder that shows no trace of a checkpoint is neither.
    """
    found, problems = [], []
    for path in checkpoint_folders(save_dir):
        is_replaced = path.name.startswith(REPLACED_PREFIX)
        try:
            manifest = _read_manifest(path)
        except (CheckpointError, OSError, ValueError) as error:
            problems.append(f"{path}: {MANIFEST_NAME}: {error}")
            continue
        if is_replaced and (save_dir / manifest.tag).exists():
            continue
        if path.name not in (manifest.tag, REPLACED_PREFIX + manifest.tag):
            problems.append(f"{path}: {MANIFEST_NAME} is that of {manifest.tag!r}")
            continue
        found.append(Checkpoint(path, manifest))
    return sorted(found, key=lambda item: item.manifest.order), problems


def _read_manifest(folder: Path) -> Manifest:
    path = folder / MANIFEST_NAME
    if not path.is_file():
        raise CheckpointError("is missing")
    if path.stat().st_size > _MAX_MANIFEST_BYTES:
        raise CheckpointError(f"has {path.stat().st_size} bytes, more than any manifest")
    return Manifest.from_json(path.read_text(encoding="utf-8"))


def checkpoint_folders(save_dir: Path) -> list[Path]:
    """Folders of checkpoints, complete or not; those still being written are no such."""
    return [
        path
        for path in (sorted(save_dir.iterdir()) if save_dir.is_dir() else ())
        if (not path.name.startswith(".") or path.name.startswith(REPLACED_PREFIX))
        and looks_like_checkpoint(path)
    ]


def looks_like_checkpoint(folder: Path) -> bool:
    """Whether a checkpoint of ours is or was there, complete or not."""
    traces = (MANIFEST_NAME, f"{CLIENT_STATE_NAME}.json", "rng")
    return any((folder / name).exists() for name in traces)
