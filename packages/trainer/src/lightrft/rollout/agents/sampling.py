"""Options of calls beside those of the run: what wins, and what is told of the difference."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Protocol

from lightrft.engines.types import SamplingParams
from lightrft.rollout.agents.http_server import HttpError
from lightrft.rollout.agents.messages import CallOptions, refused


class SamplingRule(Protocol):
    """The sampling of a call."""

    @property
    def max_tokens(self) -> int:
        """Of an answer."""
        ...

    def params(self, options: CallOptions) -> SamplingParams:
        """For one sample.

        Raises:
            HttpError: The client asks for what cannot be done.
        """
        ...


@dataclass(slots=True)
class RunSampling:
    """Options of the run win over those of clients, or the tokens could not be trained on.

    Args:
        own: Of the run.
        takes_stops: Clients may give stop strings.
        differences: By option, what clients asked for and did not get; told once.
    """

    own: SamplingParams
    takes_stops: bool = True
    differences: dict[str, str] = field(default_factory=dict)

    @property
    def max_tokens(self) -> int:
        """Of an answer."""
        return self.own.max_tokens

    def params(self, options: CallOptions) -> SamplingParams:
        """See `SamplingRule`."""
        if options.stop and not self.takes_stops:
            raise refused("stop is not supported by an engine of several ranks", "stop")
        known = vars_of(self.own)
        for name, value in options.sampling.items():
            # A seed tells equal calls apart: see `CallOptions.mark`.
            if name != "seed" and value != known[name]:
                self.differences.setdefault(name, f"{name} {known[name]:g} instead of {value:g}")
        return replace(self.own, n=1, stop=(*self.own.stop, *options.stop))


@dataclass(slots=True)
class ClientSampling:
    """Options of clients win, as servers of models have it.

    Args:
        defaults: Where a client says nothing.
    """

    defaults: SamplingParams

    @property
    def max_tokens(self) -> int:
        """Of an answer."""
        return self.defaults.max_tokens

    def params(self, options: CallOptions) -> SamplingParams:
        """See `SamplingRule`."""
        given = dict(options.sampling)
        whole = {name: int(given.pop(name)) for name in ("seed", "top_k") if name in given}
        stop = (*self.defaults.stop, *options.stop)
        try:
            return replace(self.defaults, n=1, stop=stop, **whole, **given)  # type: ignore[arg-type]
        except ValueError as error:
            raise HttpError(400, str(error), code="invalid_sampling") from error


def vars_of(params: SamplingParams) -> dict[str, float]:
    """The distribution by the names of its options."""
    return dict(zip(("temperature", "top_p", "top_k", "min_p"), params.distribution, strict=True))
