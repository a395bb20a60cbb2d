"""A complete run on a laptop: a tiny model is taught carelessly, and corrected by its reward."""
