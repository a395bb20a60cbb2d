"""Advantage estimators.

Outcome estimators need every completion of a prompt, which may sit on several ranks, so they work
on the rows of *all* ranks and give one number per row (`row_level`). Token-level estimators work
on local rows (`token_level`). Options are keyword-only arguments. Neither normalises over the
batch; the caller does so once, with moments over all ranks, where the estimator's traits ask for
it:

    traits = advantage_traits(estimator)
    if traits.is_token_level:
        rewards_bt = token_rewards(rewards, mask, kl=kl, kl_coef=coef)            # local rows
        result = estimator(TokenAdvantageInputs(rewards_bt, mask, ...))
    else:
        rows = estimator(RowAdvantageInputs(...))                                 # global rows
        result = broadcast_to_tokens(rows[mine], mask, kl=kl, kl_coef=coef)       # local rows
    if traits.whitens:
        moments = masked_moments(result.advantages, mask, sum_over_ranks=...)     # the caller's
        advantages = whiten(result.advantages, mask, moments)
"""
