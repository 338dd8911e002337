"""The autograder of phase 2, "A model too large": grades your template files.

pytest tests/test_phase2.py, or python tests/test_phase2.py, or distlab check --phase 2.
"""

from collections.abc import Iterator

import pytest

from distlab.grading.front import NotJudgedHereError, PhaseFront

FRONT = PhaseFront(2, __file__)
HEADER = FRONT.header


@pytest.fixture(scope="module")
def front() -> Iterator[PhaseFront]:
    with FRONT:
        yield FRONT


@pytest.mark.parametrize("task_id", FRONT.task_ids)
def test_task(front: PhaseFront, task_id: str) -> None:
    try:
        failure = front.failure(task_id)
    except NotJudgedHereError as reason:
        pytest.skip(str(reason))
    if failure:
        pytest.fail(failure, pytrace=False)


if __name__ == "__main__":
    raise SystemExit(FRONT.main())
