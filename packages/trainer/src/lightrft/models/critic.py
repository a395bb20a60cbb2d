"""Value model: a transformer trunk with one output per token."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from lightrft.config.files import FileError, regular_file
from lightrft.engines.media.media import RowMedia
from lightrft.models.loading import ModelLoadError, load_trunk, save_pretrained
from lightrft.models.sequence_model import SequenceModel, trunk_output
from lightrft.strategy.meta_init import parameters_on_meta

if TYPE_CHECKING:
    from transformers import PreTrainedModel

HEAD_FILE = "value_head.safetensors"


class ValueHead(nn.Linear):
    """Linear map to one number, zero at first and computed in float32."""

    def __init__(self, hidden_size: int, dtype: torch.dtype) -> None:
        super().__init__(hidden_size, 1, dtype=dtype)
        nn.init.zeros_(self.weight)
        nn.init.zeros_(self.bias)

    def forward(self, hidden: Tensor) -> Tensor:
        """Return the values [tokens] float32 of hidden states [tokens, hidden]."""
        with torch.autocast(hidden.device.type, enabled=False):
            values = F.linear(hidden.float(), self.weight.float(), self.bias.float())
        return values.squeeze(-1)


class Critic(SequenceModel):
    """Predictor of the return before each token; see `lightrft.models.types.ValueModel`.

    Args:
        trunk: Transformers model without output projection; it is used, not copied.
    """

    is_actor = False

    def __init__(self, trunk: PreTrainedModel) -> None:
        super().__init__()
        self.trunk = trunk
        hidden_size = trunk.config.get_text_config().hidden_size
        # At first no file has the head, so its memory is allocated here.
        with parameters_on_meta(False):
            self.value_head = ValueHead(hidden_size, trunk.dtype)

    @classmethod
    def from_pretrained(
        cls, path: str, *, dtype: str = "float32", allow_new_weights: Sequence[str] = ()
    ) -> Critic:
        """Load the trunk of any checkpoint, and the value head if it was saved beside it.

        Raises:
            ModelLoadError: As `lightrft.models.loading.load_causal_lm`; or the head does not fit.
        """
        critic = cls(load_trunk(path, dtype=dtype, allow_new_weights=allow_new_weights))
        head_file = Path(path) / HEAD_FILE
        if head_file.exists():
            try:
                critic.value_head.load_state_dict(load_file(regular_file(head_file)))
            except (RuntimeError, OSError, FileError, SafetensorError) as err:
                text = " ".join(str(err).split())
                raise ModelLoadError(f"{head_file} is no value head of {path!r}: {text}") from err
        return critic

    def save_pretrained(self, directory: str | Path) -> None:
        """Write the trunk as a Hugging Face checkpoint with the value head beside it."""
        save_pretrained(self.trunk, None, directory)
        save_file(self.value_head.state_dict(), Path(directory) / HEAD_FILE)

    def forward(
        self, token_ids: Tensor, attention_mask: Tensor, *, media: RowMedia | None = None
    ) -> Tensor:
        """Return the value before each token is sampled.

        Args:
            token_ids: [batch, seq] int64, padded.
            attention_mask: [batch, seq] bool, True on real tokens.
            media: Images and videos of the rows; None is text.

        Returns:
            [batch, seq] float32; entry t comes from the hidden state of token t - 1; entry 0 and
            padding are 0.
        """
        layout = self.lay_out(token_ids, attention_mask, media=media)
        output = trunk_output(self.trunk, layout, media, family=self.family)
        return layout.scatter(self.value_head(layout.select(output.last_hidden_state)))

    @property
    def pretrained(self) -> PreTrainedModel:
        """Transformers trunk."""
        return self.trunk
