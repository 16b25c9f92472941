"""Adds up the XML results of GoogleTest and pytest and prints the counts; exit code 0 only if tests ran and all passed.

    python tools/test_summary.py build/test-results --ctest-exit 0 --pytest-exit 0
"""

import argparse
import pathlib
import sys
import xml.etree.ElementTree as xml


def count(path):
    """(tests, failed, skipped, names of the failed) of one result file."""
    tests, skipped, failed = 0, 0, []
    for case in xml.parse(path).getroot().iter("testcase"):
        if case.get("status") == "notrun":  # disabled, or filtered out on the command line
            continue
        tests += 1
        # GoogleTest marks a skipped test by its result, and both by an element of its own.
        if case.find("skipped") is not None or case.get("result") == "skipped":
            skipped += 1
        elif case.find("failure") is not None or case.find("error") is not None:
            failed.append(f"{case.get('classname')}.{case.get('name')}")
    return tests, skipped, failed


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("results", type=pathlib.Path)
    parser.add_argument("--ctest-exit", type=int, required=True)
    parser.add_argument("--pytest-exit", type=int, required=True)
    options = parser.parse_args()

    total, all_failed = 0, []
    for label, pattern in (("C++", "*_test.xml"), ("Python", "pytest.xml")):
        files = sorted(options.results.glob(pattern))
        counts = [count(path) for path in files]
        tests, skipped = sum(c[0] for c in counts), sum(c[1] for c in counts)
        failed = [name for c in counts for name in c[2]]
        total += tests
        all_failed += failed
        print(f"{label:7s}{tests:6d} tests, {tests - skipped - len(failed)} passed, {len(failed)} failed, {skipped} skipped")
    for name in all_failed[:50]:
        print(f"  failed: {name}")

    # A program that crashed leaves no XML: the exit codes of the two runners decide, the counts explain.
    if options.ctest_exit or options.pytest_exit or all_failed:
        sys.exit(f"FAILED (ctest exit code {options.ctest_exit}, pytest exit code {options.pytest_exit})")
    if total == 0:
        sys.exit("FAILED: no test ran")
    print("all passed")


if __name__ == "__main__":
    main()
