"""A tiny model that knows one line, for judges whose answers must be readable."""

from itertools import pairwise

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from lightrft.tools.model_presets import ASSISTANT, END, write_tiny_model


def write_chain_model(folder, start, last):
    """A model that answers with `start`, one character of `last`, and the end.

    Each token follows from the one before alone, so no character may come twice; of several in
    `last` each is equally likely at temperature 1.
    """
    write_tiny_model(folder, "tiny-qwen3", seed=1)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    ids = [tokenizer.convert_tokens_to_ids(ASSISTANT), *start.encode()]
    end = tokenizer.convert_tokens_to_ids(END)
    follows = [*pairwise(ids), *((ids[-1], each) for each in last.encode())]
    follows += [(each, end) for each in last.encode()]
    assert len({*ids, *last.encode()}) == len(ids) + len(last)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        embedding = model.model.embed_tokens.weight
        model.lm_head.weight.zero_()
        for token, following in follows:
            own = embedding[token] / embedding[token].norm()
            model.lm_head.weight[following] += 8 * own
    model.config.max_position_embeddings = 8192
    model.save_pretrained(folder)
