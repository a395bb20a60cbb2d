"""A scripted engine: the whole interface on a distribution of its own, for tests of its callers.

Importing this module makes it the engine "fake".
"""

import importlib
import math
from itertools import accumulate

import torch

from lightrft.engines.backend_options import check_options
from lightrft.engines.base import RolloutEngine
from lightrft.engines.engine_weights import ParameterStore, full_shape, is_full_tensor
from lightrft.engines.factory import ENGINES
from lightrft.engines.rows import Limits, RawCompletion
from lightrft.engines.sampling import draw_tokens, mix64, row_keys, sampling_logprobs, uniforms
from lightrft.engines.types import EngineConfig, SamplingParams

_CPU = torch.device("cpu")
USUAL = EngineConfig("fake", "")


class FakeEngine(RolloutEngine):
    """Engine with a distribution that depends on the prompt, the tokens so far and every weight.

    The next token's logits are hashes of (weights, tokens so far), so that any change of a weight
    changes them, and `score` agrees with `Completion.output_logprobs`. A prompt remembers the
    weights it was first run with until `reset_caches`, as a prefix cache does.

    Args:
        config: Options: "vocab_size" (97), "eos_token_id" (1; -1 for none).
        script: (request, sample index) -> tokens and their logprobs, replayed instead of sampled;
            without logprobs the tokens are scored. Tokens beyond the request's bound are cut.
        parameters: Checkpoint name -> initial value, copied. One tensor under two names is tied.
        unwritten: Names whose values are placeholders until the first weight update.

    Attributes:
        calls: Names of the interface's methods in the order in which they were called.
        requests: Every request of every `generate` call, multimodal inputs included.
    """

    name = "fake"
    runs_on_every_rank = False
    streams = True
    computes_model = False

    def __init__(self, config=USUAL, *, script=None, parameters=None, unwritten=()):
        check_options(config.options, ("vocab_size", "eos_token_id"), engine_name=self.name)
        given = _default_parameters(config) if parameters is None else parameters
        super().__init__(config)
        self.weights = ParameterStore(_own_copies(given), self.name)
        self.weights.unwritten.update(unwritten)
        self.calls = []
        self.requests = []
        self.script = script
        self._vocab_size = int(config.options.get("vocab_size", 97))
        eos_id = int(config.options.get("eos_token_id", 1))
        self.eos_ids = () if eos_id == -1 else (eos_id,)
        # Any token id has a hash, and images and videos are only recorded.
        self._limits = Limits(2**62, config.max_model_len, self.name, reads_media=True)
        self._prefix_cache = {}

    @classmethod
    def for_module(cls, config, module):
        """An engine with the parameters of a module, in `config.dtype`."""
        unwritten = set()
        copies = {}
        named = dict(module.named_parameters(remove_duplicate=False))
        for name, parameter in module.named_parameters():
            copies[parameter] = torch.zeros(full_shape(parameter), dtype=config.torch_dtype)
            if is_full_tensor(parameter, parameter.shape) and parameter.numel() > 0:
                copies[parameter].copy_(parameter.detach())
            else:
                unwritten.add(name)
        parameters = {name: copies[parameter] for name, parameter in named.items()}
        return cls(config, parameters=parameters, unwritten=unwritten)

    @property
    def native(self):
        """The engine itself."""
        return self

    def submit(self, requests, sampling_params):
        """Notes the requests; see `RolloutEngine.submit`."""
        self.check_usable()
        self.requests.extend(requests)
        super().submit(requests, sampling_params)

    def score(self, token_ids):
        """Scores a sequence at temperature 1 under the weights of now."""
        self.calls.append("score")
        self.check_usable()
        return self._score(tuple(token_ids), self._fingerprint())

    def drop_caches(self):
        self._prefix_cache.clear()

    def _check_params(self, params):
        if params.stop and self.script is None:
            raise ValueError("the fake engine has no tokenizer; use stop_token_ids, not stop")

    def _encode(self, text):
        return tuple(byte % self._vocab_size for byte in text.encode())

    def _encode_media(self, request):
        """Images and videos are only noted."""

    def stream_rows(self, rows, params):
        """One row after the other."""
        requests = {request.request_id: request for request in self.requests}
        for row in rows:
            yield [(row, self.complete(row, requests[row.request_id], params))]

    def complete(self, row, request, params):
        if self.script is None:
            return self._draw(row, params)
        scripted, given = self.script(request, row.sample_index)
        tokens = tuple(scripted)[: row.max_tokens]
        if given is None:
            scores = self._score((*row.prompt, *tokens), self._cached_fingerprint(row.prompt))
            given = scores[len(row.prompt) :]
        ends = bool(tokens) and tokens[-1] in self._stop_ids(params)
        reason = "stop" if ends or len(scripted) < row.max_tokens else "length"
        return RawCompletion(tokens, tuple(given)[: row.max_tokens], reason)

    def _draw(self, row, params):
        stop_ids = self._stop_ids(params)
        state = _prefix_states(self._cached_fingerprint(row.prompt), row.prompt)[-1:]
        keys = row_keys(params.seed, [row.request_id], [row.sample_index], device=_CPU)
        numbers = uniforms(keys, 0, row.max_tokens)
        tokens = []
        logprobs = []
        reason = "length"
        for step in range(row.max_tokens):
            token, logprob = draw_tokens(self._logits(state), numbers[step], params)
            state = mix64(state ^ token)
            tokens.append(int(token))
            logprobs.append(float(logprob))
            if tokens[-1] in stop_ids and step + 1 >= params.min_tokens:
                reason = "stop"
                break
        return RawCompletion(tuple(tokens), tuple(logprobs), reason)

    def _score(self, token_ids, fingerprint):
        if not token_ids:
            return []
        logits = self._logits(_prefix_states(fingerprint, token_ids)[:-1])
        targets = torch.tensor(token_ids[1:], dtype=torch.int64)[:, None]
        logprobs = sampling_logprobs(logits, SamplingParams()).gather(-1, targets)
        return [0.0, *logprobs.squeeze(-1).tolist()]

    def _logits(self, states):
        """Logits in [0, 4), [states, vocab] float32."""
        return (4 * uniforms(states, 0, self._vocab_size).T).float()

    def _cached_fingerprint(self, prompt):
        if prompt not in self._prefix_cache:
            self._prefix_cache[prompt] = self._fingerprint()
        return self._prefix_cache[prompt]

    def _fingerprint(self):
        """A number that changes with any bit of any weight."""
        total = 0
        for name in sorted(self.weights.tensors):
            # float64 holds every narrower float exactly.
            bits = self.weights.tensors[name].detach().reshape(-1).double().view(torch.int64)
            places = torch.arange(bits.numel(), device=bits.device)
            total = (total * 31 + int(mix64(bits ^ mix64(places)).sum())) % 2**63
        return total


