"""Reading and writing of Hugging Face checkpoints, with errors that fit one line."""

import json
import logging
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import date
from fnmatch import fnmatchcase
from pathlib import Path
from pickle import UnpicklingError
from types import SimpleNamespace

import torch
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForMultimodalLM,
    AutoModelForSequenceClassification,
    AutoProcessor,
    AutoTokenizer,
    GenerationConfig,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    ProcessorMixin,
)

from lightrft.config import ConfigError, TemplateOptions
from lightrft.config.files import FileError, read_object, read_text
from lightrft.config.options import short
from lightrft.config.other_names import said_once
from lightrft.config.printable import one_line
from lightrft.engines.media.families import family_of, language_model_class
from lightrft.engines.process_state import deepspeed_unless_used
from lightrft.kernels.names import first_line
from lightrft.models.attention import use_short_attention
from lightrft.strategy.checkpoints.gathered_model import WeightFiles
from lightrft.strategy.meta_init import is_building_on_meta
from lightrft.strategy.weight_sync.parameter_source import tied_parameter_names

DTYPES: dict[str, torch.dtype] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
PROCESSOR_FILES = ("processor_config.json", "preprocessor_config.json")
WEIGHT_PATTERNS = ("*.safetensors", "pytorch_model*.bin")
# File of a head beside a trunk: transformers has sequence classifiers for hardly any
# vision-language model, and none that pool.
SCORE_FILE = "score.safetensors"
# Output layers of other tasks; that of a language model has the name that its class says.
_HEADS = ("lm_head.*", "score.*", "classifier.*", "v_head.*")
_MAX_LISTED_NAMES = 5
_END_OF_ARGUMENTS = "{#- arguments of the run +#}"
# Function by which templates write the present day, and the day that they write instead: rows of
# other ranks, of a continued run and of replays are the same.
CLOCK, DAY = "strftime_now", "2025-01-01"
_FORMATS = re.compile(rf"\b{CLOCK}\(\s*[\"']([^\"']*)[\"']\s*\)")
# Largest vocabulary.
MAX_TOKENS = 2**24


class ModelLoadError(OSError):
    """A checkpoint is missing or cannot be read; the message names the path and the remedy."""


AutoClass = (
    type[AutoModel]
    | type[AutoModelForCausalLM]
    | type[AutoModelForMultimodalLM]
    | type[AutoModelForSequenceClassification]
)


def load_config(path: str) -> PretrainedConfig:
    """Return the model's configuration.

    Raises:
        ModelLoadError: There is no config.json, or it names an unknown architecture.
    """
    config: PretrainedConfig = _read(AutoConfig, path, ("config.json",), "configuration")
    return config


def common_fields(config: PretrainedConfig) -> dict[str, object]:
    """Return the fields of a configuration, also under the names that most models use."""
    # Some configurations count their layers in a property.
    names = [n for n, value in vars(type(config)).items() if isinstance(value, property)]
    fields: dict[str, object] = {name: getattr(config, name) for name in names} | config.to_dict()
    text = config.get_text_config()
    if text is not config:
        fields["text_config"] = common_fields(text)
    return fields | {name: getattr(config, name) for name in config.attribute_map}


def load_tokenizer(path: str, config: TemplateOptions | None = None) -> PreTrainedTokenizerBase:
    """Return the tokenizer of a checkpoint.

    Args:
        path: Path of the checkpoint.
        config: Options; `chat_template` and `chat_template_args` are read.

    Raises:
        ConfigError: The template does not exist or lacks an argument.
        ModelLoadError: The tokenizer is missing or unreadable.
    """
    files = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model")
    if (Path(path) / files[0]).exists():
        _require_bounded(Path(path) / files[0])
    tokenizer: PreTrainedTokenizerBase = _read(AutoTokenizer, path, files, "tokenizer")
    if config is not None:
        tokenizer.chat_template = chosen_template(config, tokenizer.chat_template)
    return tokenizer


