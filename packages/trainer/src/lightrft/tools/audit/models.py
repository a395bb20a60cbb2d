"""Forward and backward passes of plain transformers models in float64, without padding masks.

Rows are padded on the right and attention is causal, so that no token sees padding.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from lightrft.tools.audit.record import Array, Flags, Integers, RecordError

BASE, FIRST, SECOND = ".base_layer", ".lora_A.default.weight", ".lora_B.default.weight"
# Of one forward pass, in float64.
MAX_LOGITS = 2**26
HEAD = "value_head."


@dataclass(frozen=True, slots=True)
class Layers:
    """How recorded parameters make up the weights of a plain model.

    Args:
        prefix: Of the model's own parameters among the recorded names.
        scale: Of adapters; 0 without.
    """

    prefix: str
    scale: float = 0.0

    def merge(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Weights of the plain model by its own names; W + scale B A where there are adapters."""
        merged: dict[str, Tensor] = {}
        for name, value in state.items():
            if name.endswith((FIRST, SECOND)) or not name.startswith(self.prefix):
                continue
            layer = name.removesuffix(f"{BASE}.weight")
            if layer + FIRST in state:
                value = value + self.scale * state[layer + SECOND] @ state[layer + FIRST]
            merged[name.removeprefix(self.prefix).replace(BASE, "")] = value
        return merged

    def split(self, state: Mapping[str, Tensor], slopes: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Gradients of the recorded parameters from those of the plain model."""
        found: dict[str, Tensor] = {}
        for name in state:
            layer = name.removesuffix(FIRST).removesuffix(SECOND)
            own = slopes.get(f"{layer}.weight".removeprefix(self.prefix))
            if name.endswith(FIRST) and own is not None:
                found[name] = self.scale * state[layer + SECOND].T @ own
            elif name.endswith(SECOND) and own is not None:
                found[name] = self.scale * own @ state[layer + FIRST].T
            elif name.removeprefix(self.prefix) in slopes and not self.scale:
                found[name] = slopes[name.removeprefix(self.prefix)]
        return found


class Policy:
    """A causal language model that scores rows.

    Args:
        folder: Has the model's config.json.
        layers: How to read recorded weights.
        rounds: Weights are rounded to bfloat16 before they are used.
    """

    def __init__(self, folder: Path, layers: Layers, *, rounds: bool = False) -> None:
        self.layers, self._rounds = layers, rounds
        self._model = _build(folder, AutoModelForCausalLM)
        self._vocab = int(AutoConfig.from_pretrained(folder).get_text_config().vocab_size)

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Takes recorded weights, in float64."""
        _load(self._model, self.layers.merge(_rounded(state, self._rounds)))

    @torch.no_grad()
    def score(self, ids: Integers, mask: Flags, temperature: float) -> tuple[Array, Array]:
        """Logprobs and entropies of the tokens of the mask, 0 elsewhere: [rows, seq] each."""
        logprobs, entropies = np.zeros(ids.shape), np.zeros(ids.shape)
        for rows, width in _chunks(mask, self._vocab):
            p, h = self._score(ids[rows, :width], temperature)
            logprobs[rows, 1:width], entropies[rows, 1:width] = p.numpy(), h.numpy()
        return np.where(mask, logprobs, 0.0), np.where(mask, entropies, 0.0)

    def slopes(
        self,
        ids: Integers,
        mask: Flags,
        temperature: float,
        by_logprob: Array,
        by_entropy: Array,
        state: Mapping[str, Tensor],
    ) -> dict[str, Tensor]:
        """Gradient of sum(by_logprob * logprob + by_entropy * entropy) by recorded parameters."""
        self._model.zero_grad()
        for rows, width in _chunks(mask, self._vocab):
            p, h = self._score(ids[rows, :width], temperature)
            weights = [
                torch.from_numpy(np.where(mask, each, 0.0)[rows, 1:width].copy())
                for each in (by_logprob, by_entropy)
            ]
            total: Tensor = (weights[0] * p).sum() + (weights[1] * h).sum()
            total.backward()  # type: ignore[no-untyped-call]
        return self.layers.split(state, _gradients(self._model))

    def _score(self, ids: Integers, temperature: float) -> tuple[Tensor, Tensor]:
        tokens = torch.from_numpy(ids.copy())
        logits = self._model(input_ids=tokens, use_cache=False).logits[:, :-1] / temperature
        logprobs = torch.log_softmax(logits, dim=-1)
        chosen = logprobs.gather(-1, tokens[:, 1:, None]).squeeze(-1)
        return chosen, -(logprobs.exp() * logprobs).sum(dim=-1)


class Values:
    """A trunk with a linear head that gives the value before each token.

    Args:
        folder: Has the trunk's config.json.
        rounds: Weights of the trunk are rounded to bfloat16 before they are used.
    """

    def __init__(self, folder: Path, *, rounds: bool = False) -> None:
        self._layers, self._rounds = Layers("trunk."), rounds
        self._trunk = _build(folder, AutoModel)
        self._weight = self._bias = torch.zeros(0)

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Takes recorded weights, in float64."""
        _load(self._trunk, self._layers.merge(_rounded(state, self._rounds)))
        self._weight, self._bias = (
            state[HEAD + name].detach().clone().double().requires_grad_()
            for name in ("weight", "bias")
        )

    @torch.no_grad()
    def score(self, ids: Integers, mask: Flags) -> Array:
        """Values before the tokens of the mask, 0 elsewhere: [rows, seq]."""
        found = np.zeros(ids.shape)
        for rows, width in _chunks(mask, 1):
            found[rows, 1:width] = self._values(ids[rows, :width]).numpy()
        return np.where(mask, found, 0.0)

    def slopes(
        self, ids: Integers, mask: Flags, by_value: Array, state: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        """Gradient of sum(by_value * value) by recorded parameters."""
        self._trunk.zero_grad()
        self._weight.grad = self._bias.grad = None
        for rows, width in _chunks(mask, 1):
            weights = torch.from_numpy(np.where(mask, by_value, 0.0)[rows, 1:width].copy())
            total: Tensor = (weights * self._values(ids[rows, :width])).sum()
            total.backward()  # type: ignore[no-untyped-call]
        found = self._layers.split(state, _gradients(self._trunk))
        for name, value in (("weight", self._weight), ("bias", self._bias)):
            if value.grad is not None:
                found[HEAD + name] = value.grad.clone()
        return found

    def _values(self, ids: Integers) -> Tensor:
        tokens = torch.from_numpy(ids.copy())
        hidden: Tensor = self._trunk(input_ids=tokens, use_cache=False).last_hidden_state
        return (hidden[:, :-1] @ self._weight.T + self._bias).squeeze(-1)


def reference_state(folder: Path) -> dict[str, Tensor]:
    """Weights of a checkpoint of the reference model, by their names in a `Policy`.

    Raises:
        RecordError: There is no checkpoint.
    """
    try:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    except (OSError, ValueError) as error:
        raise RecordError(
            f"the reference model is not in {folder}: {error}; give its folder with --reference"
        ) from error
    return {name: value.detach() for name, value in model.named_parameters()}


def _build(folder: Path, kind: type[AutoModel] | type[AutoModelForCausalLM]) -> nn.Module:
    config = AutoConfig.from_pretrained(folder)
    model: nn.Module = kind.from_config(config, dtype=torch.float64, attn_implementation="sdpa")
    return model.eval()


def _rounded(state: Mapping[str, Tensor], rounds: bool) -> dict[str, Tensor]:
    if rounds:
        state = {name: value.to(torch.bfloat16) for name, value in state.items()}
    return {name: value.double() for name, value in state.items()}


@torch.no_grad()
def _load(model: nn.Module, weights: Mapping[str, Tensor]) -> None:
    own = dict(model.named_parameters())
    # A second name of a tied parameter may be recorded, or not.
    known = dict(model.named_parameters(remove_duplicate=False))
    missing, unknown = sorted(set(own) - set(weights)), sorted(set(weights) - set(known))
    ids = {id(known[name]) for name in weights if name in known}
    missing = [name for name in missing if id(own[name]) not in ids]
    if missing or unknown:
        raise RecordError(
            f"recorded weights are not those of the model: missing {missing[:3]}, unknown "
            f"{unknown[:3]}"
        )
    for name, value in weights.items():
        known[name].copy_(value)


def _gradients(model: nn.Module) -> dict[str, Tensor]:
    found = {}
    for name, value in model.named_parameters(remove_duplicate=False):
        if value.grad is not None:
            found[name] = value.grad.detach()
    return found


def _chunks(mask: Flags, vocab: int) -> Iterator[tuple[NDArray[np.int64], int]]:
    """Rows with something to score, as many at a time as fit, and the width that they need."""
    wanted: Sequence[int] = np.flatnonzero(mask.any(axis=1)).tolist()
    ends = [int(np.flatnonzero(mask[row])[-1]) + 1 for row in wanted]
    order = np.argsort(ends, kind="stable")
    rows: list[int] = []
    width = 0
    for place in order:
        end = ends[place]
        if rows and (len(rows) + 1) * end * vocab > MAX_LOGITS:
            yield np.array(rows), width
            rows = []
        rows.append(wanted[place])
        width = end
    if rows:
        yield np.array(rows), width
