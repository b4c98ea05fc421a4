# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""Sphinx's configuration of the site. `make docs` builds it with warnings as errors, so each internal link is checked.

The pages are those that people read in the repository, at the same paths, so that links between them work in both. The
source folder is therefore the checkout, and this file is given by -c.
"""

import pathlib

import maxtext_pp_ext

project = "maxtext_pp_ext"
author = "The maxtext_pp_ext Authors"
copyright = "2026, The maxtext_pp_ext Authors"  # pylint: disable=redefined-builtin
version = release = maxtext_pp_ext.__version__

# MyST and this theme are what MaxText's own documentation uses.
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode", "sphinx.ext.doctest"]
extensions += ["sphinx_copybutton"]
root_doc = "docs/site/index"
include_patterns = ["*.md", "docs/**.md", "examples/README.md", "benchmarks/**.md", "patches/**.md"]
exclude_patterns = ["**/.*", "build", "dist", "demo-output", "examples/own-pipeline", "docs/templates"]

myst_heading_anchors = 4  # GitHub's
myst_enable_extensions = ["colon_fence"]
# Blocks without a language are commands, output and pseudo-code.
highlight_language = "text"

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_default_options = {"members": True}
maximum_signature_line_length = 90  # longer ones have a line for each parameter
toc_object_entries_show_parents = "hide"
default_role = "code"  # `x` in docstrings is code, as in Markdown
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True
nitpicky = False

html_theme = "sphinx_book_theme"
html_title = "maxtext_pp_ext"
html_static_path = ["static"]
html_css_files = ["site.css"]
html_extra_path = ["extra"]  # index.html, which leads to the first page
html_theme_options = {
    "show_navbar_depth": 1,
    "show_toc_level": 2,
    "use_download_button": False,
    "navbar_persistent": [],  # the search field is in the sidebar
}
html_search_scorer = str(pathlib.Path(__file__).with_name("scorer.js"))
html_copy_source = False
html_show_sourcelink = False
