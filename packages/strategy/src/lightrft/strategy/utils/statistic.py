"""Generation lengths."""

from lightrft.strategy.engine.generation import GenLenAnalyser as GenLenAnalyser