def chosen_template(config: TemplateOptions, own: str | None) -> str | None:
    """Return the chat template of a run, which sets its arguments itself.

    So everything that uses it, the saved model included, renders alike.

    Args:
        config: Options; `chat_template` and `chat_template_args` are read.
        own: Template that was saved with the model.

    Raises:
        ConfigError: The template does not exist or lacks an argument.
    """
    if config.chat_template is not None:
        file = Path(config.chat_template)
        if not file.is_file():
            raise ConfigError(f"chat_template: no file {file}")
        own = read_template(file)
    arguments = dict(config.chat_template_args or {})
    if isinstance(own, str) and f"macro {CLOCK}" not in own and _FORMATS.search(own):
        arguments.setdefault(CLOCK, DAY)
    sets = ""
    for name, value in arguments.items():
        if not isinstance(own, str) or not re.search(rf"\b{re.escape(name)}\b", own):
            raise ConfigError(
                f"chat_template_args: got {name}, which the chat template does not read: leave it "
                "out, or give a template that does (--chat_template)"
            )
        if name == CLOCK:
            sets += _clock(own, value)
            continue
        # Numbers, texts and truth values are written in Jinja as in JSON.
        sets += f"{{%- set {name} = {json.dumps(value)} +%}}"
    if not sets or own is None:
        return own
    # Behind the arguments of the run that made the model, which would win otherwise.
    before, _, rest = own.rpartition(_END_OF_ARGUMENTS)
    return f"{before}{sets}{_END_OF_ARGUMENTS}{rest}"


def _clock(template: str, value: object) -> str:
    """Return a macro that writes one day in the formats of a template."""
    try:
        day = date.fromisoformat(str(value))
    except ValueError:
        raise ConfigError(
            f"chat_template_args: {CLOCK} is {value!r}, expected a day such as {DAY}"
        ) from None
    days = json.dumps({text: day.strftime(text) for text in _FORMATS.findall(template)})
    return f"{{%- macro {CLOCK}(format) %}}{{{{- {days}[format] }}}}{{%- endmacro +%}}"


def read_template(file: Path) -> str:
    """Return the text of a chat template; raise a ConfigError if it is none."""
    from transformers.utils.chat_template_utils import _compile_jinja_template

    try:
        text = read_text(file)
        # Only parsed: compiling computes its constants, which may take all memory.
        _compile_jinja_template("").environment.parse(text)
    except Exception as err:  # whatever Jinja raises: it is no package of this layer
        raise ConfigError(f"chat_template: {file} is no Jinja template: {err}") from err
    return text


def _require_bounded(file: Path) -> None:
    """Raise a ModelLoadError for numbers that make tokenizers take as much memory."""

    def numbers(value: object) -> Iterator[int]:
        items = value.values() if isinstance(value, dict) else value
        for item in items if isinstance(items, Iterable) else ():
            if isinstance(item, int):
                yield item
            elif isinstance(item, dict):
                yield from numbers(item)

    try:
        values = read_object(file)
    except FileError as err:
        raise ModelLoadError(f"cannot read the tokenizer: {err}") from err
    places = [values.get(name) for name in ("model", "added_tokens", "padding")]
    largest = max((number for place in places for number in numbers(place)), default=0)
    if largest > MAX_TOKENS:
        raise ModelLoadError(
            f"cannot read the tokenizer: {file} has an id or a length of {short(largest)}, "
            f"expected at most {MAX_TOKENS}"
        )


