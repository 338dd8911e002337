"""What a training of the engines goes on from, and where it ends then."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.workbench.engine_probes import Net, fit


@pytest.mark.parametrize("max_steps", [2, 3])
def test_a_checkpoint_that_has_all_steps_is_not_trained_on(
    max_steps: int, tmp_path: Path
) -> None:
    first = fit(checkpoint_dir=tmp_path)
    assert len(first.losses) == 3
    Net.seen.clear()
    again = fit(
        max_steps=max_steps,
        epochs=9,
        checkpoint_dir=tmp_path,
        resume_from_checkpoint=True,
    )
    assert Net.seen == []
    assert (again.stopped_by, again.losses) == ("max_steps", first.losses)
    assert again.epochs == first.epochs
