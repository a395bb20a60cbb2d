"""Common base of actor and critic: layout, frozen parts, the forward pass up to hidden states."""

from __future__ import annotations

import re
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING

from torch import Tensor, nn
from torch.distributed import ProcessGroup

from lightrft.config import ConfigError
from lightrft.engines.hf.attention import set_text_attention
from lightrft.engines.media.families import VisionFamily, family_of, language_model
from lightrft.engines.media.media import NO_MEDIA, RowMedia
from lightrft.models.attention import has_other_layers, trunk_of, use_packed_attention
from lightrft.models.layout import LayoutPolicy, TokenLayout
from lightrft.models.types import LayoutRefusedError

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel
    from transformers.modeling_outputs import MoeModelOutputWithPast


class SequenceModel(nn.Module):
    """Model that reads padded batches and lays them out as its policy says.

    The layout changes no result: logprobs, values and gradients are those of padded rows.

    Attributes:
        coverage: One line about the layers with adapters and the weights without; "" where
            everything is trained.
    """

    coverage = ""

    def __init__(self) -> None:
        super().__init__()
        self.layout_policy = LayoutPolicy()
        self._plain_attention: str | None = None
        # Whether a proof has shown that it computes the same as the wrapped model.
        self.is_proved = False
        # Whether layers that mix sequences were looked for; see `lightrft.models.by_sequence`.
        self.is_separated = False

    @property
    @abstractmethod
    def pretrained(self) -> PreTrainedModel:
        """Wrapped model of transformers."""

    @property
    def config(self) -> PretrainedConfig:
        """Configuration of the wrapped model."""
        return self.pretrained.config

    @property
    def language_model(self) -> PreTrainedModel:
        """Trunk of the wrapped model that reads the tokens."""
        return language_model(trunk_of(self.pretrained))

    @cached_property
    def family(self) -> VisionFamily | None:
        """Family of a model that reads media; None reads text alone."""
        return family_of(self.config)

    @property
    def reads_media(self) -> bool:
        """Return whether rows may have images or videos."""
        return self.family is not None

    def lay_out(
        self,
        token_ids: Tensor,
        attention_mask: Tensor,
        scored_mask: Tensor | None = None,
        routes: Tensor | None = None,
        media: RowMedia | None = None,
    ) -> TokenLayout:
        """Lay out a batch as the policy says; see `LayoutPolicy.lay_out`."""
        return self.layout_policy.lay_out(
            token_ids,
            attention_mask,
            scored_mask,
            # Features of media are put between the tokens of the whole stream.
            is_cut_late=self.reads_media,
            routes=routes,
            media=media or NO_MEDIA,
        )

    def gradient_checkpointing_enable(self) -> None:
        """Recompute activations in the backward pass instead of storing them."""
        model = self.pretrained
        # transformers 6 has the first name alone, 5.22 and earlier the second.
        is_renamed = hasattr(model, "activation_checkpointing_enable")
        name = f"{'activation' if is_renamed else 'gradient'}_checkpointing_enable"
        getattr(model, name)({"use_reentrant": False})

    @property
    def sequence_group(self) -> ProcessGroup | None:
        """Ranks that call the model with the same batch; None is only this rank."""
        return self.layout_policy.sp_group

    @property
    def is_gradient_checkpointing(self) -> bool:
        """Return whether some layer recomputes its activations in the backward pass."""
        return any(getattr(layer, "gradient_checkpointing", False) for layer in self.modules())

    def pack_samples(self, is_packed: bool = True) -> None:
        """Lay batches out as one stream without padding, or as padded rows again.

        Raises:
            LayoutRefusedError: The model mixes packed sequences; see `use_packed_attention`.
        """
        self._use_policy(replace(self.layout_policy, packs_samples=is_packed))

    def share_prefixes(self, min_tokens: int | None) -> None:
        """Compute common prefixes of the rows of a stream once.

        Args:
            min_tokens: Least number of shared tokens; None shares none.
        """
        self._use_policy(replace(self.layout_policy, min_shared_tokens=min_tokens))

    def share_sequences(self, group: ProcessGroup | None) -> None:
        """Divide each batch's stream among the ranks of a group (sequence parallelism).

        From then on all ranks of the group call the model with the same batch, and each gets the
        results of the whole batch.

        Args:
            group: Ranks that share; None divides nothing.

        Raises:
            LayoutRefusedError: The heads cannot be distributed over the ranks, or the model mixes
                sequences.
        """
        self._use_policy(replace(self.layout_policy, sp_group=group))

    def _use_policy(self, policy: LayoutPolicy) -> None:
        if policy.is_packed:
            plain = self.pretrained.config.get_text_config()._attn_implementation
            self._refuse_other_layers(policy)
            use_packed_attention(self.pretrained, sp_size=policy.sp_size)
            if not self.layout_policy.is_packed:
                self._plain_attention = plain
        elif self.layout_policy.is_packed:
            set_text_attention(self.pretrained, self._plain_attention)
        self.layout_policy = policy

    def _refuse_other_layers(self, policy: LayoutPolicy) -> None:
        """Raise LayoutRefusedError if layers besides attention may read a stream wrongly."""
        name, trunk = type(self.pretrained).__name__, self.language_model
        if policy.sp_group is not None:
            from lightrft.models.by_sequence import BySequence

            if has_other_layers(trunk) or any(isinstance(m, BySequence) for m in trunk.modules()):
                raise LayoutRefusedError(
                    f"{name} may have layers with a state of the tokens before, which ranks do not "
                    "pass on: train without sp_size"
                )
        if not self.is_separated and has_other_layers(trunk):
            raise LayoutRefusedError(
                f"{name} may have layers that mix packed sequences: pack it by "
                "lightrft.models.proof.pack_rows, which looks for them"
            )


