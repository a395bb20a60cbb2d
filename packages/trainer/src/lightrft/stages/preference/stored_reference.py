"""Log-probabilities of the reference that were computed before the run, in a file.

They hold for one data set, one chat template and one model: the file names each by a hash, and is
used again only where all are the same.
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
from lightrft.strategy.weight_sync.parameter_source import engine_source
from lightrft.strategy.weight_sync.verification import common_hashes, model_hash

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from lightrft.strategy.backend import Backend

# Of some hundred million answers.
MAX_FILE_BYTES = 1 << 33
Sums = tuple[tuple[float, ...], ...]


@dataclass(frozen=True, slots=True)
class ReferenceOrigin:
    """Hashes of what the numbers follow from.

    Args:
        data: Of the token ids, trained tokens and labels of all answers, held-out ones included.
        template: Of the chat template's text.
        model: Of the weights, and the dtype they compute in; "" is not known yet.
    """

    data: str
    template: str
    model: str = ""


@dataclass(frozen=True, slots=True)
class StoredReference:
    """The content of the file.

    Args:
        origin: Of the numbers.
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
        """Write the file whole or not at all."""
        make_folder(path.parent)
        write_whole(path, sealed(asdict(self)) + "\n")


def read_stored(path: Path, origin: ReferenceOrigin, sizes: tuple[int, int]) -> StoredReference:
    """Return the file, if it is of this data and template.

    Args:
        path: Exists.
        origin: Of the run; its model is not looked at.
        sizes: Items to train on, and held-out ones.

    Raises:
        FileError: It is damaged.
        ConfigError: It is of other data, or of another template.
    """
    values = read_object(path, max_bytes=MAX_FILE_BYTES)
    found = typed(StoredReference, unsealed(values, path), path)
    require_origin(found, replace(origin, model=found.origin.model), path)
    if (len(found.trained), len(found.held_out)) != sizes:
        raise FileError(f"{path}: it has other numbers of rows than the data that it names")
    return found


def require_origin(stored: StoredReference, origin: ReferenceOrigin, path: Path) -> None:
    """Raise a ConfigError if the numbers follow from something else."""
    own, other = asdict(origin), asdict(stored.origin)
    different = [name for name in own if own[name] != other[name]]
    if different:
        name = different[0]
        raise ConfigError(
            f"ref_logprobs: {path} was computed with another {' and another '.join(different)} "
            f"({other[name][:16]}, here {own[name][:16]}): name another file, or delete it to have "
            "it computed anew"
        )


def origin_of_data(
    trained: Sequence[Preference],
    held_out: Sequence[Preference],
    tokenizer: PreTrainedTokenizerBase,
) -> ReferenceOrigin:
    """Return the origin of numbers about these rows, whose model is not known yet."""
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
    """Return hash of the weights a run starts from, without adapters, and their dtype; collective.

    The same for every strategy and number of ranks.
    """
    module = inner_module(model)
    source = replace(engine_source(module, backend.parameter_source(model)), add_local=None)
    hashes, _ = common_hashes(source, source)
    dtype = str(backend.context.compute_dtype).removeprefix("torch.")
    return f"{model_hash(hashes) % 2**64:016x}-{dtype}"


def stored_path(config: PreferenceOptions) -> Path | None:
    """Return the file of a run, or None without one."""
    return None if config.ref_logprobs is None else Path(config.ref_logprobs)
