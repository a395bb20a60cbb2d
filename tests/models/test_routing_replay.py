"""Experts that an engine recorded, replayed by the trainer: found by a pass, equal to slow ones."""

import copy

import numpy as np
import pytest
import torch
from tests.models.moe_types import NUM_ROUTED, TYPES, moe_model
from transformers import AutoConfig, AutoModelForCausalLM

from lightrft.engines import EngineConfig, GenerationRequest, SamplingParams
from lightrft.engines.hf.engine import HFEngine
from lightrft.engines.hf.routers import RoutesError, find_routers, prove_routers
from lightrft.engines.types import ROUTES
from lightrft.models import Actor
from lightrft.models.types import Replayed
from lightrft.records.columns import pack_routes

K, EXPERTS = 2, 8
every_type = pytest.mark.parametrize("name", TYPES)


def choices_of(model, ids):
    """The natural choices of a whole pass, by watching top-k alone: [tokens, layers * k]."""
    found, plain = [], torch.topk

    def noting(scores, k, dim=-1, **options):
        result = plain(scores, k, dim=dim, **options)
        if scores.dim() == 2 and scores.shape[-1] == EXPERTS and k == K:
            found.append(result[1])
        return result

    torch.topk = noting
    try:
        with torch.no_grad():
            model(torch.tensor([ids]), use_cache=False)
    finally:
        torch.topk = plain
    return torch.cat(found, dim=1)


def sorted_choices(choices):
    """Which experts a token has, whatever their order."""
    return choices.reshape(len(choices), -1, K).sort(-1).values


@every_type
def test_layers_that_choose_are_found_and_proved(name):
    model, ids = moe_model(name), torch.arange(3, 11)[None]
    routers = find_routers(model.base_model, lambda: model(ids))
    assert len(routers) == NUM_ROUTED[name]
    assert {(r.k, r.num_experts) for r in routers} == {(K, EXPERTS)}
    prove_routers(routers, lambda: model.base_model(ids).last_hidden_state.clone())
    model(ids)
    chosen = torch.cat([r.chosen for r in routers], dim=1)
    assert torch.equal(chosen, choices_of(model, ids[0].tolist()))


def test_a_model_without_experts_has_none():
    config = AutoConfig.for_model(
        "qwen3", vocab_size=50, hidden_size=32, intermediate_size=32, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=2, head_dim=16,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config)
    assert find_routers(model, lambda: model(torch.arange(5)[None])) == []


def test_choices_that_change_nothing_are_refused():
    model, ids = moe_model("qwen3_moe"), torch.arange(3, 11)[None]
    routers = find_routers(model.base_model, lambda: model(ids))
    hidden = torch.zeros(1, 8, 4)
    with pytest.raises(RoutesError, match="others by 0"):
        prove_routers(routers, lambda: (model(ids), hidden)[1])


def gradient(actor):
    return torch.cat([p.grad.flatten() for p in actor.parameters() if p.grad is not None])


def completions_of(model, **options):
    engine = HFEngine(EngineConfig("hf", "", options=options), module=model)
    params = SamplingParams(max_tokens=9, n=3, seed=5, records_routes=True)
    prompts = [(5, 6, 7, 8), (9, 10, 11, 12, 13, 14, 15), (20, 21)]
    requests = [GenerationRequest(ids, request_id=i) for i, ids in enumerate(prompts)]
    return engine.generate(requests, params)


def routes_of(completion):
    """Recorded experts of a completion: [positions but the last, layers * k]."""
    versions = [0] * len(completion.output_token_ids)
    flat = pack_routes(len(completion.prompt_token_ids), completion.facts[ROUTES], versions)
    tokens = len(completion.prompt_token_ids) + len(completion.output_token_ids) - 1
    return torch.from_numpy(flat.astype(np.int64)).view(tokens, -1)


@every_type
def test_the_engine_records_what_a_whole_pass_chooses(name):
    model = moe_model(name)
    completions = completions_of(model)
    assert len({len(c.output_token_ids) for c in completions}) > 1 or name != "qwen3_moe"
    for completion in completions:
        ids = [*completion.prompt_token_ids, *completion.output_token_ids]
        expected = choices_of(model, ids)[:-1]
        found = routes_of(completion)
        assert torch.equal(sorted_choices(found), sorted_choices(expected))


