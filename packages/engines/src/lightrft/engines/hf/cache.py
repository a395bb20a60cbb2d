"""A cache layer with spare room, so that a new token is written instead of concatenated."""

import torch
from transformers.cache_utils import Cache, DynamicLayer

_ROOM = 64


class RoomyLayer(DynamicLayer):  # type: ignore[misc]
    """A `DynamicLayer` whose storage grows by blocks of tokens.

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
        """Appends states [rows, kv_heads, new, head_dim]; returns all states so far."""
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
        """Keeps the given rows, in the given order; a row may be taken several times."""
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


def roomy_cache() -> Cache:
    """An empty cache of `RoomyLayer`s for a model whose layers all attend to everything."""
    return Cache(layer_class_to_replicate=RoomyLayer)
