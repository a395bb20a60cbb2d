"""Table of all facts that a step has per row or per token.

A new fact needs a line here, an engine adapter that fills it (`Completion.facts`) and a consumer.
Everything between them loops over the table: selection, merging, exchange, delivery, padding,
journals, resumed responses, evidence of the ledger, records for an audit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Literal, cast

import numpy as np
from numpy.typing import ArrayLike, NDArray

from lightrft.engines.types import KEPT_IDS, ROUTES, Facts
from lightrft.records.rollout import ScoredRollout
from lightrft.records.sample_ledger import SampleEntry

Values = NDArray[np.generic]


@dataclass(frozen=True, slots=True)
class Column:
    """Fact of every row, or of every token.

    Args:
        name: Name in tables and files, and in `Completion.facts` if an engine fills it.
        dtype: Type in tables.
        level: "row"; "token" of prompt and response; "response token"; or the name of a column
            that holds the number of values of each row.
        of: Function for the value or values of a sample; None reads `Completion.facts`.
        travels: When it leaves the rank that sampled it: "exchange" to all ranks, "delivery" to the
            rank that trains the row, or never. The exchange takes rows only.
        wire: Type on the wire, "bit" for one bit, "runs" for each value once with the number of
            its repetitions; `dtype` if empty.
        fill: Value on tokens that were not sampled, on padding, and if an engine sets none.
        sent_where: Name of a flag of rows: only rows with it send values, those of others are
            implied.
        implied: Value of all sampled tokens of such other rows: the name of a column, or True.
        is_vouched: Whether the ledger holds the engine's values and the ledger gate compares them.
            Ids, masks and versions follow from the rows that the gate rebuilds.
        noted: Function for the value of a row from the notes made where it arose; the ledger gate
            compares the rows of all ranks with it. None compares nothing.
        pack: Function for the values of a row from the prompt's length, and from the engine's
            value and the version of each token of the response. The ledger gate compares a hash of
            what it makes of the engine's ledger.

    Raises:
        ValueError: The level does not allow this travel, or the ledger cannot vouch for it.
    """

    name: str
    dtype: type[np.generic]
    level: str = "response token"
    of: Callable[[ScoredRollout], ArrayLike] | None = None
    travels: Literal["exchange", "delivery", "stays"] = "delivery"
    wire: str = ""
    fill: float = 0
    sent_where: str = ""
    implied: str | Literal[True] = True
    is_vouched: bool = False
    noted: Callable[[SampleEntry], float] | None = None
    pack: Callable[[int, Sequence[str], ArrayLike], Values] | None = None

    def __post_init__(self) -> None:
        place = self.level, self.travels
        is_lost = self.level != "row" and self.travels == "exchange"
        is_unseen = self.noted is not None and place != ("row", "exchange")
        if is_lost or is_unseen or (self.is_vouched and place != ("response token", "delivery")):
            raise ValueError(
                f"column {self.name!r}: values of tokens travel by delivery, the ledger vouches "
                "for those of responses, and what is noted of rows is known to all ranks"
            )

    @property
    def is_padded(self) -> bool:
        """Return whether it becomes a [batch, seq] tensor."""
        return self.level in ("token", "response token")

    @property
    def missing(self) -> float | str:
        """Value of a token for which the engine gives none."""
        return self.fill if self.pack is None else ""

    @property
    def is_rare(self) -> bool:
        """Return whether most rows hold only zeros of it."""
        return bool(self.sent_where) and self.sent_where == self.implied

    def read(self, scored: Sequence[ScoredRollout]) -> Values:
        """Return the values of samples, one after another."""
        if self.level == "row":
            return np.array([self._values(item) for item in scored], dtype=self.dtype)
        parts = [np.asarray(self._values(item), dtype=self.dtype) for item in scored]
        return np.concatenate([np.zeros(0, self.dtype), *parts])

    def _values(self, item: ScoredRollout) -> ArrayLike:
        if self.of is not None:
            return self.of(item)
        completion = item.rollout.completion
        values = completion.facts.get(self.name, (self.missing,) * len(completion.is_sampled))
        if self.pack is None:
            return values
        num_prompt = len(completion.prompt_token_ids)
        return self.pack(num_prompt, cast("Sequence[str]", values), _versions(item))

    def to_wire(self, values: Values) -> bytes:
        """Return the bytes to send."""
        if self.wire == "bit":
            return np.packbits(values.astype(np.bool_)).tobytes()
        if self.wire == "runs":
            starts = np.flatnonzero(np.diff(values, prepend=values[:1] + 1))
            counts = np.diff(starts, append=len(values))
            return np.stack([values[starts], counts], axis=1).astype("<i4").tobytes()
        return values.astype(self.wire or self.dtype, copy=False).tobytes()

    def from_wire(self, data: memoryview, count: int) -> tuple[Values, memoryview]:
        """Return `count` values, and the bytes behind them."""
        if self.wire == "bit":
            size = -(-count // 8)
            bits = np.unpackbits(np.frombuffer(data, np.uint8, size), count=count)
            return bits.astype(self.dtype), data[size:]
        if self.wire == "runs":
            runs = np.frombuffer(data, "<i4", len(data) // 8 * 2).reshape(-1, 2).astype(np.int64)
            # Bytes behind the last run belong to other columns.
            num_runs = int(np.argmax(np.cumsum(runs[:, 1]) >= count)) + 1 if count else 0
            made = np.repeat(runs[:num_runs, 0], runs[:num_runs, 1])
            return made.astype(self.dtype), data[8 * num_runs :]
        kind = np.dtype(self.wire or self.dtype)
        values = np.frombuffer(data, kind, count)
        return values.astype(self.dtype, copy=False), data[values.nbytes :]


def _versions(item: ScoredRollout) -> ArrayLike:
    """Return the version of the weights that sampled each token."""
    versions = item.rollout.token_versions
    return _even_versions(item) if versions is None else versions


def _even_versions(item: ScoredRollout) -> ArrayLike:
    """Return the versions if the weights at the row's end sampled all of it."""
    completion = item.rollout.completion
    return np.where(completion.is_sampled, completion.weights_version, -1)


