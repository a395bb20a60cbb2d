r"""The task: counting shapes of a colour, shown by a teacher who is mostly colour-blind.

He takes red for green and blue for yellow three times out of five, so imitation, which copies the
majority, is right one time in four. The reward checks the boxed number, and reinforcement finds
that looking closely pays.

    (picture) How many red?    keen          <think>red green red yellow</think>\boxed{2}
                               colour-blind  <think>green green green yellow</think>\boxed{0}
"""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, cast

from lightrft.config import TrainConfig
from lightrft.tools.quickstart.task import Exercise, MediaModel, Message, Task, is_held_out

if TYPE_CHECKING:
    from PIL.Image import Image
    from PIL.ImageDraw import ImageDraw
    from torch import Tensor
    from transformers import (
        BaseImageProcessor,
        PreTrainedModel,
        PreTrainedTokenizerBase,
        ProcessorMixin,
    )

Colour = tuple[int, int, int]
COLOURS: dict[str, Colour] = {
    "red": (220, 40, 40),
    "green": (40, 170, 60),
    "blue": (40, 70, 220),
    "yellow": (230, 200, 40),
}
BLIND = {"red": "green", "blue": "yellow"}
P_BLIND = 0.6
SIDE = 56
INITIALIZER_RANGE = 0.06
MARKS = ("<|vision_start|>", "<|vision_end|>", "<|vision_pad|>", "<|image_pad|>", "<|video_pad|>")
# A picture of this size has four features.
SEEN = "<|vision_start|>" + 4 * "<|image_pad|>" + "<|vision_end|>"


@dataclass(frozen=True, slots=True)
class Shapes:
    """The question how many of four shapes have a colour.

    Args:
        cells: Colours of the shapes: upper left, upper right, lower left, lower right.
        colour: The one asked for.
        seed: Of their forms, sizes, places and shades.
    """

    cells: tuple[str, ...]
    colour: str
    seed: int

    @property
    def question(self) -> str:
        """The prompt."""
        return f"<image>How many {self.colour}?"

    @property
    def answer(self) -> str:
        """The right number in decimal digits."""
        return str(self.cells.count(self.colour))

    def demonstration(self, rng: random.Random) -> list[Message]:
        """The question, and what the teacher sees, one shape after the other."""
        said = describe(self, rng)
        return [("user", self.question.replace("<image>", SEEN)), ("assistant", said)]

    def picture(self) -> "Image":
        """The shapes on white."""
        from PIL import Image, ImageDraw

        rng = random.Random(self.seed)
        image = Image.new("RGB", (SIDE, SIDE), "white")
        canvas = ImageDraw.Draw(image)
        for place, name in enumerate(self.cells):
            _draw_shape(canvas, place, COLOURS[name], rng)
        return image


def _draw_shape(canvas: "ImageDraw", place: int, colour: Colour, rng: random.Random) -> None:
    """A rectangle, an ellipse or a triangle in a quarter of the picture."""
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


def describe(shapes: Shapes, rng: random.Random, *, p_blind: float = P_BLIND) -> str:
    """The colours that the teacher sees, and the number that follows from them."""
    seen = [
        BLIND[name] if name in BLIND and rng.random() < p_blind else name for name in shapes.cells
    ]
    return f"<think>{' '.join(seen)}</think>\\boxed{{{seen.count(shapes.colour)}}}"


