"""Which model types of the installed transformers train here, each proved in a tiny random model.

    python scripts/model_types.py              write the tables of docs/models.md
    python scripts/model_types.py TYPE ...     print the verdicts of some types, with numbers

Each type is built from its default configuration with small sizes, of its text and of its towers.
It passes the proof at load; then log-probabilities and gradients of three ragged rows of text are
compared with those of transformers' own forward pass, the model is written and read again, and
rows are packed. It takes a minute of a core.
"""

from __future__ import annotations

import json
import sys
import tomllib
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
import transformers as hf
from torch import Tensor
from transformers import AutoConfig, PretrainedConfig, PreTrainedModel, ProcessorMixin
from transformers.models.auto import (
    feature_extraction_auto,
    image_processing_auto,
    modeling_auto,
    processing_auto,
    video_processing_auto,
)
from transformers.utils import logging

from lightrft.engines.media.encoder import PromptEncoder
from lightrft.engines.media.families import FAMILIES, family_of, language_model_class
from lightrft.models import Actor
from lightrft.models.attention import use_short_attention
from lightrft.models.loading import load_causal_lm, save_pretrained
from lightrft.models.proof import pack_rows, prove_model
from lightrft.models.types import LayoutRefusedError
from lightrft.models.vision.proof import prove_media
from lightrft.stages.models import turn_off_dropout
from lightrft.strategy import get_fake_strategy
from lightrft.tools import model_presets
from lightrft.tools.tiny_media_models import media_template

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "models.md"
WITH_VLLM = ROOT / "benchmarks" / "results" / "vllm_types.json"
SIZES = tomllib.loads((ROOT / "scripts" / "model_types.toml").read_text(encoding="utf-8"))
TEXT = tuple(sorted(modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES))
IMAGES = tuple(sorted(modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES))
VOCABULARY, PAD, LENGTHS = 131, 0, (14, 9, 4)
MAX_PARAMETERS = 30_000_000
MAX_GRADIENT = 1e-5  # norm of the difference, in norms of transformers' gradient
BEGIN, END = "<!-- written by docs/generate.py -->", "<!-- end -->"
PACKED, PADDED, REFUSED, UNTRIED = "packed", "padded", "refused", "not tried"


@dataclass(frozen=True)
class TypeVerdict:
    """The outcome of a model type.

    Args:
        model_type: Name of the type.
        outcome: PACKED, PADDED, REFUSED, or UNTRIED if transformers builds no small model of it.
        reason: First line of the error of one that does not train.
        logprobs: Largest difference of log-probabilities from transformers'.
        gradient: Norm of the difference of gradients, in norms of transformers'.
    """

    model_type: str
    outcome: str
    reason: str = ""
    logprobs: float = 0.0
    gradient: float = 0.0


def tiny_config(model_type: str, vocabulary: int = VOCABULARY) -> PretrainedConfig:
    """Return the default configuration of a type with small sizes; marks are its last 30 ids."""
    config: PretrainedConfig = AutoConfig.for_model(model_type)
    _shrink(config, vocabulary)
    text = config.get_text_config()
    text.pad_token_id = PAD
    options = SIZES["types"].get(text.model_type, {}) | SIZES["types"].get(model_type, {})
    for name, value in options.items():
        part, _, option = name.rpartition(".")
        is_of_text = option in vars(text) or option not in vars(config)
        target = getattr(config, part) if part else text if is_of_text else config
        setattr(target, option, value)
    return config


def _shrink(config: PretrainedConfig, vocabulary: int) -> None:
    """Set the sizes of a configuration and of its parts in place."""
    options = {k: v for k, v in vars(config).items() if not isinstance(v, bool)}
    num_layers = next((options[n] for n in SIZES["layers"] if isinstance(options.get(n), int)), 0)
    # Properties of some configurations, which are no options.
    kinds = (getattr(config, name, None) for name in ("layer_types", "layers_block_type"))
    kept = _kept_layers(next((each for each in kinds if each), ()))
    for name, value in options.items():
        if isinstance(value, PretrainedConfig):
            _shrink(value, vocabulary)
        elif name in SIZES["layers"] and isinstance(value, int):
            setattr(config, name, min(len(kept), value))
        elif isinstance(value, list) and len(value) == num_layers > len(kept):
            setattr(config, name, [value[place] for place in kept])
        elif name.endswith(("_token_id", "_token_index")):
            is_outside = isinstance(value, int) and value >= VOCABULARY
            if is_outside or isinstance(value, list):
                setattr(config, name, vocabulary - 1 - sum(map(ord, name)) % 30)
        elif name.startswith("vocab_size") and isinstance(value, int):
            setattr(config, name, vocabulary)
        elif name in SIZES["sizes"] and isinstance(value, int):
            setattr(config, name, SIZES["sizes"][name])
        elif name in SIZES["sizes"] and isinstance(value, list | tuple):
            setattr(config, name, [SIZES["sizes"][name]] * len(value))
    if "kv_lora_rank" in options:
        config.num_key_value_heads = config.num_attention_heads


