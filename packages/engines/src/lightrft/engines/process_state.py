"""Process state around a backend: settings that it must not change."""

import os
import random
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import numpy as np
import torch


@contextmanager
def preserved_process_state(inner_threads: int | None = None) -> Iterator[None]:
    """Restore random states, thread count and default dtype, also after an exception.

    A backend may even replace `torch.set_num_threads` itself, so the function is restored too.

    Args:
        inner_threads: CPU threads of torch within the context; None leaves them unchanged.
    """
    set_num_threads = torch.set_num_threads
    num_threads = torch.get_num_threads()
    if inner_threads not in (None, num_threads):
        torch.set_num_threads(inner_threads)
    dtype = torch.get_default_dtype()
    python_state = random.getstate()
    numpy_state = np.random.get_state()  # noqa: NPY002 - the global generator is what is kept
    torch_state = torch.random.get_rng_state()
    cuda_state = torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None
    try:
        yield
    finally:
        torch.set_num_threads = set_num_threads
        if torch.get_num_threads() != num_threads:
            torch.set_num_threads(num_threads)
        torch.set_default_dtype(dtype)
        random.setstate(python_state)
        np.random.set_state(numpy_state)  # noqa: NPY002
        torch.random.set_rng_state(torch_state)
        if cuda_state is not None:
            torch.cuda.set_rng_state(cuda_state)


@contextmanager
def replaced_environment(values: Mapping[str, str | None]) -> Iterator[None]:
    """Set variables within the context; None unsets one."""
    before = {name: os.environ.get(name) for name in values}
    _set_environment(values)
    try:
        yield
    finally:
        _set_environment(before)


def _set_environment(values: Mapping[str, str | None]) -> None:
    for name, value in values.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


@contextmanager
def environment(defaults: Mapping[str, str]) -> Iterator[None]:
    """Set variables within the context, unless the user has set them."""
    absent = {name: value for name, value in defaults.items() if name not in os.environ}
    with replaced_environment(absent):
        yield


@contextmanager
def deepspeed_unless_used() -> Iterator[None]:
    """Prevent an import of DeepSpeed within the context, unless it is imported already.

    When transformers saves a model, it asks DeepSpeed whether the model is one of its engines. In
    programs that do not use it, that import takes seconds and warns about accelerators.
    """
    if "deepspeed" in sys.modules:
        yield
        return
    sys.modules["deepspeed"] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        del sys.modules["deepspeed"]
