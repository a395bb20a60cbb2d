import math
import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from lightrft.engines.backend_options import check_options, parse_options
from lightrft.engines.process_state import preserved_process_state
from lightrft.engines.rows import Job, RawCompletion, joined, request_seed
from lightrft.engines.sampling import pack_ids
from lightrft.engines.types import KEPT_IDS, ROUTES, EngineConfig, SamplingParams
from lightrft.engines.vllm.backend import choose_executor, prepare_environment
from lightrft.engines.vllm.engine import raw_completions_of
from lightrft.engines.vllm.layout import check_buffers
from lightrft.engines.vllm.options import RESERVED, load_format
from lightrft.strategy.config import StrategyConfig
from lightrft.strategy.engine.generation import engine_config

VLLM = {"reserved": RESERVED, "engine_name": "vllm"}
KNOWN = ("block_size", "enforce_eager", "max_num_seqs", "model", "seed")
HINTS = {
    "block_size": int | None,
    "enforce_eager": bool,
    "swap_space": float,
    "load_format": str,
    "limit_mm_per_prompt": dict[str, int],
}


def test_unknown_and_reserved_options_are_listed_together_with_what_to_do():
    check_options({"block_size": 32, "enforce_eager": True}, KNOWN, **VLLM)
    with pytest.raises(ValueError) as caught:
        given = {"blok_size": 1, "seed": 3, "zzz": 1, "logprobs_mode": "raw"}
        check_options(given, KNOWN, **VLLM)
    message = str(caught.value)
    assert "blok_size (did you mean block_size?)" in message
    assert "seed (set by seed)" in message
    assert "zzz (no option has a similar name)" in message
    assert "logprobs_mode (set by the trainer" in message


def test_strings_of_a_command_line_become_values_of_the_declared_type():
    given = {
        "block_size": "32",
        "enforce_eager": "False",
        "swap_space": "1.5",
        "load_format": "dummy",
        "limit_mm_per_prompt": '{"image": 2}',
    }
    assert parse_options(given, HINTS) == {
        "block_size": 32,
        "enforce_eager": False,
        "swap_space": 1.5,
        "load_format": "dummy",
        "limit_mm_per_prompt": {"image": 2},
    }
    assert parse_options({"block_size": "none"}, HINTS) == {"block_size": None}
    assert parse_options({"block_size": 16}, HINTS) == {"block_size": 16}


def test_a_string_that_spells_no_value_is_refused():
    with pytest.raises(ValueError, match="block_size: got 'many', expected a value of type"):
        parse_options({"block_size": "many"}, HINTS)
    with pytest.raises(ValueError, match="enforce_eager: got 'maybe'"):
        parse_options({"enforce_eager": "maybe"}, HINTS)
    with pytest.raises(ValueError, match="not valid JSON"):
        parse_options({"limit_mm_per_prompt": "{image"}, HINTS)


@pytest.mark.parametrize(
    "config, expected",
    [
        (EngineConfig("vllm", "", awaits_weights=False), "dummy"),
        (EngineConfig("vllm", "model", awaits_weights=False), "auto"),
        (EngineConfig("vllm", "model", awaits_weights=True), "dummy"),
        (
            EngineConfig("vllm", "model", awaits_weights=True, options={"load_format": "auto"}),
            "auto",
        ),
        # Drafts and scales are in the checkpoint alone.
        (
            EngineConfig(
                "vllm", "model", awaits_weights=True, options={"speculative_config": "{}"}
            ),
            "auto",
        ),
    ],
)
def test_b10_weights_that_the_first_sync_brings_are_not_read(config, expected):
    assert load_format(config, reads_media=False) == expected


def test_a_model_of_media_is_read_from_its_checkpoint_for_it_holds_more_than_weights():
    config = EngineConfig("vllm", "model", awaits_weights=True)
    assert load_format(config, reads_media=True) == "auto"


def test_b10_a_model_with_saved_buffers_is_read_from_its_checkpoint():
    plain, saved, lost = (torch.nn.Linear(2, 2) for _ in range(3))
    saved.register_buffer("correction", torch.zeros(2))
    lost.register_buffer("frequencies", torch.zeros(2), persistent=False)
    config = StrategyConfig(pretrain="model")
    for module, awaits in ((plain, True), (lost, True), (saved, False), (None, False)):
        found = engine_config(config, "vllm", has_gpu=False, module=module)
        assert found.awaits_weights is awaits
    check_buffers(lost)
    with pytest.raises(ValueError, match=r"buffer 0\.correction, .*load_format=auto"):
        check_buffers(torch.nn.Sequential(saved))


def test_an_engine_in_another_process_is_refused(monkeypatch):
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
    with pytest.raises(ValueError, match="expected 0; unset the variable"):
        prepare_environment()


def test_what_the_user_has_set_in_the_environment_stays(monkeypatch):
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    for name in ("VLLM_CPU_OMP_THREADS_BIND", "TORCH_COMPILE_DISABLE", "VLLM_LOGGING_LEVEL"):
        monkeypatch.setenv(name, "info")
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "3")
    monkeypatch.setenv("VLLM_NO_USAGE_STATS", "0")
    prepare_environment()
    import os

    assert os.environ["VLLM_CPU_KVCACHE_SPACE"] == "3"
    assert os.environ["VLLM_CPU_OMP_THREADS_BIND"] == "info"