def _kept_layers(types: Iterable[str]) -> list[int]:
    """Return the places of the first layer of each type; of the first two if all are alike."""
    first = {kind: place for place, kind in reversed(list(enumerate(types)))}
    return sorted(first.values()) if len(first) > 1 else [0, 1]


def tiny_model(model_type: str) -> PreTrainedModel:
    """Return a random model of a type.

    Raises:
        ValueError: The sizes did not make it small.
    """
    return _random_model(tiny_config(model_type))


def _random_model(config: PretrainedConfig) -> PreTrainedModel:
    torch.manual_seed(0)
    model: PreTrainedModel = language_model_class(config).from_config(config)
    num_parameters = sum(value.numel() for value in model.parameters())
    if num_parameters > MAX_PARAMETERS:
        raise ValueError(f"sizes of other names: it has {num_parameters} parameters")
    with torch.no_grad():
        for value in model.parameters():
            if value.ndim > 1:
                value.mul_(4)  # logits of a size at which an error shows
    use_short_attention(model)
    return model


def examine(model_type: str) -> TypeVerdict:
    """Build a model of a type, prove it, compare it with transformers, and pack rows."""
    try:
        model = tiny_model(model_type)
    except Exception as error:  # noqa: BLE001  transformers' own code, with small sizes
        return TypeVerdict(model_type, UNTRIED, _first_line(error))
    try:
        actor = Actor(model)
        turn_off_dropout(actor, keeps_adapters=False)
        proof = prove_model(actor, get_fake_strategy({}).context, is_random=False)
        if proof is None:
            return TypeVerdict(model_type, UNTRIED, "its random weights give no finite numbers")
        _require_export(actor)
        logprobs, gradient = _differences(actor, is_packed=False)
        try:
            pack_rows(proof)
        except LayoutRefusedError as error:
            return TypeVerdict(model_type, PADDED, _first_line(error), logprobs, gradient)
        packed = _differences(actor, is_packed=True)
        return TypeVerdict(
            model_type, PACKED, "", max(logprobs, packed[0]), max(gradient, packed[1])
        )
    except Exception as error:  # noqa: BLE001  refusals, and models that run on no text alone
        return TypeVerdict(model_type, REFUSED, _first_line(error))


def tiny_vision(model_type: str) -> tuple[PreTrainedModel, ProcessorMixin]:
    """Return a random model of a type that reads images, and a processor for small ones."""
    row = SIZES["images"][model_type]
    row = SIZES["images"].get(row.get("like"), {}) | row
    core, tokens = model_presets.byte_level_core(), row["tokens"]
    core.add_special_tokens(list(tokens.values()))
    tokenizer = hf.PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token=model_presets.PAD,
        eos_token=model_presets.END,
        bos_token=model_presets.SYSTEM,
        padding_side="left",
        clean_up_tokenization_spaces=False,
        extra_special_tokens=tokens,
    )
    processor = _processor(model_type, row, tokenizer)
    # Some types get further tokens when their tokenizer is read.
    config = tiny_config(model_type, vocabulary=len(tokenizer) + 8)
    for option, name in row["ids"].items():
        setattr(config, option, tokenizer.convert_tokens_to_ids(tokens[name]))
    for name, value in row.get("sizes", {}).items():
        part, _, option = name.rpartition(".")
        if isinstance(value, dict):
            kind = value.get("model_type")
            value = tiny_config(kind) if kind else {int(key): each for key, each in value.items()}
        setattr(getattr(config, part) if part else config, option, value)
    return _random_model(config), processor


