"""A scripted engine: the whole interface on a distribution of its own, for tests of its callers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import nn

from lightrft.engines.adapter import EngineAdapter
from lightrft.engines.hf.random import mix64, row_keys, uniforms
from lightrft.engines.hf.sampling import draw_tokens, sampling_logprobs
from lightrft.engines.parameter_store import ParameterStore, full_shape, is_full_tensor
from lightrft.engines.types import (
    Completion,
    EngineConfig,
    FinishReason,
    GenerationRequest,
    SamplingParams,
    WeightPiece,
)

_CPU = torch.device("cpu")


class FakeEngine(EngineAdapter):
    """Samples from a distribution that depends on the prompt, the tokens so far and every weight.

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
    computes_model = False

    def __init__(
        self,
        config: EngineConfig,
        *,
        script: Callable[[GenerationRequest, int], tuple[Sequence[int], Sequence[float] | None]]
        | None = None,
        parameters: Mapping[str, torch.Tensor] | None = None,
        unwritten: Iterable[str] = (),
    ) -> None:
        unknown = sorted(set(config.options) - {"vocab_size", "eos_token_id"})
        if unknown:
            raise ValueError(
                f"unknown options of the fake engine: {', '.join(unknown)}; "
                "known: eos_token_id, vocab_size"
            )
        given = _default_parameters(config) if parameters is None else parameters
        super().__init__(config)
        self._weights: ParameterStore = ParameterStore(
            _own_copies(given), self.name, unwritten=unwritten
        )
        self.calls: list[str] = []
        self.requests: list[GenerationRequest] = []
        self._script = script
        self._vocab_size = int(config.options.get("vocab_size", 97))
        self._eos_id = int(config.options.get("eos_token_id", 1))
        self._prefix_cache: dict[tuple[int, ...], int] = {}

    @classmethod
    def for_module(cls, config: EngineConfig, module: nn.Module) -> FakeEngine:
        """An engine with the parameters of a module, in `config.dtype`."""
        dtype = config.torch_dtype
        parameters: dict[str, torch.Tensor] = {}
        unwritten = set()
        copies: dict[int, torch.Tensor] = {}
        for name, parameter in module.named_parameters(remove_duplicate=False):
            copy = copies.get(id(parameter))
            if copy is None:
                is_full = is_full_tensor(parameter, parameter.shape) and parameter.numel() > 0
                copy = torch.zeros(full_shape(parameter), dtype=dtype)
                if is_full:
                    copy.copy_(parameter.detach())
                else:
                    unwritten.add(name)
                copies[id(parameter)] = copy
            parameters[name] = copy
        return cls(config, parameters=parameters, unwritten=unwritten)

    @property
    def native(self) -> FakeEngine:
        """The engine itself."""
        return self

    def generate(
        self, requests: Sequence[GenerationRequest], sampling_params: SamplingParams
    ) -> list[Completion]:
        """Replays the script, or samples; see `RolloutEngine.generate`."""
        self.calls.append("generate")
        self.check_usable()
        self.requests.extend(requests)
        seen: set[int] = set()
        completions = []
        for request in requests:
            if request.request_id in seen:
                raise ValueError(
                    "request ids must be unique within one generate() call: got "
                    f"{request.request_id} twice"
                )
            seen.add(request.request_id)
            completions += [
                self._complete(request, index, sampling_params)
                for index in range(sampling_params.n)
            ]
        return completions

    def score(self, token_ids: Sequence[int]) -> list[float]:
        """Scores a sequence at temperature 1 under the weights of now."""
        self.calls.append("score")
        self.check_usable()
        return self._score(tuple(token_ids), self._fingerprint())

    def sleep(self, level: int = 1) -> None:
        """Releases memory."""
        self.calls.append("sleep")
        super().sleep(level)

    def wake_up(self, tags: tuple[str, ...] | None = None) -> None:
        """Takes memory back."""
        self.calls.append("wake_up")
        super().wake_up(tags)

    def begin_weight_update(self) -> None:
        """Opens an update."""
        self.calls.append("begin_weight_update")
        super().begin_weight_update()

    def load_weights(self, pieces: Iterable[WeightPiece]) -> None:
        """Copies pieces into the parameters."""
        self.calls.append("load_weights")
        super().load_weights(pieces)

    def finish_weight_update(self) -> None:
        """Closes the update."""
        self.calls.append("finish_weight_update")
        super().finish_weight_update()

    def reset_caches(self) -> None:
        """Forgets the weights that prompts were run with."""
        self.calls.append("reset_caches")
        self._prefix_cache.clear()
        super().reset_caches()

    def hash_parameters(self, names: Sequence[str] | None = None) -> dict[str, int]:
        """Hashes of the parameters."""
        self.calls.append("hash_parameters")
        return super().hash_parameters(names)

    def alias_weights(self, tensors: Mapping[str, torch.Tensor]) -> bool:
        """Uses the given tensors as parameters if they fit."""
        self.calls.append("alias_weights")
        return super().alias_weights(tensors)

    def set_weights_version(self, version: int) -> None:
        """Declares the weights verified."""
        self.calls.append("set_weights_version")
        super().set_weights_version(version)

    def close(self) -> None:
        """Frees the weights."""
        self.calls.append("close")
        super().close()

    def _complete(
        self, request: GenerationRequest, index: int, params: SamplingParams
    ) -> Completion:
        prompt, bound = self._checked(request, params)
        if self._script is None:
            tokens, logprobs, reason = self._draw(prompt, bound, request, index, params)
        else:
            scripted, given = self._script(request, index)
            tokens = tuple(scripted)[:bound]
            if given is None:
                fingerprint = self._cached_fingerprint(prompt)
                logprobs = tuple(self._score((*prompt, *tokens), fingerprint)[len(prompt) :])
            else:
                logprobs = tuple(given)[:bound]
            ends = bool(tokens) and tokens[-1] in self._ending_ids(params)
            reason = "stop" if ends or len(scripted) < bound else "length"
        return Completion(
            request_id=request.request_id,
            sample_index=index,
            prompt_token_ids=prompt,
            output_token_ids=tokens,
            output_logprobs=logprobs,
            logprobs_mode=params.logprobs_mode,
            finish_reason=reason,
            weights_version=self.weights_version,
        )

    def _checked(
        self, request: GenerationRequest, params: SamplingParams
    ) -> tuple[tuple[int, ...], int]:
        name = f"request {request.request_id}"
        prompt = tuple(request.prompt_token_ids)
        if not prompt and request.prompt_text:
            prompt = tuple(byte % self._vocab_size for byte in request.prompt_text.encode())
        if not prompt:
            raise ValueError(f"{name} has an empty prompt; give prompt_token_ids or prompt_text")
        bound = params.max_tokens if request.max_tokens is None else request.max_tokens
        if bound < 1:
            raise ValueError(f"{name}: max_tokens must be at least 1: got {bound}")
        limit = self._config.max_model_len
        if limit is not None and len(prompt) + bound > limit:
            raise ValueError(
                f"{name} needs {len(prompt)} prompt tokens + {bound} new tokens, more than "
                f"max_model_len {limit}; shorten the prompt or lower max_tokens"
            )
        return prompt, bound

    def _draw(
        self,
        prompt: tuple[int, ...],
        bound: int,
        request: GenerationRequest,
        index: int,
        params: SamplingParams,
    ) -> tuple[tuple[int, ...], tuple[float, ...], FinishReason]:
        if params.stop:
            raise ValueError("the fake engine has no tokenizer; use stop_token_ids, not stop")
        stop_ids = self._ending_ids(params)
        state = _prefix_states(self._cached_fingerprint(prompt), prompt)[-1:]
        keys = row_keys(params.seed, [request.request_id], [index], device=_CPU)
        numbers = uniforms(keys, 0, bound)
        tokens: list[int] = []
        logprobs: list[float] = []
        for step in range(bound):
            token, logprob = draw_tokens(self._logits(state), numbers[step], params)
            state = mix64(state ^ token)
            tokens.append(int(token))
            logprobs.append(float(logprob))
            if tokens[-1] in stop_ids and step + 1 >= params.min_tokens:
                return tuple(tokens), tuple(logprobs), "stop"
        return tuple(tokens), tuple(logprobs), "length"

    def _ending_ids(self, params: SamplingParams) -> frozenset[int]:
        return frozenset(params.stop_token_ids) | (
            {self._eos_id} - {-1} if not params.ignore_eos else set()
        )

    def _score(self, token_ids: tuple[int, ...], fingerprint: int) -> list[float]:
        if not token_ids:
            return []
        logits = self._logits(_prefix_states(fingerprint, token_ids)[:-1])
        targets = torch.tensor(token_ids[1:], dtype=torch.int64)[:, None]
        logprobs = sampling_logprobs(logits, SamplingParams()).gather(-1, targets)
        return [0.0, *logprobs.squeeze(-1).tolist()]

    def _logits(self, states: torch.Tensor) -> torch.Tensor:
        """Logits in [0, 4), [states, vocab] float32."""
        return (4 * uniforms(states, 0, self._vocab_size).T).float()

    def _cached_fingerprint(self, prompt: tuple[int, ...]) -> int:
        if prompt not in self._prefix_cache:
            self._prefix_cache[prompt] = self._fingerprint()
        return self._prefix_cache[prompt]

    def _fingerprint(self) -> int:
        """A number that changes with any bit of any weight."""
        total = 0
        for name in sorted(self._weights.tensors):
            # float64 holds every narrower float exactly.
            bits = self._weights.tensors[name].detach().reshape(-1).double().view(torch.int64)
            places = torch.arange(bits.numel(), device=bits.device)
            total = (total * 31 + int(mix64(bits ^ mix64(places)).sum())) % 2**63
        return total


