"""Names and shapes of a checkpoint's parameters, from its configuration alone."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import torch
from torch import nn
from transformers import AutoConfig, GenerationConfig, PreTrainedModel

from lightrft.engines.types import EngineConfig

if TYPE_CHECKING:
    from transformers import PretrainedConfig


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Names and full shapes of a checkpoint's parameters.

    Args:
        shapes: Checkpoint name -> shape, in the model's order; tied names included.
        tied: Second name of a shared parameter -> its first name.
    """

    shapes: Mapping[str, tuple[int, ...]]
    tied: Mapping[str, str]


def model_shape(
    config: PretrainedConfig, architecture: type[PreTrainedModel] | None = None
) -> ModelShape:
    """Names and shapes from the configuration alone, without memory for weights.

    Args:
        config: A transformers configuration.
        architecture: The class to build; None takes the causal language model of the config.
    """
    from transformers import AutoModelForCausalLM

    config = copy.deepcopy(config)
    with torch.device("meta"):
        model = (
            AutoModelForCausalLM.from_config(config)
            if architecture is None
            else architecture(config)
        )
    model.tie_weights()
    first: dict[int, str] = {}
    tied: dict[str, str] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        shapes[name] = tuple(parameter.shape)
        owner = first.setdefault(id(parameter), name)
        if owner != name:
            tied[name] = owner
    return ModelShape(shapes, tied)


def model_configs(
    config: EngineConfig, module: nn.Module | None
) -> tuple[PretrainedConfig, GenerationConfig | None]:
    """The model's configuration, from its directory or else from the module.

    Raises:
        ValueError: Neither is given.
    """
    if config.model_path:
        hf_config = AutoConfig.from_pretrained(config.model_path, local_files_only=True)
        try:
            generation = GenerationConfig.from_pretrained(config.model_path, local_files_only=True)
        except OSError:
            # A checkpoint need not have one.
            generation = None
        return hf_config, generation
    if not isinstance(module, PreTrainedModel):
        raise ValueError(
            f"the {config.engine_type} engine needs the directory of a Hugging Face checkpoint "
            f"(model_path) or a transformers model: got module {type(module).__name__}"
        )
    return module.config, cast("GenerationConfig | None", module.generation_config)
