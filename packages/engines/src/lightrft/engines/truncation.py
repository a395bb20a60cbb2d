"""Which engines apply several truncations in another order than `keep_support`."""


def has_known_order(
    engine_name: str | None, *, top_k: int, top_p: float, min_p: float = 0.0
) -> bool:
    """Whether what the engine keeps follows from the logits as in `lightrft.engines.hf.sampling`.

    SGLang takes top_p of the mass before top_k, and vLLM min_p before both; one truncation alone
    is the same everywhere.

    Args:
        engine_name: Of the engine; None is the embedded one's order.
        top_k, top_p, min_p: As in `SamplingParams`.
    """
    is_combined = (top_k != -1) + (top_p < 1) + (min_p > 0) > 1
    others = {"sglang": is_combined, "vllm": is_combined and min_p > 0}
    return not others.get(engine_name or "hf", False)
