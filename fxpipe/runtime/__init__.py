"""The runtime: runs a program of stages on devices, a step at a time.

It depends on the compiler by `fxpipe.rewriting.program` only: stages are callables, values have names. From the bottom:
`wiring` (dependencies of actions), `bound_program`, `transport` (copies between devices), `exchange` (values and
gradients between stages), `stage_instance` (a stage in a step), `loss_stage`, `caller_context` (thread-local state),
`executors` (workers and the actions of their rows), `step`, `stage_updates` (U after a step), `engine` (complete
steps), `stream`. `step_inputs`, `losses`, `loss_checks` and `commit` are the two ends; `step_record` has the notes.
"""
