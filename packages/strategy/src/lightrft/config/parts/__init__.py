"""Options by the part of a run that takes them; `TrainConfig` joins them to one record."""
