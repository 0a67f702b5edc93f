"""The public names of all-reduce algorithms."""

from mirrorc.passes.all_reduce import *  # noqa: F403
from mirrorc.passes.all_reduce import __all__ as __all__
