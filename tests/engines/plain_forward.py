"""A plain forward pass of a model: log-probabilities of an engine's tokens and prompts."""

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from lightrft.engines import GenerationRequest, WeightPiece


def character_tokenizer(words):
    """One token each: a pad, an end, and characters, "?" among them."""
    tokenizer = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="␀", eos_token="␄", unk_token="?"
    )


def prompts(*lengths, first_id=0):
    """Requests with distinct prompts of these lengths."""
    return [
        GenerationRequest(tuple(2 + (11 * i + 5 * j) % 90 for j in range(length)), first_id + i)
        for i, length in enumerate(lengths)
    ]


def random_prompts(num_prompts, length):
    generator = torch.Generator().manual_seed(length)
    ids = torch.randint(2, 97, (num_prompts, length), generator=generator).tolist()
    return [GenerationRequest(tuple(row), i) for i, row in enumerate(ids)]


@torch.no_grad()
def forward_logits(model, completion):
    """[output tokens, vocab] logits that a completion's tokens were drawn from."""
    ids = torch.tensor([completion.prompt_token_ids + completion.output_token_ids])
    logits = model(input_ids=ids, use_cache=False).logits[0].float()
    return logits[len(completion.prompt_token_ids) - 1 : -1]


def largest_error(model, completions, temperature=1.0):
    """Largest difference between the engine's logprobs and those of forwards without a cache."""
    errors = []
    for completion in completions:
        logprobs = (forward_logits(model, completion) / temperature).log_softmax(-1)
        tokens = torch.tensor(completion.output_token_ids)[:, None]
        expected = logprobs.gather(-1, tokens)[:, 0]
        errors.append(float((expected - torch.tensor(completion.output_logprobs)).abs().max()))
    return max(errors)


def send(engine, model, *, resets_caches=True):
    """Send every parameter of a model in two pieces."""
    engine.begin_weight_update()
    for name, parameter in model.named_parameters():
        flat = parameter.detach().reshape(-1)
        cut = flat.numel() // 3
        shape = tuple(parameter.shape)
        engine.load_weights([WeightPiece(name, shape, 0, flat[:cut].clone())])
        engine.load_weights([WeightPiece(name, shape, cut, flat[cut:].clone())])
    engine.finish_weight_update()
    if resets_caches:
        engine.reset_caches()
    else:
        # Only the accounting: the engine keeps its cache.
        engine.weights.reset_caches()
