"""Registers the backends Inductor and eager."""

from mirrorc.runtime.codegen.eager import EagerBackend
from mirrorc.runtime.codegen.inductor import InductorBackend
from mirrorc.runtime.codegen.regions import register_backend

register_backend(InductorBackend())
register_backend(EagerBackend())
