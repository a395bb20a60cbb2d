"""File of the reference's log-probabilities, computed before the run.

They hold for one data set, one chat template and one model. The file holds a hash of each and is
reused only if all hashes are equal.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from lightrft.config import ConfigError, PreferenceOptions
from lightrft.config.files import FileError, make_folder, read_object, sealed, typed, unsealed
from lightrft.config.toml import write_whole
from lightrft.datasets.preference_rows import Preference
from lightrft.strategy.backend import PreparedModel, inner_module
from lightrft.strategy.weight_sync.parameter_source import base_source
from lightrft.strategy.weight_sync.verification import weights_hash

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from lightrft.strategy.backend import Backend

# Enough for some hundred million answers.
MAX_FILE_BYTES = 1 << 33
Sums = tuple[tuple[float, ...], ...]


@dataclass(frozen=True, slots=True)
class ReferenceOrigin:
    """Hashes of the inputs of the sums.

    Args:
        data: Hash of the token ids, trained tokens and labels of all answers, also held-out ones.
        template: Hash of the chat template's text.
        model: Hash of the weights, with their compute dtype; "" is not known yet.
    """

    data: str
    template: str
    model: str = ""


@dataclass(frozen=True, slots=True)
class StoredReference:
    """Content of the file.

    Args:
        origin: Origin of the sums.
        trained, held_out: Sums of logprobs of each pair's answers in float64, in order.
    """

    origin: ReferenceOrigin
    trained: Sums
    held_out: Sums

    def by_item(
        self, trained: Sequence[Preference], held_out: Sequence[Preference]
    ) -> dict[int, tuple[float, ...]]:
        """Return the sums by the identity of each item."""
        pairs = [*zip(trained, self.trained, strict=True)]
        pairs += zip(held_out, self.held_out, strict=True)
        return {id(item): sums for item, sums in pairs}

    def save(self, path: Path) -> None:
        """Write the file, whole or not at all."""
        make_folder(path.parent)
        write_whole(path, sealed(asdict(self)) + "\n")


def read_stored(path: Path, origin: ReferenceOrigin, sizes: tuple[int, int]) -> StoredReference:
    """Return the content of the file if it is for this data and template.

    Args:
        path: Existing file.
        origin: Origin of the run; its model is not compared.
        sizes: Numbers of items to train on and of held-out ones.

    Raises:
        FileError: The file is damaged.
        ConfigError: The file is for other data or another template.
    """
    values = read_object(path, max_bytes=MAX_FILE_BYTES)
    stored = typed(StoredReference, unsealed(values, path), path)
    require_origin(stored, replace(origin, model=stored.origin.model), path)
    if (len(stored.trained), len(stored.held_out)) != sizes:
        raise FileError(f"{path}: it has other numbers of rows than the data that it names")
    return stored


def require_origin(stored: StoredReference, origin: ReferenceOrigin, path: Path) -> None:
    """Raise a ConfigError if the sums have another origin."""
    run, other = asdict(origin), asdict(stored.origin)
    different = [name for name in run if run[name] != other[name]]
    if different:
        name = different[0]
        raise ConfigError(
            f"ref_logprobs: {path} was computed with another {' and another '.join(different)} "
            f"({other[name][:16]}, here {run[name][:16]}): name another file, or delete it to have "
            "it computed anew"
        )


def origin_of_data(
    trained: Sequence[Preference],
    held_out: Sequence[Preference],
    tokenizer: PreTrainedTokenizerBase,
) -> ReferenceOrigin:
    """Return the origin of sums over these rows, without the model's hash."""
    digest = hashlib.sha256()
    for kind in (trained, held_out):
        digest.update(f"{len(kind)} items\n".encode())
        for item in kind:
            for row, is_good in zip(item.rows, item.labels, strict=True):
                digest.update(f"{len(row.token_ids)} {is_good}\n".encode())
                digest.update(row.token_ids.astype("<i4").tobytes())
                digest.update(row.is_trained.astype("u1").tobytes())
    template = str(tokenizer.chat_template or "")
    return ReferenceOrigin(digest.hexdigest(), hashlib.sha256(template.encode()).hexdigest())


def hash_of_start(model: PreparedModel, backend: Backend) -> str:
    """Return a hash of the starting weights without adapters, and their dtype; collective.

    It is equal for every strategy and number of ranks.
    """
    source = base_source(inner_module(model), backend.parameter_source(model))
    dtype = str(backend.context.compute_dtype).removeprefix("torch.")
    return f"{weights_hash(source)}-{dtype}"


def stored_path(config: PreferenceOptions) -> Path | None:
    """Return the file of a run, or None without one."""
    return None if config.ref_logprobs is None else Path(config.ref_logprobs)
