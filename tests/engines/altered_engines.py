"""Embedded engines with one changed part each, and how a strategy gets an engine, for tests."""

import dataclasses

from transformers.cache_utils import LinearAttentionLayer

from lightrft.engines import EngineConfig
from lightrft.engines.hf.engine import HFEngine


class CopyingEngine(HFEngine):
    """Has storage of its own, as every engine has whose weights are not the trainer's."""

    def alias_weights(self, tensors):
        del tensors
        return False


class EditingEngine(CopyingEngine):
    """Base of engines whose fault is in what happens to the pieces of a sync, see `edit`."""

    def load_weights(self, pieces):
        super().load_weights([edited for piece in pieces for edited in self.edit(piece)])


class ShiftedEngine(HFEngine):
    """Fault: what it samples comes with the logprobs of other weights."""

    def shift(self, completion, place):
        del completion, place
        return 0.5

    def poll(self):
        return [
            dataclasses.replace(
                found,
                output_logprobs=tuple(
                    logprob - self.shift(found, place)
                    for place, logprob in enumerate(found.output_logprobs)
                ),
            )
            for found in super().poll()
        ]


class RecordingEngine(HFEngine):
    """Fault: records another fact than it computed with, before its own ledger sees the tokens."""

    fact = ""

    def changed(self, values, token_ids):
        raise NotImplementedError

    def stream_rows(self, rows, params):
        for part in super().stream_rows(rows, params):
            yield [(row, self._changed(raw)) for row, raw in part]

    def _changed(self, raw):
        values = self.changed(raw.facts[self.fact], raw.token_ids)
        return dataclasses.replace(raw, facts={**raw.facts, self.fact: tuple(values)})


def embedded(module, kind=HFEngine):
    """An engine in this process, with the weights of a module."""
    return kind(EngineConfig("hf", ""), module=module)


def plant(strategy, actor, engine_class):
    """Give a strategy an engine of this class, with the actor's weights; return the engine."""
    module = strategy.unwrap_model(actor).model
    strategy.inference_engine = engine = embedded(module, engine_class)
    strategy.update_engine_weights(actor)
    return engine


def planted(build_world, kind, **options):
    """Return a world with a faulty engine whose weights nobody compares."""
    world = build_world(**options)
    world.strategy.config.verify_weight_sync = False
    plant(world.strategy, world.trainer.actor, kind)
    return world


def no_convolution(monkeypatch):
    """A decoded token sees no earlier one in convolutions."""
    update = LinearAttentionLayer.update_conv_state

    def losing(self, conv_states, *args, **options):
        states = update(self, conv_states, *args, **options)
        for state in self.conv_states.values():
            if state is not None:
                state.zero_()
        return states

    monkeypatch.setattr(LinearAttentionLayer, "update_conv_state", losing)
