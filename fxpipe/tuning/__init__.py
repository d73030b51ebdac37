"""Tuning: which schedule, how many micro-batches, what is recomputed, how many stages on a device.

    tuning = fxpipe.tune(model, ["cuda:0", "cuda:1"], example_args=(x,))
    print(tuning)                                               # the table that it chose from
    pipe = fxpipe.pipeline(model, **tuning.best.arguments)

`candidates_of_model.py` says what is tried, `candidate_plans.py` makes the plans that are simulated,
`search_candidates.py` goes through them; `rows.py` has what it finds of each, and `tuning_result.py` all of it.
`measure_candidates.py` runs the best few. `auto_options.py` is what `chunks="auto"` and `schedule="auto"` do in
`fxpipe.pipeline`: pipes choose by it, and the tuner measures by pipes.
"""
