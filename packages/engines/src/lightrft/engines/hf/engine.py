"""Embedded rollout engine: transformers in the trainer's process, with a separate model."""

from __future__ import annotations

import copy
import logging
from collections.abc import Mapping, Sequence
from functools import cached_property
from itertools import groupby
from pathlib import Path

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from transformers import (
    AutoConfig,
    PreTrainedModel,
)
from transformers.initialization import no_init_weights
from transformers.modeling_utils import local_torch_dtype

from lightrft.engines.adapters import add_adapters
from lightrft.engines.backend_options import check_options
from lightrft.engines.base import FinishedRows, RolloutEngine
from lightrft.engines.engine_weights import ParameterStore, is_full_tensor
from lightrft.engines.hf.attention import use_attention
from lightrft.engines.hf.decode import StopRule, decode, stop_token_table
from lightrft.engines.hf.forward import CachedForward, ModelTraits, PlainForward, WholeBatchForward
from lightrft.engines.hf.layers import module_outputs
from lightrft.engines.hf.routers import TRIED_TOKENS, Router, find_routers
from lightrft.engines.hf.tower import use_fast_tower
from lightrft.engines.hf.trial import TextForward, text_forward
from lightrft.engines.media.families import language_model_class
from lightrft.engines.media.media import EncodedPrompt
from lightrft.engines.nf4 import pack_layers, stored_tensors
from lightrft.engines.rows import RawCompletion, RequestedSample
from lightrft.engines.sampling import row_keys
from lightrft.engines.text import StopStringMatcher
from lightrft.engines.types import EngineConfig, SamplingParams

HF_OPTIONS = ("attn_implementation", "device", "rows_at_once")
_logger = logging.getLogger(__name__)
# Range of rows where the product with the weight on the left is faster. Below it, reading the
# weight dominates; above it, the arithmetic.
_MIN_ROWS = 12
_MAX_ROWS = 64
# A smaller weight stays in the cache, and transposing the result costs more than is saved.
MIN_WEIGHT = 500_000


