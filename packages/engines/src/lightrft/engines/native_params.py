"""Sampling parameters of a backend, turned into ours."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from lightrft.engines.types import SamplingParams

_PLAIN_NAMES = (
    "n", "temperature", "top_p", "top_k", "min_p", "max_tokens", "min_tokens", "stop",
    "stop_token_ids", "ignore_eos", "seed",
)  # fmt: skip


def params_from_native(
    given: Mapping[str, object],
    defaults: Mapping[str, object],
    *,
    engine_name: str,
    renamed: Mapping[str, str],
    neutral: Collection[str] = (),
) -> SamplingParams:
    """Ours from a backend's own; what has no counterpart must be at the backend's default.

    Args:
        given: Every field of the backend's object.
        defaults: The same fields of a new one.
        engine_name: For messages.
        renamed: Backend's name -> our name, where they differ.
        neutral: Fields that change no sampled token and nothing in a `Completion`.

    Raises:
        ValueError: A field that we cannot honour is set; the message names all of them.
    """
    names = {name: name for name in _PLAIN_NAMES if name in given} | dict(renamed)
    refused = sorted(
        name
        for name, value in given.items()
        if name not in names and name not in neutral and value != defaults.get(name)
    )
    if refused:
        raise ValueError(
            f"{engine_name} sampling parameters that cannot be used here: "
            + ", ".join(f"{name}={given[name]!r}" for name in refused)
            + "; completions follow the model's own distribution at the given temperature, top_p, "
            f"top_k and min_p; leave them out (usable: {', '.join(sorted(names))})"
        )
    values = {ours: given[name] for name, ours in names.items()}
    if values.get("max_tokens") is None:
        raise ValueError(
            f"{engine_name} sampling parameters without a bound on the tokens: set "
            + next((name for name, ours in names.items() if ours == "max_tokens"), "max_tokens")
        )
    values["seed"] = values.get("seed") or 0
    values["top_k"] = -1 if values.get("top_k") in (0, None, _SGLANG_TOP_K_ALL) else values["top_k"]
    for name in ("stop", "stop_token_ids"):
        values[name] = _as_tuple(values.get(name))
    return SamplingParams(**values)  # type: ignore[arg-type]


# SGLang writes "all tokens" as 2**30.
_SGLANG_TOP_K_ALL = 1 << 30


def _as_tuple(value: object) -> tuple[object, ...]:
    if value is None:
        return ()
    if isinstance(value, list | tuple | set | frozenset):
        return tuple(sorted(value, key=str) if isinstance(value, set | frozenset) else value)
    return (value,)


# Fields about text and the form of a backend's own answers; a `Completion` has ids and logprobs.
_NEUTRAL = frozenset(
    {
        # vLLM
        "logprobs", "flat_logprobs", "detokenize", "skip_special_tokens",
        "spaces_between_special_tokens", "include_stop_str_in_output", "output_kind",
        "stream_interval", "skip_clone", "output_text_buffer_length", "_all_stop_token_ids",
        "_eos_token_id", "_watermarking_skipped", "_bad_words_token_ids",
        # SGLang
        "no_stop_trim", "stop_strs", "stop_str_max_len", "stop_regex_strs", "stop_regex_max_len",
        "is_normalized",
    }
)  # fmt: skip
_RENAMED = {
    "max_new_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
    "sampling_seed": "seed",
}


def params_of_native(native: object) -> SamplingParams | None:
    """Ours from sampling parameters in the form of vLLM or SGLang, by the names of their fields.

    Raises:
        ValueError: They set penalties, biases, grammars or the like.
    """
    given = _fields(native)
    if not given.keys() & {"max_tokens", "max_new_tokens", "temperature"}:
        return None
    try:
        defaults = _fields(type(native)())
    except TypeError:  # no object without arguments
        defaults = dict.fromkeys(given)
    return params_from_native(
        given,
        defaults,
        engine_name=f"{type(native).__module__}.{type(native).__qualname__}",
        renamed={theirs: ours for theirs, ours in _RENAMED.items() if theirs in given},
        neutral=_NEUTRAL,
    )


def _fields(native: object) -> dict[str, object]:
    """Values by name, of a struct (msgspec) or a plain object."""
    names: Iterable[str] = getattr(type(native), "__struct_fields__", ())
    return {name: getattr(native, name) for name in names} or dict(getattr(native, "__dict__", {}))
