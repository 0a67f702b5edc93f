"""Prints the operations of the IR as a Markdown page."""

import sys

from mirrorc.ir.reference import reference

if __name__ == "__main__":
    sys.stdout.write(reference())