def read_generation_config(path: str) -> tuple[GenerationConfig | None, str]:
    """Return a checkpoint's generation config in writable form, and a note on what is odd.

    Sampling options without do_sample describe sampling: do_sample becomes true. Other settings
    that transformers would not write are left out.

    Returns:
        None and "" without a file; None and the reason for a file that transformers cannot read.
    """
    if Path(path).is_dir() and not (Path(path) / "generation_config.json").is_file():
        return None, ""
    with without_warnings():
        try:
            config = GenerationConfig.from_pretrained(path, local_files_only=_only_local(path))
            return _writable(config)
        except OSError as err:
            is_here = Path(path).is_dir()
            return None, f"{first_line(err)}: correct it, or remove it" if is_here else ""
        except Exception as err:  # noqa: BLE001 - settings of any kind in a file
            return None, f"{first_line(err)}: correct it, or remove it"


@contextmanager
def without_warnings() -> Iterator[None]:
    """Keep transformers from printing warnings in the body."""
    from transformers.utils import logging as transformers_logging

    level = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(level)


def _writable(config: GenerationConfig) -> tuple[GenerationConfig, str]:
    """Return the settings that transformers writes, and a line about the others."""

    def is_valid(settings: dict[str, object]) -> bool:
        try:
            GenerationConfig(**settings).validate(strict=True)
        except ValueError:
            return False
        return True

    settings: dict[str, object] = {
        name: value for name, value in config.to_diff_dict().items() if name != "compile_config"
    }
    if is_valid(settings):
        return config, ""
    sampled = settings | {"do_sample": True}
    if is_valid(sampled):
        return GenerationConfig(**sampled), (
            "it has sampling options without do_sample: it is written with do_sample = true"
        )
    kept: dict[str, object] = {}
    for name in sorted(settings, key=lambda name: name != "do_sample"):
        if is_valid(kept | {name: settings[name]}):
            kept[name] = settings[name]
    dropped = ", ".join(sorted(settings.keys() - kept.keys()))
    return GenerationConfig(**kept), f"transformers does not write {dropped}: left out"


def has_processor(folder: Path) -> bool:
    """Return whether a folder has a file of a processor."""
    return any((folder / name).is_file() for name in PROCESSOR_FILES)


def load_processor(path: str) -> ProcessorMixin:
    """Return the converter of texts, images and videos into inputs of a vision-language model.

    Raises:
        ModelLoadError: It is missing or unreadable, or lacks packages.
    """
    try:
        processor: ProcessorMixin = _read(AutoProcessor, path, PROCESSOR_FILES, "processor")
    except ImportError as err:
        raise ModelLoadError(
            f"the processor of {path!r} needs more packages: {first_line(err)}; pip install "
            "'lightrft[vision]'"
        ) from err
    return processor


def _read(
    auto_class: type[AutoConfig] | type[AutoTokenizer] | type[AutoProcessor],
    path: str,
    patterns: tuple[str, ...],
    what: str,
) -> object:
    _require(path, patterns, what)
    try:
        made = auto_class.from_pretrained(
            path, trust_remote_code=False, local_files_only=_only_local(path)
        )
        if isinstance(made, PreTrainedTokenizerBase):
            made("a")  # settings of a wrong type show only in use
        return made
    except ImportError:
        raise
    except Exception as err:  # bytes of files may fail anywhere in transformers and tokenizers
        if what == "tokenizer" and not _has_vocabulary(path):
            raise ModelLoadError(
                f"cannot read the tokenizer of {path!r}: there are settings and no vocabulary: "
                "add tokenizer.json, which the model's author gives beside the weights"
            ) from err
        reason = one_line(first_line(err), limit=1000).rstrip(".")
        far = "" if Path(path).is_dir() else "; without a network give a folder, or fill its cache"
        raise ModelLoadError(f"cannot read the {what} of {path!r}: {reason}{far}") from err


def _has_vocabulary(path: str) -> bool:
    """Return whether a folder has more of a tokenizer than settings; True for no folder."""
    patterns = ("tokenizer.json", "tokenizer.model", "vocab*", "*.tiktoken", "*.model")
    folder = Path(path)
    return not folder.is_dir() or any(any(folder.glob(pattern)) for pattern in patterns)


