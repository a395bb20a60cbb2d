"""Check of a model's tokenizer, configurations, chat template and files for contradictions."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from lightrft.config import ConfigError, TemplateOptions
from lightrft.config.files import FileError, read_object, read_text
from lightrft.engines.media.families import family_of
from lightrft.engines.text import declared_ends, end_of_sequence_ids, text_behind_answer
from lightrft.engines.types import Vocabulary
from lightrft.models.loading import (
    CLOCK,
    DAY,
    ModelLoadError,
    load_config,
    load_tokenizer,
    read_generation_config,
)

if TYPE_CHECKING:
    from transformers import GenerationConfig, PretrainedConfig, PreTrainedTokenizerBase


@dataclass(frozen=True)
class Statements:
    """Statements of the files of one model.

    path: Folder of the model.
    tokenizer: Tokenizer of the run, with its chat template.
    config: Configuration of the model.
    generation: Generation config of the model, or None.
    generation_note: Problem with the file of the generation config; "" is none.
    generates: Whether it is read as a model that writes answers; False for scores.
    """

    path: str
    tokenizer: PreTrainedTokenizerBase
    config: PretrainedConfig
    generation: GenerationConfig | None
    generation_note: str = ""
    generates: bool = True

    @cached_property
    def num_rows(self) -> int:
        """Number of rows of the embedding and of the output projection."""
        return int(self.config.get_text_config().vocab_size)

    @cached_property
    def num_ids(self) -> int:
        """Number of ids of the tokenizer, up to its last one; marks of media do not count."""
        fields = self.config.to_dict().items() if family_of(self.config) else ()
        marks = [value for name, value in fields if name.endswith(("_token_id", "_token_index"))]
        ids = self.tokenizer.get_vocab().values()
        return max((i for i in ids if i < self.num_rows or i not in marks), default=-1) + 1

    @cached_property
    def behind_answer(self) -> str:
        """Text that the chat template writes behind an answer; "" without a template."""
        try:
            return (text_behind_answer(self.tokenizer, self.tokenizer.eos_token) or "").strip()
        except MemoryError:
            raise
        except Exception:  # noqa: BLE001 - a program of the model's author; said where it is needed
            return ""

    @cached_property
    def declared(self) -> dict[str, frozenset[int]]:
        """Ids of ends of turns by the file or part that names them; parts without one are left out.

        Of the text behind an answer, the first token counts if it is a special or an added one.
        """
        tokenizer = self.tokenizer
        known = {*tokenizer.all_special_ids, *tokenizer.added_tokens_decoder}
        behind = tokenizer(self.behind_answer, add_special_tokens=False)["input_ids"][:1]
        parts: dict[str, Iterable[int | None]] = {
            "tokenizer": [tokenizer.eos_token_id],
            "chat template": [each for each in behind if each in known],
            "config.json": end_of_sequence_ids(self.config, None),
            "generation_config.json": declared_ends(self.generation),
        }
        ends = {name: frozenset(i for i in ids if i is not None) for name, ids in parts.items()}
        return {name: ids for name, ids in ends.items() if ids}

    @cached_property
    def num_tokens(self) -> int | None:
        """Number of leading rows that are tokens; None if all are."""
        return self.num_ids if 0 < self.num_ids < self.num_rows else None

    @cached_property
    def vocabulary(self) -> Vocabulary:
        """Ends at which generation stops, and the number of ids that are tokens."""
        named = frozenset[int]().union(*self.declared.values())
        ends = tuple(sorted(i for i in named if i < min(self.num_ids, self.num_rows)))
        return Vocabulary(ends, self.num_tokens)

    @property
    def vocab_size(self) -> int:
        """Number of ids that rows may hold."""
        return (self.num_tokens if self.generates else None) or self.num_rows

    def say(self, write: Callable[[str], None], *, last: int | None = None) -> None:
        """Write the decisions, one line each.

        Args:
            write: Function that takes a line.
            last: Last trained token of the first row; None without rows.
        """
        for rule in (*DECIDED, *(DECIDED_OF_ANSWERS if self.generates else ())):
            for text in rule(self):
                write(text)
        ends = self.vocabulary.ends
        if last is not None and last not in ends:
            write(
                f"warning: the first row is trained to end in {self.tokenizer.decode([last])!r}, "
                f"and generation stops at {self.named(ends) or 'no token'}: add {last} to "
                "eos_token_id in generation_config.json of the model"
            )

    def require_consistent(self) -> Statements:
        """Return it, unless it holds a contradiction that no rule resolves.

        Raises:
            ConfigError: It holds contradictions; one line each.
        """
        rules = (*REFUSED, *(REFUSED_OF_ANSWERS if self.generates else ()))
        refused = [text for rule in rules for text in rule(self)]
        if refused:
            raise ConfigError("\n".join(refused))
        return self

    def named(self, ids: Iterable[int]) -> str:
        """Return the tokens of some ids as a text."""
        tokens = [(i, self.tokenizer.convert_ids_to_tokens(i)) for i in sorted(ids)]
        return " and ".join(str(i) if token is None else repr(token) for i, token in tokens)


def read_statements(
    path: str,
    options: TemplateOptions | None = None,
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    generates: bool = True,
) -> Statements:
    """Read what the files of a model state.

    Args:
        path: Folder or hub id of the model.
        options: Options whose chat template replaces the model's; None keeps it.
        tokenizer: Tokenizer of the run; None loads it.
        generates: Whether it is read as a model that writes answers; False for scores.

    Raises:
        ConfigError: The options name a chat template that cannot be read.
        ModelLoadError: Configuration or tokenizer are missing or unreadable.
    """
    config = load_config(path)
    generation, note = read_generation_config(path)
    tokenizer = tokenizer or load_tokenizer(path, options)
    return Statements(path, tokenizer, config, generation, note, generates)


def vocabulary_of(path: str, options: TemplateOptions | None = None) -> Vocabulary:
    """Return the vocabulary of a model; without a tokenizer it leaves everything open."""
    try:
        return read_statements(path, options).vocabulary
    except ModelLoadError:
        return Vocabulary()


def _ends(said: Statements) -> Iterator[str]:
    ends, declared = set(said.vocabulary.ends), said.declared
    unknown = {name: ids - ends for name, ids in declared.items() if not ids <= ends}
    for name, ids in unknown.items():
        yield (f"ends of turn: {said.named(ids)} ({name}) is no token of the model: left out")
    if not ends:
        yield (
            f"warning: no end of turn is declared by the tokenizer, the chat template or the "
            f"configurations of {said.path}: responses end only at their bound of tokens, so set "
            "eos_token_id in generation_config.json"
        )
    of_model = declared.get("config.json", frozenset()) | declared.get(
        "generation_config.json", frozenset()
    )
    if ends - of_model:
        sources: dict[int, list[str]] = {}
        for name, ids in declared.items():
            for end in ids & ends:
                sources.setdefault(end, []).append(name)
        listed = [f"{said.named([end])} ({', '.join(names)})" for end, names in sources.items()]
        yield (f"ends of turn: generation stops at {' and at '.join(listed)}")
    if said.behind_answer and "chat template" not in declared:
        yield (
            f"ends of turn: the chat template writes {said.behind_answer[:40]!r} behind an answer, "
            "which begins with no special token: generation does not stop there"
        )


def _written(said: Statements) -> Iterator[str]:
    tokenizer = said.tokenizer
    bare, ids = (tokenizer("a", add_special_tokens=flag)["input_ids"] for flag in (False, True))
    places = range(len(ids) - len(bare) + 1)
    start = next((i for i in places if ids[i : i + len(bare)] == bare), len(ids))
    around = {"before": ids[:start], "behind": ids[start + len(bare) :]}
    listed = [f"{said.named(each)} {place}" for place, each in around.items() if each]
    if listed:
        yield (f"texts: the tokenizer writes {' and '.join(listed)} each of them")
    begin = getattr(said.config.get_text_config(), "bos_token_id", None)
    if around["before"] and isinstance(begin, int) and begin not in around["before"]:
        yield (
            f"texts: config.json begins them with {said.named([begin])} and the tokenizer with "
            f"{said.named(around['before'])}: the tokenizer's is taken"
        )
    settings = _read(Path(said.path) / "tokenizer_config.json")
    for name, place in (("bos", "before"), ("eos", "behind")):
        asked = settings.get(f"add_{name}_token")
        if isinstance(asked, bool) and asked != bool(around[place]):
            option = f"add_{name}_token = {str(asked).lower()}"
            what = said.named(around[place]) or "nothing"
            yield (
                f"texts: tokenizer_config.json has {option}, and the tokenizer writes {what} "
                f"{place} a text: what it writes is taken"
            )


def _sizes(said: Statements) -> Iterator[str]:
    rows, ids = said.num_rows, said.num_ids
    if ids > rows:
        yield (
            f"pretrain: the tokenizer of {said.path} has ids up to {ids - 1} "
            f"({said.named([ids - 1])}) and the model {rows} rows: give the tokenizer of this "
            "model, or enlarge the model first (resize_token_embeddings)"
        )
    pad = said.config.get_text_config().pad_token_id
    if isinstance(pad, int) and pad >= rows:
        yield (
            f"pretrain: config.json of {said.path} has pad_token_id {pad} and {rows} rows: give an "
            "id of the model, or null"
        )


def _padding(said: Statements) -> Iterator[str]:
    rows, ids = said.num_rows, said.num_ids
    if 0 < ids < rows:
        yield (
            f"vocabulary: the model has {rows} rows and the tokenizer {ids} ids: the last "
            f"{rows - ids} rows are neither sampled nor trained"
        )


def _generation(said: Statements) -> Iterator[str]:
    if said.generation_note and said.generation is not None:
        yield f"generation_config.json of {said.path}: {said.generation_note}"


def _unread_generation(said: Statements) -> Iterator[str]:
    if said.generation_note and said.generation is None:
        yield f"generation_config.json of {said.path}: {said.generation_note}"


def _template(said: Statements) -> Iterator[str]:
    folder = Path(said.path)
    beside = folder / "chat_template.jinja"
    inside = _read(folder / "tokenizer_config.json").get("chat_template")
    if beside.is_file() and isinstance(inside, str) and read_text(beside) != inside:
        yield (
            "chat template: chat_template.jinja and tokenizer_config.json hold different ones: "
            "chat_template.jinja is taken"
        )


def _day(said: Statements) -> Iterator[str]:
    if f"macro {CLOCK}" in str(said.tokenizer.chat_template):
        yield (
            "chat template: it writes the day of rendering, and gets one day for the whole run: "
            f"{DAY}, or that of --chat_template_args {CLOCK}=YYYY-MM-DD"
        )


def _class(said: Statements) -> Iterator[str]:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    kind, names = said.config.model_type, said.config.architectures or []
    known = dict(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    others = [name for name in names if name in known.values() and name != known.get(kind, name)]
    if others:
        yield (
            f"pretrain: config.json of {said.path} has model_type {kind} and architectures "
            f"{others[0]}, another model: make them agree"
        )


# Rules by which a contradiction is refused; they do not run the chat template.
REFUSED = (_sizes, _class)
REFUSED_OF_ANSWERS = (_unread_generation,)
# Rules by which a contradiction is resolved.
DECIDED = (_written, _template, _day)
DECIDED_OF_ANSWERS = (_padding, _ends, _generation)


def _read(file: Path) -> Mapping[str, object]:
    """Return the content of a JSON file; {} if there is none."""
    try:
        return read_object(file)
    except (FileError, OSError):
        return {}
