"""Run stages of the Makefile one after another and say how long each took: python .ci/stages.py lint types unit ...

All stages run even when one fails, so that one run shows every problem. The last line counts the tests.
"""

import os
import shutil
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from pathlib import Path

JUNIT = Path("artifacts/junit")


def main(stages: list[str]) -> int:
    shutil.rmtree(JUNIT, ignore_errors=True)
    JUNIT.mkdir(parents=True)
    began = time.monotonic()
    results = [run(stage) for stage in stages]
    total = time.monotonic() - began
    print("\n== stages ==")
    for stage, seconds, code in results:
        print(f"{stage:<10} {seconds:7.1f} s  {'passed' if code == 0 else f'FAILED (exit code {code})'}")
    print(f"{'total':<10} {total:7.1f} s  on {os.cpu_count()} cores")
    counts = count_tests()
    failed = counts["failures"] + counts["errors"]
    passed = counts["tests"] - failed - counts["skipped"]
    print(f"\n{passed} passed, {failed} failed" + (f", {counts['skipped']} skipped" if counts["skipped"] else ""))
    return int(any(code for _, _, code in results))


def run(stage: str) -> tuple[str, float, int]:
    print(f"\n== {stage} ==", flush=True)
    began = time.monotonic()
    code = subprocess.run(["make", "--no-print-directory", stage], check=False).returncode
    return stage, time.monotonic() - began, code


def count_tests() -> dict[str, int]:
    counts = dict.fromkeys(("tests", "failures", "errors", "skipped"), 0)
    for file in JUNIT.glob("*.xml"):
        for suite in ElementTree.parse(file).getroot().iter("testsuite"):
            for name in counts:
                counts[name] += int(suite.get(name, 0))
    return counts


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
