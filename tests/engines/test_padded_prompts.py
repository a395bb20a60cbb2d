"""The embedded engine decodes prompts of unequal lengths together, whatever a model caches."""

import logging

import pytest
import torch
from tests.engines.altered_engines import embedded, no_convolution
from tests.engines.plain_forward import largest_error, prompts
from tests.models.all_types import types
from transformers.cache_utils import CacheLayerMixin

from lightrft.engines import SamplingParams
from lightrft.engines.hf import engine as hf_engine
from lightrft.engines.hf.forward import CacheRefusedError, MissingCacheError, WholeBatchForward
from lightrft.engines.hf.padded import PaddedForward
from lightrft.engines.hf.trial import text_forward

REQUESTS = prompts(9, 3, 6, 3)
PARAMS = SamplingParams(max_tokens=12, n=2)


def of_type(model_type):
    return types.tiny_model(model_type).eval()


@pytest.fixture
def batches(monkeypatch):
    """Numbers of rows of the batches that are decoded, with padding and without."""
    sizes = []

    class Watched(PaddedForward):
        def __init__(self, model, traits, batch, prompt_of_row):
            sizes.append(len(prompt_of_row))
            super().__init__(model, traits, batch, prompt_of_row)

        def keep(self, rows):
            sizes.append(len(rows))
            super().keep(rows)

    def watched(*given):
        return Watched if text_forward(*given) is PaddedForward else None

    monkeypatch.setattr(hf_engine, "text_forward", watched)
    return sizes


@pytest.mark.parametrize(
    # Recurrence, state-space model, convolution, windows, two in one layer, sinks, places from 0 at
    # each step if they are not given, windows in attention of the class's own, places in the cache.
    "model_type",
    [
        "qwen3_5_text",
        "nemotron_h",
        "lfm2",
        "gemma3_text",
        "falcon_h1",
        "gpt_oss",
        "bamba",
        "gpt_neo",
        "qwen4_exp_text",
    ],
)
def test_rows_of_all_lengths_are_decoded_at_once(model_type, batches):
    model = of_type(model_type)
    completions = embedded(model).generate(REQUESTS, PARAMS)
    assert largest_error(model, completions) < 2e-4
    # All rows share one batch, and prompts are copied to their rows.
    assert batches[:2] == [8, 8]
    for request in REQUESTS:
        alone = embedded(model).generate([request], PARAMS)
        ids = [c.output_token_ids for c in completions if c.request_id == request.request_id]
        assert [c.output_token_ids for c in alone] == ids


def exchanged_rows(monkeypatch):
    """Keys of another row are read after rows have changed their places."""
    monkeypatch.setattr(CacheLayerMixin, "reorder_cache", lambda self, rows: None)


def test_a_cache_that_loses_its_convolution_is_refused_with_the_number(monkeypatch):
    no_convolution(monkeypatch)
    words = r"cache of Lfm2ForCausalLM gives other .* differ by 0\.\d+ of .* is rounding"
    with pytest.raises(CacheRefusedError, match=words):
        embedded(of_type("lfm2")).generate(REQUESTS, PARAMS)


@pytest.mark.parametrize("model_type", ["recurrent_gemma", "openai-gpt", "xlstm", "mixtral"])
def test_a_model_without_a_cache_computes_whole_rows(model_type, monkeypatch, caplog):
    model = of_type(model_type)
    params = SamplingParams(max_tokens=6, n=2, records_routes=True)
    traits, expected = hf_engine.ModelTraits(model), []
    if model_type == "mixtral":
        expected = embedded(model).generate(REQUESTS, params)
        traits.cache_argument, traits.can_drop_rows = "", False
        monkeypatch.setattr(hf_engine, "ModelTraits", lambda *_: traits)
    with caplog.at_level(logging.WARNING, logger="lightrft.engines"):
        completions = embedded(model).generate(REQUESTS, params)
    reason = "fails with a cache (matC_old has" if model_type == "xlstm" else "keeps no cache"
    assert reason in caplog.text
    assert "each token takes a pass over its whole row" in caplog.text
    assert largest_error(model, completions) < 2e-4
    if expected:
        assert completions[0].facts
        assert [c.facts for c in completions] == [c.facts for c in expected]
    if model_type != "xlstm":
        with pytest.raises(MissingCacheError, match="samples from it on texts alone"):
            WholeBatchForward(model, traits, [[5, 6]]).start()


def test_a_model_without_a_cache_in_which_padding_matters_is_refused():
    words = "XLMWithLMHeadModel computes other numbers for prompts with padding .* and keeps no"
    with pytest.raises(CacheRefusedError, match=words):
        embedded(of_type("xlm")).generate(REQUESTS, PARAMS)


def test_rows_that_padding_or_dropping_would_change_are_decoded_by_length(
    monkeypatch, caplog, batches
):
    exchanged_rows(monkeypatch)
    model = of_type("gemma3_text")
    with caplog.at_level(logging.WARNING, logger="lightrft.engines"):
        completions = embedded(model).generate(REQUESTS, PARAMS)
    assert "Gemma3ForCausalLM computes other numbers for prompts with padding" in caplog.text
    assert largest_error(model, completions) < 2e-4
    assert batches == []


def test_weights_that_are_no_numbers_are_left_to_what_samples():
    model = of_type("lfm2")
    with torch.no_grad():
        model.get_output_embeddings().weight.fill_(torch.nan)
    with pytest.raises(FloatingPointError):
        embedded(model).generate(REQUESTS, PARAMS)
