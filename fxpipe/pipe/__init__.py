"""The pipe that users hold, in one process.

`pipeline_module` (the module), `pipeline_class` (its class, derived from the model's), `pipeline_state` (its engine and
parameters), `programs` (which program a step runs), `model_calls` (parsing of mini-batches and micro-batches),
`train_stream` (loops without a flush), `verification` (`fxpipe.verify`).
"""
