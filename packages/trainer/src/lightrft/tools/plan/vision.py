"""The size of a vision tower with its projector, from a model's configuration."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

# Children under these names hold a tower, as `strategy.fsdp2.sharding` knows them.
TOWERS = ("visual", "vision_tower", "vision_model", "vision_encoder")

WIDE = 4


@dataclass(frozen=True, slots=True)
class VisionSize:
    """Sizes of a transformer over patches, and of its projector into the text model.

    Args:
        num_layers, hidden, intermediate: Sizes as of a text model.
        num_products: Matrices of a feed-forward block: 3 where it is gated.
        num_kept: Results of its width that its backward pass needs.
        patch_numbers: Numbers of a patch's pixels.
        merged: Patches that become one token of the text model.
        text_hidden: Width of those tokens.
        other_parameters: Numbers of position tables and of further projectors.
    """

    num_layers: int
    hidden: int
    intermediate: int
    num_products: int
    patch_numbers: int
    merged: int
    text_hidden: int
    other_parameters: int = 0
    num_kept: int = 4

    @classmethod
    def of_config(cls, values: Mapping[str, object]) -> "VisionSize | None":
        """Return the size from the contents of a config.json; None for a model of text."""
        tower = values.get("vision_config")
        text = values.get("text_config")
        if not isinstance(tower, Mapping):
            return None

        def number(*names: str, default: int = 1, fields: Mapping[str, object] = tower) -> int:
            numbers = (fields.get(name) for name in names)
            return next((n for n in numbers if isinstance(n, int) and n > 0), default)

        inner = text if isinstance(text, Mapping) else values
        text_hidden = number("hidden_size", fields=inner)
        # Qwen2-VL calls the tower's width embed_dim, and hidden_size what it is projected to.
        hidden = number("embed_dim", "hidden_size", default=1024)
        is_gated = str(tower.get("model_type", "")).startswith("qwen2_5_vl")
        side = number("patch_size", default=14)
        merge = number("spatial_merge_size")
        patch = side**2 * number("in_channels", "num_channels", "in_chans", default=3)
        patch *= number("temporal_patch_size")
        positions = number("num_position_embeddings", default=0)
        if merge == 1 and not positions:
            image = number("image_size", default=384)
            positions = (image // side) ** 2
            # Pooled or shuffled: the tokens of an image say how many patches become one.
            tokens = number("mm_tokens_per_image", "image_seq_length", fields=values, default=0)
            merge = round(max(1.0, positions / tokens) ** 0.5) if tokens else 1
        size = cls(
            num_layers=number("depth", "num_hidden_layers", default=24)
            + number("num_global_layers", default=0),
            hidden=hidden,
            intermediate=number(
                "intermediate_size", default=hidden * number("mlp_ratio", default=4)
            ),
            num_products=3 if is_gated else 2,
            patch_numbers=patch,
            merged=merge**2,
            text_hidden=number("out_hidden_size", default=text_hidden),
            other_parameters=positions * hidden,
            num_kept=4 if is_gated else 3 if tower.get("hidden_act") == "quick_gelu" else 2,
        )
        stacked = tower.get("deepstack_visual_indexes")
        if isinstance(stacked, list | tuple):
            more = size.other_parameters + len(stacked) * size.projector_parameters
            size = replace(size, other_parameters=more)
        return size

    @property
    def layer_parameters(self) -> int:
        """Numbers of one layer, biases and norms included."""
        feed_forward = self.num_products * (self.hidden + 1) * self.intermediate
        return 4 * self.hidden * (self.hidden + 1) + feed_forward + 5 * self.hidden

    @property
    def projector_parameters(self) -> int:
        """Numbers of two layers from merged patches to the text model's width."""
        width = self.hidden * self.merged
        return width * width + width * self.text_hidden + 2 * width + self.text_hidden

    @property
    def parameters(self) -> int:
        """Numbers of tower and projector."""
        ends = self.patch_numbers * self.hidden + self.projector_parameters + self.other_parameters
        return self.num_layers * self.layer_parameters + ends

    def adapter_parameters(self, rank: int) -> int:
        """Count the numbers of adapters on linear layers, with queries, keys and values in one."""
        attention = 4 * self.hidden + 2 * self.hidden
        feed_forward = self.num_products * (self.hidden + self.intermediate)
        merged = self.hidden * self.merged
        projector = 3 * merged + self.text_hidden
        return rank * (self.num_layers * (attention + feed_forward) + projector)

    def layer_patch_bytes(self, compute_bytes: int) -> float:
        """Return bytes that the backward pass of one layer keeps of a patch."""
        # Inputs and results of both norms and of attention; queries, keys and values, rotated.
        kept = 11.25 * compute_bytes * self.hidden
        if self.num_products == 3:
            kept += 2 * WIDE * self.hidden  # these norms widen what they keep
        return kept + compute_bytes * self.num_kept * self.intermediate

    def end_patch_bytes(self, compute_bytes: int) -> float:
        """Return bytes that are kept of a patch before the first layer and after the last one."""
        return compute_bytes * (self.patch_numbers + 3 * self.hidden)
