"""One rank dies or stalls in any phase of the engine's life: the job ends in time and says where.

Each case starts two processes of this file and waits as a launcher does: when one of them has ended
with an error, the rest is ended too. What is measured is the time from the fault to that error.
"""

import os
import signal
import sys
import time

import pytest
from tests.strategy.lone_ranks import note_fault, scaled, seconds_since_fault, texts, two_programs

pytestmark = pytest.mark.shard("strategies")

DEADLINE_SECONDS = 10.0
GRACE_SECONDS = 10.0
START_SECONDS = 180.0


PHASES = {
    "init": "start the inference engine",
    "generate": "generate",
    "gather": "generate",
    "update": "update the engine's weights",
    "sleep": "put the inference engine to sleep",
    # The peer has woken its own engine and waits in the phase that follows.
    "wake": "update the engine's weights",
}
"""Where the fault is planted -> the phase that is reported."""


def fail(kind, folder):
    """Ends this process without a word, or stops it from doing anything."""
    note_fault(folder)
    if kind == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(10 * scaled(START_SECONDS))


def run_rank(place, kind, folder):
    import torch
    from tests.engines.fake_engine import FakeEngine
    from tests.strategy.backend_world import make
    from torch import nn

    from lightrft.engines import factory

    is_faulty = os.environ["RANK"] == "1"

    class FaultyEngine(FakeEngine):
        """Fails once it is armed, in the method that the case names."""

        is_armed = False

        def _maybe(self, method):
            if is_faulty and self.is_armed and method == place:
                fail(kind, folder)

        def alias_weights(self, tensors):
            del tensors  # so that weights are sent
            return False

        def generate(self, requests, sampling_params, **keywords):
            self._maybe("generate")
            return super().generate(requests, sampling_params, **keywords)

        def load_weights(self, pieces):
            self._maybe("update")
            super().load_weights(pieces)

        def sleep(self, level=1):
            self._maybe("sleep")
            super().sleep(level)

        def wake_up(self, tags=None):
            self._maybe("wake")
            super().wake_up(tags)

    def build(config, *, module=None):
        if is_faulty and place == "init":
            fail(kind, folder)
        return FaultyEngine.for_module(config, module)

    factory.ENGINES["fake"] = build
    strategy = make("fsdp2", timeout_minutes=scaled(START_SECONDS) / 60)
    # On a busy machine processes start far apart; from here on they are together.
    strategy.sync_and_clear_cache()
    strategy.config.timeout_minutes = scaled(DEADLINE_SECONDS) / 60
    torch.manual_seed(0)
    actor = nn.Linear(4, 3)
    engine = strategy.setup_inference_engine(None, "fake", actor)
    engine.is_armed = True
    strategy.update_engine_weights(actor)

    class FaultyPrompts(list):
        """Fails when it is counted, which is what the first exchange of a rollout is about."""

        def __len__(self):
            if is_faulty and place == "gather":
                fail(kind, folder)
            return super().__len__()

    strategy.gather_and_generate({"max_tokens": 2}, FaultyPrompts([[1, 2]]))
    print("the fault never happened", flush=True)


def wait_for_error(processes, limit):
    """Exit codes of those that ended with an error of their own."""
    while time.monotonic() < limit:
        codes = {rank: process.poll() for rank, process in enumerate(processes)}
        ended = {rank: code for rank, code in codes.items() if code not in (None, 0)}
        if any(code != -signal.SIGKILL for code in ended.values()):
            return ended
        time.sleep(0.05)
    return {}


@pytest.mark.full
@pytest.mark.parametrize(
    "place, kind",
    [
        pytest.param(
            place,
            kind,
            id=f"{place}-{kind}",
            marks={("gather", "stall"): pytest.mark.full, ("update", "kill"): ()}.get(
                (place, kind), pytest.mark.slow
            ),
        )
        for place in PHASES
        for kind in ("kill", "stall")
    ],
)
def test_a_lost_rank_ends_the_job_with_rank_and_phase(place, kind, tmp_path):
    with two_programs(__file__, tmp_path, place, kind) as processes:
        ended = wait_for_error(processes, time.monotonic() + scaled(START_SECONDS))
        took = seconds_since_fault(tmp_path, time.time())
    said = texts(tmp_path)
    assert ended, f"no process ended\n{said[0][-2000:]}\n{said[1][-2000:]}"
    assert took <= scaled(DEADLINE_SECONDS) + scaled(GRACE_SECONDS), said
    rank = next(rank for rank, code in ended.items() if code != -signal.SIGKILL)
    # A watchdog's own line, or the note on the exception of a rank that lost its peer.
    told = (f"deadline: rank {rank} spent more than", f"on rank {rank} of 2")
    assert any(text in said[rank] for text in told), said[rank][-3000:]
    assert f"in phase {PHASES[place]!r}" in said[rank], said[rank][-3000:]


if __name__ == "__main__":
    run_rank(*sys.argv[1:])
