"""Policy losses, one file each: (logprobs, old_logprobs, advantages, response_mask) -> TokenLoss.

A loss states its hyper-parameters as keyword-only arguments and declares its paper's aggregation
(`lightrft.algorithms.policy_loss`).
"""
