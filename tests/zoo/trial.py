"""Runs rows of one model in a process of its own: `python -m zoo.trial NAME 'fxpipe train 3' 'pipelining eval 3'`.

Each row is printed as a line of JSON behind a mark, since libraries print what they like.
"""

import dataclasses
import json
import sys
import warnings

MARK = "@row "


def main() -> None:
    import torch
    from helpers.called_functions import called

    from zoo import BY_NAME
    from zoo.row import Row
    from zoo.ways import run

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    name, *tasks = sys.argv[1:]
    why_not_built = ""
    if name in BY_NAME:
        entry = BY_NAME[name]
    else:
        from tools.drawn_models import entry_of

        entry = entry_of(name)
        try:
            entry.build()
        except Exception as error:  # of sizes that do not fit each other
            why_not_built = f"{type(error).__name__}: {error}"
    for task in tasks:
        way, mode, stages = task.split()
        called.clear()
        if why_not_built:
            row = Row(entry.name, entry.family, way, mode, int(stages), "not built", why_not_built[:300])
        else:
            row = dataclasses.replace(run(entry, way, mode, int(stages)), called=sorted(called))
        print(MARK + json.dumps(dataclasses.asdict(row)), flush=True)


if __name__ == "__main__":
    main()
