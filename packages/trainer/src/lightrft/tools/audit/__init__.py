"""Independent recomputation of one training step in float64 from the record of the run.

    record         record of a step: writer and reader
    samples        raw completions to rows, masks and shaped rewards
    decisions      values implied by options, the count of updates and the previous step
    advantages     estimators, KL in the reward, whitening
    pairs          values of run and audit, decisions at bounds, inputs moved by rounding
    corrections    weights of tokens
    losses         policy losses, KL terms and the value loss; preference_losses for answers
    models         plain transformers forward and backward passes
    optimizers     learning rates, clipping, SGD and Adam
    replay         forward part of a step, compared with the run's values
    batches        contents of optimizer steps and micro batches
    updates        optimizer steps of every stage; objectives are in policy_updates,
                   preference_updates and row_updates
    report         one audit from end to end, for each stage
    tolerances     allowed error of each value, by dtype; fixed beforehand

This package imports nothing from `lightrft.algorithms`, `lightrft.experience` or
`lightrft.trainer`, so it cannot repeat a mistake made there. Formulas come from the papers and are
written out in torch.
"""
