"""What `lightrft data check` prints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import TYPE_CHECKING

from lightrft.cli.data_gold import GoldScore
from lightrft.datasets.check import CheckedRow, DataCheck, histogram
from lightrft.datasets.files import Row

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

NUM_SAMPLES = 3
MAX_LINES = 20
BAR_WIDTH = 40
MAX_CHARACTERS = 1500


def show_layout(source: str, rows: Sequence[Row], *, num_items: int) -> None:
    """Columns of the rows, with their types."""
    print(f"{source}: {num_items} rows, {len(rows)} of them readable")
    names = list(dict.fromkeys(name for row in rows for name in row.columns))
    for name in names:
        values = [row.columns[name] for row in rows if name in row.columns]
        kinds = sorted({_kind(value) for value in values})
        missing = len(rows) - len(values)
        note = f", missing in {missing} rows" if missing else ""
        print(f"  {name}: {' or '.join(kinds)}{note}, for example {str(values[0])[:60]!r}")


def show_samples(
    found: DataCheck, tokenizer: PreTrainedTokenizerBase | None, *, max_new_tokens: int
) -> None:
    """The first, the middle and the last prompt as the model will see them."""
    rows = found.rows
    places = sorted({0, len(rows) // 2, len(rows) - 1})[:NUM_SAMPLES] if rows else []
    for number, place in enumerate(places, start=1):
        row = rows[place]
        unit = "characters" if tokenizer is None else "tokens"
        count = len(row.text) if tokenizer is None else len(row.token_ids)
        text = row.text if tokenizer is None else visible(row, tokenizer)
        end = None if tokenizer is None else tokenizer.eos_token
        print(f"\nsample {number} of {len(places)}, {row.location}")
        print(f"  prompt, {count} {unit}, not trained (mask 0):")
        print("\n".join(f"    {line}" for line in text[:MAX_CHARACTERS].splitlines()))
        until = f" up to and including ⟦{end}⟧" if end else ""
        print(f"  response, at most {max_new_tokens} sampled tokens, trained (mask 1){until}")
        print(f"  label: {'none' if row.label is None else str(row.label)[:200]!r}")


def visible(row: CheckedRow, tokenizer: PreTrainedTokenizerBase) -> str:
    """The prompt decoded from its token ids, special tokens in ⟦brackets⟧."""
    special = {*tokenizer.all_special_ids, *tokenizer.added_tokens_decoder}
    parts = []
    for is_special, ids in groupby(row.token_ids, key=lambda token_id: token_id in special):
        if is_special:
            parts += [f"⟦{tokenizer.decode([token_id])}⟧" for token_id in ids]
        else:
            parts.append(tokenizer.decode(list(ids)))
    return "".join(parts)


def show_check(found: DataCheck, *, prompt_max_len: int, in_tokens: bool) -> None:
    """Lengths, counts, and the rows that cannot be used."""
    lengths = [len(row.token_ids) if in_tokens else len(row.text) for row in found.rows]
    bins = histogram(lengths)
    print(f"\nlength of the prompts in {'tokens' if in_tokens else 'characters'}")
    highest = max((count for _, _, count in bins), default=1)
    width = max((len(str(last)) for _, last, _ in bins), default=1)
    for first, last, count in bins:
        bar = "#" * -(-BAR_WIDTH * count // highest)
        print(f"  {first:>{width}} to {last:>{width}}  {count:>7}  {bar}")
    print()
    if in_tokens:
        _show_places(
            f"over {prompt_max_len} tokens (a run leaves them out; --prompt_max_len)",
            found.too_long,
        )
    pairs = [f"{place} = {first}" for place, first in found.duplicates]
    _show_places("duplicate prompts (a run uses them all)", pairs)
    print(f"empty prompts: {found.num_empty}")
    print(f"without label: {found.num_without_label}")
    print(f"rows that cannot be used: {len(found.problems)}")
    _show_lines(found.problems)


def show_gold(gold: GoldScore | None) -> None:
    """What the reward gives to the reference answers."""
    if gold is None:
        print("reference answers: not scored, no --reward_fn")
        return
    names = " + ".join(gold.names)
    print(f"reference answers of the first {gold.num_rows} rows, mean reward by {names}")
    for form, mean in gold.means.items():
        print(f"  {form}: {mean:.3f}")
    print(f"reference answers that cannot be right: {len(gold.problems)}")
    _show_lines(gold.problems)


def _show_places(what: str, places: Sequence[str]) -> None:
    examples = f", first: {', '.join(places[:3])}" if places else ""
    print(f"{what}: {len(places)}{examples}")


def _show_lines(lines: Sequence[str]) -> None:
    for line in lines[:MAX_LINES]:
        print(f"  {line}")
    if len(lines) > MAX_LINES:
        print(f"  and {len(lines) - MAX_LINES} more")


def _kind(value: object) -> str:
    if value is None:
        return "null"
    if isinstance(value, Sequence) and not isinstance(value, str):
        is_chat = bool(value) and isinstance(value[0], Mapping) and "role" in value[0]
        return "chat messages" if is_chat else "list"
    names = {str: "text", bool: "true or false", int: "number", float: "number", dict: "object"}
    return names.get(type(value), type(value).__name__)
