"""Tuning: chooses the schedule, the number of micro-batches, recomputation, and the number of stages per device.

    tuning = fxpipe.tune(model, ["cuda:0", "cuda:1"], example_args=(x,))
    print(tuning)                                               # the table of candidates
    pipe = fxpipe.pipeline(model, **tuning.best.arguments)

`candidates.py` lists candidates and has their results, `candidate_plans.py` plans them, `candidate_search.py` simulates
them. `measure_candidates.py` runs the best few. `auto_options.py` implements `chunks="auto"`
and `schedule="auto"` of `fxpipe.pipeline`.
"""
