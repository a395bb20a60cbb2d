"""Policy: a Hugging Face causal language model that scores tokens."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import repeat
from typing import TYPE_CHECKING, cast

import torch
import torch.nn.functional as F
import torch.utils._pytree as pytree
from torch import Tensor, nn

from lightrft.engines.media.families import placeholder_ids
from lightrft.engines.media.media import RowMedia
from lightrft.engines.text import end_of_sequence_ids
from lightrft.engines.types import Vocabulary
from lightrft.models.attention import trunk_of
from lightrft.models.head import HeadRefusedError, LinearLogprobHead, read_head_transform
from lightrft.models.layout import TokenLayout
from lightrft.models.loading import load_causal_lm
from lightrft.models.sequence_model import SequenceModel, trunk_output
from lightrft.models.statements import vocabulary_of
from lightrft.models.types import (
    NOTHING_REPLAYED,
    ActorOutput,
    EntropyMode,
    HeadReader,
    Replayed,
    TokenLossFunction,
)

if TYPE_CHECKING:
    from transformers import PreTrainedModel
    from transformers.modeling_outputs import MoeModelOutputWithPast

    from lightrft.engines.hf.routers import Router

# FSDP2 finds the tensors of a module's output, to hook the backward pass, by flattening it.
pytree.register_pytree_node(
    ActorOutput,
    lambda output: (
        [output.logprobs, output.entropy, output.router_sums, output.log_kept_mass, output.loss],
        None,
    ),
    lambda values, _: ActorOutput(*values),
)


class Actor(SequenceModel):
    """Causal language model that scores tokens; see `lightrft.models.types.PolicyModel`.

    The model's output projection is replaced by a `LinearLogprobHead` with the same parameters, so
    names in `model.state_dict()` stay those of the checkpoint, tied weights included.

    Args:
        model: Causal language model of transformers; it is changed in place.
        fused_linear_logprob: Whether to never hold the logits of all positions and tokens at once.
        chunk_size: Columns of the vocabulary that the fused head computes at a time.

    Raises:
        HeadRefusedError: The model has no linear output projection, or changes its logits
            afterwards in an unknown way.
    """

    is_actor = True
    vocabulary: Vocabulary
    # Whether outputs have `router_sums`.
    sums_routers = False

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        fused_linear_logprob: bool = False,
        chunk_size: int | None = None,
    ) -> None:
        super().__init__()
        projection = model.get_output_embeddings()
        if not isinstance(projection, nn.Linear):
            raise HeadRefusedError(
                "an actor needs a model with a linear output projection: got "
                f"{type(projection).__name__} in {type(model).__name__}"
            )
        if trunk_of(model) is model:
            raise HeadRefusedError(
                "an actor needs a model whose hidden states can be had apart from its logits: "
                f"{type(model).__name__} has no part with its embedding and without its projection"
            )
        self._trunk_name = next(n for n, part in model.named_modules() if part is trunk_of(model))
        head = LinearLogprobHead(
            projection,
            transform=read_head_transform(model),
            is_fused=fused_linear_logprob,
            chunk_size=chunk_size,
            # A response has no features for the placeholders of media.
            forbidden_ids=placeholder_ids(model.config),
        )
        model.set_output_embeddings(head)
        self.model = model
        # Those that take recorded experts, from the first recorded ones on.
        self.routers: list[Router] = []
        self.vocabulary = Vocabulary()

    def use_vocabulary(self, vocabulary: Vocabulary) -> None:
        """Score only ids that are tokens, and save the model with all ids that end its turns."""
        self.vocabulary = vocabulary
        self.head.limit_tokens(vocabulary.num_tokens)
        generation = self.model.generation_config
        ends = {*vocabulary.ends, *end_of_sequence_ids(self.config, generation)}
        if generation is not None and vocabulary.ends:
            generation.eos_token_id = sorted(ends) if len(ends) > 1 else ends.pop()

    @classmethod
    def from_pretrained(
        cls,
        path: str,
        *,
        dtype: str = "float32",
        fused_linear_logprob: bool = False,
        chunk_size: int | None = None,
        allow_new_weights: Sequence[str] = (),
    ) -> Actor:
        """Load a checkpoint; see `lightrft.models.loading.load_causal_lm`."""
        model = load_causal_lm(path, dtype=dtype, allow_new_weights=allow_new_weights)
        actor = cls(model, fused_linear_logprob=fused_linear_logprob, chunk_size=chunk_size)
        actor.use_vocabulary(vocabulary_of(path))
        return actor

    def forward(
        self,
        token_ids: Tensor,
        attention_mask: Tensor,
        *,
        scored_mask: Tensor | None = None,
        temperature: float = 1.0,
        entropy: EntropyMode = "none",
        media: RowMedia | None = None,
        recorded: Replayed = NOTHING_REPLAYED,
        token_loss: TokenLossFunction | HeadReader | None = None,
    ) -> ActorOutput:
        """Return the logprobs (and entropy) of the scored tokens.

        Args:
            token_ids: [batch, seq] int64, padded.
            attention_mask: [batch, seq] bool, True on real tokens.
            scored_mask: [batch, seq] bool, True on tokens to score; None scores all except first
                tokens.
            temperature: Divides the logits.
            entropy: "none", "value" (detached) or "grad".
            media: Images and videos of the rows; None is text.
            recorded: Facts of the sampled tokens, to be replayed.
            token_loss: Loss to compute inside the output projection, for some tokens at a time; the
                head must be fused. If ranks share sequences, each adds the loss of its tokens. With
                a `HeadReader` nothing else is computed.

        Raises:
            RoutesError: The recorded experts are not those of the model's layers.
            ValueError: Shapes differ, `scored_mask` marks padding or a first token, or ranks that
                share sequences pass different batches.
        """
        layout = self.lay_out(token_ids, attention_mask, scored_mask, recorded.routes, media)
        support = recorded.support
        self._replay(layout, recorded.routes)
        trunk: nn.Module = self.trunk
        if media is not None and not media.is_empty:
            from lightrft.models.vision.forward import reading_trunk  # of rows with media

            trunk = reading_trunk(self.model, trunk)
        output = trunk_output(
            trunk, layout, media, family=self.family, with_router_logits=self.sums_routers
        )
        inside = None if token_loss is None else layout.placed(token_loss)
        hidden: Tensor = output.last_hidden_state
        logprobs, entropies, masses, loss = self.head(
            layout.select(hidden),
            layout.targets,
            temperature=temperature,
            entropy=entropy,
            support=None if support is None else support.of_tokens(layout.rows, layout.columns),
            token_loss=inside,
        )
        return ActorOutput(
            logprobs=layout.scatter(logprobs),
            entropy=None if entropies is None else layout.scatter(entropies),
            router_sums=self._router_sums(output, layout),
            log_kept_mass=None if masses is None else layout.scatter(masses),
            loss=None if loss is None else layout.join(loss),
        )

    def _router_sums(self, output: MoeModelOutputWithPast, layout: TokenLayout) -> Tensor | None:
        if not self.sums_routers:
            return None
        top_k = self.config.num_experts_per_tok
        chosen = [each.chosen for each in self.routers if each.replayed is not None]
        # A token that rows share counts once for each of them.
        *_, places = layout.read_at(layout.is_real)
        sums = router_sums(
            output.router_logits,
            places,
            layout.attention_mask.numel(),
            top_k=top_k,
            chosen=chosen or None,
        )
        return layout.join(sums)

    def _replay(self, layout: TokenLayout, routes: Tensor | None) -> None:
        """Let the layers take the recorded experts in the next pass, or choose themselves."""
        if routes is None:
            for router in self.routers:
                router.replayed = None
            return
        from lightrft.engines.hf.routers import replay, unpack_routes  # of recorded experts

        if not self.routers:
            self._find_routers(layout)
        is_recorded = layout.is_real.clone()
        last = layout.is_real.sum(dim=1) - 1
        is_recorded[torch.arange(len(last), device=last.device), last.clamp(min=0)] = False
        rows, columns, places = layout.read_at(is_recorded)
        chosen = unpack_routes(routes[rows, columns], self.routers)
        laid_out = chosen.new_full((layout.attention_mask.numel(), chosen.shape[1]), -1)
        laid_out[places] = chosen
        replay(self.routers, laid_out)

    def _find_routers(self, layout: TokenLayout) -> None:
        """Find the layers that choose experts, and prove that choices can be replayed."""
        from lightrft.engines.hf import routers  # of recorded experts

        seen = slice(1), slice(routers.TRIED_TOKENS)
        few = self.lay_out(layout.token_ids[seen], layout.is_real[seen])

        def run() -> Tensor:
            hidden: Tensor = trunk_output(self.trunk, few, family=self.family).last_hidden_state
            return hidden.detach().clone()

        self.routers = routers.find_routers(self.trunk, run)
        if not self.routers:
            raise routers.RoutesError(
                f"the engine recorded experts, and no layer of {type(self.model).__name__} chooses "
                "any by a top-k of scores; --routing_replay off trains without them"
            )
        routers.prove_routers(self.routers, run)

    def enable_router_sums(self) -> None:
        """Add to every output the sums from which the load of the experts is computed.

        Raises:
            ValueError: The model has no experts.
        """
        if "output_router_logits" not in self.config.to_dict():
            raise ValueError(
                "aux_loss_coef balances experts: got a model without them "
                f"({type(self.model).__name__}); leave aux_loss_coef out"
            )
        self.sums_routers = True

    @property
    def trunk(self) -> PreTrainedModel:
        """Part of the model that gives hidden states."""
        return cast("PreTrainedModel", self.model.get_submodule(self._trunk_name))

    @property
    def pretrained(self) -> PreTrainedModel:
        """Wrapped model."""
        return self.model

    def fuse_head(self, chunk_size: int | None) -> None:
        """Fuse the head: from now on it never holds the logits of all positions and tokens at once.

        Args:
            chunk_size: Columns of the vocabulary that are computed at a time; None takes a number
                that suits the device.
        """
        self.head.fuse(chunk_size)

    @property
    def head(self) -> LinearLogprobHead:
        """Output projection."""
        return cast("LinearLogprobHead", self.model.get_output_embeddings())


def router_sums(
    router_logits: Sequence[Tensor] | None,
    places: Tensor,
    num_places: int,
    *,
    top_k: int,
    chosen: Sequence[Tensor | None] | None = None,
) -> Tensor:
    """Return the choices and probability of each expert, summed over all real tokens.

    They are sums, not means: those of micro batches and ranks add up to those of their batch.

    Args:
        router_logits: Logits of each layer, [tokens, experts]; tokens are all places, or only the
            real ones.
        places: [tokens] place of each real token of each row.
        num_places: Number of places, padding included.
        top_k: Number of experts for each token.
        chosen: Experts of each layer, [tokens, k], if they are not those of the highest logits.

    Returns:
        [2, experts] float32: row 0 counts choices, without gradient, row 1 sums probabilities;
        over layers and real tokens.

    Raises:
        ValueError: There are no logits, or they are of another number of tokens.
    """
    if not router_logits:
        raise ValueError("the model returned no router logits: it has no experts to balance")
    counts, sums = [], []
    for layer, experts in zip(router_logits, chosen or repeat(None), strict=False):
        logits = layer.reshape(-1, layer.shape[-1]).float()
        if len(logits) == num_places:
            logits = logits[places]
            experts = experts if experts is None else experts[places]
        elif len(logits) != len(places):
            raise ValueError(
                f"router logits must be of {num_places} positions or of {len(places)} tokens: got "
                f"{len(logits)}"
            )
        probabilities = F.softmax(logits, dim=-1)
        if experts is None:
            experts = probabilities.topk(top_k, dim=-1).indices
        counts.append(torch.bincount(experts.reshape(-1), minlength=logits.shape[-1]).float())
        sums.append(probabilities.sum(dim=0))
    return torch.stack([torch.stack(counts).sum(0), torch.stack(sums).sum(0)])
