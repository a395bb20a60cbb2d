"""A word-level tokenizer and a writer of data files."""

import json

import pytest
from tests.datasets.row_files import written

CHAT_TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}> {{ m['content'] }} </s>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.fixture(scope="session")
def tokenizer():
    """Splits at spaces; puts <s> in front where special tokens are asked for; has a template."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    words = ["<unk>", "<s>", "</s>", "one", "two", "three"]
    backend = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 1)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        unk_token="<unk>",
        bos_token="<s>",
        eos_token="</s>",
        chat_template=CHAT_TEMPLATE,
    )


@pytest.fixture
def write(tmp_path):
    """`write(name, rows)`: rows as .jsonl, .json or .parquet, a string as it is."""

    def write_file(name, rows):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(rows, str):
            path.write_text(rows, encoding="utf-8")
        elif name.endswith(".json"):
            path.write_text(json.dumps(rows))
        else:
            written(tmp_path, rows, name)
        return path

    return write_file
