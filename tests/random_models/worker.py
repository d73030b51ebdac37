"""Judges cases in a process of its own, so that one that crashes or hangs is a verdict, and the next go on.

`python -m random_models.worker` answers a case, as a line of JSON, with the fields of its verdict.
"""

import dataclasses

from helpers.answering import AnsweringProcess, NoAnswerError, serve

from random_models.case import Case


class Worker(AnsweringProcess):
    """A process that judges one case at a time; another one where it ends or takes too long."""

    def __init__(self, limit: float):
        super().__init__("random_models.worker", limit=limit)

    def judge(self, case: Case) -> dict[str, object]:
        """The fields of a verdict."""
        try:
            verdict: dict[str, object] = self.ask(case.to_json())
        except NoAnswerError as error:
            verdict = {"kind": error.kind, "detail": str(error), "refused_steps": []}
        return verdict


if __name__ == "__main__":
    from random_models.judge import judge

    serve(lambda line: dataclasses.asdict(judge(Case.from_json(line))))
