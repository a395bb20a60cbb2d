"""Reader of media and checks before the models are built, and the opening line."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from lightrft.config import (
    BuildOptions,
    ConfigError,
    MediaOptions,
    ModelOptions,
    RolloutOptions,
    RowDataOptions,
    TrainConfig,
)
from lightrft.datasets.media import Modality, TextModality, VisionPrompts, encoder_of
from lightrft.engines.media.families import family_of
from lightrft.engines.media.text_encoder import TextEncoder
from lightrft.engines.text import context_tokens
from lightrft.models.loading import (
    chosen_template,
    has_processor,
    is_reward_model,
    load_config,
    load_processor,
)
from lightrft.models.sequence_model import freeze_tensors
from lightrft.models.weight_files import tensor_shapes
from lightrft.stages.machine_choices import decide_by_machine, read_model_facts
from lightrft.strategy.backend import Backend

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase, ProcessorMixin
    from transformers.models.auto.auto_factory import _BaseAutoModelClass


def opening_line(
    config: BuildOptions, backend: Backend, num_weights: int, *, method: str = ""
) -> str:
    """Return a line of model and size, algorithm, processes, strategy and dtype.

    Args:
        config: Options of the run.
        backend: Started backend.
        num_weights: Number of weights of the model.
        method: Algorithm, where options choose among several.
    """
    context, world = backend.context, backend.context.world_size
    device = "GPU" if context.has_gpu else "CPU process"
    plural = "es" if device.endswith("s") else "s"
    parts = [
        f"{Path(str(config.pretrain)).name}: {num_weights / 1e6:,.3g} million weights",
        f"adapters of rank {config.lora_rank}" if config.lora_rank else "",
        method,
        f"{world} {device}{plural if world > 1 else ''}",
        backend.name,
        str(context.compute_dtype).removeprefix("torch."),
    ]
    return ", ".join(filter(None, parts))


def decide_by_files(config: TrainConfig, backend: Backend, *, method: str = "") -> TrainConfig:
    """Print the opening line, and decide the options left to the machine; collective.

    Args:
        config, backend: Options and backend of the run.
        method: See `opening_line`.

    Raises:
        ConfigError: The backend cannot hold a model of this size.
    """
    facts = read_model_facts(config, backend.context)
    backend.check_model_size(facts.num_weights)
    backend.context.print(opening_line(config, backend, facts.num_weights, method=method))
    return decide_by_machine(config, backend.context, facts=facts)


def check_parts(config: BuildOptions, kind: type[_BaseAutoModelClass]) -> None:
    """Check that the model, built without weights, has the parts that options name.

    Raises:
        ConfigError: The path holds a reward model where a language model is trained, files and
            configuration differ in shapes, or layers or tensors of these names are missing.
    """
    path = str(config.pretrain)
    model_config = load_config(path)
    is_policy = kind.__name__ == "AutoModelForCausalLM"
    if is_policy and is_reward_model(path):
        raise ConfigError(f"pretrain: {path} is a reward model: give a language model")
    shapes = tensor_shapes(path) if is_policy and not config.allow_new_weights else {}
    has_names = config.lora_rank or config.freeze_prefix
    if (
        not (has_names or shapes) or family_of(model_config) is not None
    ):  # `kind` builds no model of images
        return
    with torch.device("meta"):
        skeleton: PreTrainedModel = kind.from_config(model_config)
    _check_shapes(path, shapes, skeleton)
    if config.lora_rank:
        from lightrft.models.lora import target_layers  # of runs with adapters

        layers = target_layers(skeleton, config.target_modules, frozen=config.freeze_prefix)
        if config.lora_path is not None and skeleton.get_output_embeddings() is not None:
            from lightrft.models.adapter_files import check_adapters

            check_adapters(config, skeleton, layers)
    freeze_tensors(skeleton, config.freeze_prefix)


def prompts_within_context(config: RolloutOptions) -> dict[str, object]:
    """Return options of prompts, lowered so that the model's context has room for a response.

    Raises:
        ConfigError: No prompt leaves room for a response.
    """
    longest = config.max_len or _context_of(config)
    if longest is None:
        return {}
    room = longest - config.generate_max_len
    if room < 1:
        raise ConfigError(
            f"generate_max_len: got {config.generate_max_len}, expected less than the {longest} "
            f"tokens that {config.pretrain} takes (max_len, or the positions of the model)"
        )
    bounds: dict[str, object] = {"prompt_max_len": min(config.prompt_max_len, room)}
    return bounds | ({"max_len": longest} if config.has_episodes else {})


def rows_within_context(config: RowDataOptions) -> dict[str, object]:
    """Return options of rows, lowered to the number of the model's positions."""
    longest = _context_of(config) or config.max_row_tokens
    return {"max_row_tokens": min(config.max_row_tokens, longest)}


