"""The pipe that users hold, in one process.

`pipeline_module` (the module, which passes for the model), `pipeline_class` (its class, made of the model's),
`pipeline_state` (its plan, graphs and engine), `graph_cache` (graphs by what they hold for), `train_stream` (loops
without a flush), `parameter_groups` and `optimizer_state` (optimizers of models whose stages move), `verification`
(`fxpipe.verify`).
"""
