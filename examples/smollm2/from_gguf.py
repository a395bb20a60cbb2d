"""The model of a GGUF file (llama.cpp's format) as a checkpoint of transformers.

    python examples/smollm2/from_gguf.py DIRECTORY FILE.gguf

writes weights (dequantised to float32), tokenizer, chat template and generation settings; it needs
the package gguf.
"""

import copy
import io
import shutil
import sys
from collections.abc import Sequence
from contextlib import redirect_stderr
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from numpy.typing import NDArray
from tokenizers import pre_tokenizers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from lightrft.cli.errors import ExitCode, PreflightError, run_guarded
from lightrft.cli.launch import hide_progress_bars
from lightrft.cli.options import Parser
from lightrft.models.loading import ModelLoadError, save_pretrained
from lightrft.tools.init_model_command import require_empty

if TYPE_CHECKING:
    from gguf import GGUFReader

MAGIC = b"GGUF"
# The texts on which the written tokenizer must agree with the one that was read.
SAMPLES = ("What is 23+45?\n\n  7 8", " Hello é ü\tdon't  stop 12345\n", "\\boxed{7} 日本語 🙂")
# Vocabularies whose merges were learned with every digit by itself (`tokenizer.ggml.pre`, after
# llama.cpp's llm_tokenizer_bpe); transformers splits them as GPT-2 does, by which a space before
# a number belongs to it.
_SINGLE_DIGITS = ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone")
# Architectures whose size of a head transformers does not read from the file.
_DEFAULT_HEAD_SIZE = ("qwen3",)
# Which tokens end a response: the end of the text, of a turn, of a message.
_ENDS = ("eos_token_id", "eot_token_id", "eom_token_id")
_MAX_LISTED_NAMES = 3
# Of a header; a vocabulary of 256,000 tokens with its merges has a million.
MAX_VALUES = 2**22
# What readers of a file that is cut off or damaged raise.
_UNREADABLE = (
    OSError,
    ValueError,
    KeyError,
    IndexError,
    TypeError,
    AttributeError,
    OverflowError,
    RuntimeError,
    MemoryError,
    ArithmeticError,
)


def write_model_from_gguf(file: Path, directory: Path) -> PretrainedConfig:
    """Writes weights (dequantised, float32), tokenizer and generation settings of a GGUF file.

    Args:
        file: Of any architecture that transformers reads from GGUF.
        directory: Created if it does not exist.

    Returns:
        The configuration of the model.

    Raises:
        ModelLoadError: The file is missing, cut off, damaged or not of this format, or transformers
            does not know its architecture, tokenizer or tensors.
    """
    fields = read_fields(file)
    where = {"gguf_file": file.name, "local_files_only": True}
    try:
        config: PretrainedConfig = AutoConfig.from_pretrained(file.parent, **where)
        _complete_config(config, fields)
        tokenizer = AutoTokenizer.from_pretrained(file.parent, **where)
        with redirect_stderr(io.StringIO()):  # a bar for every tensor
            model, report = AutoModelForCausalLM.from_pretrained(
                file.parent, config=config, dtype=torch.float32, output_loading_info=True, **where
            )
    except _UNREADABLE as err:
        raise ModelLoadError(f"cannot read the model in {file}: {_first_line(err)}") from err
    for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        if report[kind]:
            names = ", ".join(sorted(map(str, report[kind]))[:_MAX_LISTED_NAMES])
            raise ModelLoadError(
                f"{file} does not fit the model: {len(report[kind])} {kind.replace('_keys', '')} "
                f"tensors ({names}); expected a complete {config.model_type} model"
            )
    complete_tokenizer(tokenizer, fields, config)
    try:
        plain = without_quantization(model)
    except RuntimeError as err:  # transformers does not compare the shapes
        raise ModelLoadError(
            f"{file} does not fit the model: {' '.join(str(err).split()[:40])}"
        ) from err
    complete_generation(plain, tokenizer, fields)
    unchecked = directory.with_name(f"{directory.name}.unchecked")
    try:
        save_pretrained(plain, tokenizer, unchecked)
        _check_tokenizer(tokenizer, unchecked)
        unchecked.replace(directory)
    finally:
        shutil.rmtree(unchecked, ignore_errors=True)
    return config


def read_fields(file: Path) -> dict[str, object]:
    """The metadata of a GGUF file, of which every tensor has been found inside the file.

    Raises:
        ModelLoadError: It is missing, cut off, damaged or not of this format.
    """
    if not file.is_file():
        raise ModelLoadError(f"no file {file}: expected a model in GGUF format")
    with file.open("rb") as stream:
        start = stream.read(len(MAGIC))
    if start != MAGIC:
        raise ModelLoadError(
            f"{file} is not a GGUF file: it starts with {start!r}, expected {MAGIC!r}"
        )
    try:
        # The vocabulary is read by the tokenizer.
        return {
            name: field.contents()
            for name, field in _bounded_reader(file).fields.items()
            if len(field.data) == 1
        }
    except _UNREADABLE as err:
        raise ModelLoadError(
            f"{file} is cut off or damaged ({_first_line(err)}): its header tells of more than its "
            f"{file.stat().st_size} bytes hold; copy or download it again"
        ) from err


