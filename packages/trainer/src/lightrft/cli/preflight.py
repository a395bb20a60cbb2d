"""What can be known about the input before torch is imported and a model is built."""

import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from lightrft.config import TrainConfig
from lightrft.datasets.mixture import read_sources
from lightrft.datasets.render import render
from lightrft.reporting.files import read_json
from lightrft.run.resume import plan_run
from lightrft.strategy.config import ConfigError

HUB_ID = re.compile(r"[\w.-]+/[\w.-]+\Z")
MODEL_FILES = {
    "configuration": ("config.json",),
    "tokenizer": ("tokenizer.json", "tokenizer.model", "tokenizer_config.json"),
    "weights": ("*.safetensors", "pytorch_model*.bin"),
}


def check_paths(config: TrainConfig) -> list[str]:
    """What is missing among the model, the data and the rewards, one line each."""
    problems = []
    if config.pretrain is None:
        problems.append("--pretrain is missing: give a model directory, see lightrft init-model")
    else:
        problems += model_problems("--pretrain", config.pretrain) or context_problems(config)
    if isinstance(config.critic_pretrain, str):
        problems += model_problems("--critic_pretrain", config.critic_pretrain)
    for path in config.reward_pretrain:
        problems += model_problems("--reward_pretrain", path)
    if config.prompt_data is None:
        problems.append("--prompt_data is missing: give a JSONL, JSON or Parquet file")
    if not config.reward_fn and not config.remote_rm_url and config.environment is None:
        problems.append("--reward_fn is missing: give boxed_math, gsm8k or FILE.py:FUNCTION")
    try:
        plan_run(config)
    except ConfigError as err:
        problems.append(str(err))
    return problems


def model_problems(flag: str, name: str) -> list[str]:
    """What a model directory lacks; a hub id (owner/name) is left to transformers."""
    directory = Path(name)
    if not directory.is_dir():
        if HUB_ID.match(name) and not directory.parent.is_dir():
            return []
        return [f"{flag}: no model directory at {name}"]
    return [
        f"{flag}: no {what} in {name}: expected {' or '.join(patterns)}"
        for what, patterns in MODEL_FILES.items()
        if not any(any(directory.glob(pattern)) for pattern in patterns)
    ]


def context_problems(config: TrainConfig) -> list[str]:
    """A response that no prompt would fit before, by the model's own configuration."""
    values = read_json(Path(str(config.pretrain)) / "config.json")
    text = values.get("text_config")
    longest = (text if isinstance(text, dict) else values).get("max_position_embeddings")
    if not isinstance(longest, int) or config.generate_max_len < longest:
        return []
    return [
        f"generate_max_len: got {config.generate_max_len}, expected less than the "
        f"{longest} positions of {config.pretrain}"
    ]


def check_algorithm(config: TrainConfig) -> None:
    """Load loss, estimator and corrections, and try a user's own on an example batch.

    Raises:
        ConfigError: They cannot be computed with these options; or `strict`, and an option that
            they do not use was changed.
    """
    # Here, and not in the rules of the options: it needs torch.
    from lightrft.stages.policy.algorithm import (
        algorithm_problems,
        build_algorithm,
        unused_algorithm_options,
    )

    problems = algorithm_problems(config)
    if config.strict and not problems:
        problems = unused_algorithm_options(
            config, build_algorithm(config), has_reference=config.init_kl_coef > 0
        )
    if problems:
        raise ConfigError("\n".join(problems))


def check_data(config: TrainConfig) -> frozenset[str]:
    """Read and render every row of the training and evaluation data, without a tokenizer.

    Returns:
        Columns that every training row has beside its prompt and its label.

    Raises:
        DataError: A file is missing, malformed or empty, or a row lacks its prompt.
    """
    sources = (
        (config.prompt_data, config.prompt_split, config.prompt_data_probs),
        (config.eval_data, config.eval_split, ()),
    )
    columns: frozenset[str] | None = None
    for text, split, probabilities in sources:
        if text is None:
            continue
        for row in read_sources(text, split=split, probabilities=probabilities, seed=config.seed):
            render(row, PlainTokenizer(), config)
            if text == config.prompt_data:
                columns = frozenset(row.columns) & (columns or frozenset(row.columns))
    return (columns or frozenset()) - {config.input_key, config.label_key}


def check_reward(config: TrainConfig, columns: frozenset[str]) -> None:
    """Load the reward functions, and compare what they need with the columns of the data.

    Raises:
        ConfigError: An unknown function or file.
        RewardError: A file that cannot be loaded, or a function that cannot be called.
    """
    from lightrft.rewards.build import build_reward, reward_urls

    urls = reward_urls(config)
    if not config.reward_fn and not urls:
        return  # reward models alone
    with build_reward(config.reward_fn, urls=urls, config=config) as reward:
        reward.check_columns(columns)


class PlainTokenizer:
    """Stands in for the model's tokenizer: rendering itself is checked when that is loaded."""

    chat_template: str | None = "plain"

    def __call__(
        self, text: list[str], *, add_special_tokens: bool
    ) -> Mapping[str, list[list[int]]]:
        """One id per character."""
        return {"input_ids": [list(map(ord, item)) for item in text]}

    def apply_chat_template(
        self,
        conversation: Iterable[Mapping[str, object]],
        *,
        tokenize: bool,
        add_generation_prompt: bool,
    ) -> object:
        """The contents of the messages."""
        return "\n".join(str(message["content"]) for message in conversation)
