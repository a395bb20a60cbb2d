"""Cached forwards of a transformers model over rows of prompts."""

import inspect
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import ExitStack

import torch
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import Cache, DynamicLayer

from lightrft.engines.hf.attention import MASKED
from lightrft.engines.hf.routers import Router, stacked_choices
from lightrft.engines.media.cross_attention import only_own_images
from lightrft.engines.media.families import family_of, placeholder_ids
from lightrft.engines.media.inputs import (
    Prompts,
    axes_of_rows,
    foreign_places,
    media_inputs,
    pad_right,
    read_as_text,
    token_types,
)

# Names by which forwards take their cache: every model since transformers 5.24; models of keys and
# values, and of states, before. XLM's `cache` is a dictionary instead.
_CACHE_ARGUMENTS = ("cache", "past_key_values", "cache_params")
# Tokens by which a cache grows at a time.
_ROOM = 64


class CacheRefusedError(ValueError):
    """A cache of a model gives other log-probabilities than its whole forward pass."""


class MissingCacheError(CacheRefusedError):
    """A model keeps no cache."""


class ModelTraits:
    """Traits of a model's forward, determined once.

    Attributes:
        cache_argument: Name of its argument for the cache; "" if it takes none.
        takes_positions: Whether it takes the places of tokens.
        can_drop_rows: Whether rows can be padded, repeated and dropped, because its cache keeps
            all keys and values of each row separately.
        head_arguments: Extra arguments that restrict the logits to the last position.
        family: Family of a vision-language model; None for text models.
        num_tokens: Number of leading logits that belong to tokens; None takes all.
        forbidden: Tokens that are never sampled, [placeholders] int64; None for text models.
    """

    def __init__(self, model: PreTrainedModel, num_tokens: int | None = None) -> None:
        arguments = inspect.signature(model.forward).parameters
        caches = [
            name
            for name in _CACHE_ARGUMENTS
            if name in arguments and "dict[" not in str(arguments[name].annotation)
        ]
        self.cache_argument = next(iter(caches), "")
        self.takes_positions = "position_ids" in arguments
        self.head_arguments = {"logits_to_keep": 1} if "logits_to_keep" in arguments else {}
        self.family = family_of(model.config)
        self.num_tokens = num_tokens
        forbidden = _placeholders(model, num_tokens)
        self.forbidden = forbidden if len(forbidden) else None
        layers = DynamicCache(config=model.config).layers
        is_plain = all(type(layer) is DynamicLayer for layer in layers)
        text_config = model.config.get_text_config()
        self.can_drop_rows = (
            is_plain
            and self.cache_argument not in ("", "cache_params")
            and self.takes_positions
            # Attention of a class's own may count distances by places in the cache: it is tried.
            and model.get_decoder()._supports_attention_backend
            and text_config._attn_implementation in MASKED
            and not (self.family and (self.family.takes_types or self.family.attends_to_images))
        )

    def sampled(self, logits: torch.Tensor) -> torch.Tensor:
        """Return the logits [rows, vocab] without padding, with -inf at forbidden tokens."""
        logits = logits[:, : self.num_tokens]
        if self.forbidden is None:
            return logits
        return logits.index_fill(-1, self.forbidden, float("-inf"))


def _hexadecimal(choices: torch.Tensor) -> str:
    return choices.numpy().tobytes().hex()


def _placeholders(model: PreTrainedModel, num_tokens: int | None) -> torch.Tensor:
    """Return the placeholder ids of media among the first `num_tokens`."""
    ids = torch.tensor(placeholder_ids(model.config), dtype=torch.int64, device=model.device)
    return ids if num_tokens is None else ids[ids < num_tokens]


