"""What a run shows: console, metrics, tracker logs, the HTML report."""
