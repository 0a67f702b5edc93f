"""The algorithms of all-reduce under the name that users import."""

from mirrorc.passes.all_reduce import *  # noqa: F403
from mirrorc.passes.all_reduce import __all__ as __all__