class RoomyLayer(DynamicLayer):  # type: ignore[misc]
    """`DynamicLayer` with spare room, so that new tokens are written instead of concatenated.

    `keys` and `values` are views [rows, kv_heads, seq, head_dim] of larger buffers.
    """

    def __init__(self) -> None:
        super().__init__()
        self.keys = torch.empty(0)
        self.values = torch.empty(0)
        self._key_buffer = torch.empty(0)
        self._value_buffer = torch.empty(0)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append states [rows, kv_heads, new, head_dim]; return all states so far."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        start = self.get_seq_length()
        stop = start + key_states.shape[-2]
        if start == 0 or stop > self._key_buffer.shape[-2]:
            self._key_buffer = _with_room(key_states, self.keys, start, stop + _ROOM)
            self._value_buffer = _with_room(value_states, self.values, start, stop + _ROOM)
        self._key_buffer[:, :, start:stop] = key_states
        self._value_buffer[:, :, start:stop] = value_states
        self.keys = self._key_buffer[:, :, :stop]
        self.values = self._value_buffer[:, :, :stop]
        return self.keys, self.values

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Select rows in the order of `indices`; a row may be taken several times."""
        stop = self.get_seq_length()
        if stop == 0:
            return
        self._key_buffer = self._key_buffer.index_select(0, indices)
        self._value_buffer = self._value_buffer.index_select(0, indices)
        self.keys = self._key_buffer[:, :, :stop]
        self.values = self._value_buffer[:, :, :stop]


def _with_room(
    new_states: torch.Tensor, old_states: torch.Tensor, length: int, capacity: int
) -> torch.Tensor:
    rows, heads, _, width = new_states.shape
    buffer = new_states.new_empty(rows, heads, capacity, width)
    if length:
        buffer[:, :, :length] = old_states
    return buffer


class CachedForward(ABC):
    """Model with its cache and the media of its prompts.

    Args:
        model: Model in eval mode.
        traits: Traits of the model.
        cache: Cache of keys, values or states; None lets the model make its own kind.
        prompts: Tokens of each prompt.
        media: Encoded prompt of each; () if none has media.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        traits: ModelTraits,
        cache: Cache | None,
        prompts: Sequence[Sequence[int]],
        media: Prompts,
    ) -> None:
        self._model = model
        self._traits = traits
        self._cache = cache
        self._device = model.device
        self._prompts = prompts
        self._media = media if any(media) else ()
        # Routers whose choices are recorded, and the choices of passes since `routes`.
        self.routers: Sequence[Router] = ()
        self._passes: list[torch.Tensor] = []
        self._has_begun = False

    # Whether rows can be dropped before all end.
    can_drop_rows: bool

    @abstractmethod
    def start(self) -> torch.Tensor:
        """Run the prompts; return the logits [rows, vocab] of the first new token."""

    @abstractmethod
    def advance(self, tokens: torch.Tensor) -> torch.Tensor:
        """Append tokens [rows] int64; return the logits [rows, vocab] of the next ones."""

    @abstractmethod
    def keep(self, rows: torch.Tensor) -> None:
        """Keep only these rows, [kept] int64."""

    @property
    def _rows(self) -> list[torch.Tensor]:
        """Tokens of each prompt on the host, [tokens] int64."""
        return [torch.tensor(prompt) for prompt in self._prompts]

    def _axes_of_rows(self) -> list[torch.Tensor]:
        """Return the places of tokens, [3, tokens] each; [] unless the model has three axes."""
        family = self._traits.family
        if not self._media or family is None or not family.has_axes:
            return []
        return axes_of_rows(self._model.base_model, self._rows, self._media)

    def _media_inputs(self, width: int) -> dict[str, torch.Tensor]:
        if not self._media:
            return {}
        assert self._traits.family is not None
        return media_inputs(
            self._traits.family,
            self._rows,
            self._media,
            width=width,
            device=self._device,
            dtype=self._model.dtype,
        )

    def _run_media(self, input_ids: torch.Tensor, **inputs: torch.Tensor | None) -> torch.Tensor:
        """Run whole prompts, reading placeholders outside of media as text."""
        marks = foreign_places(self._model.config, list(input_ids), self._media)
        with read_as_text(self._model, input_ids, torch.stack(marks)) as ids:
            return self._run(ids, **inputs)

    def _run(self, input_ids: torch.Tensor, **inputs: torch.Tensor | None) -> torch.Tensor:
        if not self._traits.cache_argument:
            raise self._missing_cache()
        output = self._model(
            input_ids=input_ids,
            use_cache=True,
            **inputs,
            **({} if self._cache is None else {self._traits.cache_argument: self._cache}),
            **self._traits.head_arguments,
        )
        if self._cache is None:
            caches = [
                value
                for name, value in output.items()
                if isinstance(value, Cache) or name in _CACHE_ARGUMENTS
            ]
            if not caches:
                raise self._missing_cache()
            self._cache = caches[0]
        self._note_routes(input_ids)
        return self._traits.sampled(output.logits[:, -1])

    def _missing_cache(self) -> MissingCacheError:
        return MissingCacheError(
            f"{type(self._model).__name__} keeps no cache: the hf engine samples from it on texts "
            "alone; take another --engine_type"
        )

    def _note_routes(self, input_ids: torch.Tensor) -> None:
        """Keep the experts that the last pass chose for tokens [rows, tokens]."""
        if self.routers:
            choices = stacked_choices(self.routers)
            self._passes.append(choices.view(*input_ids.shape, -1).cpu())

    def routes(self) -> list[str]:
        """Return the fact `ROUTES` of the next token of each row; [] if none are recorded."""
        passes, self._passes = self._passes, []
        if not passes:
            return []
        if self._has_begun:
            return [_hexadecimal(row) for row in passes[0]]
        self._has_begun = True
        texts = [_hexadecimal(self._of_prompt(passes, i)) for i in range(len(self._prompts))]
        return [texts[i] for i in self._rows_of_prompts()]

    def _of_prompt(self, passes: Sequence[torch.Tensor], index: int) -> torch.Tensor:
        """Return the choices for the tokens of a prompt, [tokens, choices]."""
        return passes[0][index][-len(self._prompts[index]) :]

    def _rows_of_prompts(self) -> Sequence[int]:
        """Return the index of each row's prompt as the rows begin."""
        return range(len(self._prompts))


