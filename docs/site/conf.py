"""Settings of Sphinx for the documentation site, which `make site` builds. The source is the whole repository, so that links lead to the same files in both."""

import pathlib
import sys

HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parents[1])]  # For the modules beside this one, and for fitflax and benchmarks as they are in this checkout.

import docstrings  # noqa: E402
import names  # noqa: E402
import pages  # noqa: E402

project = "fitflax"
author = "The fitflax authors"
root_doc = "docs/index"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx_copybutton"]

source_suffix = dict.fromkeys([".md", ".py", ".ipynb"], "markdown")
include_patterns = [
    "docs/**.md",
    "examples/*.py",
    "examples/pretrained/*.py",
    "examples/configuration/*.py",
    "examples/cluster/*.py",
    "examples/*.ipynb",
    "benchmarks/*.md",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
]
exclude_patterns = ["docs/site", ".*", "build", "dist", "fitflax", "runs", "site", "tests"]  # Not walked through, either.

# Headings have the anchors that hosts of repositories give them.
myst_heading_anchors = 3
myst_all_links_external = False

# Docstrings: Google's sections; what stands in single backticks is code, and a link where it is a name of fitflax.
default_role = "name"
add_module_names = False
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_inherit_docstrings = True
python_maximum_signature_line_length = 110
python_use_unqualified_type_names = True
python_display_short_literal_types = True
toc_object_entries_show_parents = "hide"

smartquotes = False

html_theme = "furo"
html_title = "fitflax"
html_static_path = ["static"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_sourcelink = False
html_show_copyright = False
html_permalinks_icon = "#"
html_use_index = True
html_domain_indices = False
html_scaled_image_link = False
highlight_language = "none"
pygments_style = "default"  # Each color has a contrast of at least 4.5 with the background.
pygments_dark_style = "monokai"
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True


def setup(app):
    """Connects what this project adds."""
    docstrings.setup(app)
    pages.setup(app)
    names.setup(app)