def batch_of(completions):
    """Rows, their mask, the mask of sampled tokens, engine logprobs, and bytes of experts."""
    rows = [[*c.prompt_token_ids, *c.output_token_ids] for c in completions]
    shape = len(rows), max(map(len, rows))
    ids, mask = torch.zeros(shape).long(), torch.zeros(shape).bool()
    scored = mask.clone()
    logprobs, routes = torch.zeros(shape), None
    for i, (row, completion) in enumerate(zip(rows, completions, strict=True)):
        first = len(completion.prompt_token_ids)
        ids[i, : len(row)], mask[i, : len(row)] = torch.tensor(row), True
        scored[i, first : len(row)] = True
        logprobs[i, first : len(row)] = torch.tensor(completion.output_logprobs)
        experts = routes_of(completion)
        if routes is None:
            routes = torch.zeros(*shape, experts.shape[1], dtype=torch.uint8)
        routes[i, : len(experts)] = experts.to(torch.uint8)
    return ids, mask, scored, logprobs, routes


def noisy(actor, size):
    """Plant noise in the inputs of all routers, as other kernels would round them."""

    def add(_, args):
        noise = torch.randn(args[0].shape, generator=torch.Generator().manual_seed(1))
        return (args[0] + size * noise.to(args[0].dtype), *args[1:])

    for name, module in actor.model.named_modules():
        if name.endswith((".gate", ".router")):
            module.register_forward_pre_hook(add)


@every_type
def test_with_replay_noise_of_routers_costs_no_more_than_other_rounding(name):
    model = moe_model(name, torch.bfloat16)
    ids, mask, scored, engine, routes = batch_of(completions_of(model))

    def distance(size, routes):
        actor = Actor(copy.deepcopy(model))
        noisy(actor, size)
        with torch.no_grad():
            output = actor(ids, mask, scored_mask=scored, recorded=Replayed(routes=routes))
        return float((output.logprobs - engine)[scored].abs().mean())

    quiet = distance(0.0, routes)
    replayed, natural = distance(0.05, routes), distance(0.05, None)
    assert replayed < 0.5 * natural, (quiet, replayed, natural)
    assert replayed < 3 * quiet + 0.02, (quiet, replayed, natural)


def loss_of(actor, batch, routes, rows=slice(None)):
    ids, mask, scored, _, _ = batch
    given = None if routes is None else routes[rows]
    output = actor(ids[rows], mask[rows], scored_mask=scored[rows], recorded=Replayed(routes=given))
    weights = torch.linspace(-1, 1, ids.shape[1], dtype=output.logprobs.dtype)
    return (output.logprobs * weights).sum()


@every_type
def test_gradients_at_recorded_experts_are_finite_differences(name):
    model = moe_model(name, torch.float64)
    batch = batch_of(completions_of(moe_model(name)))
    # Other experts than the model's own, so that replaying them is no accident.
    routes = (batch[4] + 1) % EXPERTS
    actor = Actor(model)
    loss_of(actor, batch, routes).backward()
    gates = [p for n, p in actor.named_parameters() if "gate.weight" in n or "router.weight" in n]
    assert len(gates) == NUM_ROUTED[name]
    generator = torch.Generator().manual_seed(2)
    for gate in gates:
        direction = torch.randn(gate.shape, generator=generator, dtype=torch.float64)
        direction /= direction.norm()
        values = []
        for step in (5e-3, -5e-3):
            with torch.no_grad():
                gate += step * direction
                values.append(float(loss_of(actor, batch, routes)))
                gate -= step * direction
        expected = (values[0] - values[1]) / 1e-2
        assert abs(expected) > 1e-2
        assert float((gate.grad * direction).sum()) == pytest.approx(expected, rel=5e-3, abs=1e-4)


