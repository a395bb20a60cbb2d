"""Record of what an engine sampled, written before any other code sees it."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from lightrft.engines.rows import RawCompletion, RequestedSample
from lightrft.engines.types import Facts, SamplingParams

# Request id, sample index, hash of the context: what one call sampled for one sample.
Key = tuple[int, int, str]


@dataclass(frozen=True, slots=True)
class LedgerEntry:
    """Tokens of one sample from one call of the engine.

    Args:
        request_id, sample_index: As in the request.
        context_hash: Of the ids before the tokens, as the engine got them; see `hash_context`.
        token_ids, logprobs: As they were sampled.
        weights_version: Of the weights that sampled them.
        facts: As in `Completion`.
        sampling: See `SamplingParams.distribution`; () where a checkpoint does not say.
        finish_reason: Why the call ended; "" where a checkpoint does not say.
    """

    request_id: int
    sample_index: int
    context_hash: str
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    weights_version: int
    facts: Facts = field(default_factory=dict)
    sampling: tuple[float, ...] = ()
    finish_reason: str = ""

    @property
    def key(self) -> Key:
        """What it is looked up by."""
        return self.request_id, self.sample_index, self.context_hash


def hash_context(token_ids: Sequence[int] | NDArray[np.int64]) -> str:
    """128 bits of the ids, as hexadecimal digits."""
    data = np.asarray(token_ids, dtype=np.int64).tobytes()
    return hashlib.blake2b(data, digest_size=16).hexdigest()


class Ledger:
    """The entries of the calls made while it records; off unless somebody asks."""

    def __init__(self) -> None:
        self._entries: list[LedgerEntry] = []
        self._is_recording = False

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Records the calls inside."""
        self._is_recording = True
        try:
            yield
        finally:
            self._is_recording = False

    def append(
        self,
        rows: Sequence[RequestedSample],
        raws: Sequence[RawCompletion],
        version: int,
        params: SamplingParams,
    ) -> None:
        """Notes what was sampled for each row."""
        if not self._is_recording:
            return
        hashes: dict[int, str] = {}  # samples of one request share their prompt
        for row, raw in zip(rows, raws, strict=True):
            found = hashes.get(id(row.prompt))
            if found is None:
                found = hashes[id(row.prompt)] = hash_context(row.prompt)
            self._entries.append(
                LedgerEntry(
                    row.request_id,
                    row.sample_index,
                    found,
                    raw.token_ids,
                    raw.logprobs,
                    version,
                    raw.facts,
                    params.distribution,
                    raw.finish_reason,
                )
            )

    def restore(self, entries: Iterable[LedgerEntry]) -> None:
        """Notes what the engine of a killed process had written down."""
        if self._is_recording:
            self._entries += entries

    def discard(self, request_ids: Collection[int]) -> None:
        """Forgets what was sampled for these requests."""
        self._entries = [e for e in self._entries if e.request_id not in request_ids]

    def take(self) -> list[LedgerEntry]:
        """All entries; none are left."""
        entries, self._entries = self._entries, []
        return entries
