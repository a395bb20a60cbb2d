"""From prompts to what a trainer learns from: rollouts, rewards, model outputs, advantages."""