class HFEngine(RolloutEngine):
    """Engine with a decode loop over the transformers forward.

    Each rank generates for its prompts: `tensor_parallel_size` forms no groups here, and
    `memory_utilization` has no effect because the cache is allocated per call.

    Args:
        config: Settings; options: "device", "attn_implementation", "rows_at_once".
        module: Transformers model whose architecture (and weights, if it holds them in full) to
            take instead of reading `config.model_path`.
    """

    name = "hf"
    runs_on_every_rank = False
    streams = True
    reads_media = True

    def __init__(self, config: EngineConfig, *, module: nn.Module | None = None) -> None:
        super().__init__(config)
        self._model, unwritten = build_model(config, module)
        if config.adapters is not None:
            unwritten |= add_adapters(self._model, config.adapters)
        self.weights = ParameterStore(stored_tensors(self._model), self.name)
        self.weights.unwritten.update(unwritten & self.weights.owners)
        if config.tensor_parallel_size > 1:
            _logger.info(
                "the hf engine generates on each rank by itself; tensor_parallel_size=%d only "
                "forms groups",
                config.tensor_parallel_size,
            )
        self._traits = ModelTraits(self._model, config.vocabulary.num_tokens)
        self._routers: list[Router] | None = None
        self._rows_at_once = rows_at_once(config.options)
        self._read_limits(self._model.config, self._model.generation_config)

    @property
    def native(self) -> object:
        """Transformers model."""
        return self._model

    def stream_rows(self, rows: Sequence[RequestedSample], params: SamplingParams) -> FinishedRows:
        """Yield rows as they finish."""

        def group(row: RequestedSample) -> int:
            # Other rows are decoded with those of the same length.
            return 0 if self._pads(row) else len(row.prompt)

        for _, chunk in groupby(sorted(rows, key=group), key=group):
            alike = list(chunk)
            size = self._rows_at_once or len(alike)
            for start in range(0, len(alike), size):
                yield from self._decode(alike[start : start + size], params)

    @torch.inference_mode()
    def score(self, token_ids: Sequence[int]) -> list[float]:
        """Score a sequence at temperature 1."""
        self.check_usable()
        if not token_ids:
            return []
        input_ids = torch.tensor([list(token_ids)], device=self._model.device)
        logits = self._model(input_ids=input_ids, use_cache=False).logits[0, :-1]
        logits = self._traits.sampled(logits)
        logprobs = logits.float().log_softmax(dim=-1).gather(-1, input_ids[0, 1:, None])
        return [0.0, *logprobs.squeeze(-1).tolist()]

    @torch.inference_mode()
    def layer_outputs(
        self, token_ids: Sequence[int], media: EncodedPrompt | None
    ) -> dict[str, torch.Tensor]:
        """Return the outputs of all modules for one sequence of text."""
        if media is not None:
            return {}
        tokens = torch.tensor([list(token_ids)], device=self._model.device)
        mask = torch.ones_like(tokens)
        return module_outputs(
            self._model, lambda: self._model(input_ids=tokens, attention_mask=mask, use_cache=False)
        )

    @torch.inference_mode()
    def _decode(self, rows: Sequence[RequestedSample], params: SamplingParams) -> FinishedRows:
        device = self._model.device
        keys = row_keys(
            params.seed,
            [row.request_id for row in rows],
            [row.sample_index for row in rows],
            device=device,
        )
        forward = self._forward(rows)
        if params.records_routes:
            forward.routers = self._known_routers(rows[0].prompt)
        for ended in decode(
            forward,
            keys=keys,
            limits=[row.max_tokens for row in rows],
            params=params,
            rule=self._stop_rule(params, len(rows)),
        ):
            yield [
                (
                    rows[row],
                    RawCompletion(
                        tuple(tokens), tuple(logprobs), "stop" if stops else "length", facts
                    ),
                )
                for row, tokens, logprobs, stops, facts in ended
            ]

    def _known_routers(self, token_ids: Sequence[int]) -> list[Router]:
        """Return the routers of the model; [] without experts."""
        if self._routers is None:
            tokens = torch.tensor([list(token_ids[:TRIED_TOKENS])], device=self._model.device)
            trunk = self._model.base_model
            self._routers = find_routers(trunk, lambda: trunk(input_ids=tokens, use_cache=False))
        return self._routers

    def _forward(self, rows: Sequence[RequestedSample]) -> CachedForward:
        if not all(map(self._pads, rows)):
            prompts, media = [row.prompt for row in rows], [row.media for row in rows]
            return WholeBatchForward(self._model, self._traits, prompts, media)
        # Rows with the same prompt share one pass over it, even across requests.
        index_of: dict[tuple[tuple[int, ...], EncodedPrompt | None], int] = {}
        prompt_of_row = [
            index_of.setdefault((row.prompt, row.media), len(index_of)) for row in rows
        ]
        prompts, media = [key[0] for key in index_of], [key[1] for key in index_of]
        if self._traits.can_drop_rows:
            return PlainForward(self._model, self._traits, prompts, prompt_of_row, media)
        assert self._text_forward is not None
        return self._text_forward(self._model, self._traits, prompts, prompt_of_row)

    @cached_property
    def _text_forward(self) -> TextForward | None:
        """Return how texts of other lengths are decoded together, by a trial of the weights."""
        return text_forward(self._model, self._traits)

    def _pads(self, row: RequestedSample) -> bool:
        """Return whether a row can be decoded with rows of other lengths, and be dropped."""
        return self._traits.can_drop_rows or (self._text_forward is not None and row.media is None)

    def _stop_rule(self, params: SamplingParams, num_rows: int) -> StopRule:
        stop_ids = self._stop_ids(params)
        table = None
        if stop_ids:
            table = stop_token_table(stop_ids, self._limits.vocab_size, device=self._model.device)
        num_matched = num_rows if params.stop else 0
        matchers = [StopStringMatcher(params.stop, self._text) for _ in range(num_matched)]
        return StopRule(table, matchers, params.min_tokens)


def rows_at_once(options: Mapping[str, object]) -> int | None:
    """Return the most rows that are decoded together; None is all.

    Rounding depends on the rows of a batch. Rows that are decoded alone, or by whole groups, have
    the same bits regardless of other requests and of the number of ranks.

    Raises:
        ValueError: The option is no positive integer.
    """
    value = options.get("rows_at_once")
    if value is None:
        return None
    text = str(value)
    if not text.isdecimal() or int(text) < 1:
        raise ValueError(f"rows_at_once of the hf engine: got {value!r}, expected 1 or more")
    return int(text)


def build_model(config: EngineConfig, module: nn.Module | None) -> tuple[PreTrainedModel, set[str]]:
    """Load the checkpoint at `config.model_path`, or rebuild `module` with separate storage.

    Neither the global random state nor the default dtype is changed.

    Args:
        config: Settings: dtype, path and options ("device", "attn_implementation").
        module: Transformers model. Parameters that it holds in full are copied; sharded ones
            stay unwritten until the first weight update.

    Returns:
        Model in eval mode, and names of its parameters that hold no weights yet.

    Raises:
        ValueError: An option or dtype is unknown, or the checkpoint lacks weights.
        TypeError: `module` is not a transformers model.
        FileNotFoundError: `config.model_path` is not a directory.
    """
    check_options(config.options, HF_OPTIONS, engine_name="hf")
    dtype: torch.dtype = config.torch_dtype
    attention = config.options.get("attn_implementation")
    device = _device(config, module)
    # The model is built on the host: with the default, fork_rng would open every GPU.
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        model = _load(config.model_path, dtype) if module is None else _rebuild(module, dtype)
        packed = () if config.adapters is None else config.adapters.packed
        unwritten = pack_layers(model, packed, dtype)
        if module is not None:
            unwritten = _copy_weights(module, model)
    use_attention(model, None if attention is None else str(attention))
    use_fast_tower(model)
    model.requires_grad_(False)
    model.eval()
    head = model.get_output_embeddings()
    if head is not None:
        head.register_forward_pre_hook(_in_one_piece)
    model = model.to(device)
    use_few_rows_products(model)
    return model, unwritten