def _prefix_states(fingerprint: int, token_ids: tuple[int, ...]) -> torch.Tensor:
    """One 64-bit state for each prefix of the tokens, [tokens] int64."""
    states = []
    state = torch.tensor([fingerprint], dtype=torch.int64)
    for token in token_ids:
        state = mix64(state ^ token)
        states.append(state)
    return torch.cat(states)


def _default_parameters(config: EngineConfig) -> dict[str, torch.Tensor]:
    """Three small matrices, a vector and a tied head, in `config.dtype`."""
    shapes = {"embed.weight": (13, 4), "layers.0.weight": (4, 6), "norm.weight": (4,)}
    dtype = config.torch_dtype
    parameters = {}
    for index, (name, shape) in enumerate(shapes.items()):
        count = int(torch.tensor(shape).prod())
        parameters[name] = torch.linspace(-1 - index, 1, count).reshape(shape).to(dtype)
    parameters["head.weight"] = parameters["embed.weight"]
    return parameters


def _own_copies(parameters: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    copies: dict[int, torch.Tensor] = {}
    return {
        name: copies.setdefault(id(tensor), tensor.detach().clone())
        for name, tensor in parameters.items()
    }


def build_fake(config: EngineConfig, *, module: nn.Module | None = None) -> FakeEngine:
    """The engine, with the parameters of a module if there is one."""
    return FakeEngine(config) if module is None else FakeEngine.for_module(config, module)
