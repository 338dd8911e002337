"""Explain a hang afterwards, from the dumps of torch's flight recorder.

read_dumps(paths)   the dumps of all ranks, as calls in groups
find_hang(records)  what the ranks disagree about, or whom they wait for
page, as_json       the finding and each rank's last call, for people and programs
"""

from distlab.flight.hang import Hang, find_hang
from distlab.flight.page import as_json, page
from distlab.flight.records import Call, Dump, Records, read_dumps

__all__ = [
    "Call",
    "Dump",
    "Hang",
    "Records",
    "as_json",
    "find_hang",
    "page",
    "read_dumps",
]
