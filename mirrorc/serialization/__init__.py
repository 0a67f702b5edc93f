"""The complete text of programs, in files and strings. The grammar is in `mirrorc.serialization.parser`."""

from mirrorc.serialization.printer import VERSION, body_text
from mirrorc.serialization.program_file import load_program, parse, save_program, text_of

__all__ = ["VERSION", "body_text", "load_program", "parse", "save_program", "text_of"]
