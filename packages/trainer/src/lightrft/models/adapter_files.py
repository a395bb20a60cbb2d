"""Adapters in PEFT's format, from which training starts."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from lightrft.config import BuildOptions, ConfigError
from lightrft.config.files import FileError, read_object, regular_file

SETTINGS_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."
FACTORS = ("lora_A", "lora_B")
# Settings whose other values change the product of the factors or the trained parameters.
PLAIN: Mapping[str, object] = {
    "peft_type": "LORA",
    "bias": "none",
    "use_dora": False,
    "use_rslora": False,
    "modules_to_save": None,
    "rank_pattern": {},
    "alpha_pattern": {},
    "trainable_token_indices": None,
    "layer_replication": None,
    "alora_invocation_tokens": None,
    "lora_bias": False,
    "fan_in_fan_out": False,
    "use_qalora": False,
}
# Initialisations that leave the model's weights as they are.
BEGINNINGS = (True, False, "gaussian", "orthogonal")


def check_adapters(
    config: BuildOptions, model: nn.Module, layers: Collection[str], whole: Collection[str] = ()
) -> None:
    """Compare the adapters of `lora_path` with the options and the layers that get adapters.

    Args:
        config: Options with a `lora_path`.
        model: Model with the linear layers of the adapters; it needs no weights.
        layers: Names of the layers that get adapters.
        whole: Children of the model that are trained whole, which the adapters may hold.

    Raises:
        ConfigError: There are none, or their form, size, model or layers differ.
    """
    folder = Path(str(config.lora_path))
    try:
        settings = read_object(folder / SETTINGS_FILE)
    except FileError as error:
        raise ConfigError(f"lora_path: {error}: give a folder of PEFT's format") from error
    saved = settings.get("modules_to_save")
    if saved == [*whole]:
        settings = {**settings, "modules_to_save": None}
    _check_settings(folder, settings, config)
    shapes = {name: tuple(value.shape) for name, value in read_adapters(folder).items()}
    wanted: dict[str, tuple[int, ...]] = {
        f"{PREFIX}{name}.{factor}.weight": (config.lora_rank, layer.in_features)
        if factor == FACTORS[0]
        else (layer.out_features, config.lora_rank)
        for name, layer in model.named_modules()
        if name in layers and isinstance(layer, nn.Linear)
        for factor in FACTORS
    }
    if saved == [*whole]:
        parameters = model.named_parameters()
        wanted |= {f"{PREFIX}{n}": tuple(p.shape) for n, p in parameters if is_below(n, whole)}
    odd = sorted(shapes.keys() ^ wanted.keys())
    if odd:
        targets = sorted({name.split(".")[-3] for name in shapes if name.count(".") > 2})
        where = "the adapters alone have" if odd[0] in shapes else "the adapters lack"
        raise ConfigError(
            f"lora_path: {folder} is for other layers than target_modules "
            f"{' '.join(config.target_modules)} gives adapters ({where} {odd[0]:.200}): give "
            f"--target_modules {' '.join(targets):.200}"
        )
    for name, shape in wanted.items():
        if shapes[name] != shape:
            raise ConfigError(
                f"lora_path: {name} of {folder} is {list(shapes[name])}, the model needs "
                f"{list(shape)}: give the model that the adapters were made on"
            )


def _check_settings(folder: Path, settings: Mapping[str, object], config: BuildOptions) -> None:
    settings_by_name = {name: settings.get(name, plain) for name, plain in PLAIN.items()}
    odd = {
        n: value
        for n, value in settings_by_name.items()
        if value != PLAIN[n] and (value or PLAIN[n])
    }
    if (start := settings.get("init_lora_weights", True)) not in BEGINNINGS:
        odd["init_lora_weights"] = start
    for name, value in odd.items():
        raise ConfigError(
            f"lora_path: {folder} has {name} {value!r:.80}, which is not trained here: merge the "
            "adapters into their model and give that as --pretrain"
        )
    for option, name in (("lora_rank", "r"), ("lora_alpha", "lora_alpha")):
        wanted, saved = config.__dict__[option], settings.get(name)
        if wanted != saved:
            theirs = f"{saved!s:.80}"
            raise ConfigError(
                f"lora_path: the adapters in {folder} have {name} {theirs}, got {option} "
                f"{wanted:g}: give --{option} {theirs}"
            )
    base = str(settings.get("base_model_name_or_path") or "")
    model = base if config.pretrain is None else config.pretrain
    if Path(base).name != Path(model).name and base:
        raise ConfigError(
            f"lora_path: the adapters in {folder} were made on {base:.200}, got pretrain "
            f"{config.pretrain}: give that model, or, where it is the same one, write its name "
            f"into base_model_name_or_path of {SETTINGS_FILE}"
        )


def read_adapters(folder: Path) -> dict[str, torch.Tensor]:
    """Return factors and whole trained parts by name.

    Raises:
        ConfigError: The file is missing or cannot be read.
    """
    file = folder / WEIGHTS_FILE
    try:
        with safe_open(regular_file(file), framework="pt") as opened:
            names = opened.keys()
            return {name: opened.get_tensor(name) for name in names}
    except (OSError, FileError, SafetensorError) as error:
        raise ConfigError(
            f"lora_path: {file} cannot be read ({error}): save the adapters as safetensors"
        ) from error


@torch.no_grad()
def load_adapters(folder: Path, model: nn.Module, adapter: str) -> None:
    """Copy factors and whole trained parts into a model, after `check_adapters`.

    Args:
        folder: Folder in PEFT's format.
        model: Model with adapters.
        adapter: Name of the adapters in the model.
    """
    parameters = dict(model.named_parameters())
    for name, value in read_adapters(folder).items():
        parameter = name.removeprefix(PREFIX)
        if parameter not in parameters:
            parameter = parameter.removesuffix(".weight") + f".{adapter}.weight"
        parameters[parameter].copy_(value)


def is_below(name: str, children: Collection[str]) -> bool:
    """Return whether a parameter belongs to one of some children of a model."""
    return name.partition(".")[0] in children
