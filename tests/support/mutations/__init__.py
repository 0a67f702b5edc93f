"""Ways to change a valid program, in one table: `KINDS`. Importing this package imports all files, which fill the table."""

import importlib
import pkgutil

from mutations.table import KINDS, Kind

__all__ = ["KINDS", "Kind"]

for _module in pkgutil.iter_modules(__path__, f"{__name__}."):
    importlib.import_module(_module.name)
