"""A user's own code between the steps of a run."""

from collections.abc import Mapping, Sequence

from lightrft.config import ConfigError


class Callback:
    """Calls around the steps; a subclass overrides what it needs.

    All methods are called on every rank, so that they may use collectives.
    """

    def begin_step(self, step: int) -> None:
        """Called before the data of a step is drawn.

        Args:
            step: Its number, counted from 1.
        """

    def end_step(self, step: int, metrics: Mapping[str, float]) -> Mapping[str, float]:
        """Called after the update of a step, its sync and its evaluation.

        Args:
            step: Its number.
            metrics: Exact over all ranks.

        Returns:
            Further metrics, say of an evaluation of one's own; those of the first rank are logged.
        """
        return {}

    def wants_stop(self) -> bool:
        """Whether the run ends with this step, as it would with its last; asked after `end_step`.

        One rank that says yes ends the run on all of them.
        """
        return False


_METHODS = ("begin_step", "end_step", "wants_stop")


def require_callbacks(callbacks: Sequence[object]) -> None:
    """Raises a ConfigError that names the first object that is no callback, and what to write."""
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
    """Several of them as one.

    Args:
        callbacks: Called in this order.
    """

    def __init__(self, callbacks: Sequence[Callback] = ()) -> None:
        self._callbacks = tuple(callbacks)

    def __bool__(self) -> bool:
        return bool(self._callbacks)

    def begin_step(self, step: int) -> None:
        """See `Callback.begin_step`."""
        for callback in self._callbacks:
            callback.begin_step(step)

    def end_step(self, step: int, metrics: Mapping[str, float]) -> dict[str, float]:
        """The metrics with what the callbacks add.

        Raises:
            ValueError: One returns a metric that is there already, or something else than numbers.
        """
        found = dict(metrics)
        for callback in self._callbacks:
            own: Mapping[str, object] = callback.end_step(step, metrics) or {}
            for name, value in own.items():
                where = f"{type(callback).__name__}.end_step: metric {name!r}"
                if name in found:
                    raise ValueError(f"{where} is there already: give it another name")
                if not isinstance(value, int | float):
                    kind = type(value).__name__
                    raise ValueError(f"{where}: expected a number, got {value!r} ({kind})")
                found[name] = float(value)
        return found

    def wants_stop(self) -> bool:
        """Whether one of them says so."""
        return any(callback.wants_stop() for callback in self._callbacks)
