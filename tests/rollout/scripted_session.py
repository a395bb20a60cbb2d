"""A session of one rank whose engine says what a script says."""

from tests.engines.fake_engine import FakeEngine

from lightrft.engines.types import EngineConfig


class Session:
    """An engine without a strategy.

    Args:
        context: Ranks and collectives.
        script: Function of `FakeEngine` for what it says; the end of a response is said, too.
        eos_id: Token that ends a response.
    """

    shares_engine, last_weight_sync = False, None

    def __init__(self, context, script, eos_id):
        self.context, self.seeds = context, []
        self.engine = FakeEngine(EngineConfig("fake", ""), script=script)
        self.engine.eos_ids = (eos_id,)
        self.engine.set_weights_version(0)

    def gather_and_generate(self, batch, params, on_finished, *, sleep_engine):
        self.seeds.append(params.seed)
        told = on_finished if len(self.seeds) % 2 else None  # not every engine tells
        asked = batch.token_ids
        return self.engine.generate(asked, params, on_finished=told) if asked else []
