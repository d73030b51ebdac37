"""Tuning: which schedule, how many micro-batches, what is recomputed, how many stages on a device.

    tuning = fxpipe.tune(model, ["cuda:0", "cuda:1"], example_args=(x,))
    print(tuning)                                               # the table that it chose from
    pipe = fxpipe.pipeline(model, **tuning.best.arguments)

`candidates.py` lists what is tried, `candidate_plans.py` makes the plans that are simulated, `candidate_search.py`
simulates them, and `tuning_result.py` has the rows. `measure_candidates.py` runs the best few. `auto_options.py` is
`chunks="auto"` and `schedule="auto"` of `fxpipe.pipeline`.
"""
