"""Registers the backends Inductor and eager."""

from mirrorc.runtime.codegen.backends import register_backend
from mirrorc.runtime.codegen.eager import EagerBackend
from mirrorc.runtime.codegen.inductor import InductorBackend

register_backend(InductorBackend())
register_backend(EagerBackend())
