"""Export of a trained model."""
