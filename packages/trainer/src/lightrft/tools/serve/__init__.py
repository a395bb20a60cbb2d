"""`lightrft serve`: the endpoint of agents without training."""
