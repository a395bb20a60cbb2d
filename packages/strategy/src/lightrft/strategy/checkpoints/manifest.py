"""What a complete checkpoint folder says about itself."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

from lightrft.strategy.checkpoints.client_state import (
    CheckpointError,
    load_state,
    restore_rng_state,
)

logger = logging.getLogger(__name__)

FORMAT = "lightrft-checkpoint"
FORMAT_VERSION = 1
MANIFEST_NAME = "manifest.json"
CLIENT_STATE_NAME = "client_state"
# A checkpoint that is being replaced under the same tag; it counts until the new one is in place.
REPLACED_PREFIX = ".lightrft-old-"


@dataclass(frozen=True, slots=True)
class FileEntry:
    """One file of a checkpoint; `path` is relative to the checkpoint's folder."""

    path: str
    num_bytes: int
    sha256: str


@dataclass(frozen=True, slots=True)
class Manifest:
    """What a complete checkpoint consists of.

    Args:
        tag: Name of its folder.
        order: Greater than that of every checkpoint that was in the folder before.
        strategy: Name of the strategy class that wrote it.
        world_size: Number of ranks that wrote it.
        details: What the strategy needs to know before it loads (for instance the ZeRO stage).
        files: Every file except the manifest.
    """

    tag: str
    order: int
    strategy: str
    world_size: int
    details: dict[str, int | str] = field(default_factory=dict)
    files: tuple[FileEntry, ...] = ()

    @property
    def num_bytes(self) -> int:
        """Size of all files."""
        return sum(entry.num_bytes for entry in self.files)

    def to_json(self) -> str:
        """The text of the manifest file."""
        return json.dumps(
            {"format": FORMAT, "format_version": FORMAT_VERSION, **asdict(self)}, indent=1
        )

    @classmethod
    def from_json(cls, text: str) -> Manifest:
        """Parse a manifest.

        Raises:
            CheckpointError: The text is not a manifest of this format.
        """
        try:
            values = json.loads(text)
            if values["format"] != FORMAT or values["format_version"] != FORMAT_VERSION:
                raise CheckpointError(
                    f"unknown checkpoint format {values['format']!r} version "
                    f"{values['format_version']!r}: expected {FORMAT!r} version {FORMAT_VERSION}"
                )
            return cls(
                tag=values["tag"],
                order=values["order"],
                strategy=values["strategy"],
                world_size=values["world_size"],
                details=values["details"],
                files=tuple(FileEntry(**entry) for entry in values["files"]),
            )
        except (KeyError, TypeError, json.JSONDecodeError) as error:
            raise CheckpointError(f"not a checkpoint manifest: {error!r}") from error


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A complete checkpoint on disk."""

    path: Path
    manifest: Manifest

    def client_state(self) -> dict[str, object]:
        """What the caller gave to `save_ckpt` as `client_state`."""
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
        restore_rng_state(load_state(state_file))
        return True


def rng_file(folder: Path, rank: int) -> Path:
    """Where the generators of one rank are kept, without a suffix."""
    return folder / "rng" / f"rank_{rank:05d}"


def list_checkpoints(save_dir: Path) -> list[Checkpoint]:
    """Every folder below `save_dir` that holds a readable manifest, oldest first."""
    found = []
    for path in sorted(save_dir.iterdir()) if save_dir.is_dir() else ():
        is_replaced = path.name.startswith(REPLACED_PREFIX)
        is_hidden = path.name.startswith(".") and not is_replaced
        if is_hidden or not (path / MANIFEST_NAME).is_file():
            continue
        try:
            manifest = Manifest.from_json((path / MANIFEST_NAME).read_text())
        except CheckpointError as error:
            logger.warning("skipping %s: %s", path, error)
            continue
        if not is_replaced or not (save_dir / manifest.tag).exists():
            found.append(Checkpoint(path, manifest))
    return sorted(found, key=lambda item: item.manifest.order)
