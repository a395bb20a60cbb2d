"""Output of a run: console, metrics, tracker logs, the HTML report."""
