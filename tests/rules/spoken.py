"""Models whose next token does not depend on what came before, for the rules of samples."""

import json

import torch
from tests import runs

from lightrft.tools.model_presets import byte_level_tokenizer, random_model, save_checked

NUM_IDS = 261
END, USER = 257, 258
ROWS = [{"input": f"Say {n}.", "label": "A"} for n in range(4)]
SMALL = {
    **runs.SMALL,
    "generate_max_len": 12,
    "max_steps": 1,
    "save_rollouts": True,
    "check_memory": False,
}


def spoken_model(folder, logits, *, num_rows=NUM_IDS):
    """A folder of a model that gives these tokens these logits, and all others -40.

    Its configurations name no end, so that only tokenizer and chat template know one.
    """
    from transformers import PhiConfig

    tokenizer = byte_level_tokenizer()
    config = PhiConfig(
        vocab_size=num_rows,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
    )
    model = random_model(config, tokenizer, 1)
    with torch.no_grad():
        model.lm_head.weight.zero_()
        model.lm_head.bias.fill_(-40.0)
        for token, value in logits.items():
            model.lm_head.bias[token] = value
    save_checked(model, tokenizer, folder / "model", sample="a b")
    for name in ("config.json", "generation_config.json"):
        path = folder / "model" / name
        path.write_text(json.dumps({**json.loads(path.read_text()), "eos_token_id": None}))
    return str(folder / "model")


def rollouts(folder):
    """Every sample of a run, as `save_rollouts` writes it."""
    return [json.loads(line) for line in (folder / "rollouts.jsonl").read_text().splitlines()]
