"""Sampling options of calls against those of the run: which win, and how clients differ."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Protocol

from lightrft.engines.types import SamplingParams
from lightrft.rollout.agents.http_server import HttpError
from lightrft.rollout.agents.messages import CallOptions, refused


class SamplingRule(Protocol):
    """Rule for the sampling options of a call."""

    @property
    def max_tokens(self) -> int:
        """Maximum number of tokens of an answer."""
        ...

    def params(self, options: CallOptions) -> SamplingParams:
        """Return the parameters of one sample.

        Raises:
            HttpError: The client's options are not supported.
        """
        ...


@dataclass(slots=True)
class RunSampling:
    """Rule by which the run's options win, because training depends on them.

    Args:
        own: Sampling parameters of the run.
        takes_stops: Whether clients may set stop strings.
        differences: Ignored requests of clients by option; each is reported once.
    """

    own: SamplingParams
    takes_stops: bool = True
    differences: dict[str, str] = field(default_factory=dict)

    @property
    def max_tokens(self) -> int:
        """Maximum number of tokens of an answer."""
        return self.own.max_tokens

    def params(self, options: CallOptions) -> SamplingParams:
        """Return the run's parameters with the client's stop strings."""
        if options.stop and not self.takes_stops:
            raise refused("stop is not supported by an engine of several ranks", "stop")
        known = vars_of(self.own)
        for name, value in options.sampling.items():
            # A seed only distinguishes equal calls, see `CallOptions.mark`.
            if name != "seed" and value != known[name]:
                self.differences.setdefault(name, f"{name} {known[name]:g} instead of {value:g}")
        return replace(self.own, n=1, stop=(*self.own.stop, *options.stop))


@dataclass(slots=True)
class ClientSampling:
    """Rule by which the client's options win, as on model servers.

    Args:
        defaults: Parameters that a client does not set.
    """

    defaults: SamplingParams

    @property
    def max_tokens(self) -> int:
        """Maximum number of tokens of an answer."""
        return self.defaults.max_tokens

    def params(self, options: CallOptions) -> SamplingParams:
        """Return the defaults with the client's options."""
        values = dict(options.sampling)
        whole = {name: int(values.pop(name)) for name in ("seed", "top_k") if name in values}
        stop = (*self.defaults.stop, *options.stop)
        try:
            return replace(self.defaults, n=1, stop=stop, **whole, **values)  # type: ignore[arg-type]
        except ValueError as error:
            raise HttpError(400, str(error), code="invalid_sampling") from error


def vars_of(params: SamplingParams) -> dict[str, float]:
    """Return the sampling distribution by option name."""
    return dict(zip(("temperature", "top_p", "top_k", "min_p"), params.distribution, strict=True))
