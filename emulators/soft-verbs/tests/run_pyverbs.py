"""Runs rdma-core's pyverbs tests: run_pyverbs.py DIRECTORY, where DIRECTORY is the tests' package.

Prints a line for each test: `ok NAME`, `skip NAME: reason` or `FAIL NAME: error`.
"""

import os
import sys
import unittest


class Lines(unittest.TestResult):
    def addSuccess(self, test):
        print("ok", test.id())

    def addSkip(self, test, reason):
        print(f"skip {test.id()}: {reason}")

    def addFailure(self, test, error):
        print(f"FAIL {test.id()}: {error[1]!r}")

    def addError(self, test, error):
        self.addFailure(test, error)


def main():
    directory = os.path.realpath(sys.argv.pop())
    # The modules import each other from the package `tests`, except one that is imported by its bare name.
    sys.path[:0] = [directory, os.path.dirname(directory)]
    sys.dont_write_bytecode = True
    import tests
    from args_parser import parser

    parser.parse_args()
    unittest.defaultTestLoader.loadTestsFromModule(tests).run(Lines())


main()
