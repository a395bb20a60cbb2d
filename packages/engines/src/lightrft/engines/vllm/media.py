"""Conversion of prompts with media to vLLM's form, and a check of vLLM's tokens."""

import importlib
import re
from collections.abc import Sequence

import torch
from torch import nn

from lightrft.engines.media.media import MEDIA_KINDS
from lightrft.engines.rows import Job


def native_prompt(job: Job) -> dict[str, object]:
    """Return a job in vLLM's form, with one placeholder per medium, which vLLM expands.

    Raises:
        ValueError: The encoded prompt has no media sources.
        MediaError: A medium cannot be read.
    """
    media = job.media
    if media is None:
        return {"prompt_token_ids": list(job.prompt)}
    if not media.media:
        raise ValueError(
            "the vllm engine has a processor of its own and needs the media themselves: got an "
            "encoded prompt without images and videos; make it with PromptEncoder"
        )
    data: dict[str, object] = {}
    names: dict[str, object] = {}
    for kind in media.media.kinds:
        row, media_of_kind = MEDIA_KINDS[kind], media.media[kind]
        data[kind] = [row.native(medium.decode()) for medium in media_of_kind]
        sizes = media.sizes if row.is_scaled else {}
        names[kind] = [f"{medium.digest}{sizes or ''}" for medium in media_of_kind]
    sampled = job.prompt[len(media.token_ids) :]
    request: dict[str, object] = {
        "prompt_token_ids": [*media.request_token_ids, *sampled],
        "multi_modal_data": data,
        # vLLM caches media by these names: another picture needs another name.
        "multi_modal_uuids": names,
    }
    if media.sizes:
        request["mm_processor_kwargs"] = dict(media.sizes)
    return request


def check_prompt(found: Sequence[int], job: Job) -> None:
    """Raise a ValueError unless vLLM tokenized the prompt as the model's processor does."""
    if job.media is None or tuple(found) == job.prompt:
        return
    pairs = zip(found, job.prompt, strict=False)
    first = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(found), len(job.prompt)))
    raise ValueError(
        f"vLLM reads a prompt with {job.media.media.counts} as {len(found)} tokens and the model's "
        f"processor as {len(job.prompt)}: they "
        f"differ first at token {first}, {list(found[first : first + 4])} and "
        f"{list(job.prompt[first : first + 4])}; expected the same token ids, so sizes or rules "
        "of the two processors differ: train this model with engine_type hf"
    )


# Families whose towers lie one level deeper in vLLM 0.32 than in transformers 5.19, with vLLM's
# module and class.
_TOWERS = {
    "gemma3": ("gemma3_mm", "Gemma3ForConditionalGeneration"),
    "llava": ("llava", "LlavaForConditionalGeneration"),
    "llava_onevision": ("llava_onevision", "LlavaOnevisionForConditionalGeneration"),
}
_UNNAMED = ("qwen2_audio",)
# These use features of an earlier layer; vLLM omits the rest of the tower.
_CUT_TOWERS = ("llava", "llava_onevision")
_OWN_LEVEL = re.compile(r"\bvision_tower\.(?!vision_model\.)")


def name_tower(model_type: str) -> None:
    """Register the names of the tower's weights, on disk and in updates, with vLLM's model.

    Raises:
        ValueError: The names in vLLM's model differ from the trainer's.
    """
    if model_type in _UNNAMED:
        raise ValueError(
            f"the vllm engine cannot take weights of {model_type!r}: vLLM 0.32 reads them by the "
            "names of released checkpoints alone, which transformers 5.19 does not write; train "
            "this model with engine_type hf"
        )
    if model_type not in _TOWERS:
        return
    from vllm.model_executor.models.utils import WeightsMapper

    module_name, class_name = _TOWERS[model_type]
    home = importlib.import_module(f"vllm.model_executor.models.{module_name}")
    model = vars(home)[class_name]
    if _OWN_LEVEL not in model.hf_to_vllm_mapper.orig_to_new_regex:
        model.hf_to_vllm_mapper |= WeightsMapper(
            orig_to_new_regex={_OWN_LEVEL: "vision_tower.vision_model."}
        )


def may_lack(model_type: str) -> str:
    """Return the prefix of parameters that vLLM's model may lack; "" for none."""
    return "model.vision_tower." if model_type in _CUT_TOWERS else ""


def forbid_tokens(model: nn.Module, token_ids: Sequence[int], vocab_size: int) -> None:
    """Set the logits of some tokens, and of ids from `vocab_size` on, to -inf in vLLM's model."""
    # Copied once: a copy at each step would wait for the GPU and defeat asynchronous scheduling.
    forbidden: dict[torch.device, torch.Tensor] = {}
    compute = model.compute_logits

    def compute_logits(*args: object, **options: object) -> torch.Tensor | None:
        logits: torch.Tensor | None = compute(*args, **options)  # type: ignore[operator]
        if logits is None:  # this rank samples nothing
            return None
        device = logits.device
        if device not in forbidden:
            forbidden[device] = torch.tensor(token_ids, dtype=torch.int64, device=device)
        logits[..., vocab_size:] = float("-inf")
        return logits.index_fill_(-1, forbidden[device], float("-inf"))

    model.compute_logits = compute_logits  # type: ignore[assignment]