def load_causal_lm(
    path: str, *, dtype: str = "float32", allow_new_weights: Sequence[str] = ()
) -> PreTrainedModel:
    """Return a language model, or vision-language model, with its output projection.

    Args:
        path: Directory of a checkpoint, or a model id of the Hugging Face hub.
        dtype: A key of `DTYPES`.
        allow_new_weights: Patterns of tensor names (`score.*`) that may be missing, of another
            shape, or unexpected. Those that the model needs are initialised anew, with equal
            numbers in every process and every model that is loaded from this path.

    Raises:
        ModelLoadError: Configuration or weights are missing or unreadable, or a tensor is missing,
            unexpected or of another shape; the message names it.
        ValueError: The dtype is unknown.
    """
    return load_model(language_model_class(load_config(path)), path, dtype, allow_new_weights)


def load_trunk(
    path: str, *, dtype: str = "float32", allow_new_weights: Sequence[str] = ()
) -> PreTrainedModel:
    """Return a model up to its last hidden states; arguments and errors as `load_causal_lm`.

    Output layers in the file are not loaded.
    """
    trunk = load_model(AutoModel, path, dtype, allow_new_weights, left_out=other_heads(path))
    if trunk.get_output_embeddings() is not None:
        raise ModelLoadError(
            f"transformers has no {type(trunk).__name__} without its output layer: {path!r} can be "
            "no value or reward model; take another model"
        )
    return trunk


def other_heads(path: str) -> tuple[str, ...]:
    """Return patterns of output layers in a file, which a trunk or classifier leaves there."""
    config = load_config(path)
    with _one_line_errors(path):
        try:
            with torch.device("meta"):
                model = language_model_class(config).from_config(config)
        except ValueError:  # a type without a language model
            return _HEADS
        head = model.get_output_embeddings()
        heads = [name for name, layer in model.named_modules() if layer is head]
        try:
            files = WeightFiles(Path(path), model)
        except FileNotFoundError:  # other files, or none here
            return (*_HEADS, *(f"*{name}.*" for name in heads))
    tensors = (name for name in files.names if name.rpartition(".")[0] in heads)
    return (*_HEADS, *map(files.name_in_file, tensors))


def save_pretrained(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None, directory: str | Path
) -> None:
    """Write config, weights and the tokenizer, if there is one, as a checkpoint directory."""
    with deepspeed_unless_used():
        model.save_pretrained(directory)
    if tokenizer is not None:
        tokenizer.save_pretrained(directory)


def parse_dtype(name: str) -> torch.dtype:
    """Return the torch dtype of a name in `DTYPES`."""
    if name not in DTYPES:
        raise ValueError(f"unknown dtype {name!r}: expected one of {', '.join(DTYPES)}")
    return DTYPES[name]


def load_model(
    auto_class: AutoClass,
    path: str,
    dtype: str,
    allow_new_weights: Sequence[str] | None = (),
    *,
    left_out: Sequence[str] = (),
    num_labels: int | None = None,
) -> PreTrainedModel:
    """Return a model of any kind; see `load_causal_lm`.

    Args:
        auto_class: Class that fixes the kind.
        path, dtype, allow_new_weights: See `load_causal_lm`; None is for models where no weight may
            be new.
        left_out: Patterns of tensors in the file that may stay unused.
        num_labels: Outputs of a classifier; None takes those of the file.
    """
    options: dict[str, object] = {
        "dtype": parse_dtype(dtype),
        "trust_remote_code": False,
    }
    config = load_config(path)
    # Where the file names another one, that may not be installed.
    model_class = auto_class._model_mapping.get(type(config), None)
    is_fused = getattr(model_class, "_supports_sdpa", False)
    options["attn_implementation"] = "sdpa" if is_fused else "eager"
    if num_labels is not None:
        config.num_labels = num_labels
        options["config"] = config
    _require(path, WEIGHT_PATTERNS, "weights")
    is_on_meta = is_building_on_meta()
    if is_on_meta:
        # Weights that are in no file would get no memory.
        allow_new_weights, left_out = None, (*left_out, *(allow_new_weights or ()))
    fits = _Fit(path, allow_new_weights, left_out)
    with _one_line_errors(path):
        if is_on_meta:
            # The strategy reads the weights from the configuration's directory, shard by shard.
            options.pop("config", None)
            model: PreTrainedModel = auto_class.from_config(config, **options).eval()
            fits.check_files(model)
        else:
            model = _with_weights(auto_class, path, options, fits)
        declare_ties(model)
        if model.can_generate():
            model.generation_config = read_generation_config(path)[0] or model.generation_config
    use_short_attention(model)
    if family_of(model.config) is not None:
        from lightrft.engines.hf.tower import use_fast_tower

        use_fast_tower(model)
    return model