def _bounded_reader(file: Path) -> "GGUFReader":
    """A reader that takes no value from beyond the file, and no more of them than any model has."""
    import numpy as np
    from gguf import GGUFReader

    class Bounded(GGUFReader):
        """A reader whose counts are compared with the file."""

        num_values = 0

        def _get(
            self, offset: int, dtype: np.dtype[np.generic], count: int = 1, **options: str
        ) -> NDArray[np.generic]:
            self.num_values += 1
            if int(offset) + np.dtype(dtype).itemsize * int(count) > self.data.size:
                raise ValueError(f"a value of {int(count)} items at byte {int(offset)}")
            if self.num_values > MAX_VALUES:
                raise ValueError(f"more than {MAX_VALUES} values")
            return super()._get(offset, dtype, count, **options)

    return Bounded(file)


def complete_tokenizer(
    tokenizer: PreTrainedTokenizerBase, fields: dict[str, object], config: PretrainedConfig
) -> None:
    """Sets what transformers leaves aside: single digits, a leading mark, the longest input."""
    if fields.get("tokenizer.ggml.pre") in _SINGLE_DIGITS:
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(False)]
        )
    adds_bos = fields.get("tokenizer.ggml.add_bos_token")
    if adds_bos is not None and tokenizer.bos_token is not None:
        tokenizer.add_bos_token = bool(adds_bos)
    length = config.to_dict().get("max_position_embeddings")
    if length is not None:
        tokenizer.model_max_length = length


def _complete_config(config: PretrainedConfig, fields: dict[str, object]) -> None:
    """Sets the size of a head where transformers leaves it at its default."""
    architecture = fields["general.architecture"]
    head_size = fields.get(f"{architecture}.attention.key_length")
    if head_size is not None and architecture in _DEFAULT_HEAD_SIZE:
        config.head_dim = head_size


def without_quantization(model: PreTrainedModel) -> PreTrainedModel:
    """The same dequantised tensors in a model that transformers agrees to save."""
    config = copy.deepcopy(model.config)
    if "quantization_config" in config.to_dict():
        del config.quantization_config
    config.name_or_path = ""
    with torch.device("meta"):
        plain: PreTrainedModel = type(model)(config)
    plain.load_state_dict(model.state_dict(), assign=True)
    plain.tie_weights()
    plain.generation_config = copy.deepcopy(model.generation_config)
    return plain


def complete_generation(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, fields: dict[str, object]
) -> None:
    """Sets the tokens that end a response and the one that fills up rows."""
    ends = [fields[name] for key in _ENDS if (name := f"tokenizer.ggml.{key}") in fields]
    ends = list(dict.fromkeys(ends))
    settings = model.generation_config
    if ends:
        settings.eos_token_id = ends if len(ends) > 1 else ends[0]
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    settings.pad_token_id = model.config.pad_token_id = tokenizer.pad_token_id


def _check_tokenizer(tokenizer: PreTrainedTokenizerBase, directory: Path) -> None:
    # AutoTokenizer takes the class of the architecture for some, which may split otherwise.
    loaded = AutoTokenizer.from_pretrained(directory)
    for sample in (*SAMPLES, *map(str, tokenizer.all_special_tokens)):
        expected, found = tokenizer(sample)["input_ids"], loaded(sample)["input_ids"]
        if expected != found:
            raise ModelLoadError(
                f"the tokenizer, written and loaded by AutoTokenizer, reads {sample!r} as {found}, "
                f"expected {expected} as from the GGUF file; check the version of transformers"
            )
    if loaded.chat_template != tokenizer.chat_template:
        raise ModelLoadError(
            "the chat template, written and loaded by AutoTokenizer, is not that of the GGUF file; "
            "check the version of transformers"
        )


def _first_line(err: BaseException) -> str:
    lines = str(err).strip().splitlines()
    return f"{type(err).__name__}: {lines[0]}" if lines else type(err).__name__


def run(argv: Sequence[str]) -> int:
    """Write the model of a GGUF file."""
    parser = Parser("from_gguf", "Write the model of a GGUF file as a Hugging Face checkpoint.")
    parser.add_argument("directory", metavar="DIR", type=Path, help="New or empty.")
    parser.add_argument("file", metavar="FILE", type=Path)
    given = parser.parse_args(argv)
    if find_spec("gguf") is None:
        raise PreflightError(
            "the package gguf is not installed: pip install 'lightrft-trainer[smollm2]'"
        )
    require_empty(given.directory)
    hide_progress_bars()
    config = write_model_from_gguf(given.file, given.directory)
    print(f"wrote the {config.model_type} model of {given.file}, dequantised to float32")
    return ExitCode.OK


def main(argv: Sequence[str]) -> int:
    """The exit code of `run`."""
    return run_guarded("from_gguf", lambda: run(argv))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