class PlainForward(CachedForward):
    """Forward over a cache of every key: rows can share a prompt, be padded and be dropped.

    Prompts are padded on the right, where a causal model cannot see the padding. The cache then
    has holes after short prompts, which an additive mask hides from later tokens. Without padding
    there is no mask.

    Args:
        model: Model in eval mode.
        traits: Traits of the model.
        prompts: Distinct prompts, each not empty.
        prompt_of_row: Index of each row's prompt.
        media: Encoded prompt of each prompt; () if none has media.
    """

    can_drop_rows = True

    def __init__(
        self,
        model: PreTrainedModel,
        traits: ModelTraits,
        prompts: Sequence[Sequence[int]],
        prompt_of_row: Sequence[int],
        media: Prompts = (),
    ) -> None:
        super().__init__(model, traits, Cache(layer_class_to_replicate=RoomyLayer), prompts, media)
        self._rows_at_start = prompt_of_row
        self._prompt_of_row = torch.tensor(prompt_of_row, device=self._device)
        lengths = [len(prompt) for prompt in prompts]
        self._is_ragged = len(set(lengths)) > 1
        self._positions = torch.tensor(
            [[length - 1] for length in (lengths if self._is_ragged else lengths[:1])],
            device=self._device,
        )
        # Without the last token when ragged, see `_start_ragged`.
        self._cached_length = max(lengths) - int(self._is_ragged)
        self._mask: torch.Tensor | None = None
        self._axes: torch.Tensor | None = None
        axes = self._axes_of_rows()
        if axes:
            self._axes = pad_right(axes, max(lengths)).to(self._device)
            # Prompts end with text, which lies behind all media.
            self._positions = torch.stack([a[:, -1:] for a in axes], dim=1).to(self._device)

    def start(self) -> torch.Tensor:
        """Run each prompt once, then copy its cache to every row."""
        if self._is_ragged:
            logits = self._start_ragged()
        else:
            input_ids = torch.tensor(self._prompts, device=self._device)
            logits = self._run_prompts(input_ids)
        self._select(self._prompt_of_row)
        return logits[self._prompt_of_row]

    def advance(self, tokens: torch.Tensor) -> torch.Tensor:
        """Append one token to every row."""
        self._positions = self._positions + 1
        self._cached_length += 1
        mask = None if self._mask is None else self._visible(self._mask)
        return self._run(tokens[:, None], position_ids=self._positions, attention_mask=mask)

    def keep(self, rows: torch.Tensor) -> None:
        """Keep only these rows."""
        self._select(rows)

    def _of_prompt(self, passes: Sequence[torch.Tensor], index: int) -> torch.Tensor:
        if not self._is_ragged:
            return super()._of_prompt(passes, index)
        # The last tokens ran in a separate pass.
        before, last = passes
        return torch.cat([before[index][: len(self._prompts[index]) - 1], last[index]])

    def _rows_of_prompts(self) -> Sequence[int]:
        return self._rows_at_start

    def _start_ragged(self) -> torch.Tensor:
        # All tokens but the last of each prompt run at once, then the last ones in a separate step.
        # So logits are computed at one position whatever the lengths.
        lengths = torch.tensor([[len(p) - 1] for p in self._prompts], device=self._device)
        width = self._cached_length
        padded = [[*p[:-1], *[p[-1]] * (width + 1 - len(p))] for p in self._prompts]
        columns = torch.arange(width, device=self._device)
        self._run_prompts(torch.tensor(padded, device=self._device))
        is_hole = columns[None] >= lengths
        mask = torch.zeros(is_hole.shape, dtype=self._model.dtype, device=self._device)
        mask.masked_fill_(is_hole, torch.finfo(mask.dtype).min)
        self._mask = mask[:, None, None, :]
        last_tokens = torch.tensor([prompt[-1] for prompt in self._prompts], device=self._device)
        self._positions = self._positions - 1
        return self.advance(last_tokens)

    def _run_prompts(self, input_ids: torch.Tensor) -> torch.Tensor:
        width = input_ids.shape[1]
        inputs = self._media_inputs(width)
        run = self._run_media if self._media else self._run
        positions = torch.arange(width, device=self._device)[None]
        if self._axes is not None:
            positions = self._axes[..., :width]
        return run(input_ids, position_ids=positions, attention_mask=None, **inputs)

    def _visible(self, mask: torch.Tensor) -> torch.Tensor:
        """Return the mask of cached tokens, [rows, 1, 1, cached]; new tokens are visible to all."""
        if mask.shape[-1] < self._cached_length:
            mask = torch.nn.functional.pad(mask, (0, self._cached_length + 64 - mask.shape[-1]))
            self._mask = mask
        return mask[..., : self._cached_length]

    def _select(self, rows: torch.Tensor) -> None:
        assert self._cache is not None
        self._cache.batch_select_indices(rows)
        if self._is_ragged or self._axes is not None:
            self._positions = self._positions[..., rows, :]
        if self._mask is not None:
            self._mask = self._mask[rows]