def has_prefix(name: str, prefixes: Sequence[str]) -> bool:
    r"""Return whether the dotted name of a layer or tensor begins with one of the prefixes.

    Prefixes are regular expressions: `visual(?!\.merger)` is the tower of Qwen-VL without its
    projector. The `model.` before the names of a language model's trunk may be left out.

    Raises:
        ConfigError: A prefix is not a regular expression.
    """
    return any(names_part(prefix).match(_plain(name)) for prefix in prefixes)


def names_part(text: str) -> re.Pattern[str]:
    """Return the pattern of the names of a part of a model, and of everything below it.

    Raises:
        ConfigError: The text is not a regular expression.
    """
    plain = _plain(text)
    try:
        return re.compile(rf"(?:{plain[:-1]})\." if plain else "")
    except re.error as error:
        raise ConfigError(f"{text!r} is no regular expression: {error}") from error


def _plain(name: str) -> str:
    return f"{name.rstrip('.')}.".removeprefix("model.")


def freeze(model: SequenceModel, prefixes: Sequence[str]) -> None:
    """Exclude all tensors below the prefixes of a sequence model; see `freeze_tensors`."""
    freeze_tensors(model.pretrained, prefixes)


def freeze_tensors(model: nn.Module, prefixes: Sequence[str]) -> None:
    """Exclude all tensors below the prefixes from training; they stay in saved and sent weights.

    Args:
        model: Model to change in place, before a strategy prepares it.
        prefixes: Prefixes like `visual` or `model.language_model.layers.0`; () freezes nothing.

    Raises:
        ConfigError: No tensor has one of the prefixes, or nothing is left to train.
    """
    tensors = dict(model.named_parameters())
    for prefix in prefixes:
        chosen = [value for name, value in tensors.items() if has_prefix(name, [prefix])]
        if not chosen:
            parts = sorted({".".join(_plain(name).split(".")[:2]) for name in tensors})
            raise ConfigError(
                f"freeze_prefix: no weights of {type(model).__name__} begin with "
                f"{prefix!r}; there are {', '.join(parts[:12])}"
            )
        for value in chosen:
            value.requires_grad_(False)
    if not any(value.requires_grad for value in tensors.values()):
        raise ConfigError(
            f"freeze_prefix: {', '.join(prefixes)} leave nothing of {type(model).__name__} to train"
        )


def layout_policy(model: object) -> LayoutPolicy:
    """Return the layout policy of a model; models of other kinds see padded rows."""
    return model.layout_policy if isinstance(model, SequenceModel) else LayoutPolicy()


def attends_causally(trunk: nn.Module) -> bool:
    """Return whether no token of a trunk sees a later one, as far as its config says."""
    config: PretrainedConfig = trunk.config
    values = config.get_text_config().to_dict()
    return values.get("is_causal", True) and not values.get("use_bidirectional_attention")


def trunk_output(
    trunk: nn.Module,
    layout: TokenLayout,
    media: RowMedia | None = None,
    *,
    family: VisionFamily | None,
    with_router_logits: bool = False,
) -> MoeModelOutputWithPast:
    """Return the output of a transformers trunk for the inputs of a layout.

    Args:
        trunk: Model up to its last hidden states [batch or 1, tokens, hidden].
        layout: Layout of the batch.
        media: Media of the rows; None is text.
        family: Family of a model that reads media; None reads text alone.
        with_router_logits: Ask for the logits of the experts of every layer.

    Raises:
        ValueError: There are media, but the model reads text only; see also `vision_inputs`.
    """
    extra: dict[str, object] = {"output_router_logits": True} if with_router_logits else {}
    # Models with images may let the tokens of an image see each other.
    is_causal = family is None and attends_causally(trunk)
    extra |= layout.attention_inputs(is_causal=is_causal)
    media = media or NO_MEDIA
    if family is not None:
        from lightrft.models.vision.forward import image_blocks, run_trunk, vision_inputs

        extra |= vision_inputs(trunk, family, layout, media)
        if layout.bounds is not None and family.has_blocks:
            extra["sequence_bounds"] = replace(layout.bounds, blocks=image_blocks(layout, media))
        return run_trunk(trunk, family, layout, media, extra)
    if not media.is_empty:
        raise ValueError(
            f"rows have images or videos, but {type(trunk).__name__} reads text only: train a "
            "vision-language model, or leave the media out with --text_only"
        )
    output: MoeModelOutputWithPast = trunk(
        input_ids=layout.input_ids, position_ids=layout.position_ids, use_cache=False, **extra
    )
    return output
