"""The rules that the verifier checks, a file for each topic: every file here is found, and its rules register themselves."""

import importlib
import pkgutil

for _module in pkgutil.iter_modules(__path__, f"{__name__}."):
    importlib.import_module(_module.name)
