"""Shows a plan and its step before it runs: `python -m fxpipe.inspect`, a thin layer over the library.

`cli` is the command, from its options (`cli_options`) through its work (`run`) to its output. A `table` is shown as
text, in notebooks and in reports: `plan_text` has the tables of a plan and of a tuner, `step_summary` of steps.
`json_document` makes the JSON document, `report` an HTML page. Pictures are data that `svg` writes:
`gantt` draws a step with its memory, `stage_graph` a plan.
"""
