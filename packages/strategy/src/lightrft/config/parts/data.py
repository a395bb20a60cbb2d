"""Rows, prompts made of them, and their media."""

import os.path
import re
from collections.abc import Sequence

from lightrft.config.options import (
    Arguments,
    checks,
    option,
    part,
)
from lightrft.config.registry import PROMPT_SAMPLERS


def split_sources(text: str) -> tuple[str, ...]:
    """Return the sources of a comma-separated list; an existing path is one, commas included."""
    # Unlike Path.exists, false for text that no file system accepts as a name.
    if os.path.exists(text):
        return (text,)
    return tuple(part.strip() for part in text.split(",") if part.strip()) or (text,)


def has_splits(text: str | None) -> bool:
    """Return whether any source has named parts: folders and data sets have them, files do not."""
    return text is not None and any(not os.path.isfile(source) for source in split_sources(text))


def probability_problem(sources: Sequence[str], probabilities: Sequence[float]) -> str | None:
    """Return the misfit of probabilities and sources; None if they fit."""
    if not probabilities or tuple(probabilities) == (1.0,):
        return None
    if len(probabilities) != len(sources):
        return (
            f"prompt_data_probs must have one number per source of prompt_data: got "
            f"{len(probabilities)} for {len(sources)}"
        )
    if min(probabilities) <= 0 or abs(sum(probabilities) - 1) > 1e-6:
        shown = ", ".join(f"{value:g}" for value in probabilities)
        return f"prompt_data_probs must be positive with sum 1: got {shown}"
    return None


@part("data")
class SplitOptions:
    """The part of the data."""

    prompt_split: str = option(
        "train",
        "Part of a folder or data set to train on.",
        acts_with="a folder or data set in prompt_data",
        acts_when=lambda c: has_splits(c.prompt_data),
    )


@part("data", may_change=True)
class HeldOutOptions:
    """Rows to evaluate on."""

    eval_data: str | None = option(
        None,
        "Evaluation prompts, in the same formats.",
        common=True,
        path="file",
    )
    eval_split: str = option(
        "test",
        "Part of a folder or data set of eval_data.",
        acts_with="a folder or data set in eval_data",
        acts_when=lambda c: has_splits(c.eval_data),
    )
    max_eval_samples: int = option(
        500,
        "Use at most this many evaluation prompts.",
        at_least=1,
        acts_with="eval_data",
    )


@part("data")
class OrderOptions:
    """Rows that are drawn, and their order."""

    prompt_sampler: str | None = option(
        None,
        "What decides which rows are drawn: shuffle (a new order in each pass), in_order, "
        "weighted, pools (by the pass rates of the run) or a class FILE.py:NAME; unset is weighted "
        "with prompt_weight, in_order with --no_shuffle, else shuffle.",
        choices=PROMPT_SAMPLERS,
    )
    prompt_sampler_args: Arguments = option(
        None,
        "Hyper-parameters of the sampler under their own names.",
    )
    shuffle: bool = option(
        True,
        "Draw the rows in a new order in each pass; --no_shuffle keeps that of the files.",
    )
    prompt_weight: str | None = option(
        None,
        "Column of numbers: how often a row is drawn, relative to the others; 0 is never.",
    )

    rules = checks(
        lambda c: (
            not c.shuffle
            and c.prompt_sampler not in (None, "in_order")
            and f"no_shuffle is in_order, and prompt_sampler is {c.prompt_sampler}: leave one out"
        ),
        lambda c: (
            c.prompt_weight is not None
            and c.order in ("shuffle", "in_order")
            and f"prompt_weight {c.prompt_weight} has no meaning with the order {c.order}: leave "
            "one of them out"
        ),
    )

    @property
    def order(self) -> str:
        """Name of the sampler that decides the order."""
        if self.prompt_sampler is not None:
            return self.prompt_sampler
        if not self.shuffle:
            return "in_order"
        return "shuffle" if self.prompt_weight is None else "weighted"


@part("data")
class SourceOptions(OrderOptions, SplitOptions, HeldOutOptions):
    """Rows to train and to evaluate on."""

    prompt_data: str | None = option(
        None,
        "Training prompts (rows of lightrft sft, prefer, reward): a JSONL, JSON, Parquet or CSV "
        "file, a folder, or the name of a data set (owner/name[:configuration]); several separated "
        "by commas.",
        common=True,
        path="file",
    )
    prompt_data_probs: tuple[float, ...] = option(
        (),
        "Shares of several sources of prompt_data; unset follows their sizes.",
    )
    max_samples: int = option(
        1_000_000,
        "Use at most this many training prompts.",
        at_least=1,
    )

    rules = checks(
        lambda c: probability_problem(split_sources(c.prompt_data or ""), c.prompt_data_probs),
    )


def rate_bounds(text: str) -> tuple[float, float] | None:
    """Return the bounds of LOW:HIGH; None if they are not two numbers from 0 to 1, in order."""
    low, _, high = text.partition(":")
    try:
        bounds = float(low), float(high)
    except ValueError:
        return None
    return bounds if 0 <= bounds[0] <= bounds[1] <= 1 else None


