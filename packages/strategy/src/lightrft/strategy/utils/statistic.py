"""Generation lengths."""

from lightrft.strategy.engine.statistics import GenLenAnalyser as GenLenAnalyser
