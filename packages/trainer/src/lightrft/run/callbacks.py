"""User code between the steps of a run."""

from collections.abc import Mapping, Sequence

from lightrft.config import ConfigError


class Callback:
    """Calls around the steps; a subclass overrides what it needs.

    All methods are called on every rank, so that they may use collectives.
    """

    def begin_step(self, step: int) -> None:
        """Run before the data of a step is drawn.

        Args:
            step: Number of the step, counted from 1.
        """

    def end_step(self, step: int, metrics: Mapping[str, float]) -> Mapping[str, float]:
        """Run after the update of a step, its sync and its evaluation.

        Args:
            step: Number of the step.
            metrics: Metrics of the step, exact over all ranks.

        Returns:
            Further metrics, such as a user-defined evaluation; those of the first rank are logged.
        """
        return {}

    def wants_stop(self) -> bool:
        """Return whether the run ends with this step, as with its last; called after `end_step`.

        True on one rank ends the run on all of them.
        """
        return False


_METHODS = ("begin_step", "end_step", "wants_stop")


def require_callbacks(callbacks: Sequence[object]) -> None:
    """Raise a ConfigError that names the first object that is no callback, and the remedy."""
    for each in callbacks:
        kind = each if isinstance(each, type) else type(each)
        if isinstance(each, type):
            raise ConfigError(f"callbacks: got the class {kind.__name__}: give {kind.__name__}()")
        if all(callable(getattr(each, name, None)) for name in _METHODS):
            continue
        is_theirs = any(name.startswith("on_") for name in dir(kind))
        what = "is a callback of transformers" if is_theirs else "lacks methods of a callback"
        raise ConfigError(
            f"callbacks: {kind.__name__} {what}: subclass lightrft.trainer.Callback and write "
            "end_step(self, step, metrics), which is called after each step (begin_step(self, "
            "step) before it; wants_stop(self) ends the run)"
        )


class Callbacks:
    """Several callbacks as one.

    Args:
        callbacks: Callbacks in the order of their calls.
    """

    def __init__(self, callbacks: Sequence[Callback]) -> None:
        self._callbacks = tuple(callbacks)

    def begin_step(self, step: int) -> None:
        """Run `begin_step` of all callbacks."""
        for callback in self._callbacks:
            callback.begin_step(step)

    def end_step(self, step: int, metrics: Mapping[str, float]) -> dict[str, float]:
        """Return the metrics with those of the callbacks.

        Raises:
            ValueError: A callback returns an existing metric, or something else than numbers.
        """
        merged = dict(metrics)
        for callback in self._callbacks:
            added: Mapping[str, object] = callback.end_step(step, metrics) or {}
            for name, value in added.items():
                where = f"{type(callback).__name__}.end_step: metric {name!r}"
                if name in merged:
                    raise ValueError(f"{where} is there already: give it another name")
                if not isinstance(value, int | float):
                    kind = type(value).__name__
                    raise ValueError(f"{where}: expected a number, got {value!r} ({kind})")
                merged[name] = float(value)
        return merged

    def wants_stop(self) -> bool:
        """Return whether a callback ends the run."""
        return any(callback.wants_stop() for callback in self._callbacks)
