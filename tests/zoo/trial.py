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
    from zoo.ways import run

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    name, *tasks = sys.argv[1:]
    for task in tasks:
        way, mode, stages = task.split()
        called.clear()
        row = dataclasses.replace(run(BY_NAME[name], way, mode, int(stages)), called=sorted(called))
        print(MARK + json.dumps(dataclasses.asdict(row)), flush=True)


if __name__ == "__main__":
    main()
