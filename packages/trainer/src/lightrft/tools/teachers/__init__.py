"""Teachers behind servers."""
