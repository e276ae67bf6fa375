# SPDX-License-Identifier: Apache-2.0
"""Configuration of the documentation; it builds offline and every warning is an error."""

import re
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE / "_ext"))

project = "nvrx"
author = "the nvrx authors"
copyright = author  # noqa: A001 - the name that Sphinx reads

extensions = [
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "myst_parser",
    "nvrx_reference",
]
source_suffix = {".md": "markdown", ".rst": "restructuredtext"}
exclude_patterns = ["_build", "_ext"]
html_theme = "furo"
html_static_path = ["_static"]
html_css_files = ["nvrx.css"]
html_js_files = [("copy.js", {"defer": "defer"})]
# Drawings and output have no language; by default they would be coloured as Python.
highlight_language = "text"
_ROOT = HERE.parent / "packages/nvrx-common/src/nvidia_resiliency_ext/__init__.py"
version = re.findall(r'__version__.*?"(.+?)"', _ROOT.read_text())[0]
html_title = f"nvrx {version}"

myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 3

# Each page carries the contents of all pages: with every object in them the build takes four times
# as long, and the list beside a page of the reference has hundreds of lines.
toc_object_entries = False

# Docstrings mark code with single backticks.
default_role = "code"
# Two dashes before a flag stay two dashes.
smartquotes = False
autodoc_typehints = "signature"
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
# The heading above names the module.
add_module_names = False