def _recorded(name):
    def method(self, *args, **options):
        self.calls.append(name)
        inherited = getattr(super(FakeEngine, self), name)
        return inherited(*args, **options)

    return method


for _name in (
    "generate",
    "sleep",
    "wake_up",
    "begin_weight_update",
    "load_weights",
    "finish_weight_update",
    "reset_caches",
    "hash_parameters",
    "alias_weights",
    "set_weights_version",
    "close",
):
    setattr(FakeEngine, _name, _recorded(_name))


def _prefix_states(fingerprint, token_ids):
    """One 64-bit state for each prefix of the tokens, [tokens] int64."""
    first = torch.tensor([fingerprint], dtype=torch.int64)
    states = accumulate(token_ids, lambda state, token: mix64(state ^ token), initial=first)
    return torch.cat(list(states)[1:])


def _default_parameters(config):
    """Three small matrices, a vector and a tied head, in `config.dtype`."""
    shapes = {"embed.weight": (13, 4), "layers.0.weight": (4, 6), "norm.weight": (4,)}
    parameters = {
        name: torch.linspace(-1 - i, 1, math.prod(shape)).reshape(shape).to(config.torch_dtype)
        for i, (name, shape) in enumerate(shapes.items())
    }
    return {**parameters, "head.weight": parameters["embed.weight"]}


def _own_copies(parameters):
    copies = {}
    return {
        name: copies.setdefault(id(tensor), tensor.detach().clone())
        for name, tensor in parameters.items()
    }


def build_fake(config, *, module=None):
    """The engine, with the parameters of a module if there is one."""
    return FakeEngine(config) if module is None else FakeEngine.for_module(config, module)


# Options list the engines that there are before any test adds one, in whatever order tests run.
importlib.import_module("lightrft.config.train_config")
ENGINES["fake"] = build_fake