@contextmanager
def _one_line_errors(path: str) -> Iterator[None]:
    """Turn any error of the libraries into a ModelLoadError that names the path."""
    try:
        yield
    except ModelLoadError:
        raise
    except UnpicklingError as err:
        raise ModelLoadError(
            f"cannot load the model {path!r}: a .bin file holds pickled objects other than "
            "tensors, which are not run; give the model as safetensors"
        ) from err
    except Exception as err:  # the bytes of a file may fail anywhere in three libraries
        is_cut = type(err).__name__ == "SafetensorError" and "header" in str(err)
        raise ModelLoadError(
            f"cannot load the model {path!r}: {first_line(err)}"
            + ("; a file of weights is cut or damaged: get it again" if is_cut else "")
        ) from err


@contextmanager
def _quietly() -> Iterator[None]:
    """Suppress the table that transformers prints about tensors that do not fit."""
    logger = logging.getLogger("transformers.modeling_utils")
    was_disabled, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = was_disabled


class _Fit:
    """Comparison of the tensors of a checkpoint with those of a model.

    Args:
        path: Path of the checkpoint.
        new: Patterns of names that need not fit; None where no weight may be new.
        left_out: Patterns of names in the file that may stay unused.
    """

    def __init__(self, path: str, new: Sequence[str] | None, left_out: Sequence[str]) -> None:
        self._path, self._new, self._unused = path, new or (), (*(new or ()), *left_out)
        self._remedy = "unused" if new is None else "new or unused"

    def check(
        self,
        model: PreTrainedModel,
        *,
        missing: Iterable[str],
        unexpected: Iterable[str],
        mismatched: Iterable[tuple[str, Sequence[int], Sequence[int]]],
    ) -> None:
        """Raise a ModelLoadError that names the tensors that do not fit, up to a few."""
        # Names in a trunk lack the first part of those in the whole model.
        prefix = f"{model.base_model_prefix}."

        def matches(name: str, patterns: Sequence[str]) -> bool:
            return any(fnmatchcase(n, p) for p in patterns for n in (name, prefix + name))

        kinds = {
            "missing": [name for name in missing if not matches(name, self._new)],
            "unexpected": [name for name in unexpected if not matches(name, self._unused)],
            "of another shape": [
                f"{name} is {list(stored)} instead of {list(wanted)}"
                for name, stored, wanted in mismatched
                if not matches(name, self._new)
            ],
        }
        texts = [
            f"{len(names)} {kind} ({_listed(names)})" for kind, names in kinds.items() if names
        ]
        if texts:
            raise ModelLoadError(
                f"the tensors of {self._path!r} do not fit the model: {', '.join(texts)}; give a "
                f"complete checkpoint, or --allow_new_weights PATTERN for what is {self._remedy} "
                "by intent"
            )

    def check_files(self, model: PreTrainedModel) -> None:
        """Check a model that is built without memory, from the headers of its files."""
        files = WeightFiles(Path(self._path), model)
        for names in tied_parameter_names(model).items():
            if files.names.issuperset(names) and not files.are_equal(*names):
                raise ModelLoadError(
                    f"{self._path!r} says tie_word_embeddings and has two different tensors "
                    f"{' and '.join(names)}: set it to false in its config.json"
                )
        shapes = {name: tuple(value.shape) for name, value in model.state_dict().items()}
        odd = SimpleNamespace(
            missing_keys=shapes.keys() - files.names, unexpected_keys=files.names - shapes.keys()
        )
        model._adjust_missing_and_unexpected_keys(odd)
        self.check(
            model,
            missing=odd.missing_keys,
            unexpected=odd.unexpected_keys,
            mismatched=[
                (name, files.shape(name), shape)
                for name, shape in sorted(shapes.items())
                if name in files.names and files.shape(name) != shape
            ],
        )
        # As `from_pretrained` does: a model is saved under the names that it was read by.
        model._weight_conversions = files.conversions


