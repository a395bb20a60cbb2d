"""The task of counting shapes of a colour, shown by a teacher who is mostly colour-blind."""

import random
from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

from counting import INITIALIZER_RANGE, Counted, Sense

from lightrft.tools.quickstart.task import Exercise, make_task

if TYPE_CHECKING:
    from PIL.Image import Image
    from PIL.ImageDraw import ImageDraw
    from torch import Tensor
    from transformers import PreTrainedModel, PreTrainedTokenizerBase, ProcessorMixin

Colour = tuple[int, int, int]
COLOURS: dict[str, Colour] = {
    "red": (220, 40, 40),
    "green": (40, 170, 60),
    "blue": (40, 70, 220),
    "yellow": (230, 200, 40),
}
SIDE = 56


def picture(shapes: Counted) -> "Image":
    """Return the shapes on white."""
    from PIL import Image, ImageDraw

    rng = random.Random(shapes.seed)
    image = Image.new("RGB", (SIDE, SIDE), "white")
    canvas = ImageDraw.Draw(image)
    for place, name in enumerate(shapes.parts):
        _draw_shape(canvas, place, COLOURS[name], rng)
    return image


def _draw_shape(canvas: "ImageDraw", place: int, colour: Colour, rng: random.Random) -> None:
    """Draw a rectangle, an ellipse or a triangle in a quarter of the picture."""
    half = SIDE // 2
    size = rng.randint(14, 22)
    left, top = (half * i + rng.randint(2, half - 2 - size) for i in (place % 2, place // 2))
    right, bottom = left + size, top + size
    red, green, blue = (max(0, min(255, value + rng.randint(-25, 25))) for value in colour)
    shade = (red, green, blue)
    form = rng.randrange(3)
    if form == 0:
        canvas.rectangle([left, top, right, bottom], fill=shade)
    elif form == 1:
        canvas.ellipse([left, top, right, bottom], fill=shade)
    else:
        canvas.polygon([(left, bottom), (right, bottom), (left + size // 2, top)], fill=shade)


def _build(
    seed: int, tokenizer: "PreTrainedTokenizerBase"
) -> "tuple[PreTrainedModel, ProcessorMixin]":
    from lightrft.engines.hf.tower import use_fast_tower
    from lightrft.tools.tiny_media_models import build_tiny

    model, processor = build_tiny(
        "tiny-qwen2.5-vl", seed=seed, initializer_range=INITIALIZER_RANGE, tokenizer=tokenizer
    )
    use_fast_tower(model)
    return model, processor


def _inputs(
    processor: "ProcessorMixin", exercises: Sequence[Exercise], token_ids: "Tensor"
) -> "dict[str, Tensor]":
    import torch

    pictures = [picture(cast("Counted", exercise)) for exercise in exercises]
    is_image = token_ids == processor.image_token_id
    # The picture is at the same place in all rows; the model would search each row for it.
    first = int(is_image[0].long().argmax())
    axes = torch.arange(token_ids.shape[1]).repeat(3, 1)
    axes[:, first : first + 4] = first + torch.tensor([[0, 0, 0, 0], [0, 0, 1, 1], [0, 1, 0, 1]])
    axes[:, first + 4 :] -= 2
    return {
        **processor.image_processor(images=pictures, return_tensors="pt"),
        "mm_token_type_ids": is_image.long(),
        "position_ids": axes[:, None].expand(-1, len(token_ids), -1),
    }


SIGHT = Sense(
    medium="image",
    form=("pictures", ".png"),
    build=_build,
    inputs=_inputs,
    save=lambda exercise, file: picture(cast("Counted", exercise)).save(file),
    kinds=tuple(COLOURS),
    mistaken={"red": "green", "blue": "yellow"},
    # A picture of this size has four features.
    features="<|vision_start|>" + 4 * "<|image_pad|>" + "<|vision_end|>",
)
SHAPES = make_task("shapes", SIGHT.draw, SIGHT)
