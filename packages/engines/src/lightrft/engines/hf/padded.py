"""Forwards over padded prompts of text, for caches of every kind, and for models without a cache.

Transformers pads on the left where it generates: windows of attention and states of recurrences
then end at the same place in all rows. `trial` decides which models it is right for.
"""

from collections.abc import Sequence

import torch
from transformers import PreTrainedModel

from lightrft.engines.hf.forward import CachedForward, ModelTraits


class PaddedForward(CachedForward):
    """Forward whose prompts are padded on the left: rows can share a prompt and be dropped.

    Args:
        model: Model in eval mode.
        traits: Traits of the model.
        prompts: Distinct prompts of text, each not empty.
        prompt_of_row: Index of each row's prompt.
    """

    can_drop_rows = True

    def __init__(
        self,
        model: PreTrainedModel,
        traits: ModelTraits,
        prompts: Sequence[Sequence[int]],
        prompt_of_row: Sequence[int],
    ) -> None:
        super().__init__(model, traits, None, prompts, ())
        self._rows_at_start = prompt_of_row
        self._prompt_of_row = torch.tensor(prompt_of_row, device=self._device)
        width = max(map(len, prompts))
        lengths = torch.tensor([[len(prompt)] for prompt in prompts], device=self._device)
        places = torch.arange(width, device=self._device) - (width - lengths)
        self._places = places.clamp(min=0)
        # [rows, tokens so far] int64, 0 on padding; None without padding.
        self._mask = None if (lengths == width).all() else (places >= 0).long()
        self._input_ids = torch.tensor(
            [[*[prompt[0]] * (width - len(prompt)), *prompt] for prompt in prompts],
            device=self._device,
        )

    def start(self) -> torch.Tensor:
        """Run each prompt once, then copy its cache to every row."""
        logits = self._step(self._input_ids)
        self._places = self._places[:, -1:]
        self.keep(self._prompt_of_row)
        return logits[self._prompt_of_row]

    def advance(self, tokens: torch.Tensor) -> torch.Tensor:
        """Append one token to every row."""
        self._places = self._places + 1
        if self._mask is not None:
            self._mask = torch.nn.functional.pad(self._mask, (0, 1), value=1)
        return self._step(tokens[:, None])

    def keep(self, rows: torch.Tensor) -> None:
        """Keep only these rows."""
        assert self._cache is not None
        self._cache.reorder_cache(rows)
        # Beside its layers a cache may hold the places of all tokens, [axes, rows, tokens].
        for name, value in vars(self._cache).items():
            if isinstance(value, torch.Tensor):
                setattr(self._cache, name, value.index_select(-2, rows))
        self._places = self._places[rows]
        if self._mask is not None:
            self._mask = self._mask[rows]

    def _rows_of_prompts(self) -> Sequence[int]:
        return self._rows_at_start

    def _step(self, input_ids: torch.Tensor) -> torch.Tensor:
        positions = {"position_ids": self._places} if self._traits.takes_positions else {}
        return self._run(input_ids, attention_mask=self._mask, **positions)


class UncachedForward(CachedForward):
    """Forward over whole rows, padded on the right as a trainer pads them.

    Args:
        model: Model in eval mode.
        traits: Traits of the model.
        prompts: Distinct prompts of text, each not empty.
        prompt_of_row: Index of each row's prompt.
    """

    can_drop_rows = True

    def __init__(
        self,
        model: PreTrainedModel,
        traits: ModelTraits,
        prompts: Sequence[Sequence[int]],
        prompt_of_row: Sequence[int],
    ) -> None:
        rows = [prompts[i] for i in prompt_of_row]
        super().__init__(model, traits, None, rows, ())
        width = max(map(len, rows))
        # Place of the last token of each row.
        self._last = torch.tensor([len(row) - 1 for row in rows], device=self._device)
        self._tokens = torch.tensor(
            [[*row, *[row[-1]] * (width - len(row))] for row in rows], device=self._device
        )

    def start(self) -> torch.Tensor:
        """Run the prompt of every row."""
        return self._step()

    def advance(self, tokens: torch.Tensor) -> torch.Tensor:
        """Append one token to every row."""
        self._last = self._last + 1
        wider = torch.nn.functional.pad(self._tokens, (0, 1))
        self._tokens = wider.scatter(1, self._last[:, None], tokens[:, None])
        return self._step()

    def keep(self, rows: torch.Tensor) -> None:
        """Keep only these rows."""
        self._tokens, self._last = self._tokens[rows], self._last[rows]

    def _step(self) -> torch.Tensor:
        columns = torch.arange(self._tokens.shape[1], device=self._device)
        rows = torch.arange(len(self._tokens), device=self._device)
        # Logits of all places may take more memory than the model.
        places, place_of_row = self._last.unique(return_inverse=True)
        cut = dict.fromkeys(self._traits.head_arguments, places)
        output = self._model(
            input_ids=self._tokens,
            attention_mask=(columns <= self._last[:, None]).long(),
            use_cache=False,
            **cut,
        )
        self._note_routes(self._tokens)
        if self._has_begun and self._passes:
            self._passes[-1] = self._passes[-1][rows.cpu(), self._last.cpu()][:, None]
        return self._traits.sampled(output.logits[rows, place_of_row if cut else self._last])

    def _of_prompt(self, passes: Sequence[torch.Tensor], index: int) -> torch.Tensor:
        return passes[0][index][: len(self._prompts[index])]
