"""Hostile values at every door: legal, or refused by the documented error. Derandomised.

`LIGHTRFT_FUZZ_EXAMPLES` is the number of examples of each property; the shard `fuzz` of `.ci/slow`
sets it high.
"""

import contextlib
import io
import json
import os
from pathlib import Path
from typing import get_origin

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from lightrft.cli.options import available_options, merge_options
from lightrft.config import ConfigError, TrainConfig
from lightrft.config.options import alternatives, options_of, type_hints
from lightrft.datasets.files import Row, read_rows, scan_rows
from lightrft.datasets.render import tokenise
from lightrft.datasets.types import DataError
from lightrft.reporting.alarms import alarms
from lightrft.rewards.user_task import checked_results
from lightrft.rewards.worker import ReportedError

NUM_EXAMPLES = int(os.environ.get("LIGHTRFT_FUZZ_EXAMPLES", "60"))
settings.register_profile(
    "fuzz",
    max_examples=NUM_EXAMPLES,
    derandomize=True,
    deadline=None,
    database=None,
    suppress_health_check=list(HealthCheck),
)
FUZZ = settings.get_profile("fuzz")
# The long setting takes as many times longer as it has examples.
pytestmark = [pytest.mark.shard("fuzz"), pytest.mark.timeout(300 + NUM_EXAMPLES)]

NUMBERS = st.one_of(
    st.integers(),
    st.floats(),
    st.sampled_from([0, -1, 1, 2**31, 2**63, 10**400, -(10**400)]),
    st.sampled_from([float("nan"), float("inf"), -float("inf"), 1e-320, -0.0, 1e308]),
)
# Surrogates, controls and escapes included.
TEXTS = st.one_of(
    st.text(max_size=20),
    st.text(st.characters(min_codepoint=0xD7FE, max_codepoint=0xE001), max_size=3),
    st.sampled_from(
        [
            "",
            "\0",
            "\x1b[2J",
            "nan",
            "inf",
            "-1",
            "1e999",
            "none",
            "true",
            "9" * 5000,
            "../..",
            "a.py:f",
            ":",
            "{}",
            "{0}",
            "%s",
            "\u2028",
            "'; --",
        ]
    ),
)
JSON = st.recursive(
    st.one_of(st.none(), st.booleans(), NUMBERS, TEXTS),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(TEXTS, inner, max_size=3)),
    max_leaves=6,
)
OPTIONS = sorted(available_options())
HINTS = type_hints(TrainConfig)


@pytest.mark.full
@FUZZ
@given(st.dictionaries(st.sampled_from(OPTIONS), JSON, min_size=1, max_size=4))
def test_any_toml_values_are_refused_by_name_or_can_be_saved_and_read_again(tmp_path, values):
    try:
        config = TrainConfig.from_args(values)
    except ConfigError:
        return
    path = tmp_path / "c.toml"
    config.save(path)
    assert TrainConfig.load(path).problems() == []
    shown = [name for name, (_, info) in options_of(TrainConfig).items() if not info.secret]
    kept = TrainConfig.load(path)
    assert {n: kept.__dict__[n] for n in shown if config.__dict__[n] is not None} == {
        n: _masked(config.__dict__[n]) for n in shown if config.__dict__[n] is not None
    }


def _masked(value):
    from lightrft.config.options import masked

    return masked(value)


@FUZZ
@given(st.sampled_from(OPTIONS), TEXTS)
def test_every_option_takes_or_refuses_any_text(name, text):
    is_list = any(get_origin(kind) is tuple for kind in alternatives(HINTS[name]))
    for value in (text, [text]) if is_list else (text,):
        config, problems = merge_options([], {name: value})
        assert isinstance(problems, list)
        assert problems or config.problems() == []


@pytest.mark.full
def test_every_option_refuses_what_no_number_may_be():
    """All float options, all hostile numbers: not left to chance."""
    refused = 0
    for name, (_, info) in options_of(TrainConfig).items():
        if float not in alternatives(HINTS[name]):
            continue
        for text in ("nan", "inf", "-inf", "1e999"):
            _, problems = merge_options([], {name: text})
            allowed = text != "nan" and not info.finite and not text.startswith("-")
            assert bool(problems) != allowed, (name, text)
            refused += bool(problems)
    assert refused > 100


