"""Shows a plan and its step before it runs: `python -m fxpipe.inspect`, a thin layer over the library.

The files here are the command, from its options to its output: `step_summary` and `sweep` make comparisons as data and
as text, `json_document` makes the document for programs, `report` and `report_sections` make HTML reports.
Plans and steps print themselves, by `fxpipe.plans.display` and `fxpipe.simulation.text_timeline`; the picture of a
plan is `fxpipe.viz.stage_graph`.
"""
