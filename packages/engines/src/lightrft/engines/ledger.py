"""Record of sampled tokens, written before any other code sees them."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from lightrft.engines.rows import RawCompletion, RequestedSample
from lightrft.engines.types import Facts, SamplingParams

# Request id, sample index and hash of the context, which identify one sample of one call.
Key = tuple[int, int, str]


@dataclass(frozen=True, slots=True)
class LedgerEntry:
    """Tokens of one sample from one call of the engine.

    Args:
        request_id, sample_index: Ids of the sample, as in the request.
        context_hash: Hash of the ids before the tokens, as the engine got them, by `hash_context`.
        token_ids, logprobs: Sampled tokens and their logprobs.
        weights_version: Version of the weights that sampled them.
        facts: Further facts, as in `Completion`.
        sampling: `SamplingParams.distribution`; () in checkpoints without it.
        finish_reason: Reason why the call ended; "" in checkpoints without it.
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
        """Key for looking it up."""
        return self.request_id, self.sample_index, self.context_hash


def hash_context(token_ids: Sequence[int] | NDArray[np.int64]) -> str:
    """Return a 128-bit hash of the ids, as hexadecimal digits."""
    data = np.asarray(token_ids, dtype=np.int64).tobytes()
    return hashlib.blake2b(data, digest_size=16).hexdigest()


class Ledger:
    """Entries of the calls made while recording, which is off by default."""

    def __init__(self) -> None:
        self._entries: list[LedgerEntry] = []
        self._is_recording = False

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record calls within the context."""
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
        """Add an entry for each row."""
        if not self._is_recording:
            return
        hashes: dict[int, str] = {}  # samples of one request share their prompt
        for row, raw in zip(rows, raws, strict=True):
            context_hash = hashes.get(id(row.prompt))
            if context_hash is None:
                context_hash = hashes[id(row.prompt)] = hash_context(row.prompt)
            self._entries.append(
                LedgerEntry(
                    row.request_id,
                    row.sample_index,
                    context_hash,
                    raw.token_ids,
                    raw.logprobs,
                    version,
                    raw.facts,
                    params.distribution,
                    raw.finish_reason,
                )
            )

    def restore(self, entries: Iterable[LedgerEntry]) -> None:
        """Add entries recorded by the engine of a killed process."""
        if self._is_recording:
            self._entries += entries

    def discard(self, request_ids: Collection[int]) -> None:
        """Drop the entries of these requests."""
        self._entries = [e for e in self._entries if e.request_id not in request_ids]

    def take(self) -> list[LedgerEntry]:
        """Remove and return all entries."""
        entries, self._entries = self._entries, []
        return entries
