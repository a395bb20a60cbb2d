"""Learning from preferences as a stage: pairs of answers, or labelled answers."""
