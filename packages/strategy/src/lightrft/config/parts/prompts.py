"""Options of one part of a run: how a row becomes a prompt."""

from __future__ import annotations

from dataclasses import dataclass

from lightrft.config.options import (
    DATA_AND_EVAL,
    SFT,
    Arguments,
    data_option,
)


@dataclass(kw_only=True)
class PromptOptions:
    """How a row becomes a prompt."""

    input_key: str = data_option(
        "input",
        "Column that holds the prompt.",
        common=True,
        commands=DATA_AND_EVAL,
    )
    label_key: str | None = data_option(
        "label",
        "Column that holds the reference answer.",
        common=True,
        commands=DATA_AND_EVAL,
    )
    apply_chat_template: bool = data_option(
        False,
        "Render prompts by the model's chat template.",
        common=True,
        commands=(*DATA_AND_EVAL, *SFT),
    )
    system_prompt: str | None = data_option(
        None,
        "System message put before every prompt.",
        commands=DATA_AND_EVAL,
    )
    input_template: str | None = data_option(
        None,
        "Text around the prompt, which replaces {}.",
        commands=DATA_AND_EVAL,
    )
    prompt_max_len: int = data_option(
        1024,
        "Longest prompt, in tokens; longer ones, and those that leave no room for "
        "generate_max_len in the model's context, are left out and counted.",
        at_least=1,
        common=True,
        commands=DATA_AND_EVAL,
    )
    chat_template: str | None = data_option(
        None,
        "File with a Jinja chat template in place of the tokenizer's.",
        path="file",
        acts_with="apply_chat_template",
        commands=(*DATA_AND_EVAL, *SFT),
    )
    chat_template_args: Arguments = data_option(
        None,
        "Variables of the chat template, such as enable_thinking=false.",
        acts_with="apply_chat_template",
        commands=(*DATA_AND_EVAL, *SFT),
    )
    pretrain_column: str = data_option(
        "text",
        "Column of the texts in pretrain_data, where it has texts.",
        acts_with="pretrain_data",
    )