def _processor(
    model_type: str, row: dict[str, dict[str, object]], tokenizer: hf.PreTrainedTokenizerFast
) -> ProcessorMixin:
    """Return the processor of a type with the classes that transformers' tables name."""
    tables = {
        "image_processor": image_processing_auto.IMAGE_PROCESSOR_MAPPING_NAMES,
        "video_processor": video_processing_auto.VIDEO_PROCESSOR_MAPPING_NAMES,
        "feature_extractor": feature_extraction_auto.FEATURE_EXTRACTOR_MAPPING_NAMES,
    }
    kind = getattr(hf, processing_auto.PROCESSOR_MAPPING_NAMES[model_type])
    parts = {}
    for part in kind.get_attributes():
        if part != "tokenizer":
            name = row.get("classes", {}).get(part) or tables[part][model_type]
            name = name["torchvision"] if isinstance(name, dict) else name
            parts[part] = getattr(hf, name)(**row.get(part, {}))
    template = media_template({"image": row.get("shown") or row["tokens"]["image_token"]})
    options = row.get("processor", {})
    made: ProcessorMixin = kind(**parts, tokenizer=tokenizer, chat_template=template, **options)
    return made


def examine_images(model_type: str) -> TypeVerdict:
    """Prove that a model of a type reads images, as a run with images does at its start."""
    if model_type not in SIZES["images"]:
        return TypeVerdict(model_type, UNTRIED)
    try:
        model, processor = tiny_vision(model_type)
        encoder = PromptEncoder(processor, family_of(model.config))
        if encoder.hindrance:
            return TypeVerdict(model_type, REFUSED, encoder.hindrance)
        actor = Actor(model)
        proof = prove_media(actor, get_fake_strategy({}).context, encoder)
        if proof is None:
            return TypeVerdict(model_type, UNTRIED, "its random weights give no finite numbers")
    except Exception as error:  # noqa: BLE001  refusals
        return TypeVerdict(model_type, REFUSED, _first_line(error))
    logprobs = proof.distance_of_layout()
    try:
        proof.separate_rows()
        actor.pack_samples()
        proof.require_packing()
    except LayoutRefusedError as error:
        return TypeVerdict(model_type, PADDED, _first_line(error), logprobs)
    return TypeVerdict(model_type, PACKED, "", logprobs)


def _differences(actor: Actor, *, is_packed: bool) -> tuple[float, float]:
    """Return the differences of logprobs and gradients from transformers', over ragged rows."""
    logprobs, gradient = _compare(actor, is_packed=is_packed)
    if gradient > MAX_GRADIENT:  # long sums round more: a fault stays in float64
        logprobs, gradient = _compare(actor.double(), is_packed=is_packed)
        actor.float()
    return logprobs, gradient


def _compare(actor: Actor, *, is_packed: bool) -> tuple[float, float]:
    draw = torch.Generator().manual_seed(1)
    ids = torch.randint(5, VOCABULARY, (len(LENGTHS), max(LENGTHS)), generator=draw)
    never = torch.tensor(actor.head.forbidden_ids, dtype=torch.long)
    ids = torch.where(torch.isin(ids, never), 3, ids)
    mask = torch.arange(max(LENGTHS)) < torch.tensor(LENGTHS)[:, None]
    upstream = torch.randn(ids.shape, generator=draw) * mask
    actor.eval()
    actor.pack_samples(is_packed)
    ours = actor(ids.masked_fill(~mask, PAD), mask).logprobs
    trained = [value for value in actor.parameters() if value.requires_grad]
    got = _gradient((ours * upstream).sum(), trained)
    actor.pack_samples(False)
    theirs = torch.zeros_like(ours)
    for row, length in enumerate(LENGTHS):
        logits = actor.model(input_ids=ids[row : row + 1, :length], use_cache=False).logits[0]
        allowed = logits.float().index_fill(-1, never, -torch.inf).log_softmax(-1)
        theirs[row, 1:length] = allowed[:-1].gather(1, ids[row, 1:length, None])[:, 0]
    want = _gradient((theirs * upstream).sum(), trained)
    return float((ours - theirs).detach().abs().max()), float((got - want).norm() / want.norm())


