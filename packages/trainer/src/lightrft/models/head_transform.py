"""What a model does to its logits after the output projection, read from its configuration."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PretrainedConfig

SOFTCAP_FIELD = "final_logit_softcapping"
FACTOR_FIELDS = ("logit_scale", "logits_scaling", "lm_head_multiplier", "output_multiplier")
"""Fields by which some model multiplies or divides its logits."""

MULTIPLIED_BY = {"cohere": "logit_scale", "cohere2": "logit_scale"}
DIVIDED_BY = {
    "granite": "logits_scaling",
    "granitemoe": "logits_scaling",
    "granitemoeshared": "logits_scaling",
}
"""Model types for which the meaning of the field is known."""


@dataclass(frozen=True, slots=True)
class HeadTransform:
    """Logits become softcap * tanh(scale * logits / softcap), or scale * logits without softcap.

    Args:
        scale: Factor on the logits.
        softcap: Bound on their magnitude, or None.
    """

    scale: float = 1.0
    softcap: float | None = None


def read_head_transform(config: PretrainedConfig) -> HeadTransform:
    """The distribution of a model's logits.

    Raises:
        ValueError: The configuration scales the logits in a way that is not known for this type
            of model, or scales and caps them.
    """
    fields = config.get_text_config().to_dict()
    model_type = fields["model_type"]
    softcap = fields.get(SOFTCAP_FIELD)
    factors = {name: fields[name] for name in FACTOR_FIELDS if fields.get(name) not in (None, 1)}
    scale = 1.0
    if model_type in MULTIPLIED_BY:
        scale = float(factors.pop(MULTIPLIED_BY[model_type], 1.0))
    elif model_type in DIVIDED_BY:
        scale = 1.0 / float(factors.pop(DIVIDED_BY[model_type], 1.0))
    if factors:
        raise ValueError(
            f"model type {model_type!r} scales its logits by {factors}, which is not supported: "
            f"expected one of {', '.join(sorted((*MULTIPLIED_BY, *DIVIDED_BY)))}, or no such field"
        )
    if softcap is not None and scale != 1.0:
        raise ValueError(
            f"model type {model_type!r} scales its logits by {scale} and caps them at {softcap}: "
            "the two together are not supported"
        )
    return HeadTransform(scale=scale, softcap=None if softcap is None else float(softcap))
