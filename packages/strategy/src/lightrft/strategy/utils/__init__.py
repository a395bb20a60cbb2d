"""Names of the published interface under their published paths."""
