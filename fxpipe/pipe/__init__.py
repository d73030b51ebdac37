"""The pipe that users hold, in one process.

`pipeline_module` (the module, which passes for the model), `pipeline_class` (its class, made of the model's),
`pipeline_state` (its plan and engine), `graph_finder` and `graph_cache` (which graphs a step runs), `program_binding`
(a graph on devices), `model_calls` (mini-batches and micro-batches as users give them), `train_stream` (loops without a
flush), `parameter_groups` and `optimizer_state` (optimizers of models whose stages move), `verification`
(`fxpipe.verify`).
"""
