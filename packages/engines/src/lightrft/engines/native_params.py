"""Sampling parameters of a backend, turned into ours."""

import dataclasses
from collections.abc import Iterable

from lightrft.engines.types import SamplingParams

# A backend's name -> ours.
_NAMES = {field.name: field.name for field in dataclasses.fields(SamplingParams)} | {
    "max_new_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
    "sampling_seed": "seed",
}
# Fields about text and the backend's form of answers; a `Completion` has ids and logprobs.
_NEUTRAL = frozenset(
    {
        # vLLM
        "logprobs",
        "flat_logprobs",
        "detokenize",
        "skip_special_tokens",
        "spaces_between_special_tokens",
        "include_stop_str_in_output",
        "output_kind",
        "stream_interval",
        "skip_clone",
        "output_text_buffer_length",
        "_all_stop_token_ids",
        "_eos_token_id",
        "_watermarking_skipped",
        "_bad_words_token_ids",
        # SGLang
        "no_stop_trim",
        "stop_strs",
        "stop_str_max_len",
        "stop_regex_strs",
        "stop_regex_max_len",
        "is_normalized",
    }
)
# SGLang writes "all tokens" as 2**30.
_ALL_TOKENS = (0, None, 1 << 30)


def params_of_native(native: object) -> SamplingParams | None:
    """Convert sampling parameters of vLLM or SGLang to ours, by the names of their fields.

    Fields without a counterpart must be at the backend's default.

    Returns:
        Our parameters; None if the object is of another kind.

    Raises:
        ValueError: Unsupported fields are set (penalties, biases, grammars or the like); the
            message names all of them.
    """
    fields = _fields(native)
    if not fields.keys() & {"max_tokens", "max_new_tokens", "temperature"}:
        return None
    try:
        defaults = _fields(type(native)())
    except TypeError:  # the class needs arguments
        defaults = dict.fromkeys(fields)
    kind = f"{type(native).__module__}.{type(native).__qualname__}"
    usable = {theirs: ours for theirs, ours in _NAMES.items() if theirs in fields}
    refused = sorted(
        f"{name}={value!r}"
        for name, value in fields.items()
        if name not in usable and name not in _NEUTRAL and value != defaults.get(name)
    )
    if refused:
        raise ValueError(
            f"{kind} sampling parameters that cannot be used here: {', '.join(refused)}; "
            "completions follow the model's own distribution at the given temperature, top_p, "
            f"top_k and min_p; leave them out (usable: {', '.join(sorted(usable))})"
        )
    values = {ours: fields[theirs] for theirs, ours in usable.items()}
    if values.get("max_tokens") is None:
        bound = next((name for name, ours in usable.items() if ours == "max_tokens"), "max_tokens")
        raise ValueError(f"{kind} sampling parameters without a bound on the tokens: set {bound}")
    values["seed"] = values.get("seed") or 0
    values["top_k"] = -1 if values.get("top_k") in _ALL_TOKENS else values["top_k"]
    for name in ("stop", "stop_token_ids"):
        values[name] = _as_tuple(values.get(name))
    return SamplingParams(**values)  # type: ignore[arg-type]


def _as_tuple(value: object) -> tuple[object, ...]:
    if value is None:
        return ()
    if isinstance(value, list | tuple | set | frozenset):
        return tuple(sorted(value, key=str) if isinstance(value, set | frozenset) else value)
    return (value,)


def _fields(native: object) -> dict[str, object]:
    """Return fields by name, of a struct (msgspec) or a plain object."""
    names: Iterable[str] = getattr(type(native), "__struct_fields__", ())
    return {name: getattr(native, name) for name in names} or dict(getattr(native, "__dict__", {}))