def test_several_ranks_need_a_process_group():
    assert choose_executor(1) == "uni"
    with pytest.raises(RuntimeError, match=r"torch\.distributed is not initialised"):
        choose_executor(2)


def test_seeds_of_neighbours_are_unrelated_and_leave_room_for_sample_indices():
    seeds = {request_seed(s, r, p) for s in range(4) for r in range(50) for p in range(4)}
    assert len(seeds) == 800
    assert all(0 <= seed < 2**62 for seed in seeds)
    assert min(abs(a - b) for a in list(seeds)[:50] for b in seeds if a != b) > 1000
    assert request_seed(1, 2, 0) == request_seed(1, 2, 0)


class Letters:
    """Token 0 is "a", 1 is "b", ..."""

    def decode(self, token_ids):
        return "".join(chr(ord("a") + i) for i in token_ids)


@pytest.mark.parametrize(
    "second, expected_length, reason",
    [
        ((1, 3, 4), 4, "stop"),  # "aab" + "b..": the stop string "bb" begins in the first part
        ((3, 4, 5), 6, "length"),
        ((3, 1, 1), 6, "stop"),
    ],
)
def test_a_stop_string_may_begin_before_the_minimum(second, expected_length, reason):
    params = SamplingParams(max_tokens=6, min_tokens=4, stop=("bb",))
    first = RawCompletion((0, 0, 1), (-1.0, -2.0, -3.0), "length")
    ending = "stop" if second[-1] == 1 else "length"
    whole = joined(first, RawCompletion(second, (-4.0, -5.0, -6.0), ending), params, Letters())
    assert len(whole.token_ids) == len(whole.logprobs) == expected_length
    assert whole.finish_reason == reason


def numpy_state():
    return np.random.get_state()[1].tolist()  # noqa: NPY002


def test_the_state_of_the_process_is_restored_even_after_a_failure():
    set_num_threads, num_threads = torch.set_num_threads, torch.get_num_threads()
    expected = torch.random.get_rng_state(), random.getstate(), numpy_state()
    with pytest.raises(KeyError), preserved_process_state():
        torch.manual_seed(99)
        random.seed(99)
        np.random.seed(99)  # noqa: NPY002
        torch.set_default_dtype(torch.float64)
        torch.set_num_threads(num_threads + 1)
        torch.set_num_threads = print
        raise KeyError
    assert torch.set_num_threads is set_num_threads
    assert torch.get_num_threads() == num_threads
    assert torch.get_default_dtype() == torch.float32
    assert torch.equal(torch.random.get_rng_state(), expected[0])
    assert random.getstate() == expected[1]
    assert numpy_state() == expected[2]


def test_greedy_samples_are_drawn_once_and_repeated():
    class Entry:
        logprob = -0.25

    class Output:
        index, token_ids, logprobs, finish_reason = 0, [7], [{7: Entry}], "length"

    raws = raw_completions_of(Job((1,), 1, 0, num_samples=3), [Output])
    assert raws == [RawCompletion((7,), (-0.25,), "length")] * 3


def output_of(logprobs, **more):
    """Logprobs of two tokens in the form of vLLM."""
    named = {"index": 0, "token_ids": [7, 3], "finish_reason": "stop"}
    return SimpleNamespace(logprobs=logprobs, **named, **more)


class Flat:
    token_ids, logprobs = [7, 3], [-0.25, -1.5]
    start_indices, end_indices = [0, 1], [1, 2]


def test_flat_logprobs_are_those_of_the_sampled_tokens_or_refused(monkeypatch):
    job = Job((1,), 1, 0, num_samples=1)
    assert raw_completions_of(job, [output_of(Flat)]) == [
        RawCompletion((7, 3), (-0.25, -1.5), "stop")
    ]
    monkeypatch.setattr(Flat, "token_ids", [7, 4])
    with pytest.raises(RuntimeError, match="logprobs of 2 tokens that are not the 2 sampled ones"):
        raw_completions_of(job, [output_of(Flat)])


def test_experts_of_all_positions_become_those_before_each_token():
    output = output_of(Flat, routed_experts=np.arange(12, dtype=np.uint16).reshape(3, 2, 2))
    (raw,) = raw_completions_of(Job((1, 2), 1, 0), [output])
    values = [np.frombuffer(bytes.fromhex(each), np.uint16).tolist() for each in raw.facts[ROUTES]]
    assert values == [list(range(8)), [8, 9, 10, 11]]
    with pytest.raises(RuntimeError, match="experts of 3 positions, expected 4"):
        raw_completions_of(Job((1, 2, 3), 1, 0), [output])


def test_likely_tokens_beside_the_sampled_ones_show_which_were_kept():
    """The second set may go on behind its last token; the first one ends before it."""

    class Flat:
        token_ids = [7, 9, 7, 4, 3, 8, 3, 2]
        logprobs = [-1.0, -0.5, -1.0, -math.inf, -1.5, -0.6, -1.5, -2.0]
        start_indices, end_indices = [0, 4], [4, 8]

    output = output_of(Flat)
    (raw,) = raw_completions_of(Job((1,), 1, 0), [output])
    assert raw.logprobs == (-1.0, -1.5)
    assert raw.facts == {KEPT_IDS: (pack_ids([7, 9]), "")}
    output.sampling_mask = SimpleNamespace(token_ids=[[9, 7], [3]])
    (raw,) = raw_completions_of(Job((1,), 1, 0), [output])
    assert raw.facts == {KEPT_IDS: (pack_ids([7, 9]), pack_ids([3]))}
