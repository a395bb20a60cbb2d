"""Samplers that decide the order of rows; `config.registry.PROMPT_SAMPLERS` names them."""