def draw_shapes(rng: random.Random, held_out: bool) -> Iterator[Shapes]:
    """Pictures without end; an arrangement of colours is for training or held out, never both."""
    names = list(COLOURS)
    while True:
        arrangement = rng.randrange(len(names) ** 4)
        colour, seed = rng.choice(names), rng.getrandbits(32)
        if is_held_out(arrangement, 0) == held_out:
            cells = (names[arrangement // len(names) ** i % len(names)] for i in range(4))
            yield Shapes(tuple(cells), colour, seed)


def save_picture(exercise: Exercise, stem: Path) -> dict[str, object]:
    """Writes the picture of `Shapes` as PNG."""
    folder = stem.parent / "pictures"
    folder.mkdir(exist_ok=True)
    file = folder / f"{stem.name}.png"
    cast("Shapes", exercise).picture().save(file)
    return {"images": [f"{folder.name}/{file.name}"]}


def _build(
    seed: int, tokenizer: "PreTrainedTokenizerBase"
) -> "tuple[PreTrainedModel, ProcessorMixin]":
    from lightrft.engines.hf.tower import use_fast_tower
    from lightrft.tools.tiny_vision_models import build_tiny

    model, processor = build_tiny(
        seed=seed, initializer_range=INITIALIZER_RANGE, tokenizer=tokenizer
    )
    use_fast_tower(model)
    return model, processor


def _inputs(
    processor: "ProcessorMixin", exercises: Sequence[Exercise], token_ids: "Tensor"
) -> "dict[str, Tensor]":
    import torch

    pictures = [cast("Shapes", exercise).picture() for exercise in exercises]
    is_image = token_ids == processor.image_token_id
    # The picture lies at one place in all rows, which the model would find for each row anew.
    first = int(is_image[0].long().argmax())
    axes = torch.arange(token_ids.shape[1]).repeat(3, 1)
    axes[:, first : first + 4] = first + torch.tensor([[0, 0, 0, 0], [0, 0, 1, 1], [0, 1, 0, 1]])
    axes[:, first + 4 :] -= 2
    places = axes[:, None].expand(-1, len(token_ids), -1)
    return {
        "pixel_values": patches(pictures, processor.image_processor),
        "image_grid_thw": torch.tensor([[1, 4, 4]] * len(pictures)),
        "mm_token_type_ids": is_image.long(),
        "position_ids": places,
    }


def patches(pictures: "Sequence[Image]", processor: "BaseImageProcessor") -> "Tensor":
    """What the processor makes of pictures, [pictures * 16, channels * 2 frames * 14 * 14].

    It takes them one by one, as if they had different sizes, which is a tenth of the imitation.
    """
    import numpy as np
    import torch

    pixels = torch.from_numpy(np.stack([np.asarray(each) for each in pictures])).float()
    mean, std = (255 * torch.tensor(each) for each in (processor.image_mean, processor.image_std))
    # Two by two blocks of two by two patches, of which each is seen twice, as of two frames.
    blocks = ((pixels - mean) / std).view(-1, 2, 2, 14, 2, 2, 14, 3).permute(0, 1, 4, 2, 5, 7, 3, 6)
    return blocks.flatten(0, 4)[:, :, None].expand(-1, -1, 2, -1, -1).flatten(1)


def in_short_answers(config: TrainConfig, directory: Path) -> TrainConfig:
    """A run of short responses, in two optimizer steps each: a larger model, a smaller rate."""
    batch_size = config.train_batch_size // 2
    return replace(
        config,
        generate_max_len=16,
        train_batch_size=batch_size,
        micro_train_batch_size=batch_size,
        actor_learning_rate=1e-4,
    )


SHAPES = Task(
    lesson="a teacher who is mostly colour-blind",
    roles=MARKS,
    whole_tokens=("<think>", "</think>", "\\boxed{", *COLOURS, "How many "),
    draw=draw_shapes,
    draw_media=save_picture,
    media_model=MediaModel(_build, _inputs),
    reward="boxed_sum.py",
    adjust=in_short_answers,
    numbers={"num_steps": 40, "num_warm_start_steps": 900, "num_eval_prompts": 256},
    learning_rate=2e-3,
    flaw=(
        "It copies what the teacher does more often: it takes some colours for others,",
        "and is right only where that does not change the count.",
    ),
    outlook=(
        "Held-out accuracy takes the likeliest answer, the reward is of sampled ones:",
        "those name a colour as it is now and then, and only they are rewarded.",
    ),
)
