"""Tuning: chooses the schedule, the number of micro-batches, recomputation, and the number of stages per device.

    tuning = fxpipe.tune(model, ["cuda:0", "cuda:1"], example_args=(x,))
    print(tuning)                                               # the table of candidates
    pipe = fxpipe.pipeline(model, **tuning.best.arguments)

`candidates.py` lists candidates, `candidate_plans.py` plans them, `candidate_search.py` simulates them, and
`tuning_result.py` has the rows. `measure_candidates.py` runs the best few. `auto_options.py` implements `chunks="auto"`
and `schedule="auto"` of `fxpipe.pipeline`.
"""