@part("data")
class RateOptions:
    """Measured pass rates of prompts."""

    prompt_rates: str | None = option(
        None,
        "File of pass rates, as lightrft eval --rates writes it: for prompt_pass_rate, pools, and "
        "prompt_sampler weighted, which draws by the spread of the samples, rate x (1 - rate).",
        path="file",
    )
    prompt_pass_rate: str | None = option(
        None,
        "Keep only the prompts whose pass rate is from LOW to HIGH, such as 0.1:0.9.",
        acts_with="prompt_rates",
    )
    prompt_importance: bool = option(
        False,
        "Weigh each drawn prompt by 1 / (number of prompts x its probability), so that the mean "
        "gradient is that of drawing all alike.",
    )

    rules = checks(
        lambda c: (
            c.prompt_pass_rate is not None
            and rate_bounds(c.prompt_pass_rate) is None
            and f"prompt_pass_rate: got {c.prompt_pass_rate!r}, expected LOW:HIGH from 0 to 1, "
            "such as 0.1:0.9"
        ),
        lambda c: (
            c.prompt_pass_rate is not None
            and c.prompt_rates is None
            and "prompt_pass_rate needs prompt_rates, the file that lightrft eval --rates writes"
        ),
        lambda c: (
            c.prompt_importance
            and c.dynamic_sampling
            and "prompt_importance excludes dynamic_sampling: it replaces groups without a "
            "signal, so the mean is not over the drawn prompts; leave one of them out"
        ),
    )


# The {} right after a letter, as in \\boxed{}, is not the place of the prompt.
PROMPT_SLOT = re.compile(r"(?<![A-Za-z])\{\}")


@part("data")
class TemplateOptions:
    """Chat templates."""

    apply_chat_template: bool = option(
        False,
        "Render prompts by the model's chat template.",
        common=True,
    )
    chat_template: str | None = option(
        None,
        "File with a Jinja chat template in place of the tokenizer's.",
        path="file",
        acts_with="apply_chat_template",
    )
    chat_template_args: Arguments = option(
        None,
        "Variables of the chat template, such as enable_thinking=false.",
        acts_with="apply_chat_template",
    )


@part("data")
class LengthOptions:
    """Longest prompts and responses."""

    prompt_max_len: int = option(
        1024,
        "Longest prompt, in tokens; longer ones, and those that leave no room for "
        "generate_max_len in the model's context, are left out and counted.",
        at_least=1,
        common=True,
    )
    generate_max_len: int = option(
        1024,
        "Longest response, in tokens.",
        at_least=1,
        common=True,
        group="rollout",
    )


@part("data")
class PromptOptions(TemplateOptions, LengthOptions):
    """Prompts, made of rows."""

    input_key: str = option(
        "input",
        "Column that holds the prompt.",
        common=True,
    )
    label_key: str | None = option(
        "label",
        "Column that holds the reference answer.",
        common=True,
    )
    system_prompt: str | None = option(
        None,
        "System message put before every prompt.",
    )
    input_template: str | None = option(
        None,
        "Text around the prompt, which replaces {}.",
    )

    rules = checks(
        lambda c: (
            c.input_template is not None
            and not PROMPT_SLOT.search(c.input_template)
            and (
                f"input_template: got {c.input_template!r}, "
                "expected a text with {} where the prompt goes"
            )
        ),
        lambda c: (
            c.system_prompt is not None
            and not c.apply_chat_template
            and "system_prompt is part of the chat template: add apply_chat_template"
        ),
    )


@part("data")
class MediaOptions:
    """Images, videos and sounds of rows."""

    images_key: str = option(
        "images",
        "Column with the images of a prompt: paths relative to the file, bytes or "
        "base64, one or a list. The default also finds a column called image.",
    )
    videos_key: str = option(
        "videos",
        "Column with the videos of a prompt: films, animated images, or objects with frames and "
        "fps. "
        "The default also finds a column called video.",
    )
    audios_key: str = option(
        "audios",
        "Column with the sounds of a prompt: paths relative to the file, bytes, base64 or arrays "
        "with a sampling_rate. The default also finds a column called audio.",
    )
    media_root: str | None = option(
        None,
        "Folder in which media of rows may lie, beside that of the data file; / allows every file.",
        may_change=True,
    )
    text_only: bool = option(
        False,
        "Leave images, videos and sounds of the data out, with their places.",
    )
    max_pixels: int | None = option(
        None,
        "Most pixels of an image or frame; larger ones are scaled down. Unset is the "
        "processor's own.",
        at_least=1,
    )
    min_pixels: int | None = option(
        None,
        "Fewest pixels of an image or frame; smaller ones are scaled up. Unset is the "
        "processor's own.",
        at_least=1,
    )
    video_fps: float | None = option(
        None,
        "Frames a second that are taken of a video. Unset takes 2 of a film, and all of what is "
        "given as frames.",
        above=0,
    )
    video_max_frames: int | None = option(
        None,
        "Most frames of a video, spread evenly. Unset takes 768 of a film.",
        at_least=2,
        at_most=4096,
    )
    limit_mm_image_per_prompt: int | None = option(
        None,
        "Most images of a prompt; a row with more is an error. Unset sets no limit.",
        at_least=0,
    )
    limit_mm_video_per_prompt: int | None = option(
        None,
        "Most videos of a prompt; a row with more is an error. Unset sets no limit.",
        at_least=0,
    )
    limit_mm_audio_per_prompt: int | None = option(
        None,
        "Most sounds of a prompt; a row with more is an error. Unset sets no limit.",
        at_least=0,
    )

    rules = checks(
        lambda c: (
            c.max_pixels is not None
            and c.min_pixels is not None
            and c.min_pixels > c.max_pixels
            and f"min_pixels must be at most max_pixels: got {c.min_pixels} and {c.max_pixels}"
        ),
    )
