"""Sphinx builds the documentation site with this configuration: ``make docs``."""

import sys
from importlib import metadata
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))  # for generate.py

project = "mirrorc"
author = "the mirrorc authors"
project_copyright = "the mirrorc authors"
version = release = metadata.version("mirrorc")

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx_design",
    "sphinx_copybutton",
    "generate",
]
source_suffix = {".md": "markdown"}
exclude_patterns = ["README.md"]
html_theme = "furo"
html_title = f"mirrorc {release}"
html_static_path: list[str] = []

myst_enable_extensions = ["colon_fence", "deflist", "attrs_inline"]
myst_heading_anchors = 4

default_role = "py:obj"  # docstrings write `mirrorc.compile`
autodoc_member_order = "bysource"
autodoc_typehints = "none"  # docstrings describe arguments in words
autodoc_class_signature = "mixed"
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_rtype = False
python_maximum_signature_line_length = 100
toc_object_entries = False

copybutton_prompt_text = "$ "
suppress_warnings = ["misc.highlighting_failure"]  # a printed program is shown as plain text
