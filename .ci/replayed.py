"""Say which tests failed the first time, and why: `replayed.py STAGE REPORT.xml`.

A test that passes only when it is played again is a defect with a name, so the list is
printed, appended to `replayed.txt` beside the report, and counted by `.ci/run`.
"""

import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

LINES = 6  # of each failure; the whole of it stands in the stage's own output


def failures(report: Path) -> list[tuple[str, str]]:
    """Name and first lines of every test in a JUnit report that failed."""
    found = []
    for case in ElementTree.parse(report).getroot().iter("testcase"):
        for kind in ("failure", "error"):
            failed = case.find(kind)
            if failed is not None:
                name = f"{case.get('classname')}::{case.get('name')}"
                text = failed.get("message") or failed.text or ""
                found.append((name, "\n".join(text.strip().splitlines()[:LINES])))
    return found


def main(stage: str, report: Path) -> int:
    """Exit with 1 if the run itself broke: no report, or a report without failures."""
    if not report.is_file():
        print(f"{stage}: no report of the tests, so nothing can be played again")
        return 1
    found = failures(report)
    for name, text in found:
        print(f"failed in {stage}: {name}")
        print("    " + text.replace("\n", "\n    "))
    with (report.parent / "replayed.txt").open("a", encoding="utf-8") as file:
        file.writelines(f"{stage}: {name}\n" for name, _ in found)
    return 0 if found else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], Path(sys.argv[2])))