@every_type
@pytest.mark.parametrize("way", ["checkpointed", "packed", "prefixes once", "in micro-batches"])
def test_other_ways_to_compute_give_the_same_gradients(name, way):
    batch = batch_of(completions_of(moe_model(name)))
    routes = (batch[4] + 3) % EXPERTS
    # An engine that computed a prompt of seven tokens again chose others.
    routes[4, 3] = (routes[4, 3] + 1) % EXPERTS
    results = []
    for is_other in (False, True):
        actor = Actor(moe_model(name, torch.float64)).train()
        if is_other and way == "checkpointed":
            actor.gradient_checkpointing_enable()
        if is_other and way in ("packed", "prefixes once"):
            actor.pack_samples()
            actor.share_prefixes(2 if way == "prefixes once" else None)
        cut = 4 if is_other and way == "in micro-batches" else 9
        for rows in (slice(0, cut), slice(cut, 9)):
            if not len(batch[0][rows]):
                continue
            loss_of(actor, batch, routes, rows).backward()
        results.append(gradient(actor))
    distance = (results[0] - results[1]).norm() / results[0].norm()
    assert distance < 1e-5  # routers compute in float32
    actor = Actor(moe_model(name, torch.float64))
    loss_of(actor, batch, None).backward()
    assert (gradient(actor) - results[0]).norm() > 1e-2 * results[0].norm()


def test_experts_that_do_not_fit_the_model_are_refused():
    batch = batch_of(completions_of(moe_model("qwen3_moe")))
    actor = Actor(moe_model("qwen3_moe"))
    with pytest.raises(RoutesError, match="recorded 4 bytes of experts a token"):
        loss_of(actor, batch, batch[4][..., :4])
    with pytest.raises(RoutesError, match="an expert that a layer does not have"):
        loss_of(actor, batch, batch[4] + EXPERTS)


def test_experts_of_all_layers_are_those_of_the_layers_that_choose():
    """As vLLM gives them: layers without experts have zeros."""
    batch = batch_of(completions_of(moe_model("deepseek_v3")))
    actor, routes = Actor(moe_model("deepseek_v3")), (batch[4] + 1) % EXPERTS
    whole = torch.cat([torch.zeros_like(routes[..., :K]), routes], dim=-1)
    with torch.no_grad():
        assert loss_of(actor, batch, whole) == loss_of(actor, batch, routes)


def test_a_later_pass_without_experts_chooses_again():
    batch = batch_of(completions_of(moe_model("mixtral")))
    actor = Actor(moe_model("mixtral"))
    with torch.no_grad():
        before = loss_of(actor, batch, None)
        other = loss_of(actor, batch, (batch[4] + 1) % EXPERTS)
        after = loss_of(actor, batch, None)
    assert before == after != other


def test_balance_counts_the_recorded_experts():
    model = moe_model("qwen3_moe")
    batch = batch_of(completions_of(model))
    actor = Actor(model)
    actor.enable_router_sums()
    ids, mask, scored, _, routes = batch
    routes = (routes + 1) % EXPERTS
    with torch.no_grad():
        sums = actor(ids, mask, scored_mask=scored, recorded=Replayed(routes=routes)).router_sums
        natural = actor(ids, mask, scored_mask=scored).router_sums
    is_recorded = mask & (mask.cumsum(1) < mask.sum(1, keepdim=True))
    counts = torch.bincount(routes[is_recorded].long().flatten(), minlength=EXPERTS)
    last = sum(int(m.sum()) > 0 for m in mask) * K * NUM_ROUTED["qwen3_moe"]
    assert int(sums[0].sum()) == int(counts.sum()) + last
    assert (sums[0] - counts).abs().sum() <= last
    assert (natural[0] - counts).abs().sum() > last


def test_rows_of_experts_are_put_where_they_belong():
    """Two calls: the second one computed the whole context again, with the same and new weights."""
    first = ("0001" * 3, "0203")  # three prompt positions, then the first response token
    again = "0405" * 6  # of the call after an observation
    parts = (*first, "", "", again)
    same = pack_routes(3, parts, [0, 0, -1, -1, 0]).reshape(-1, 2).tolist()
    assert same == [[0, 1]] * 3 + [[2, 3]] + [[4, 5]] * 3
    newer = pack_routes(3, ("0001" * 3, "0203", "0405" * 5), [0, 0, 1]).reshape(-1, 2).tolist()
    assert newer == [[4, 5]] * 5
