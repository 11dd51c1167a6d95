"""Sphinx configuration: Markdown pages, numpydoc reference."""

from alchemi_xr import __version__

project = "alchemi_xr"
author = "the alchemi_xr developers"
copyright = "the alchemi_xr developers"
release = version = __version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.mathjax", "numpydoc"]
myst_enable_extensions = ["dollarmath", "colon_fence"]
myst_heading_anchors = 3
exclude_patterns = ["_build"]
html_theme = "pydata_sphinx_theme"
html_title = "alchemi_xr"
html_theme_options = {"show_toc_level": 2}
numpydoc_show_class_members = False
autodoc_typehints = "none"
autodoc_member_order = "groupwise"
# The reference lists names, the docstrings give types in words ("int64 array, [N + 1]").
nitpicky = False
