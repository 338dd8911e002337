"""What a ring costs: how many messages, of how many bytes, to whom, and steps."""

from __future__ import annotations

from typing import Any

from distlab.grading.kit.messages import calls_of_each
from distlab.grading.runs import Runs, RunSpec
from distlab.grading.verdict import NotYetError
from distlab.runner import RankRecord, Run
from distlab.terminal import ranks_in_words

SENDING = frozenset({"send", "isend", "sendrecv"})
MANY = 16  # simulated ranks
ONE_WAY = "in each step a rank sends to one side while it receives from the other"


def bytes_enough(length: int, n: int, itemsize: int, halves: int) -> int:
    """What a rank may send: all chunks but one, in each half; the shortest left out."""
    return halves * (length - length // n) * itemsize


def expect_few_bytes(run: Run, length: int, itemsize: int, halves: int) -> None:
    """No rank sends more than all chunks but one, in each half of the ring.

    Raises:
        NotYetError: one does.
    """
    enough = bytes_enough(length, run.world_size, itemsize, halves)
    for record in run.ranks:
        if record.sent_bytes > enough:
            whole = length * itemsize
            sizes = [call["bytes"] for call in _sends(record)]
            is_whole = set(sizes) == {whole}
            sent = f"{record.sent_bytes:.0f} bytes"
            if is_whole:
                often = f" {len(sizes)} times" * (len(sizes) > 1)
                sent = f"the whole tensor{often}, {sent}"
            raise NotYetError(
                f"for a tensor of {whole} bytes on {run.world_size} ranks, rank "
                f"{record.rank} sent {sent}, expected at most {enough}",
                slug="whole-tensor-every-step" if is_whole else "extra-messages",
                evidence=calls_of_each(run),
                rule="each message is one chunk, and in each half of the ring a rank "
                "sends every chunk but one",
            )


def expect_few_messages(run: Run, halves: int) -> None:
    """Expect n - 1 messages in each half.

    Raises:
        NotYetError: a rank sends more.
    """
    enough = halves * (run.world_size - 1)
    for record in run.ranks:
        if record.messages > enough:
            raise NotYetError(
                f"on {run.world_size} ranks, rank {record.rank} sent {record.messages} "
                f"messages, expected at most {enough}: one in each step of the ring",
                slug="extra-messages",
                evidence=calls_of_each(run),
                rule="after n - 1 steps each chunk has been at every rank",
            )


def expect_one_neighbor(run: Run) -> None:
    """A rank sends to one other rank only.

    Raises:
        NotYetError: it sends to more of them.
    """
    for record in run.ranks:
        peers = sorted({call["dst"] for call in _sends(record)})
        if len(peers) > 1:
            raise NotYetError(
                f"rank {record.rank} sent messages to {ranks_in_words(peers)}, "
                "expected only one neighbor, as in a ring",
                slug="not-a-ring",
                evidence=calls_of_each(run),
                rule="send on to the right what came from the left",
            )


def expect_ring(run: Run, length: int, halves: int) -> None:
    """Of float64, `length` of them.

    Raises:
        NotYetError: it is not what a ring sends.
    """
    expect_few_bytes(run, length, 8, halves)
    expect_few_messages(run, halves)
    expect_one_neighbor(run)


def told(run: Run, length: int) -> str:
    """What a rank sends, as a note."""
    most = max(record.sent_bytes for record in run.ranks)
    return (
        f"n = {run.world_size}, {length * 8} bytes: each rank sends at most "
        f"{most:.0f} in {run.ranks[0].messages} messages"
    )


def _sends(record: RankRecord) -> list[Any]:
    return [call for call in record.calls() if call["op"] in SENDING]


def expect_few_steps(runs: Runs, on_many: RunSpec, halves: int) -> None:
    """On more ranks than there are processors, in virtual time.

    `on_many` is `in_rounds`, with a tensor of 8 bytes for each of MANY ranks.

    Raises:
        NotYetError: it takes more steps than a ring.
    """
    enough = halves * (MANY - 1)
    needed = runs.simulated(on_many)["time_s"]
    if needed > enough:
        is_double = needed == 2 * enough
        raise NotYetError(
            f"on {MANY} simulated ranks, the ring took {needed:.0f} steps, expected at "
            f"most {enough}"
            + ": a rank can send and receive in the same step"
            * is_double,
            slug="half-duplex" if is_double else "",
            rule=ONE_WAY,
        )
