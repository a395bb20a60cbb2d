"""Normalisation of a reward model's scores to mean 0 and deviation 1, in its weights."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from lightrft.cli.errors import CommandError, ExitCode
from lightrft.models import RewardModel
from lightrft.models.score_heads import AttentionHead, ScoreHead, score_weights

if TYPE_CHECKING:
    from transformers import PretrainedConfig

STANDARD = "standard"
MEAN_FIELD, DEVIATION_FIELD = "score_mean", "score_std"


class NormalisingError(CommandError):
    """Scores that cannot be normalised; nothing is written."""

    code = ExitCode.USAGE


@torch.no_grad()
def normalise_scores(model: RewardModel, way: str) -> float:
    """Change the head to divide scores by their deviation and, if asked, subtract their mean.

        deviation: score / s;  standard: (score - m) / s, with m and s of the configuration

    The division changes the head's last weights, in every architecture. The subtraction needs the
    bias of the head or, without one, the bias b of the final norm before it. The latter becomes
    b + c w / (w . w). All readers of the weights therefore compute the same scores.

    Args:
        model: Model in float32; changed in place, its configuration included.
        way: Way to normalise, "deviation" or "standard".

    Returns:
        The largest difference of a score from its formula, over a few random texts.

    Raises:
        NormalisingError: The mean and deviation are not known, there are several scores, there is
            no bias, or scores differ from the formula.
    """
    config = model.config
    mean, deviation = _statistics(config)
    head = _last_layer(model.head)
    texts = _random_texts(config.get_text_config().vocab_size)
    before = _scores(model, texts)
    shift = mean / deviation if way == STANDARD else 0.0
    bias = head.bias
    norm = None if bias is not None or not shift else _last_norm(model, texts)
    if shift and bias is None and norm is None:
        raise NormalisingError(
            f"normalize_score {STANDARD}: neither the head nor the final norm of "
            f"{type(model.model).__name__} has a bias, so no weight can move the mean from "
            f"{mean:g} to 0: use deviation (group baselines subtract the mean anyway), or train "
            "with centering_coef"
        )
    head.weight.div_(deviation)
    if bias is not None:
        bias.div_(deviation).sub_(shift)
    elif norm is not None:
        row = head.weight[0]
        norm.bias.sub_(shift * row / row.square().sum())
    config.score_mean, config.score_std = 0.0 if way == STANDARD else mean / deviation, 1.0
    return _require_formula(before / deviation - shift, _scores(model, texts))


def _statistics(config: PretrainedConfig) -> tuple[float, float]:
    """Return the mean and deviation of a model's scores."""
    mean, deviation = (config.to_dict().get(name) for name in (MEAN_FIELD, DEVIATION_FIELD))
    if not isinstance(mean, float) or not isinstance(deviation, float):
        raise NormalisingError(
            "normalize_score: the configuration has no score_mean and score_std, which a run of "
            "lightrft reward writes when it ends: continue the run, or leave it out"
        )
    if not (math.isfinite(mean) and 0 < deviation < math.inf):
        raise NormalisingError(
            f"normalize_score: scores of mean {mean:g} and deviation {deviation:g} cannot be "
            "normalised: train the model further, or leave it out"
        )
    if len(score_weights(config)) > 1:
        raise NormalisingError(
            "normalize_score: several scores have no common mean: set reward_head_weights, or "
            "leave it out"
        )
    return mean, deviation


def _require_formula(expected: Tensor, found: Tensor) -> float:
    difference = float((found - expected).abs().max())
    if not difference <= 1e-4 * max(1.0, float(expected.abs().max())):
        raise NormalisingError(
            f"normalize_score: scores differ by {difference:.3g} from (score - mean) / deviation: "
            "the head does not read the final norm alone; leave it out"
        )
    return difference


def _last_layer(head: nn.Module) -> ScoreHead:
    """Return the linear layer that computes the score."""
    layer = head.pools[0].get_submodule("output") if isinstance(head, AttentionHead) else head
    if not isinstance(layer, ScoreHead):
        raise TypeError(f"a head of {type(head).__name__} ends in no linear map")
    return layer


def _last_norm(model: RewardModel, texts: Tensor) -> nn.LayerNorm | None:
    """Return the norm that outputs the hidden states, if it has a bias."""
    given: dict[nn.LayerNorm, Tensor] = {}

    def keep(module: nn.Module, args: object, output: Tensor) -> None:
        if isinstance(module, nn.LayerNorm):
            given[module] = output

    norms = [each for each in model.pretrained.modules() if isinstance(each, nn.LayerNorm)]
    handles = [each.register_forward_hook(keep) for each in norms if each.bias is not None]
    hidden = model.pretrained(input_ids=texts, use_cache=False).last_hidden_state
    for handle in handles:
        handle.remove()
    return next((norm for norm, output in given.items() if torch.equal(output, hidden)), None)


def _random_texts(vocab_size: int) -> Tensor:
    """Return ids of random texts, [texts, tokens]."""
    return torch.randint(vocab_size, (4, 12), generator=torch.Generator().manual_seed(0))


def _scores(model: RewardModel, texts: Tensor) -> Tensor:
    scores: Tensor = model(texts, torch.ones_like(texts, dtype=torch.bool))
    return scores.double()
