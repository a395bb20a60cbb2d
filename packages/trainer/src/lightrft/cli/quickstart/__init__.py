"""A complete run on a laptop: a tiny model is made, taught carelessly, and mended by its reward."""