def declare_ties(model: PreTrainedModel) -> None:
    """Correct the configuration if it claims tied weights but the files have a separate head."""
    head = model.get_output_embeddings()
    if head is None or head.weight is model.get_input_embeddings().weight:
        return
    for config in (model.config, model.config.get_text_config()):
        if getattr(config, "tie_word_embeddings", False):
            config.tie_word_embeddings = False


def _with_weights(
    auto_class: AutoClass, path: str, options: Mapping[str, object], fits: _Fit
) -> PreTrainedModel:
    """Return a model with the weights of its files, which must fit it."""
    model: PreTrainedModel
    with _quietly(), torch.random.fork_rng():
        # New weights are equal in all processes, and in an actor and its reference.
        torch.manual_seed(torch.initial_seed())
        model, report = auto_class.from_pretrained(
            path,
            output_loading_info=True,
            ignore_mismatched_sizes=True,
            local_files_only=_only_local(path),
            **options,
        )
    fits.check(
        model,
        missing=report["missing_keys"],
        unexpected=report["unexpected_keys"],
        mismatched=report["mismatched_keys"],
    )
    return model


def _listed(texts: Sequence[str]) -> str:
    more = len(texts) - _MAX_LISTED_NAMES
    return ", ".join(sorted(texts)[:_MAX_LISTED_NAMES]) + (f" and {more} more" if more > 0 else "")


def _only_local(path: str) -> bool:
    """Return whether to use only local files; asks the hub only about names of the hub."""
    if Path(path).is_dir():
        return True
    from lightrft.utils.hub import is_hub_reachable

    said_once(f"looking for {path} in the hub and its cache", by_workers=True)
    return not is_hub_reachable()


def _require(path: str, patterns: tuple[str, ...], what: str) -> None:
    """Check a local directory; a path that looks like a hub id is left to transformers."""
    directory = Path(path)
    if not directory.is_dir():
        is_hub_id = path.count("/") <= 1 and not path.startswith((".", "/", "~"))
        if is_hub_id and not directory.exists():
            return
        raise ModelLoadError(f"no model directory at {path!r}: expected a Hugging Face checkpoint")
    special = [f for f in directory.iterdir() if f.exists() and not f.is_file() and not f.is_dir()]
    if special:
        raise ModelLoadError(f"{special[0]} is no regular file: expected those of a checkpoint")
    if not any(any(directory.glob(pattern)) for pattern in patterns):
        raise ModelLoadError(
            f"no {what} in {path!r}: expected {' or '.join(patterns)}; is it a complete Hugging "
            "Face checkpoint?"
        )


def is_classifier(config: PretrainedConfig) -> bool:
    """Return whether a checkpoint is a sequence classifier, by the class that wrote it."""
    return any(kind.endswith("ForSequenceClassification") for kind in config.architectures or ())


def is_reward_model(path: str) -> bool:
    """Return whether a checkpoint has a head that gives scores.

    Raises:
        ModelLoadError: Its configuration cannot be read.
    """
    return is_classifier(load_config(path)) or (Path(path) / SCORE_FILE).is_file()