def _in_one_piece(_: nn.Module, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    """Make the last positions' states contiguous, so that the head is one product.

    For a slice torch computes one product per row. On a CPU each reads the whole weight, and in
    bfloat16 even copies it.
    """
    return (inputs[0].contiguous(), *inputs[1:])


def _device(config: EngineConfig, module: nn.Module | None) -> torch.device:
    if "device" in config.options:
        return torch.device(str(config.options["device"]))
    module_device = None if module is None else next((p.device for p in module.parameters()), None)
    if module_device is not None and module_device.type not in ("meta", "cpu"):
        return module_device
    if module_device is None and torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def _load(model_path: str, dtype: torch.dtype) -> PreTrainedModel:
    if not model_path or not Path(model_path).is_dir():
        raise FileNotFoundError(
            f"the hf engine reads its model from a local directory: {model_path!r} is none; "
            "pass the path of a Hugging Face checkpoint, or a module"
        )
    config = AutoConfig.from_pretrained(model_path, local_files_only=True, trust_remote_code=False)
    model, report = language_model_class(config).from_pretrained(
        model_path,
        dtype=dtype,
        local_files_only=True,
        output_loading_info=True,
        trust_remote_code=False,
    )
    if report["missing_keys"]:
        raise ValueError(
            f"the checkpoint at {model_path} lacks {len(report['missing_keys'])} parameters "
            f"(first: {min(report['missing_keys'])})"
        )
    return model


def _rebuild(module: nn.Module, dtype: torch.dtype) -> PreTrainedModel:
    """Build a model of the same architecture with uninitialised parameters."""
    if not isinstance(module, PreTrainedModel):
        raise TypeError(
            f"the hf engine needs a transformers model: got {type(module).__name__}; "
            "pass the inner model of a wrapper (actor.model)"
        )
    architecture = architecture_of(type(module))
    hf_config = copy.deepcopy(module.config)
    hf_config.dtype = dtype
    with no_init_weights(), local_torch_dtype(dtype):
        model = architecture(hf_config)
    model.tie_weights()
    model.generation_config = copy.deepcopy(module.generation_config)
    return model


def architecture_of(kind: type[PreTrainedModel]) -> type[PreTrainedModel]:
    """Return the class that defines a model: sharding replaces it by a generated subclass."""
    mro: list[type[PreTrainedModel]] = [c for c in kind.__mro__ if issubclass(c, PreTrainedModel)]
    return next(c for c in mro if not issubclass(c, FSDPModule))


def _copy_weights(source: nn.Module, target: nn.Module) -> set[str]:
    """Copy what the source holds in full; return the names of the other parameters."""
    sources = stored_tensors(source)
    unwritten: set[str] = set()
    for name, parameter in stored_tensors(target).items():
        tensor = sources.get(name)
        if tensor is not None and is_full_tensor(tensor, parameter.shape):
            parameter.copy_(tensor)
        else:
            unwritten.add(name)
    buffers = dict(source.named_buffers())
    for name, buffer in target.named_buffers():
        if name in buffers and buffers[name].shape == buffer.shape:
            buffer.copy_(buffers[name])
    return unwritten


class FewRowsLinear(nn.Linear):
    """`nn.Linear` that multiplies weight by rows if rows are few, as in decoding on a CPU.

    The BLAS that torch ships reads a large weight up to twice as fast as the left factor. Only the
    order of sums differs from `nn.Linear`.
    """

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Map [..., in_features] to [..., out_features]."""
        rows = input.numel() // self.in_features
        if not _MIN_ROWS <= rows <= _MAX_ROWS:
            return super().forward(input)
        columns = torch.mm(self.weight, input.reshape(rows, self.in_features).t())
        # A resized head has another number of rows than `out_features` says.
        output = columns.t().contiguous().view(*input.shape[:-1], -1)
        return output if self.bias is None else output + self.bias


def use_few_rows_products(model: nn.Module) -> None:
    """Turn a model's large float32 linear layers on the CPU into `FewRowsLinear`s."""
    for module in model.modules():
        # A subclass may have another forward.
        if type(module) is not nn.Linear or module.weight.numel() < MIN_WEIGHT:
            continue
        if module.weight.device.type == "cpu" and module.weight.dtype == torch.float32:
            module.__class__ = FewRowsLinear