def _require_export(actor: Actor) -> None:
    """Write the model and read it again as a run does.

    Raises:
        ValueError: A tensor differs, or has another name.
    """
    with TemporaryDirectory() as folder:
        save_pretrained(actor.model, None, folder)
        read = load_causal_lm(folder).state_dict()
    written = actor.model.state_dict()
    names = {name for name in {*read, *written} if not _equal(read.get(name), written.get(name))}
    if names:
        raise ValueError(f"{len(names)} tensors are not read as written, {min(names)} first")


def _equal(left: Tensor | None, right: Tensor | None) -> bool:
    return left is not None and right is not None and torch.equal(left, right)


def _gradient(loss: Tensor, trained: list[torch.nn.Parameter]) -> Tensor:
    gradients = torch.autograd.grad(loss, trained, allow_unused=True, materialize_grads=True)
    return torch.cat([gradient.flatten().double() for gradient in gradients])


def _first_line(error: Exception) -> str:
    lines = [line for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    return lines[0].strip()


def page(texts: Iterable[TypeVerdict], images: Iterable[TypeVerdict]) -> str:
    """Return the tables of the page of models, as Markdown.

    Args:
        texts: Verdicts on rows of text, of all types.
        images: Verdicts on rows with images, of the types that read them without a row.
    """
    by_type = {verdict.model_type: verdict for verdict in texts}
    seen = {verdict.model_type: verdict for verdict in images}
    lines = [*_table("text train on rows of text", TEXT, by_type), ""]
    lines += [*_table("images train on rows of text", IMAGES, by_type), ""]
    # Types with a row are tried by tests/models/vision, and lie as their texts do.
    seen |= {t: by_type[t] for t in IMAGES if t in FAMILIES and t not in seen}
    seen |= {t: TypeVerdict(t, UNTRIED) for t in IMAGES if t not in seen}
    lines += [*_table("images train on rows with images", IMAGES, seen), ""]
    return "\n".join([*lines, *_table_of_vllm()])


def _table(title: str, types: tuple[str, ...], by_type: dict[str, TypeVerdict]) -> Iterator[str]:
    count = sum(by_type[t].outcome in (PACKED, PADDED) for t in types)
    yield f"{count} of {len(types)} types of transformers' models of {title}:"
    yield ""
    yield "| rows | types |"
    yield "|---|---|"
    for outcome in (PACKED, PADDED, REFUSED, UNTRIED):
        names = [t for t in types if by_type[t].outcome == outcome]
        shown = [f"**{t}**" if t in FAMILIES else t for t in names]
        yield f"| {outcome} | {', '.join(shown)} |"


def outcomes_of_page(title: str) -> dict[str, str]:
    """Return the outcome of each type in a table of the page."""
    rest = PAGE.read_text(encoding="utf-8").partition(f"{title}:")[2].split("\n\n")
    cells = [line.strip("| ").partition(" | ") for line in rest[1].splitlines()[2:]]
    return {t.strip("*"): outcome for outcome, _, names in cells for t in names.split(", ")}


def _table_of_vllm() -> Iterator[str]:
    """Yield what scripts/vllm_types.py found out."""
    yield (
        "Weights and adapters in vLLM's CPU build (`python scripts/vllm_types.py`), where adapters "
        "of mixtures of experts lack Triton:"
    )
    yield ""
    yield "| type | all weights | adapters |"
    yield "|---|---|---|"
    for name, verdict in json.loads(WITH_VLLM.read_text(encoding="utf-8")).items():
        outcomes = (
            f"not: {verdict[p]}" if verdict[p] else "proved" for p in ("weights", "adapters")
        )
        yield f"| {name} | {' | '.join(outcomes)} |"


def main(names: list[str]) -> int:
    """Print verdicts of some types, or write the page."""
    warnings.simplefilter("ignore")
    logging.set_verbosity_error()
    if names:
        for name in names:
            print(json.dumps(vars(examine(name))), flush=True)
            if name in SIZES["images"]:
                print("images", json.dumps(vars(examine_images(name))), flush=True)
        return 0
    verdicts = [examine(name) for name in sorted({*TEXT, *IMAGES})]
    images = [examine_images(name) for name in SIZES["images"]]
    before, begin, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    _, end, after = rest.partition(END)
    PAGE.write_text(f"{before}{begin}\n{page(verdicts, images)}\n{end}{after}", encoding="utf-8")
    for verdict in (*verdicts, *images):
        if verdict.outcome in (REFUSED, UNTRIED):
            print(json.dumps(vars(verdict)))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