def _has_mixed_versions(item: ScoredRollout) -> bool:
    versions = item.rollout.token_versions
    return versions is not None and not np.array_equal(versions, _even_versions(item))


def _turn_rewards(item: ScoredRollout) -> list[float]:
    """Return the rewards of answered turns; () without rewards by turn or for excluded rows."""
    conversation = item.rollout.conversation
    rewards = [] if conversation is None or item.is_masked else conversation.turn_rewards
    return rewards if any(rewards) else []


def _paid(item: ScoredRollout) -> ArrayLike:
    """Return the rewards of turns, placed on their last tokens."""
    is_sampled = np.array(item.rollout.completion.is_sampled, dtype=np.bool_)
    paid, rewards = np.zeros(len(is_sampled)), _turn_rewards(item)
    if rewards:
        ends = np.flatnonzero(is_sampled & ~np.append(is_sampled[1:], False))
        paid[ends[: len(rewards)]] = rewards
    return paid


def pack_kept_ids(_: int, ids: Sequence[str], __: ArrayLike) -> Values:
    """Return the number of kept ids of each token of a response, then the ids of all tokens.

    A response without any has no values.
    """
    flat = np.frombuffer(bytes.fromhex("".join(ids)), "<i4")
    sizes = np.array([len(each) // 8 for each in ids], np.int32)
    return np.concatenate([sizes, flat]) if len(flat) else flat


class MissingRoutesError(RuntimeError):
    """An engine recorded the experts of only some positions of a row."""


def pack_routes(num_prompt: int, routes: Sequence[str], versions: ArrayLike) -> Values:
    """Return the bytes of the experts of each position but the last, one after another.

    A position has the experts of the newest weights that computed it, and of these the first.

    Raises:
        MissingRoutesError: There are experts of some positions only.
    """
    parts = [bytes.fromhex(each) for each in routes]
    if not any(parts):
        return np.zeros(0, np.uint8)
    first = next(place for place, part in enumerate(parts) if part)
    width = max(1, len(parts[first]) // (num_prompt + first))
    made = np.zeros((num_prompt + len(parts) - 1, width), np.uint8)
    newest, numbers = np.full(len(made), _NEVER), np.asarray(versions)
    for place, part in enumerate(parts):
        count, rest = divmod(len(part), width)
        stop = num_prompt + place
        if rest or count > stop:
            raise MissingRoutesError(
                f"the experts before response token {place} are {len(part)} bytes, expected a "
                f"multiple of {width} for at most {stop} positions"
            )
        known = slice(stop - count, stop)
        is_new = newest[known] < numbers[place]
        made[known][is_new] = np.frombuffer(part, np.uint8).reshape(count, width)[is_new]
        newest[known] = np.maximum(newest[known], numbers[place])
    lacking = np.flatnonzero(newest == _NEVER)
    # Observations at the end are read by no call.
    sampled = np.flatnonzero(numbers >= 0)
    lacking = lacking[lacking < (num_prompt + sampled[-1] if len(sampled) else len(made))]
    if len(lacking):
        raise MissingRoutesError(
            f"the engine recorded no experts of {len(lacking)} of {len(made)} positions, first of "
            f"position {lacking[0]}: --routing_replay off trains without them"
        )
    return made.reshape(-1)


_NEVER = np.iinfo(np.int64).min
_known = partial(Column, level="row", travels="exchange")
_count = partial(_known, dtype=np.int64, wire="<i4")
_claim = partial(_known, dtype=np.bool_)
_score = partial(_known, dtype=np.float64)
# The order of columns on the wire and within a message of tokens.
COLUMNS: dict[str, Column] = {
    column.name: column
    for column in (
        _count("sample_ids", of=lambda item: item.rollout.sample_id),
        _count(
            "group_ids", of=lambda item: item.rollout.group_id, noted=lambda entry: entry.group_id
        ),
        # A place in the data: teachers and samplers look up rows by it.
        _count("prompt_places", of=lambda item: item.rollout.prompt.id),
        _count("prompt_lengths", of=lambda item: len(item.rollout.completion.prompt_token_ids)),
        # Equal for equal prompts of a group: calls of an agent begin with prompts of their own,
        # and in another group the same tokens may stand for other images.
        _known(
            "prompt_hashes",
            np.int64,
            of=lambda item: hash((item.rollout.group_id, item.rollout.completion.prompt_token_ids)),
        ),
        _count("response_lengths", of=lambda item: len(item.rollout.completion.output_token_ids)),
        _count("sampled_lengths", of=lambda item: len(item.rollout.completion.sampled_token_ids)),
        _count("weights_versions", of=lambda item: item.rollout.completion.weights_version),
        _score(
            "rewards",
            of=lambda item: item.reward,
            noted=lambda entry: entry.reward,
        ),
        _score(
            "accuracies",
            of=lambda item: item.accuracy,
            noted=lambda entry: entry.accuracy,
        ),
        _claim(
            "is_truncated",
            of=lambda item: item.rollout.completion.finish_reason == "length",
        ),
        _claim(
            "is_masked",
            of=lambda item: item.is_masked,
            noted=lambda entry: entry.is_masked,
        ),
        _claim(
            "is_untruncated",
            of=lambda item: item.rollout.completion.logprobs_mode == "temperature",
        ),
        _claim("has_mixed_versions", of=_has_mixed_versions),
        _claim("has_turn_rewards", of=lambda item: bool(_turn_rewards(item))),
        _score("unshaped_rewards", of=lambda item: item.unshaped, travels="stays"),
        _score(
            "draw_weights",
            of=lambda item: item.rollout.prompt.draw_weight,
            travels="delivery",
        ),
        Column("token_ids", np.int32, level="token", of=lambda item: item.rollout.token_ids),
        Column(
            "rollout_logprobs",
            np.float32,
            of=lambda item: item.rollout.completion.output_logprobs,
            is_vouched=True,
        ),
        Column(
            "is_sampled",
            np.bool_,
            of=lambda item: item.rollout.completion.is_sampled,
            wire="bit",
            sent_where="has_observations",
        ),
        Column(
            "token_versions",
            np.int32,
            of=_versions,
            fill=-1,
            wire="runs",
            sent_where="has_mixed_versions",
            implied="weights_versions",
        ),
        _count("num_kept", of=lambda item: len(COLUMNS[KEPT_IDS].read([item]))),
        Column(KEPT_IDS, np.int32, level="num_kept", pack=pack_kept_ids),
        _count("num_route_bytes", of=lambda item: len(COLUMNS[ROUTES].read([item]))),
        Column(ROUTES, np.uint8, level="num_route_bytes", pack=pack_routes),
        Column(
            "turn_rewards",
            np.float32,
            of=_paid,
            sent_where="has_turn_rewards",
            implied="has_turn_rewards",  # 0 where there are none
        ),
    )
}


def columns(travels: str) -> list[Column]:
    """Return the columns that travel in one way, in the order of the table."""
    return [column for column in COLUMNS.values() if column.travels == travels]


def vouched_columns() -> list[Column]:
    """Return the columns that the ledger holds, in the order of the table."""
    return [column for column in COLUMNS.values() if column.is_vouched]


def packed_columns() -> list[Column]:
    """Return the columns that are compared with the ledger by a hash, in the order of the table."""
    return [column for column in COLUMNS.values() if column.pack is not None]


def join_facts(*parts: tuple[int, Facts]) -> dict[str, tuple[float | str, ...]]:
    """Return the facts of the parts of a response, one after another; missing ones are filled.

    Args:
        parts: Number of tokens of each part, and its facts by column; unknown facts are dropped.
    """
    joined = {}
    for name, column in COLUMNS.items():
        if any(name in facts for _, facts in parts):
            values = (facts.get(name, (column.missing,) * count) for count, facts in parts)
            joined[name] = tuple(chain.from_iterable(values))
    return joined
