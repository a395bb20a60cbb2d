"""Specifications of the environments of a run: parser and prompt tokenizer for each row."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

from lightrft.datasets.media import VisionPrompts
from lightrft.datasets.types import DataError
from lightrft.rollout.environments.call_formats import CallParser
from lightrft.rollout.environments.calls import ENVIRONMENT_COLUMN, choose_parser, whole_turn
from lightrft.rollout.environments.pool import EnvironmentSpec

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Schema = dict[str, object]


class ToolTokenizer:
    """A tokenizer whose chat template shows the tools.

    Args:
        tokenizer: Tokenizer of the model.
        schemas: Schemas of the tools.
        by_name: Tokenizers of several environments, by the names that rows have.
    """

    shows_row_tools = False

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase | VisionPrompts,
        schemas: Sequence[Schema],
        by_name: Mapping[str, ToolTokenizer] | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self._schemas = list(schemas) or None
        self._by_name = by_name
        self.chat_template = cast("str | None", tokenizer.chat_template)

    def for_row(self, columns: Mapping[str, object]) -> ToolTokenizer:
        """Return the tokenizer that shows the tools of the row's environment.

        Raises:
            DataError: There is no such environment.
        """
        if self._by_name is None:
            return self
        return self._by_name[name_of(columns, self._by_name)]

    def __call__(
        self, text: list[str], *, add_special_tokens: bool
    ) -> Mapping[str, list[list[int]]]:
        """Return token ids under the key `input_ids`."""
        encoded: Mapping[str, list[list[int]]] = self._tokenizer(
            text, add_special_tokens=add_special_tokens
        )
        return encoded

    def apply_chat_template(
        self,
        conversation: list[dict[str, object]],
        *,
        tokenize: bool,
        add_generation_prompt: bool,
        tools: list[dict[str, object]] | None = None,
    ) -> object:
        """Render the conversation with the environment's tools, whatever the row has."""
        del tools
        return self._tokenizer.apply_chat_template(
            conversation,
            tools=self._schemas,
            tokenize=tokenize,
            add_generation_prompt=add_generation_prompt,
        )


@dataclass(frozen=True, slots=True)
class RowEnvironment:
    """Environment of a row.

    Args:
        spec: Specification of its class.
        parse: Parser of calls.
        tokenizer: Tokenizer that shows its tools.
    """

    spec: EnvironmentSpec
    parse: CallParser
    tokenizer: ToolTokenizer


class EnvironmentSpecs:
    """All environments of a run; most have one.

    Args:
        specs: Specifications by their names in rows; "" where there is only one.
        tokenizer: Tokenizer of the model.
        tool_parser: Name of the format of calls.
        renderer: Renderer of prompts.

    Attributes:
        whole: Merged specification of all environments.
        tokenizer: Tokenizer that shows each row the tools of its environment.

    Raises:
        ConfigError: The tokenizer does not reveal the format of calls.
    """

    def __init__(
        self,
        specs: Mapping[str, EnvironmentSpec],
        tokenizer: PreTrainedTokenizerBase,
        tool_parser: str,
        renderer: PreTrainedTokenizerBase | VisionPrompts,
    ) -> None:
        self.whole = _together(specs)
        shown = {name: ToolTokenizer(renderer, spec.schemas) for name, spec in specs.items()}
        self.tokenizer = shown.get("") or ToolTokenizer(renderer, (), shown)
        self._by_name = {
            name: RowEnvironment(
                spec,
                whole_turn
                if spec.answers_turns
                else choose_parser(tool_parser, tokenizer, spec.schemas),
                shown[name],
            )
            for name, spec in specs.items()
        }

    @property
    def parse(self) -> CallParser:
        """Parser of calls, whose format all environments share."""
        return next(iter(self._by_name.values())).parse

    @property
    def tool_names(self) -> tuple[str, ...]:
        """Names of all tools, sorted."""
        return tuple(sorted(self.whole.functions))

    def of(self, columns: Mapping[str, object]) -> RowEnvironment:
        """Return the environment of a row."""
        return self._by_name[name_of(columns, self._by_name)]


def name_of(columns: Mapping[str, object], known: Mapping[str, object]) -> str:
    """Return the name of a row's environment.

    Raises:
        DataError: There is no such environment.
    """
    if "" in known:
        return ""
    name = columns.get(ENVIRONMENT_COLUMN)
    if name not in known:
        raise DataError(
            f"column {ENVIRONMENT_COLUMN!r} must name one of {', '.join(known)}: got "
            f"{str(name)[:80]!r}"
        )
    return str(name)


def _together(specs: Mapping[str, EnvironmentSpec]) -> EnvironmentSpec:
    if "" in specs:
        return specs[""]
    schemas: list[Schema] = []
    for spec in specs.values():
        schemas += [schema for schema in spec.schemas if schema not in schemas]
    return EnvironmentSpec(
        ", ".join(f"{name}={spec.name}" for name, spec in specs.items()),
        tuple(schemas),
        any(spec.has_reward for spec in specs.values()),
        tuple(sorted({name for spec in specs.values() for name in spec.takes})),
        stateless=tuple(sorted({name for spec in specs.values() for name in spec.stateless})),
    )
