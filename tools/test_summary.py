"""Adds up the XML results of GoogleTest and pytest and prints the counts; exit code 0 only if tests of both ran and all passed.

    python tools/test_summary.py build/test-results --ctest-exit 0 --pytest-exit 0

A skipped test is listed with its reason. Only what a machine may lack is a reason to skip; a package of requirements-dev.txt is not.
"""

import argparse
import collections
import os
import pathlib
import re
import sys
import xml.etree.ElementTree as xml

MAY_LACK = re.compile(r"GPU|CUDA|device|chromium|pkg-config|fetch|AVX512|address space|room for a cluster|file system can be mounted|driver")


def count(path):
    """(tests, reasons of the skipped, names of the failed) of one result file."""
    tests, skipped, failed = 0, [], []
    for case in xml.parse(path).getroot().iter("testcase"):
        if case.get("status") == "notrun":  # disabled, or filtered out on the command line
            continue
        tests += 1
        # GoogleTest marks a skipped test by its result, and both by an element of its own.
        reason = case.find("skipped")
        if reason is not None or case.get("result") == "skipped":
            text = "no reason given" if reason is None else reason.get("message") or "no reason given"
            skipped.append(text.strip().splitlines()[-1])
        elif case.find("failure") is not None or case.find("error") is not None:
            failed.append(f"{case.get('classname')}.{case.get('name')}")
    return tests, skipped, failed


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("results", type=pathlib.Path)
    parser.add_argument("--ctest-exit", type=int, required=True)
    parser.add_argument("--pytest-exit", type=int, required=True)
    options = parser.parse_args()

    problems = []
    for label, pattern in (("C++", "*_test.xml"), ("Python", "pytest.xml")):
        counts = {path.stem: count(path) for path in sorted(options.results.glob(pattern))}
        problems += [f"{program} ran no test" for program, (tests, _, _) in counts.items() if tests == 0]
        tests = sum(c[0] for c in counts.values())
        reasons = collections.Counter(reason for c in counts.values() for reason in c[1])
        failed = [name for c in counts.values() for name in c[2]]
        if tests == 0:
            problems.append(f"no {label} test ran")
        skipped = reasons.total()
        print(f"{label:7s}{tests:6d} tests, {tests - skipped - len(failed)} passed, {len(failed)} failed, {skipped} skipped")
        for reason, times in reasons.most_common():
            line = f"{label} tests: {times} skipped: {reason}"
            print(f"  {line}")
            if not MAY_LACK.search(reason):
                problems.append(f"{reason}: this is no reason to skip")
            elif os.environ.get("LINNET_LEFT_OUT"):
                with open(os.environ["LINNET_LEFT_OUT"], "a") as file:
                    print(line, file=file)
        problems += [f"failed: {name}" for name in failed]
    for problem in problems[:50]:
        print(f"  {problem}")

    # A program that crashed leaves no XML: the exit codes of the two runners decide, the counts explain.
    if options.ctest_exit or options.pytest_exit or problems:
        sys.exit(f"FAILED (ctest exit code {options.ctest_exit}, pytest exit code {options.pytest_exit})")
    print("all passed")


if __name__ == "__main__":
    main()