class WholeBatchForward(CachedForward):
    """Forward over any kind of cache: prompts have equal lengths, and rows stay to the end.

    Args:
        model: Model in eval mode.
        traits: Traits of the model.
        prompts: Prompts of equal length, one for each row.
        media: Encoded prompt of each row; () if none has media.
    """

    can_drop_rows = False

    def __init__(
        self,
        model: PreTrainedModel,
        traits: ModelTraits,
        prompts: Sequence[Sequence[int]],
        media: Prompts = (),
    ) -> None:
        super().__init__(model, traits, None, prompts, media)
        self._input_ids = torch.tensor(prompts, device=self._device)
        # Inputs of tokens after the prompt, which repeat those of its last token.
        self._later: dict[str, torch.Tensor] = {}
        # Places of the last tokens, [rows, 1] or [axes, rows, 1]: some models count from 0 at each
        # step if they are not given.
        self._places: torch.Tensor | None = None

    def start(self) -> torch.Tensor:
        """Run the prompt of every row."""
        width, inputs = self._input_ids.shape[1], dict[str, torch.Tensor]()
        if self._traits.takes_positions:
            places = torch.arange(width, device=self._device)
            inputs["position_ids"] = places.expand_as(self._input_ids)
            self._places = inputs["position_ids"][:, -1:]
        family = self._traits.family
        if family is None or not self._media:
            return self._run(self._input_ids, **inputs)
        inputs |= self._media_inputs(width)
        if family.takes_types:
            types = torch.stack(token_types(self._rows, self._media))
            inputs[str(family.token_types)] = types.to(self._device)
        self._later = {name: inputs[name][:, -1:] for name in family.token_axis}
        axes = self._axes_of_rows()
        if axes:
            inputs["position_ids"] = torch.stack(axes, dim=1).to(self._device)
            self._places = inputs["position_ids"][..., -1:]
        with ExitStack() as hooks:
            if family.attends_to_images:
                hooks.enter_context(only_own_images(self._model.base_model, self._media))
            return self._run_media(self._input_ids, **inputs)

    def advance(self, tokens: torch.Tensor) -> torch.Tensor:
        """Append one token to every row."""
        if self._places is not None:
            self._places = self._places + 1
            self._later["position_ids"] = self._places
        return self._run(tokens[:, None], **self._later)

    def keep(self, rows: torch.Tensor) -> None:
        """Raise a RuntimeError: this cache cannot drop rows."""
        raise RuntimeError(f"rows of this cache cannot be dropped: asked to keep {rows.numel()}")
