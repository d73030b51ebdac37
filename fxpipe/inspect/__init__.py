"""Shows a plan and its step before it runs: `python -m fxpipe.inspect`, a thin layer over the library.

`cli` is the command, from its options (`cli_options`) to its output: `step_summary` and `sweep` compare steps,
`json_document` makes the document for programs, `report` and `report_sections` make HTML reports.
Pictures are data (`scene`), which `svg` writes: `gantt` draws a step, `stage_graph` a plan, `memory_chart` memory.
"""
