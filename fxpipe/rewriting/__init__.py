"""Rewriting: stage numbers become stages, skips become portals.

    program = split_into_stages(traced, starts=(0, 12), devices=(cpu, cpu))
    print(program.stages[1].code)

`forbidden_cuts` returns where cuts are not allowed. The runtime reads only `program`.
"""
