"""Programs in files: `Program.save` and `Program.load`. The format is in `mirrorc.serialization.program_file`."""

from mirrorc.serialization.program_file import VERSION, load_program, save_program

__all__ = ["VERSION", "load_program", "save_program"]
