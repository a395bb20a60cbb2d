"""Manifests of checkpoint folders."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

from lightrft.config.files import (
    FileEntry,
    FileError,
    parse_json,
    read_bytes,
    require_object,
    sealed,
    typed,
    unsealed,
)
from lightrft.strategy.distributed.process_end import CheckpointError

logger = logging.getLogger(__name__)

FORMAT = "lightrft-checkpoint"
FORMAT_VERSION = 2
MANIFEST_NAME = "manifest.json"
CLIENT_STATE_NAME = "client_state"
# A checkpoint that is being replaced under its tag; it counts until the new one is in place.
REPLACED_PREFIX = ".lightrft-old-"


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
        """Return the text of the manifest file, ending with a hash of everything else."""
        values = {"format": FORMAT, "format_version": FORMAT_VERSION, **asdict(self)}
        return sealed(values)

    @classmethod
    def from_json(cls, content: bytes) -> Manifest:
        """Parse a manifest.

        Raises:
            CheckpointError: It is not a whole manifest of this format.
        """
        place = "not a checkpoint manifest"
        try:
            values_with_hash = require_object(parse_json(content, place), place)
            version = values_with_hash.get("format"), values_with_hash.get("format_version")
            if version != (FORMAT, FORMAT_VERSION):
                raise CheckpointError(
                    f"unknown checkpoint format {str(version[0])[:40]!r} version "
                    f"{str(version[1])[:40]!r}: expected {FORMAT!r} version {FORMAT_VERSION}"
                )
            values = unsealed(values_with_hash, "it")
            del values["format"], values["format_version"]
            manifest = typed(cls, values, place)
        except FileError as error:
            raise CheckpointError(str(error)) from error
        if not is_plain_name(manifest.tag):
            raise CheckpointError(f"{place}: tag {manifest.tag!r} is no folder name")
        return manifest


def is_plain_name(name: str) -> bool:
    """Return whether it names one entry of a folder, visible and not the folder itself."""
    return bool(name) and not name.startswith(".") and not set("/\\\0") & set(name)


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A complete checkpoint on disk."""

    path: Path
    manifest: Manifest

    def client_state(self) -> dict[str, object]:
        """Client state that the caller passed to `save_ckpt`."""
        # Imported here and below: finding checkpoints must not cost the import of torch.
        from lightrft.strategy.checkpoints.files import load_state

        return load_state(self.path / CLIENT_STATE_NAME)

    def require_strategy(self, name: str) -> None:
        """Raise a CheckpointError if another strategy wrote it."""
        written = self.manifest.strategy
        if written != name:
            raise CheckpointError(
                f"{self.path} was written by {written}, not by {name}: resume with the same "
                "backend, or start from a model written by save_model"
            )

    def require_world_size(self, world_size: int) -> None:
        """Raise a CheckpointError if another number of ranks wrote it."""
        written = self.manifest
        if written.world_size != world_size:
            raise CheckpointError(
                f"{self.path} was written by {written.world_size} ranks and can only be loaded by "
                f"as many with {written.strategy}: got {world_size}; start as many ranks, or start "
                "from a model written by save_model"
            )

    def require_details(
        self,
        details: Mapping[str, int | str],
        remedy: str = "use the same, or load only the weights (load_module_only=True)",
    ) -> None:
        """Compare the strategy's details with those of the save.

        Raises:
            CheckpointError: A value differs; the message names it.
        """
        for name, wanted in details.items():
            saved = self.manifest.details.get(name)
            if saved != wanted:
                raise CheckpointError(
                    f"{self.path} was written with {name} {saved}: got {wanted}; {remedy}"
                )

    def restore_rng(self, rank: int) -> bool:
        """Set this process's generators to those of `rank`; False if there are none."""
        state_file = rng_file(self.path, rank)
        if not state_file.with_name(state_file.name + ".json").exists():
            return False
        from lightrft.strategy.checkpoints.files import load_state, restore_rng_state

        restore_rng_state(load_state(state_file))
        return True


def rng_file(folder: Path, rank: int) -> Path:
    """Return the path of the generators of one rank, without a suffix."""
    return folder / "rng" / f"rank_{rank:05d}"


def list_checkpoints(save_dir: Path) -> list[Checkpoint]:
    """Return every folder below `save_dir` with a readable manifest, oldest first."""
    checkpoints, problems = scan_checkpoints(save_dir)
    for problem in problems:
        logger.warning("skipping %s", problem)
    return checkpoints


def scan_checkpoints(save_dir: Path) -> tuple[list[Checkpoint], list[str]]:
    """Return a folder's readable checkpoints, oldest first, and what is wrong with the others.

    A folder that shows no trace of a checkpoint is in neither list.
    """
    checkpoints, problems = [], []
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
        checkpoints.append(Checkpoint(path, manifest))
    return sorted(checkpoints, key=lambda item: item.manifest.order), problems


def _read_manifest(folder: Path) -> Manifest:
    path = folder / MANIFEST_NAME
    if not path.is_file():
        raise CheckpointError("is missing")
    return Manifest.from_json(read_bytes(path))


def checkpoint_folders(save_dir: Path) -> list[Path]:
    """Return folders of checkpoints, complete or not; those still being written do not count."""
    return [
        path
        for path in (sorted(save_dir.iterdir()) if save_dir.is_dir() else ())
        if (not path.name.startswith(".") or path.name.startswith(REPLACED_PREFIX))
        and looks_like_checkpoint(path)
    ]


def looks_like_checkpoint(folder: Path) -> bool:
    """Return whether a checkpoint of ours is or was there, complete or not."""
    traces = (MANIFEST_NAME, f"{CLIENT_STATE_NAME}.json", "rng")
    return any((folder / name).exists() for name in traces)
