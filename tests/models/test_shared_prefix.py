"""Rows that begin alike: each prefix is computed once, and nothing else changes."""

import copy

import pytest
import torch
from tests.models.batches import gradients, relative_norm, sliding_model
from tests.models.tiny import tiny_model

from lightrft.models import Actor, TokenLayout
from lightrft.models.layout import pad_rows
from lightrft.models.shared_prefix import Sharing

MIN = 3


def draw(*lengths, seed=0):
    """Return lists of random ids of some lengths."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(1, 131, (n,), generator=generator).tolist() for n in lengths]


def group(prompt, responses):
    """Return the samples of a prompt: rows of one prefix."""
    first, *rest = draw(prompt, *responses, seed=prompt)
    return [first + response for response in rest]


def branches():
    """Return an episode's branches: a prefix of a prefix, in an order that is none of the tree."""
    a, b, c, d, e = draw(11, 6, 4, 9, 7)
    return [a + b, d, a + c, a + b + d, a + b[:4] + e, d + c, a + b + d + c]


BATCHES = {
    "one group": group(9, (5, 1, 12, 3)),
    "ragged groups": group(8, (5, 2)) + group(15, (1, 1, 30)) + group(4, (6,)) + draw(12),
    "sixteen samples": group(20, range(1, 17)),
    "pairs": [*group(7, (5, 9)), *group(3, (1, 2)), *group(12, (4, 4))],
    "branches": branches(),
    "equal rows": [*group(6, (4, 4)), *(2 * group(6, (4, 4)))],
    "a row that is another's beginning": [draw(9)[0], draw(9)[0][:5], draw(9)[0] + [3, 4]],
}


def slow_runs(rows, minimum):
    """Return the tokens that a trie of rows stores, and of each row its ids and positions."""
    seen, stored = [], 0
    for row in rows:
        count = max(n for n in range(len(row)) if not n or row[:n] in [each[:n] for each in seen])
        stored += len(row) - (count if count >= max(minimum, len(row) / 8) else 0)
        seen.append(row)
    return stored


@pytest.mark.parametrize("rows", BATCHES.values(), ids=BATCHES)
def test_each_row_reads_its_own_ids_and_positions_along_its_path(rows):
    ids, mask = pad_rows(rows, "cpu")
    layout = TokenLayout.packed(ids, mask, sharing=Sharing(MIN))
    shared = layout.bounds.shared
    assert layout.input_ids.shape[1] == slow_runs(rows, MIN)
    stream, positions = layout.input_ids[0], layout.position_ids[0]
    assert shared.read(stream, dim=0).tolist() == [token for row in rows for token in row]
    assert shared.read(positions, dim=0).tolist() == [p for row in rows for p in range(len(row))]
    # The last token of a prefix predicts the first token of each branch.
    places = [layout.places[r, c - 1] for r, c in zip(layout.rows, layout.columns, strict=True)]
    assert layout.sources.tolist() == [int(place) for place in places]
    assert torch.equal(stream[layout.places[mask]], ids[mask])
    assert torch.equal(layout.targets, ids[layout.rows, layout.columns])


def test_rows_that_share_little_stay_as_they_are():
    rows = [[1, 2, 3, *row] for row in draw(40, 22)]
    assert TokenLayout.packed(*pad_rows(rows, "cpu"), sharing=Sharing(MIN)).bounds.shared is None
    layout = TokenLayout.packed(*pad_rows([*rows, [1, 2, 3, 4]], "cpu"), sharing=Sharing(MIN))
    assert layout.bounds.shared.paths == (((0, 43),), ((43, 68),), ((0, 3), (68, 69)))


def test_tokens_with_other_experts_are_not_shared():
    rows = group(9, (5, 5, 5))
    ids, mask = pad_rows(rows, "cpu")
    routes = torch.zeros(3, 14, 4, dtype=torch.uint8)
    routes[1, 5, 2] = 1
    layout = TokenLayout.packed(ids, mask, sharing=Sharing(MIN, routes))
    assert layout.bounds.shared.paths == (((0, 14),), ((0, 5), (14, 23)), ((0, 9), (23, 28)))
    assert torch.equal(layout.input_ids[0, layout.places], ids)


@pytest.mark.parametrize("num_rows", [0, 1])
def test_no_row_and_one_row_share_nothing(num_rows):
    ids = torch.ones(num_rows, 5, dtype=torch.int64)
    layout = TokenLayout.packed(ids, ids > 0, sharing=Sharing(MIN))
    assert layout.bounds.shared is None
    assert layout.input_ids.numel() == max(5 * num_rows, 1)


def slow_gradients(model, rows, upstream):
    """Return gradients of weighted logprobs and entropies of rows, one pass of the model a row."""
    model.zero_grad()
    for row, weights in zip(rows, upstream, strict=True):
        logits = model(input_ids=torch.tensor([row])).logits[0, :-1]
        logp = (logits / 0.7).log_softmax(-1)
        scored = logp.gather(1, torch.tensor(row[1:])[:, None])[:, 0]
        entropy = -(logp.exp() * logp).sum(-1)
        ((scored - 0.3 * entropy) * weights[1 : len(row)]).sum().backward()
    return {f"model.{name}": p.grad.double() for name, p in model.named_parameters()}


def shared_gradients(actor, rows, upstream, *, inside=False):
    ids, mask = pad_rows(rows, "cpu")
    actor.zero_grad()

    def loss(logprobs, entropy, where, columns):
        return ((logprobs - 0.3 * entropy) * upstream[where, columns]).sum()

    output = actor(ids, mask, entropy="grad", temperature=0.7, token_loss=loss if inside else None)
    where, columns = mask[:, 1:].nonzero(as_tuple=True)
    place = where, columns + 1
    whole = output.loss if inside else loss(output.logprobs[place], output.entropy[place], *place)
    whole.backward()
    return gradients(actor)


def sharing(model, **options):
    actor = Actor(model, **options)
    actor.pack_samples()
    actor.share_prefixes(MIN)
    return actor


def assert_computed_as_alone(model, rows, how="plain"):
    upstream = torch.randn(len(rows), max(map(len, rows)), generator=torch.manual_seed(1))
    exact = slow_gradients(copy.deepcopy(model).double(), rows, upstream)
    error = relative_norm(slow_gradients(copy.deepcopy(model), rows, upstream), exact)
    actor = sharing(model, fused_linear_logprob=how == "inside", chunk_size=50)
    if how == "checkpointed":
        actor.gradient_checkpointing_enable()
        actor.train()
    shared = shared_gradients(actor, rows, upstream, inside=how == "inside")
    assert relative_norm(shared, exact) <= max(1e-6, 2 * error)


@pytest.mark.parametrize("prompt", [0, 4096])
def test_prompts_of_no_and_of_many_tokens(prompt):
    """Responses are longer than a block of masked queries."""
    model = tiny_model(max_position_embeddings=8192)
    assert_computed_as_alone(model, group(prompt, (600, 530)) + draw(5))


@pytest.mark.parametrize("family", ["qwen3", "sliding"])
@pytest.mark.parametrize("how", ["plain", "inside", "checkpointed"])
@pytest.mark.parametrize("name", BATCHES)
def test_gradients_are_those_of_separate_rows_in_float64(name, how, family):
    model = tiny_model(max_position_embeddings=128) if family == "qwen3" else sliding_model()
    model.set_attn_implementation("eager")
    assert_computed_as_alone(model, BATCHES[name], how)
