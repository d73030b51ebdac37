"""Tuning: chooses the schedule, the number of micro-batches, recomputation, and the number of stages per device.

`candidates.py` lists candidates, plans and simulates them, and has their results, also for `chunks="auto"` and
`schedule="auto"` of `fxpipe.pipeline`.
"""