def _context_of(config: ModelOptions) -> int | None:
    return None if config.pretrain is None else context_tokens(load_config(config.pretrain))


def shared_prompts(
    trained: Iterable[Hashable], held_out: Sequence[Hashable], what: str = "rows"
) -> list[str]:
    """Return a warning if prompts of the evaluation are trained on, else an empty list.

    Args:
        trained: Key of each trained row's prompt.
        held_out: Key of each held-out row's prompt.
        what: Name of the rows.
    """
    known = set(trained)
    shared = sum(key in known for key in held_out)
    line = (
        f"warning: the prompts of {shared} of {len(held_out)} held-out {what} are trained on, too: "
        "the evaluation says less about others"
    )
    return [line] * (shared > 0)


def _check_shapes(
    path: str, shapes: Mapping[str, tuple[int, ...]], skeleton: PreTrainedModel
) -> None:
    """Raise a ConfigError if tensors have other shapes in the files than in the model."""
    wanted = {name: tuple(value.shape) for name, value in skeleton.state_dict().items()}
    odd = [name for name, shape in shapes.items() if wanted.get(name, shape) != shape]
    if odd:
        raise ConfigError(
            f"pretrain: {len(odd)} tensors in the files of {path} do not fit its config.json, such "
            f"as {odd[0]}, {list(shapes[odd[0]])} instead of {list(wanted[odd[0]])}: give both of "
            "one model, or --allow_new_weights PATTERN for what is to begin anew"
        )


def load_modality(config: RowDataOptions, tokenizer: PreTrainedTokenizerBase) -> Modality:
    """Return the reader of prompts for the trained model.

    Raises:
        ConfigError: An option does not fit the model.
        ModelLoadError: The model's processor cannot be read.
    """
    family = family_of(load_config(str(config.pretrain)))
    if family is None:
        return TextModality(tokenizer)
    path = Path(str(config.pretrain))
    if path.is_dir() and not has_processor(path):
        return TextModality(tokenizer, encoder=TextEncoder(family))
    processor = load_processor(str(path))
    template = chosen_template(config, processor.chat_template) if processor.chat_template else None
    processor.chat_template = template or tokenizer.chat_template
    if family.reads:
        limit_pixels(processor, config)
    encoder = encoder_of(processor, family)
    if not isinstance(encoder, TextEncoder):
        return VisionPrompts(encoder)
    tokenizer.chat_template = tokenizer.chat_template or template
    return TextModality(tokenizer, processor=processor, encoder=encoder)


# How often a processor's size counts each pixel: GLM-4V's is the size of two frames.
_PIXEL_COUNTS = {"Qwen": 1, "Glm4v": 2}


def limit_pixels(processor: ProcessorMixin, config: MediaOptions) -> None:
    """Set the sizes to which a processor scales media; they are saved with the model."""
    name = type(processor).__name__
    counts = next((n for family, n in _PIXEL_COUNTS.items() if name.startswith(family)), None)
    limits = {"longest_edge": config.max_pixels, "shortest_edge": config.min_pixels}
    wanted = {edge: value * (counts or 0) for edge, value in limits.items() if value is not None}
    if not wanted:
        return
    size = dict(processor.image_processor.size)
    if set(size) != {"longest_edge", "shortest_edge"} or counts is None:
        raise ConfigError(
            f"{name} does not support max_pixels and min_pixels, only the Qwen-VL families and "
            "GLM-4V do: leave them out"
        )
    processor.image_processor.size = {**size, **wanted}
    if config.max_pixels is not None:
        # Frames are scaled to whole patches before; the processor must not enlarge them again.
        frames = processor.video_processor
        lowest = min(int(frames.size["shortest_edge"]), config.max_pixels // 4)
        frames.size = {**dict(frames.size), "shortest_edge": lowest}
