"""An independent recomputation of a step of a run, in float64, from what the run recorded of it.

    record         what a run writes of a step, and how it is read
    samples        raw completions to rows, masks and shaped rewards
    decisions      what options, a count of updates and the step before ask for
    advantages     estimators, KL in the reward, whitening
    pairs          numbers of run and audit, decisions at bounds, derivatives by autograd
    corrections    weights of tokens
    losses         policy losses, KL terms and the value loss; preference_losses those of answers
    models         plain transformers forward and backward passes
    optimizers     learning rates, clipping, SGD and Adam
    replay         the chain of all of these, compared with the run's values
    updates        optimizer steps of every stage; policy_updates, preference_updates,
                   reward_updates and supervised_updates have their objectives, given_rows what
                   rows of data are
    report         one audit from end to end, for each stage
    tolerances     how far a value may be off, by dtype; fixed beforehand

Nothing of `lightrft.algorithms`, `lightrft.experience` or `lightrft.trainer` is imported: a mistake
there cannot be repeated here. Formulas are those of the papers, written out in torch.
"""
