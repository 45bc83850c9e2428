"""How the site is built: ``make docs``. What is generated, and from what, stands in docs/builder/."""

import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

project = "minimeg"
author = "The minimeg authors"
project_copyright = "The minimeg authors, MIT licence"

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "builder.extension",
]
exclude_patterns = ["_build", "builder", "**/.ipynb_checkpoints"]

# Notebooks show the outputs that are stored in them: building the site runs nothing.
nb_execution_mode = "off"
nb_merge_streams = True
myst_enable_extensions = ["dollarmath", "colon_fence"]
myst_heading_anchors = 3
myst_links_external_new_tab = False

autodoc_member_order = "bysource"
autodoc_default_options = {"members": True, "ignore-module-all": True}  # what a front door re-exports is described once
napoleon_numpy_docstring = False
napoleon_use_ivar = True  # or a dataclass's fields would be described twice
add_module_names = False

# MathML needs no script: browsers draw it, screen readers read it, and nobody is asked for a font.
html_math_renderer = "mathml"
html_theme = "furo"
html_title = "minimeg"
html_static_path = ["_static"]
html_favicon = "_static/favicon.svg"
html_css_files = ["minimeg.css"]
html_copy_source = False
html_show_sphinx = False
html_theme_options = {
    "light_css_variables": {"color-brand-primary": "#005A8C", "color-brand-content": "#005A8C"},
    "dark_css_variables": {"color-brand-primary": "#66AAD1", "color-brand-content": "#66AAD1"},
}
