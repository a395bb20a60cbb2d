"""A reward or a tool that fails on one of two ranks while both sample ends both, with the cause."""

import io
import time
from contextlib import redirect_stderr
from dataclasses import replace

import pytest
from tests.machine import seconds
from tests.ranks import run_multiprocess
from tests.runs import rollout_options, train, write_inputs

from lightrft.cli.errors import ExitCode, run_guarded

# Tokens of the samples of each prompt: the first of rank 1 ends long before all others.
LENGTHS = (24, 2, 24, 24)
WAIT_SECONDS = 60.0
REWARD = """
from pathlib import Path


def score(responses):
    if min(map(len, responses)) <= 2:
        Path(__file__).with_suffix(".failed").touch()
        raise ValueError("no score for short ones")
    return [float(len(text)) for text in responses]
"""


HANGS = """
import time
from pathlib import Path


class Hangs:
    def reset(self, *, prompt, **row):
        if prompt[-1]["content"].endswith("ee"):
            Path(__file__).with_suffix(".failed").touch()
            time.sleep(600)

    def get_reward(self):
        return 1.0
"""


def told_by(values):
    """Exit code and what is told of it."""
    with redirect_stderr(io.StringIO()) as told:
        code = run_guarded("lightrft", lambda: train(values) and 0)
    return int(code), told.getvalue()


def train_both(rank, world_size, values, hanging, failed):
    """Of each run what is told and the seconds since its failure; the engine's groups before it."""
    from lightrft.engines.hf.engine import HFEngine
    from lightrft.strategy.distributed.process_groups import start_process_group

    start_process_group(None)  # of both runs
    episodes = (*told_by(hanging), time.time() - failed[1].stat().st_mtime)
    submit, stream, seen = HFEngine.submit, HFEngine.stream_rows, []

    def submit_bounded(self, requests, params):
        is_training = params.n == 2
        bounded = [replace(r, max_tokens=LENGTHS[r.request_id]) for r in requests if is_training]
        submit(self, bounded or requests, params)

    def stream_until_it_failed(self, rows, params):
        """The engine of rank 1 gives its short samples, and no others before the failure."""
        for part in stream(self, rows, params):
            yield part
            if rank == 1 and params.n == 2 and not seen:
                ends = time.monotonic() + seconds(WAIT_SECONDS)
                while not failed[0].exists() and time.monotonic() < ends:
                    time.sleep(0.01)
                seen.append((len(part), failed[0].exists()))

    HFEngine.submit, HFEngine.stream_rows = submit_bounded, stream_until_it_failed
    return episodes, (*told_by(values), time.time() - failed[0].stat().st_mtime), seen


@pytest.mark.full
@pytest.mark.timeout(300)
def test_both_ranks_end_with_the_code_of_rewards(tmp_path, tiny_model):
    rows = [{"prompt": f"say {'aeiou'[i % 5] * (1 + i)}"} for i in range(4)]
    write_inputs(tmp_path, rows, reward=REWARD, files={"hangs.py": HANGS})
    common = {
        "pretrain": tiny_model,
        "n_samples_per_prompt": 2,
        "generate_max_len": 32,
        "max_steps": 1,
    }
    values = rollout_options(tmp_path, **common)
    hanging = rollout_options(
        tmp_path,
        "hanging",
        reward_fn=(),
        environment=f"{tmp_path / 'hangs.py'}:Hangs",
        apply_chat_template=True,
        tool_parser="hermes",
        tool_timeout_seconds=3.0,
        environment_workers=1,
        **common | {"prompt_max_len": 64},
    )
    failed = tuple(tmp_path / name for name in ("reward.failed", "hangs.failed"))
    ranks = run_multiprocess(train_both, 2, timeout_seconds=240, args=(values, hanging, failed))
    causes = (
        "for prompt 1: reset did not return within 3 s",
        "ValueError: no score for short ones",
    )
    for rank, (*runs, seen) in enumerate(ranks):
        for (code, told, took), cause in zip(runs, causes, strict=True):
            assert code == ExitCode.REWARD == 5, told
            assert f"lightrft[{rank}]: " in told
            assert cause in told
            assert took < seconds(WAIT_SECONDS)
        # One group of two was given, and its reward had failed before the next one came.
        assert seen == ([(2, True)] if rank == 1 else [])
    assert "rank 1 could not score its samples: " in ranks[0][1][1]
    assert any(f"rank {r}: the environment failed" in ranks[1 - r][0][1] for r in range(2))
