"""Names and shapes of a checkpoint's parameters, from its configuration alone."""

import copy
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import cast

import torch
from torch import nn
from transformers import (
    AutoConfig,
    GenerationConfig,
    PretrainedConfig,
    PreTrainedModel,
)

from lightrft.engines.hf.engine import architecture_of
from lightrft.engines.media.families import language_model_class
from lightrft.engines.types import EngineConfig, tied_names


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Names and full shapes of a checkpoint's parameters.

    Args:
        shapes: Checkpoint name -> shape, in the model's order; tied names included.
        tied: Second name of a shared parameter -> its first name.
        model: Model without memory, whose rules give the names of files on disk.
    """

    shapes: Mapping[str, tuple[int, ...]]
    tied: Mapping[str, str]
    model: PreTrainedModel | None = None


def model_shape(
    config: PretrainedConfig, architecture: type[PreTrainedModel] | None = None
) -> ModelShape:
    """Return names and shapes from the configuration alone, without memory for weights.

    Args:
        config: Transformers configuration.
        architecture: Class to build; None takes the language model of the configuration.
    """
    config = copy.deepcopy(config)
    with torch.device("meta"):
        auto_class = language_model_class(config)
        model = auto_class.from_config(config) if architecture is None else architecture(config)
    model.tie_weights()
    parameters = dict(model.named_parameters(remove_duplicate=False))
    shapes = {name: tuple(parameter.shape) for name, parameter in parameters.items()}
    return ModelShape(shapes, tied_names(parameters.items()), model)


def model_configs(
    config: EngineConfig, module: nn.Module | None
) -> tuple[PretrainedConfig, GenerationConfig | None, type[PreTrainedModel] | None]:
    """Return the model's configurations, from its directory or else the module, and its class.

    The class is that of the module; None is the causal language model of the configuration.

    Raises:
        ValueError: There is neither a directory nor a module.
    """
    architecture = architecture_of(type(module)) if isinstance(module, PreTrainedModel) else None
    if config.model_path:
        hf_config = AutoConfig.from_pretrained(
            config.model_path, local_files_only=True, trust_remote_code=False
        )
        try:
            generation = GenerationConfig.from_pretrained(config.model_path, local_files_only=True)
        except OSError:
            # A checkpoint need not have one.
            generation = None
        return hf_config, generation, architecture
    if not isinstance(module, PreTrainedModel):
        raise ValueError(
            f"the {config.engine_type} engine needs the directory of a Hugging Face checkpoint "
            f"(model_path) or a transformers model: got module {type(module).__name__}"
        )
    return module.config, cast("GenerationConfig | None", module.generation_config), architecture


@contextmanager
def model_directory(
    model_path: str, hf_config: PretrainedConfig, architecture: type | None
) -> Iterator[str]:
    """Yield the checkpoint, or a temporary directory with the architecture alone.

    Args:
        model_path: Path of the checkpoint, or empty.
        hf_config: Configuration of the model.
        architecture: Name of the transformers class.
    """
    if model_path:
        yield model_path
        return
    with tempfile.TemporaryDirectory(prefix="lightrft-engine-") as directory:
        hf_config = copy.deepcopy(hf_config)
        hf_config.architectures = None if architecture is None else [architecture.__name__]
        hf_config.save_pretrained(directory)
        yield directory
