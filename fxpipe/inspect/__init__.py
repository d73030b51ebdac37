"""Shows a plan and its step before it runs: `python -m fxpipe.inspect`, a thin layer over the library.

`cli` is the command, from its options (`cli_options`) to its output. A `table` is shown as text, in notebooks and in
reports: `plan_text` has those of a plan, `step_summary` those of a step, `sweep` and `tuning_text` those of many.
`json_document` makes the document for programs, `report` a page of HTML. Pictures are data (`scene`), which `svg`
writes: `gantt` draws a step, `stage_graph` a plan, `memory_chart` memory.
"""
