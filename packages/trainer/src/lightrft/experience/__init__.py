"""Training data made from prompts: rollouts, rewards, model outputs, advantages."""