@pytest.fixture(scope="module")
def tokenizer():
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.WordLevel({"<unk>": 0, "a": 1}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>")


ROWS = st.one_of(
    st.binary(max_size=60),
    st.builds(lambda value: json.dumps(value).encode(), JSON),
    st.builds(lambda value: json.dumps({"input": value, "label": value}).encode(), JSON),
    st.sampled_from(
        [
            b"[" * 10**5,
            b'{"input": ' + b"9" * 5000 + b"}",
            b'{"a":' * 200 + b"}" * 200,
            b'{"input": "\\ud800"}',
            b"\xef\xbb\xbf{}",
            b"\x00",
            b"7",
            b"NaN",
        ]
    ),
)


@FUZZ
@given(st.lists(ROWS, max_size=3), st.sampled_from(["d.jsonl", "d.json", "d.parquet"]))
def test_any_file_of_rows_is_read_and_tokenised_or_refused(tmp_path, tokenizer, rows, name):
    path = tmp_path / name
    path.write_bytes(b"\n".join(rows) if name != "d.json" else b"[" + b",".join(rows) + b"]")
    try:
        for row in read_rows(path):
            tokenise([row], tokenizer, TrainConfig())
        list(scan_rows(path))
    except DataError as err:
        message = str(err)
    else:
        message = name
    assert name in message


@FUZZ
@given(TEXTS, JSON)
def test_any_template_is_rendered_or_refused(tmp_path, tokenizer, template, content):
    template = template + "{{ messages[0]['content'] + 1 }}"
    config = TrainConfig(apply_chat_template=True)
    tokenizer.chat_template = template
    messages = [{"role": "user", "content": content}]
    try:
        tokenise([Row({"input": messages}, "d.jsonl:1")], tokenizer, config)
    except DataError as err:
        message = str(err)
    else:
        message = "d.jsonl:1"
    tokenizer.chat_template = None
    assert "d.jsonl:1" in message


@FUZZ
@given(st.dictionaries(TEXTS, st.floats(), max_size=5))
def test_any_metrics_have_alarms_and_nan_always_has(metrics):
    found = alarms(TrainConfig(), metrics)
    is_odd = any(value != value or abs(value) == float("inf") for value in metrics.values())
    assert not is_odd or found


@FUZZ
@given(JSON, st.integers(0, 4))
def test_any_answer_of_a_reward_is_numbers_or_refused(answer, count):
    try:
        results = checked_results(answer, count)
    except ReportedError:
        return
    assert len(results) == count
    for reward, components in results:
        for number in [*components.values(), *([] if reward is None else [reward])]:
            assert abs(number) < float("inf")


@pytest.mark.slow
@pytest.mark.parametrize("part", range(5))
def test_hostile_command_lines_end_with_a_documented_code(tmp_path, monkeypatch, part):
    """Whole command lines in process, with a run that would start refused."""
    from lightrft.cli.main import main

    def refuse(config, **_):
        raise SystemExit(0)

    monkeypatch.setattr("lightrft.run.assembly.run_training", refuse)
    monkeypatch.chdir(tmp_path)
    Path("m").mkdir()
    for name in ("config.json", "tokenizer.json", "model.safetensors"):
        Path("m", name).write_text("{}")
    Path("d.jsonl").write_text('{"input": "a", "label": "1"}\n')
    before = dict(os.environ)

    @settings(FUZZ, max_examples=2 * NUM_EXAMPLES)
    @given(st.sampled_from(OPTIONS[part::5]), TEXTS)
    def check(name, text):
        os.environ.clear()
        os.environ.update(before)
        stream = io.StringIO()
        with contextlib.redirect_stderr(stream), contextlib.redirect_stdout(stream):
            code = main(
                [
                    "train",
                    "--fsdp",
                    "--pretrain=m",
                    "--prompt_data=d.jsonl",
                    "--reward_fn=gsm8k",
                    f"--{name}={text}",
                ]
            )
        assert code in (0, 2, 3, 4, 5), stream.getvalue()
        assert code == 5 or "Traceback" not in stream.getvalue()

    check()
