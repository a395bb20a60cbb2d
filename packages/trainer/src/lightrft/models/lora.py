"""Low-rank adapters on a frozen policy, by peft; the only module that imports it.

    W' = W + s B A,  s = alpha / rank,  A [rank, in], B [out, rank], B = 0 at first

The base weights are never modified: the sum is formed in the weight buckets of a sync and in the
files of an export.

Source: Hu et al. 2021, arXiv:2106.09685, eq. 3.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import cast

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from lightrft.config import BuildOptions, ConfigError
from lightrft.engines.libraries import check_library
from lightrft.engines.nf4 import RANGES, quantized_layers
from lightrft.engines.types import AdapterShape
from lightrft.models.actor import Actor
from lightrft.models.adapter_files import (
    PREFIX,
    WEIGHTS_FILE,
    check_adapters,
    is_below,
    load_adapters,
)
from lightrft.models.sequence_model import SequenceModel, has_prefix, names_part
from lightrft.strategy.checkpoints.gathered_model import (
    BASE_LAYER,
    SavesPretrained,
    pretrained_prefix,
)
from lightrft.strategy.distributed.collectives import transfer_device
from lightrft.strategy.meta_init import on_host, parameters_on_meta
from lightrft.strategy.nf4 import dequantized, dequantized_source, is_product, quantize_layers
from lightrft.strategy.weight_sync.parameter_source import (
    ParameterSource,
    SourceParameter,
    whole_parameter,
)

ALL_LINEAR = "all-linear"
# Layer types that the error about other layers does not name.
_TAKEN = nn.Embedding | nn.Linear
ADAPTER = "default"
_BODY = "body"
BASE = BASE_LAYER
FIRST, SECOND = f".lora_A.{ADAPTER}.weight", f".lora_B.{ADAPTER}.weight"


class LoraModel(SequenceModel):
    """Model whose linear layers are frozen and carry trained adapters.

    Attributes:
        whole: Children of the model that are trained whole, and saved with the adapters.
    """

    scale = 1.0
    rank = 0
    whole: tuple[str, ...] = ()

    def add_adapters(self, model: PreTrainedModel, config: BuildOptions) -> None:
        """Freeze a model and put adapters on its layers.

        Args:
            model: Model to change in place.
            config: Options; `lora_rank`, `lora_alpha`, `lora_dropout` and `target_modules` define
                the adapters' layers and sizes; `seed` fixes the first factors, on every rank.

        Raises:
            ImportError: peft is not installed.
            ConfigError: A target names no linear layer of the model, or `lora_rank` is 0.
        """
        if config.lora_rank < 1:
            raise ConfigError(f"adapters need lora_rank >= 1: got {config.lora_rank}")
        self.rank, self.scale = config.lora_rank, config.lora_alpha / config.lora_rank
        self.adapters = _inject(model, config, self.whole)
        self.coverage = adapter_coverage(model, self.whole)
        if config.quantize:
            self.coverage += f"; {_quantize(model, self.whole, config)}"

    def gradient_checkpointing_enable(self) -> None:
        """Enable checkpointing; inputs of the first block must carry gradients to its adapters."""
        super().gradient_checkpointing_enable()
        self.pretrained.enable_input_require_grads()

    @contextmanager
    def adapters_off(self) -> Iterator[None]:
        """Run the model in the body without its adapters; nothing there may need a gradient."""
        from peft.tuners.tuners_utils import BaseTunerLayer

        layers = [layer for layer in self.modules() if isinstance(layer, BaseTunerLayer)]
        # `enable_adapters` would also freeze parameters that a strategy has sharded.
        for layer in layers:
            layer._disable_adapters = True
        try:
            yield
        finally:
            for layer in layers:
                layer._disable_adapters = False

    def base_source(self, source: ParameterSource) -> ParameterSource:
        """Return the source of the base alone, dequantised where it has 4 bits."""
        entries = tuple(e for e in source.entries if not is_factor(e.checkpoint_name))
        return dequantized_source(self.pretrained, replace(source, entries=entries), BASE)

    def merged_source(self, source: ParameterSource) -> ParameterSource:
        """Return the source of the merged weights; one collective for all adapters."""
        base = self.base_source(source)
        stored = source.entries
        factors = _gather([entry for entry in stored if is_factor(entry.checkpoint_name)], source)
        adapted = {name.removesuffix(FIRST) for name in factors if name.endswith(FIRST)}

        def add_local(name: str, start: int, values: Tensor) -> None:
            layer = name.removesuffix(".weight")
            if base.add_local is not None:
                base.add_local(name, start, values)
            if layer in adapted:
                first, second = factors[layer + FIRST], factors[layer + SECOND]
                add_product(values, start, first, second, scale=self.scale)

        def merged(entry: SourceParameter) -> SourceParameter:
            if entry.checkpoint_name.removesuffix(".weight") not in adapted:
                return entry
            return replace(entry, frozen=False, is_aliasable=False)

        changed = [entry for entry in stored if BASE in entry.checkpoint_name]
        changed += _ranges(self.pretrained)
        return replace(
            base,
            entries=tuple(map(merged, base.entries)),
            add_local=add_local,
            changed_base=tuple(changed),
        )

    def adapter_source(self, source: ParameterSource) -> ParameterSource:
        """Return the source of base and adapters; the base is training's, s B is a copy."""
        entries = (*source.entries, *_ranges(self.pretrained))
        return replace(source, entries=tuple(_apart(entry, self.scale) for entry in entries))

    def adapter_shape(self) -> AdapterShape:
        """Return the rank and the layers of the adapters, and the layers of 4 bits."""
        names = (name for name, _ in self.pretrained.named_parameters() if name.endswith(FIRST))
        layers = tuple(name.removesuffix(FIRST) for name in names)
        packed = (name.replace(BASE, "") for name in quantized_layers(self.pretrained))
        return AdapterShape(self.rank, layers, tuple(packed))

    def merged_state(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return a state with the adapters merged into the base weights."""
        merged: dict[str, Tensor] = {}
        for name, value in dequantized(self, state):
            if is_factor(name):
                continue
            layer = name.removesuffix(f"{BASE}.weight")
            if layer + FIRST in state:
                full = value.to(torch.float32, copy=True).reshape(-1)
                add_product(full, 0, state[layer + FIRST], state[layer + SECOND], scale=self.scale)
                value = full.view(value.shape)
            merged[name.replace(BASE, "")] = value
        return merged

    def save_adapters(self, state: Mapping[str, Tensor], folder: Path) -> None:
        """Write the adapters as PEFT's files, which vLLM reads, too."""
        prefix = pretrained_prefix(self) or ""
        inner = {name.removeprefix(prefix): value for name, value in state.items()}
        tensors = {
            # The inner name as in PEFT's wrapper, which adds no name of the adapter.
            f"{PREFIX}{name.replace(f'.{ADAPTER}.', '.')}": value
            for name, value in inner.items()
            if is_factor(name) or is_below(name, self.whole)
        }
        self.adapters.save_pretrained(folder)
        save_file(tensors, folder / WEIGHTS_FILE)


class LoraActor(LoraModel, Actor):
    """Actor with adapters; see `LoraModel` and `Actor`."""

    def __init__(self, model: PreTrainedModel, config: BuildOptions) -> None:
        super().__init__(model)
        self.add_adapters(model, config)


def add_product(values: Tensor, start: int, first: Tensor, second: Tensor, *, scale: float) -> None:
    """Add scale * (second @ first), flattened, from element `start` on, in place.

    The sum over the rank runs in float64 in a fixed order, where products of float32 numbers are
    exact. So an element has the same bits for every range and device. Hashes of the source and of
    the sent weights rely on this.

    Args:
        values: [numel] float32.
        start: Index of its first element in the flattened [out, in] product.
        first: [rank, in].
        second: [out, rank].
        scale: Factor of the product.
    """
    width = first.shape[1]
    first_row, stop = start // width, start + values.numel()
    rows = second[first_row : -(-stop // width)].to(values.device, torch.float64)
    columns = first.to(values.device, torch.float64)
    product = torch.zeros(len(rows), width, dtype=torch.float64, device=values.device)
    for k in range(len(columns)):
        product.addcmul_(rows[:, k : k + 1], columns[k : k + 1])
    offset = start - first_row * width
    product.mul_(scale)
    values.copy_(product.view(-1)[offset : offset + values.numel()].add_(values))


def _inject(model: PreTrainedModel, config: BuildOptions, whole: Sequence[str]) -> SavesPretrained:
    """Put the adapters into the layers; return their description."""
    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ImportError as error:
        raise ImportError(
            "--lora_rank needs the package peft, which is not installed: install lightrft[lora], "
            "or leave it out"
        ) from error
    check_library("peft")
    names = target_layers(model, config.target_modules, frozen=config.freeze_prefix)
    if config.lora_path is not None:
        check_adapters(config, model, names, whole)
    model.requires_grad_(False)
    adapters = LoraConfig(
        r=config.lora_rank,
        lora_alpha=config.lora_alpha,
        lora_dropout=config.lora_dropout,
        target_modules=[f"{_BODY}.{name}" for name in names],
        bias="none",
        base_model_name_or_path=config.pretrain,
    )
    # Adapters are in no file, and peft puts them where their layers are.
    with torch.random.fork_rng(devices=[]), parameters_on_meta(False), on_host(model):
        torch.manual_seed(config.seed)
        # Without the model's type: for some, peft has names of experts that are not layers' names,
        # and refuses layers of recurrences. Names here are those of layers, proved to be called.
        body = nn.ModuleDict({_BODY: model})
        inject_adapter_in_model(adapters, body, adapter_name=ADAPTER)
    renamed = _renamed_by_peft(model, names)
    adapters.target_modules = {*names} - renamed
    if renamed:
        adapters.target_parameters = sorted(f"{name}.weight" for name in renamed)
        adapters.lora_dropout = 0.0  # PEFT refuses another one there; factors are the same
    # Set afterwards: peft would make copies of these modules.
    adapters.modules_to_save = [*whole] or None
    bound = [name for name, _ in model.named_parameters() if name.endswith(FIRST)]
    if len(bound) != len(names):
        raise RuntimeError(
            f"peft put adapters on {len(bound)} of {len(names)} layers, e.g. not on "
            f"{sorted(set(names) - {name.removesuffix(FIRST) for name in bound})[:3]}"
        )
    if config.lora_path is not None:
        load_adapters(Path(config.lora_path), model, ADAPTER)
    return cast("SavesPretrained", adapters)


def _renamed_by_peft(model: PreTrainedModel, names: Sequence[str]) -> set[str]:
    """Return the layers that PEFT would take for experts when it reads their names from a file.

    By the model's type it maps the names of layers that experts had once, such as gate_proj, to
    tensors of all experts, also where a dense block has layers of these names.
    """
    from peft import LoraConfig

    try:
        from peft.utils.transformers_weight_conversion import convert_peft_config_for_transformers
    except ImportError:  # earlier versions take names as they are
        return set()

    def is_renamed(name: str) -> bool:
        config = LoraConfig(target_modules=[name])
        try:
            convert_peft_config_for_transformers(config, model, None)
        except ValueError:  # it wants the other half of the experts' tensor, too
            return True
        return bool(config.target_modules != {name})

    return {name for name in names if is_renamed(name)}


def target_layers(
    model: nn.Module, targets: Sequence[str], *, frozen: Sequence[str] = ()
) -> list[str]:
    """Return the names of the target linear layers, without those below frozen prefixes.

    A target is the last name of layers, or a regular expression for their whole names:
    `language_model.*` names the text layers of a vision-language model.

    Raises:
        ConfigError: A target names no linear layer; the message lists the existing names.
    """
    linear = _linear_layers(model)
    if ALL_LINEAR in targets:
        chosen = set(linear)
    else:
        matches = {t: {n for n in linear if _is_meant(n, t)} for t in targets}
        unbound = [target for target, names in matches.items() if not names]
        if unbound:
            known = sorted({name.rsplit(".", 1)[-1] for name in linear})
            raise ConfigError(
                f"target_modules: no linear layer is called {', '.join(unbound)}; the model has "
                f"{', '.join(known)}, or give {ALL_LINEAR}"
            )
        chosen = set().union(*matches.values())
    chosen = {name for name in chosen if not has_prefix(name, frozen)}
    if not chosen:
        raise ConfigError(
            f"target_modules: {type(model).__name__} has no linear layer for an adapter"
            f"{_other_layers(model)}; train it whole (--lora_rank 0), or take another model"
        )
    return sorted(chosen)


def _linear_layers(model: nn.Module) -> list[str]:
    """Return the names of the linear layers of the body, without a policy's output projection."""
    head = model.get_output_embeddings() if isinstance(model, PreTrainedModel) else None
    layers = ((n, each) for n, each in model.named_modules() if each is not head)
    return [n for n, layer in layers if is_product(layer)]


def _quantize(model: nn.Module, whole: Sequence[str], config: BuildOptions) -> str:
    """Store linear layers in 4 bits, those below adapters, too; return a line about them."""
    has_gpu = torch.cuda.is_available()
    names = [
        n for n in _linear_layers(model) if not (is_factor(f"{n}.weight") or is_below(n, whole))
    ]
    dtype = torch.bfloat16 if config.computes_in_bf16(has_gpu=has_gpu) else torch.float32
    quantize_layers(model, names, dtype)
    made = quantized_layers(model).values()
    number = sum(layer.size for layer in made) / 1e6
    return (
        f"{len(made)} layers with {number:,.3g} million weights in 4 bits (NF4), dequantised to "
        f"{str(dtype).removeprefix('torch.')} where they are used and in a merged export"
    )


def _other_layers(model: nn.Module) -> str:
    """Name the layers with matrices that take no adapter; "" without any."""
    kinds = Counter(
        type(layer).__name__
        for layer in model.modules()
        for name, value in layer.named_parameters(recurse=False)
        if name == "weight" and value.dim() > 1 and not isinstance(layer, _TAKEN)
    )
    others = ", ".join(f"{number} of {kind}" for kind, number in kinds.items())
    return f": its layers are {others}, which take none" if others else ""


def adapter_coverage(model: PreTrainedModel, whole: Sequence[str] = ()) -> str:
    """Return one line about the layers with adapters and the body's matrices without.

    Args:
        model: Model with adapters.
        whole: Children that are trained whole.
    """
    names = {name for name, _ in model.named_parameters() if name.endswith(FIRST)}
    layers = (model.get_input_embeddings(), model.get_output_embeddings())
    ends = {id(each.weight) for each in layers if each is not None}
    without: Counter[str] = Counter()
    total = 0
    for name, value in model.named_parameters():
        if is_factor(name) or id(value) in ends or is_below(name, whole):
            continue
        total += value.numel()
        if value.dim() > 1 and name.removesuffix(f"{BASE}.weight") + FIRST not in names:
            module = name.rpartition(".")[0]
            without[next((w for w in module.split(".")[::-1] if not w.isdigit()), name)] += (
                value.numel()
            )
    line = f"adapters on {len(names)} layers"
    if not without:
        return line
    places = " and ".join(place for place, _ in without.most_common(3))
    part, whole = (f"{number / 1e6:,.3g}" for number in (without.total(), total))
    return f"{line}; {part} of {whole} million weights, in {places}, get none"


def _is_meant(name: str, target: str) -> bool:
    is_last = name == target or name.endswith(f".{target}")
    return is_last or names_part(target).fullmatch(f"{name.removeprefix('model.')}.") is not None


def _ranges(model: nn.Module) -> Iterator[SourceParameter]:
    """Yield the ranges of layers of 4 bits, which are no parameters: every rank has them."""
    for name, layer in quantized_layers(model).items():
        yield whole_parameter(f"{name}.{RANGES}", layer.ranges)


def _apart(entry: SourceParameter, scale: float) -> SourceParameter:
    name = entry.checkpoint_name.replace(BASE, "")
    if not is_factor(name):
        return replace(entry, checkpoint_name=name)
    plain_name = name.replace(f".{ADAPTER}.", ".")
    if name.endswith(FIRST):
        return replace(entry, checkpoint_name=plain_name)
    # An engine's B includes the scale; it is rounded once, when it is sent.
    scaled = entry.local_shard.float() * scale
    return replace(entry, checkpoint_name=plain_name, local_shard=scaled, is_aliasable=False)


def is_factor(name: str) -> bool:
    """Return whether a parameter is a factor of an adapter."""
    return name.endswith((FIRST, SECOND))


def _gather(factors: Sequence[SourceParameter], source: ParameterSource) -> dict[str, Tensor]:
    """Return all factors, whole and in float32, on every rank; one all-gather if any is sharded."""
    sharded = [entry for entry in factors if entry.is_sharded]
    full = {
        entry.checkpoint_name: entry.local_shard.float().view(entry.shape)
        for entry in factors
        if not entry.is_sharded
    }
    if not sharded or source.group is None:
        return full
    by_rank = zip(*(entry.shards for entry in sharded), strict=True)
    sizes = [[stop - start for start, stop in ranges] for ranges in by_rank]
    device = transfer_device(source.group)
    local = torch.cat([entry.local_shard.float() for entry in sharded]).to(device)
    padded = torch.zeros(max(map(sum, sizes)), device=device)
    padded[: local.numel()] = local
    parts = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather(parts, padded, group=source.group)
    split = [part[: sum(n)].split(n) for part, n in zip(parts, sizes, strict=True)]
    for entry, *pieces in zip(sharded, *split, strict=True):
        full[entry.checkpoint_name] = torch.cat(pieces).view(entry.shape)
    return full
