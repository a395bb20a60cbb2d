import pytest
import torch
from transformers import GenerationConfig, LlamaConfig

from lightrft.engines.hf.decode import stop_token_table
from lightrft.engines.text import StopStringMatcher, end_of_sequence_ids
from lightrft.engines.types import SamplingParams


class ByteDecoder:
    """One token a byte; incomplete characters decode to the replacement character."""

    def decode(self, token_ids):
        return bytes(token_ids).decode(errors="replace")


class WordDecoder:
    words = ("a", "b", "ST", "OP", "STOP", "xSTOPy", "")

    def decode(self, token_ids):
        return "".join(self.words[i] for i in token_ids)


def test_end_of_sequence_ids_unite_both_configs_and_lists():
    config = LlamaConfig(eos_token_id=7)
    assert end_of_sequence_ids(config, GenerationConfig(eos_token_id=[9, 7, 3])) == (3, 7, 9)
    assert end_of_sequence_ids(config, None) == (7,)
    assert end_of_sequence_ids(LlamaConfig(eos_token_id=None), GenerationConfig()) == ()


def test_the_stop_table_ignores_ids_that_cannot_be_sampled():
    table = stop_token_table((2, 40, -1), 4, device=torch.device("cpu"))
    assert table.tolist() == [False, False, True, False]


def test_a_stop_string_may_straddle_tokens_or_lie_within_one():
    def hits(*token_ids):
        return [*map(StopStringMatcher(["STOP"], WordDecoder()).push, token_ids)]

    assert hits(0, 2, 3) == [False, False, True]
    assert hits(2, 6, 3) == [False, False, True]
    assert hits(2, 1, 3, 4) == [False, False, False, True]
    assert hits(5) == [True]


def test_a_match_is_reported_once():
    matcher = StopStringMatcher(["STOP", "b"], WordDecoder())
    assert [matcher.push(t) for t in (4, 0, 0, 1)] == [True, False, False, True]


def test_a_character_counts_once_all_its_bytes_are_there():
    text = "naïve → stop…"
    matcher = StopStringMatcher(["→ s", "…"], ByteDecoder())
    hits = [i for i, byte in enumerate(text.encode()) if matcher.push(byte)]
    assert [text.encode()[: i + 1].decode() for i in hits] == ["naïve → s", "naïve → stop…"]


def test_an_empty_stop_string_is_refused():
    with pytest.raises(ValueError, match=r"stop=.*expected strings that are not empty"):
        SamplingParams(stop=("a", ""))
