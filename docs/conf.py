"""Sphinx: pages in MyST, generated pages made first, warnings as errors (`make docs`)."""

import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

import generate  # noqa: E402  it lies beside this file

generate.write(HERE / "reference")

project = "autopar"
author = "the autopar authors"
release = "0.1.0"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.mathjax"]
myst_enable_extensions = ["dollarmath", "deflist"]
myst_heading_anchors = 3
exclude_patterns = ["_build"]
html_theme = "furo"
html_title = "autopar"
autodoc_member_order = "bysource"
autodoc_typehints = "description"
nitpicky = False
suppress_warnings = ["myst.xref_missing"]  # links to files outside of docs/, which tests/cpu/test_docs.py follows
