"""Heads of reward models: from hidden states to one or several numbers for each text."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Protocol, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightrft.config.registry import SCORE_POOLINGS

if TYPE_CHECKING:
    from transformers import PretrainedConfig

LAST_TOKEN = "last"
# Fields of a configuration: pooling of texts, and names and weights of several scores.
POOLING_FIELD, NAMES_FIELD, WEIGHTS_FIELD = "score_pooling", "score_names", "score_weights"
ATTENTION_HEADS = 4


class ScoreHead(nn.Module):
    """Linear map of a hidden state to scores, computed in float32.

    In bfloat16 scores between 4 and 8 would have steps of 0.03.

    Args:
        weight: [scores, hidden], used, not copied.
        bias: [scores], or None.
    """

    bias: nn.Parameter | None

    def __init__(self, weight: nn.Parameter, bias: nn.Parameter | None = None) -> None:
        super().__init__()
        self.weight = weight
        self.register_parameter("bias", bias)

    def forward(self, hidden: Tensor) -> Tensor:
        """Return scores [texts, score] float32 of hidden states [texts, hidden]."""
        with torch.autocast(hidden.device.type, enabled=False):
            bias = None if self.bias is None else self.bias.float()
            return F.linear(hidden.float(), self.weight.float(), bias)


class AttentionPool(nn.Module):
    """Pooling to one score of all real tokens of a text, in float32.

        a_t = softmax_t(q . K h_t / sqrt(d)) of each head
        score = w . SiLU(RMSNorm(U sum_t a_t V h_t)) + b

    Source: pooling by a learned query, Lee et al. 2019, arXiv:1810.00825, sec. 3.2.

    Args:
        hidden_size: Width of the trunk.
    """

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.num_heads = ATTENTION_HEADS if hidden_size % ATTENTION_HEADS == 0 else 1
        self.query = nn.Parameter(torch.empty(self.num_heads, hidden_size // self.num_heads))
        self.keys = nn.Linear(hidden_size, hidden_size, bias=False)
        self.values = nn.Linear(hidden_size, hidden_size, bias=False)
        self.mix = nn.Linear(hidden_size, hidden_size, bias=False)
        self.norm = nn.RMSNorm(hidden_size, eps=1e-6)
        self.output = ScoreHead(
            nn.Parameter(torch.empty(1, hidden_size)), nn.Parameter(torch.zeros(1))
        )

    def forward(self, hidden: Tensor, is_own: Tensor) -> Tensor:
        """Return scores [texts, 1] of tokens.

        Args:
            hidden: [tokens, hidden] float32.
            is_own: [texts, tokens] bool, tokens of each text.
        """
        shape = (len(hidden), *self.query.shape)
        logits = (self.keys(hidden).view(shape) * self.query).sum(-1) / shape[-1] ** 0.5
        # Dense over the few texts of a pass, so that sums have one order on every device.
        spread = logits.masked_fill(~is_own[..., None], -torch.inf).softmax(dim=1)
        pooled = torch.einsum("btn,tnd->bnd", spread, self.values(hidden).view(shape))
        mixed: Tensor = self.output(F.silu(self.norm(self.mix(pooled.flatten(1)))))
        return mixed


class AttentionHead(nn.Module):
    """Masked attention pooling, separate for each score."""

    def __init__(self, hidden_size: int, num_scores: int) -> None:
        super().__init__()
        self.pools = nn.ModuleList(AttentionPool(hidden_size) for _ in range(num_scores))

    def forward(self, hidden: Tensor, texts: Tensor, num_texts: int) -> Tensor:
        """Return scores [texts, score] float32.

        Args:
            hidden: [tokens, hidden] of real tokens only.
            texts: [tokens] index of each token's text.
            num_texts: Number of texts, which all have tokens.
        """
        is_of_text = torch.arange(num_texts, device=texts.device)[:, None] == texts
        with torch.autocast(hidden.device.type, enabled=False):
            return torch.cat([pool(hidden.float(), is_of_text) for pool in self.pools], dim=1)


class HeadBuilder(Protocol):
    """Entry of the registry of poolings."""

    def __call__(self, hidden_size: int, num_scores: int) -> nn.Module:
        """Return a head in float32 with uninitialised numbers."""
        ...


def last_token(hidden_size: int, num_scores: int) -> ScoreHead:
    """Return the head of the last token's hidden state, with a bias."""
    weight = nn.Parameter(torch.empty(num_scores, hidden_size))
    return ScoreHead(weight, nn.Parameter(torch.zeros(num_scores)))


def build_head(pooling: str, hidden_size: int, num_scores: int) -> nn.Module:
    """Return a head of the registry; see `HeadBuilder`."""
    return cast("HeadBuilder", SCORE_POOLINGS.load(pooling))(hidden_size, num_scores)


@torch.no_grad()
def initialise(head: nn.Module, seed: int) -> None:
    """Fix all numbers of a head by a seed: first scores are of size 1, biases 0.

    Source: Stiennon et al. 2020, arXiv:2009.01325: deviation 1 / sqrt(hidden + 1).
    """
    generator = torch.Generator().manual_seed(seed)
    for name, value in head.named_parameters():
        if name.endswith("bias"):
            value.zero_()
        elif name.endswith("norm.weight"):
            value.fill_(1.0)
        else:
            draw = torch.randn(value.shape, generator=generator)
            value.copy_(draw * (value.shape[-1] + 1) ** -0.5)


def pooling_of(config: PretrainedConfig) -> str:
    """Return the pooling of a saved reward model."""
    return str(_field(config, POOLING_FIELD, LAST_TOKEN))


def score_weights(config: PretrainedConfig) -> dict[str, float]:
    """Return the weight of each score of a saved reward model by name; a single one is ""."""
    names = cast("list[str]", _field(config, NAMES_FIELD, [""]))
    weights = cast("list[float]", _field(config, WEIGHTS_FIELD, [1.0] * len(names)))
    return dict(zip(map(str, names), map(float, weights), strict=True))


def describe_head(config: PretrainedConfig, pooling: str, weights: Mapping[str, float]) -> None:
    """Store the values that `pooling_of` and `score_weights` read in a configuration."""
    if pooling != LAST_TOKEN:
        setattr(config, POOLING_FIELD, pooling)
    if len(weights) > 1:
        setattr(config, NAMES_FIELD, list(weights))
        setattr(config, WEIGHTS_FIELD, list(weights.values()))
        config.id2label = dict(enumerate(weights))
        config.label2id = {name: place for place, name in enumerate(weights)}


def _field(config: PretrainedConfig, name: str, default: object) -> object:
    return config.to_dict().get(name, default)
