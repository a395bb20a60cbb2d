"""Forward and backward passes of plain transformers models in float64, without padding masks.

Rows are padded on the right and attention is causal, so no token attends to padding.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import ClassVar, Self, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.overrides import TorchFunctionMode
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    PreTrainedModel,
)

from lightrft.config.files import read_object
from lightrft.config.parts.learning import TeacherOptions
from lightrft.config.printable import one_line
from lightrft.tools.audit.record import RecordError

T = TypeVar("T")
BASE, FIRST, SECOND = ".base_layer", ".lora_A.default.weight", ".lora_B.default.weight"
AutoKind = type[AutoModel | AutoModelForCausalLM | AutoModelForSequenceClassification]
# Limit of one forward pass, in float64.
MAX_LOGITS = 2**26
MAX_LAYERS = 10_000
# Prefixes of recorded parameter names.
POLICY, TRUNK, HEAD = "model", "trunk", "value_head"
# Output layer of a classifier.
SCORE = "score"


# Number of experts, and of those that a token gets.
Kind = tuple[int, int]


class Choices(TorchFunctionMode):
    """Notes the calls of top-k for tokens, and answers those of one kind.

    Args:
        kind: Kind of the calls to answer.
        experts: [tokens, k] int64 of each such call; -1 leaves the choice to the model.
    """

    def __init__(self, kind: Kind = (0, 0), experts: Iterable[Tensor] = ()) -> None:
        super().__init__()
        self.kinds: list[Kind] = []
        self._kind, self._experts = kind, iter(experts)

    def __torch_function__(
        self,
        func: Callable[..., object],
        types: object,
        args: tuple[Tensor, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        if func not in (torch.topk, Tensor.topk):
            return func(*args, **(kwargs or {}))
        values, chosen = torch.topk(*args, **(kwargs or {}))  # type: ignore[arg-type]
        if chosen.dim() == 2:
            kind = args[0].shape[-1], chosen.shape[-1]
            self.kinds.append(kind)
            if kind == self._kind:
                recorded = next(self._experts)
                chosen = torch.where(recorded < 0, chosen, recorded)
                values = args[0].gather(-1, chosen)
        return torch.return_types.topk((values, chosen))


def read_experts(
    routes: Mapping[int, Tensor], kinds: Sequence[Kind]
) -> tuple[Kind, dict[int, Tensor]]:
    """Return the kind of the calls that choose experts, and the recorded ones of each row.

    Args:
        routes: [positions, bytes] uint8 of each row; layers without experts may have zeros.
        kinds: Calls of top-k in a pass.

    Returns:
        The kind, and [positions, calls, k] int64 by row.

    Raises:
        RecordError: The bytes are not those of the model's layers.
    """
    everything = torch.cat(list(routes.values()))
    for kind in sorted(set(kinds), reverse=True):  # groups of experts are fewer than experts
        num_experts, k = kind
        wide = everything.view(torch.uint8 if num_experts <= 256 else torch.uint16).long()
        if wide.shape[1] % k or wide.max() >= num_experts:
            continue
        experts = wide.unflatten(1, (-1, k))
        if experts.shape[1] != kinds.count(kind):
            experts = experts[:, experts.any(dim=2).any(dim=0)]
        if experts.shape[1] == kinds.count(kind):
            parts = experts.split([len(each) for each in routes.values()])
            return kind, dict(zip(routes, parts, strict=True))
    raise RecordError(
        f"the record is damaged: {everything.shape[1]} bytes of experts a token are not "
        "those of the model's layers; audit another step with --step"
    )


class _ScorerModules(nn.ModuleDict):
    """Modules that compute a function of theirs, for `functional_call`."""

    def forward(self, function: Callable[[Tensor], T], tokens: Tensor) -> T:
        return function(tokens)


class Scorer(ABC):
    """Plain model that computes numbers per token.

    Args:
        parts: Modules by prefix of the recorded names.
        width: Numbers that a forward pass computes per token.
        lora_scale: Scale of the adapters; 0 without.
        rounds: True to round weights to bfloat16 before use, except a value head's.
    """

    num_outputs: ClassVar = 1

    def __init__(
        self, parts: dict[str, nn.Module], *, width: int, lora_scale: float = 0.0, rounds: bool
    ) -> None:
        self._model = _ScorerModules(parts)
        self._width, self._scale, self._rounds = width, lora_scale, rounds
        self._dtype, self._weights = torch.float64, dict[str, Tensor]()
        self._rows: Sequence[int] = ()
        model = cast("PreTrainedModel", parts.get(POLICY, parts.get(TRUNK)))
        self._head: nn.Module | None = None
        self._num_ids = int(model.get_input_embeddings().weight.shape[0])

    def linear_layers(self) -> list[str]:
        """Return recorded names of the linear layers that can have adapters."""
        modules = self._model.named_modules()
        return [n for n, each in modules if isinstance(each, nn.Linear) and each is not self._head]

    def in_bfloat16(self) -> Self:
        """Return a model that computes in bfloat16, except a value head, to measure rounding."""
        rounded = copy.copy(self)
        rounded._dtype = torch.bfloat16
        return rounded

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Take recorded weights, in float64."""
        if self._rounds:
            state = {n: v if n.startswith(HEAD) else v.bfloat16() for n, v in state.items()}
        # Leaves of their own: the recorded tensors stay without gradients.
        self._weights = {n: v.double().detach().requires_grad_() for n, v in state.items()}
        weights = self.merged(self._weights)
        known = dict(self._model.named_parameters(remove_duplicate=False))
        # The second name of a tied parameter may be missing from the record.
        covered = {id(known[name]) for name in weights.keys() & known.keys()}
        odd = {name for name, value in known.items() if id(value) not in covered}
        odd |= {n for n, v in weights.items() if n not in known or v.shape != known[n].shape}
        if odd:
            raise RecordError(
                f"recorded weights are not those of the model, such as {min(odd)}, one of "
                f"{len(odd)}; audit another step with --step"
            )

    @torch.no_grad()
    def score(self, ids: Tensor, mask: Tensor) -> list[Tensor]:
        """Return the numbers of the masked tokens, 0 elsewhere: [rows, seq] float64 each.

        Raises:
            RecordError: A token is not in the model's vocabulary.
        """
        largest = int(ids.max())
        if largest >= self._num_ids:
            raise RecordError(
                f"the record is damaged: token {largest} is none of the model's {self._num_ids}; "
                "audit another step with --step"
            )
        numbers = [torch.zeros(mask.shape, dtype=torch.float64) for _ in range(self.num_outputs)]
        for rows, width in _chunks(mask, self._width):
            self._rows = rows
            outputs = self.compute(self._outputs, ids[rows, :width])
            for each, values in zip(numbers, outputs, strict=True):
                each[rows, 1:width] = values.double()
        return [torch.where(mask, each, 0.0) for each in numbers]

    def slopes(self, ids: Tensor, mask: Tensor, weights: Sequence[Tensor]) -> dict[str, Tensor]:
        """Return gradients of the weighted sum of all numbers, by recorded parameter name."""
        for leaf in self._weights.values():
            leaf.grad = None
        for rows, width in _chunks(mask, self._width):
            self._rows = rows
            outputs = self.compute(self._outputs, ids[rows, :width])
            parts = [torch.where(mask, each, 0.0)[rows, 1:width] for each in weights]
            total = sum((part * each).sum() for part, each in zip(parts, outputs, strict=True))
            cast("Tensor", total).backward()
        return {n: leaf.grad for n, leaf in self._weights.items() if leaf.grad is not None}

    def compute(self, function: Callable[[Tensor], T], tokens: Tensor) -> T:
        """Return a function of the tokens under the loaded weights."""
        merged = self.merged(self._weights)
        rounded = {n: v if n.startswith(HEAD) else v.to(self._dtype) for n, v in merged.items()}
        return cast("T", functional_call(self._model, rounded, (function, tokens)))

    @abstractmethod
    def _outputs(self, tokens: Tensor) -> tuple[Tensor, ...]:
        """Return the numbers of all tokens but the first: [rows, seq - 1] each."""

    def merged(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return weights by the plain model's names; with adapters, W + scale B A."""
        merged: dict[str, Tensor] = {}
        for name, value in state.items():
            if name.endswith((FIRST, SECOND)):
                continue
            layer = name.removesuffix(f"{BASE}.weight")
            if layer + FIRST in state:
                value = value + self._scale * state[layer + SECOND] @ state[layer + FIRST]
            merged[name.replace(BASE, "")] = value
        return merged


class Policy(Scorer):
    """Causal language model that computes logprobs and entropies.

    Args:
        folder: Folder with the model's config.json.
        temperature: Divisor of the logits.
        lora_scale, rounds: See `Scorer`.
    """

    num_outputs: ClassVar = 2

    def __init__(
        self, folder: Path, *, temperature: float, lora_scale: float = 0.0, rounds: bool = False
    ) -> None:
        model = _build(folder, AutoModelForCausalLM)
        # The output projection may have more rows than tokens; then the record gives their number.
        num_rows = model.config.get_text_config().vocab_size
        self._num_tokens = vocab = int(model.config.to_dict().get("num_tokens", num_rows))
        super().__init__({POLICY: model}, width=vocab, lora_scale=lora_scale, rounds=rounds)
        self.temperature = temperature
        self._head = cast("PreTrainedModel", model).get_output_embeddings()
        # Ids by row over which logprobs are renormalised, of the last tokens of the row.
        self.kept: Mapping[int, Sequence[Tensor]] = {}
        self._lengths: Sequence[int] = ()
        self._kind, self._experts = (0, 0), dict[int, Tensor]()

    def _outputs(self, tokens: Tensor) -> tuple[Tensor, ...]:
        logprobs = self.logprobs(tokens)
        chosen = logprobs.gather(-1, tokens[:, 1:, None]).squeeze(-1)
        entropy = -(logprobs.exp() * logprobs).sum(dim=-1)
        if self.kept:
            chosen = chosen - torch.stack(
                [self._log_mass(row, each) for row, each in zip(self._rows, logprobs, strict=True)]
            )
        return chosen, entropy

    def _log_mass(self, row: int, logprobs: Tensor) -> Tensor:
        """Return the log-probability of each place's recorded ids, 0 without any: [seq - 1]."""
        sets, masses = self.kept.get(row, ()), [logprobs.new_zeros(()) for _ in logprobs]
        # Place t holds the distribution of token t + 1.
        first = self._lengths[row] - len(sets) - 1
        for place, ids in enumerate(sets, start=first):
            if len(ids) and place < len(masses):
                masses[place] = logprobs[place, ids].logsumexp(dim=0)
        return torch.stack(masses)

    def renormalise(self, kept: Mapping[int, Sequence[Tensor]], lengths: Sequence[int]) -> None:
        """Renormalise logprobs over these ids of the last tokens of rows of these lengths."""
        self.kept, self._lengths = kept, lengths

    @torch.no_grad()
    def replay(self, routes: Mapping[int, Tensor]) -> None:
        """Take the recorded experts of rows in all passes; see `read_experts`."""
        with Choices() as seen:
            self._model[POLICY](input_ids=torch.zeros(1, 2, dtype=torch.int64), use_cache=False)
        self._kind, self._experts = read_experts(routes, seen.kinds)

    @property
    def has_experts(self) -> bool:
        """Return whether passes take recorded experts."""
        return bool(self._experts)

    def _choices(self, tokens: Tensor) -> Choices:
        """Return the recorded experts of a pass over these rows, if there are any."""
        if not self.has_experts:
            return Choices()
        like = next(iter(self._experts.values()))
        experts = like.new_full((*tokens.shape, *like.shape[1:]), -1)
        for part, row in zip(experts, self._rows, strict=True):
            recorded = self._experts.get(row, like[:0])[: len(part)]
            part[: len(recorded)] = recorded
        return Choices(self._kind, experts.flatten(0, 1).unbind(1))

    def logprobs(self, tokens: Tensor, vocab: int | None = None) -> Tensor:
        """Return logprobs of each next token among the first ids: [rows, seq - 1, vocab]."""
        with self._choices(tokens):
            logits = self._model[POLICY](input_ids=tokens, use_cache=False).logits
        logits = logits[:, :-1, : vocab or self._num_tokens]
        return torch.log_softmax(logits.double() / self.temperature, dim=-1)


class Student(Policy):
    """Causal language model that computes its divergence from a teacher, and logprobs.

    Args:
        folder, lora_scale, rounds: See `Policy`.
        config: Options of the divergence.
        teacher: Folder of the teacher.
    """

    def __init__(
        self, config: TeacherOptions, teacher: Path, folder: Path, lora_scale: float, rounds: bool
    ) -> None:
        super().__init__(folder, temperature=1.0, lora_scale=lora_scale, rounds=rounds)
        self.teacher = Policy(teacher, temperature=1.0, rounds=rounds)
        self.teacher.load(frozen_state(teacher))
        self._form, self._share = config.teacher_form, config.teacher_beta

    def in_bfloat16(self) -> Self:
        """Return a copy of student and teacher in bfloat16."""
        rounded = super().in_bfloat16()
        rounded.teacher = self.teacher.in_bfloat16()
        return rounded

    def _outputs(self, tokens: Tensor) -> tuple[Tensor, ...]:
        q = self.logprobs(tokens)
        with torch.no_grad():
            # Ids beyond the student's vocabulary are not tokens.
            p = self.teacher.compute(lambda ids: self.teacher.logprobs(ids, q.shape[-1]), tokens)
        chosen = q.gather(-1, tokens[:, 1:, None]).squeeze(-1)
        return self._divergence(q, p), chosen

    def _divergence(self, q: Tensor, p: Tensor) -> Tensor:
        """Follow Agarwal et al. 2024, arXiv:2306.13649: KL(q || p), KL(p || q), or of a mixture."""
        if self._form == "reverse":
            return (q.exp() * (q - p)).sum(dim=-1)
        if self._form == "forward":
            return (p.exp() * (p - q)).sum(dim=-1)
        b = self._share
        m = (b * p.exp() + (1 - b) * q.exp()).log()
        return (b * p.exp() * (p - m) + (1 - b) * q.exp() * (q - m)).sum(dim=-1)


class Classifier(Scorer):
    """Sequence classifier with one label, or trunk with a head: computes a score at each token.

    Args:
        folder: Folder with the trunk's config.json.
        lora_scale, rounds: See `Scorer`.
    """

    def __init__(self, folder: Path, lora_scale: float = 0.0, rounds: bool = False) -> None:
        try:
            model = _build(folder, AutoModelForSequenceClassification)
            parts: dict[str, nn.Module] = {POLICY: model}
            self._trunk, head = cast("nn.Module", model.base_model), model.get_submodule(SCORE)
        except (RecordError, AttributeError):  # no class of the type, or another head
            self._trunk = model = _build(folder, AutoModel)
            head = nn.Linear(model.config.get_text_config().hidden_size, 1, dtype=torch.float64)
            parts = {POLICY: model, SCORE: head}
        super().__init__(parts, width=1, lora_scale=lora_scale, rounds=rounds)
        self._head = self._score_head = head

    def _outputs(self, tokens: Tensor) -> tuple[Tensor, ...]:
        hidden = self._trunk(input_ids=tokens, use_cache=False).last_hidden_state
        return (self._score_head(hidden[:, 1:]).double().squeeze(-1),)


class Values(Scorer):
    """Trunk with a linear head that computes the value before each token.

    Args:
        folder: Folder with the trunk's config.json.
        rounds: See `Scorer`.
    """

    def __init__(self, folder: Path, *, rounds: bool = False) -> None:
        trunk = _build(folder, AutoModel)
        hidden = trunk.config.get_text_config().hidden_size
        head = nn.Linear(hidden, 1, dtype=torch.float64)
        super().__init__({TRUNK: trunk, HEAD: head}, width=1, rounds=rounds)

    def _outputs(self, tokens: Tensor) -> tuple[Tensor, ...]:
        hidden = self._model[TRUNK](input_ids=tokens, use_cache=False).last_hidden_state
        return (self._model[HEAD](hidden[:, :-1].double()).squeeze(-1),)


def sees_media(folder: Path) -> bool:
    """Return whether a config.json is of a model of images, videos or audio."""
    return not {"vision_config", "audio_config"}.isdisjoint(read_object(folder / "config.json"))


def frozen_state(folder: Path, begin: str = POLICY) -> dict[str, Tensor]:
    """Return weights of a reference model or teacher, by their recorded names.

    Args:
        folder: Folder of a causal language model.
        begin: `POLICY` for all weights, `TRUNK` for weights below the output layer.

    Raises:
        RecordError: There is no checkpoint.
    """
    try:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    except Exception as error:  # damaged files fail anywhere in transformers
        raise RecordError(
            f"no model in {folder}: {one_line(str(error))}; give the folder of the reference model "
            "with --reference"
        ) from error
    part = model if begin == POLICY else model.base_model
    return {f"{begin}.{n}": value.detach() for n, value in part.named_parameters()}


def _build(folder: Path, kind: AutoKind) -> PreTrainedModel:
    sizes = [path.stat().st_size for path in folder.glob("*.safetensors")]
    # Grouped products of experts take no float64.
    options = {
        "dtype": torch.float64,
        "experts_implementation": "eager",
        "trust_remote_code": False,
    }
    try:
        read_object(folder / "config.json")
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
        layers = config.get_text_config().num_hidden_layers
        if layers > MAX_LAYERS:
            raise RecordError(f"a model of {layers} layers")
        with torch.device("meta"):
            model: PreTrainedModel = kind.from_config(config, **options)
        numbers = sum(value.numel() for value in model.parameters())
        if numbers > sum(sizes):
            raise RecordError(f"a model of {numbers} numbers, and {sum(sizes)} bytes of weights")
        model = kind.from_config(config, **options)
    except Exception as error:  # damaged files fail anywhere in transformers
        raise RecordError(
            f"{folder / 'config.json'} is damaged: {one_line(str(error))}; audit another step with "
            "--step"
        ) from error
    model.eval()
    return model


def _chunks(mask: Tensor, vocab: int) -> Iterator[tuple[list[int], int]]:
    """Yield rows that have tokens to score, as many as fit, and their width."""
    ends = {
        row: int(row_mask.nonzero()[-1]) + 1 for row, row_mask in enumerate(mask) if row_mask.any()
    }
    rows: list[int] = []
    width = 0
    for row in sorted(ends, key=ends.__getitem__):
        if rows and (len(rows) + 1) * ends[row] * vocab > MAX_LOGITS:
            yield rows, width
            rows = []
        rows.append(row)
        width = ends[row]
    if rows:
        yield rows, width
