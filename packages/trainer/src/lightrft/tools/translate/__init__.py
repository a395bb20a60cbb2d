"""Scripts of other libraries as options of lightrft."""
