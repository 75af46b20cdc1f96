"""Sphinx configuration of the documentation site: `make docs` builds it into build/site.

The source directory is the repository, so that pages link to notebooks, CHANGELOG.md and CONTRIBUTING.md by the same
paths on the site and in the repository. Notebooks are rendered with their saved outputs. Nothing is fetched, neither
when the site is built nor when it is read.
"""

import pathlib
import re
import sys
import tomllib

ROOT = pathlib.Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

import jaxspec  # noqa: E402

REPOSITORY = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["urls"]["Repository"]

project = "jaxspec"
author = "The jaxspec authors"
copyright = author
version = release = jaxspec.__version__

extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode", "sphinx_copybutton"]
root_doc = "docs/index"
include_patterns = ["docs/**", "notebooks/*.ipynb", "CHANGELOG.md", "CONTRIBUTING.md"]
exclude_patterns = [".*", "build", "dist", "**/.*"]

highlight_language = "text"
html_theme = "furo"
html_title = f"jaxspec {release}"
html_extra_path = ["site"]
html_static_path = ["static"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_copyright = False
html_logo = html_favicon = "static/logo.svg"
html_theme_options = {
    "footer_icons": [],
    "source_repository": REPOSITORY,
    "source_branch": "main",
    "source_directory": "",
    "light_css_variables": {"color-brand-primary": "#1e7a46", "color-brand-content": "#1e7a46"},
    "dark_css_variables": {"color-brand-primary": "#5fd08f", "color-brand-content": "#5fd08f"},
}
copybutton_exclude = ".linenos, .gp, .go"
pygments_style = "default"
pygments_dark_style = "github-dark"

nb_execution_mode = "off"
nb_merge_streams = True
nb_ipywidgets_js: dict = {}
myst_heading_anchors = 3
myst_enable_extensions = ["attrs_inline"]

nitpicky = True
nitpick_ignore_regex = [
    ("py:.*", r"(?!jaxspec\.).*"),  # names of other packages: resolving them would need their inventories
    ("py:class", r"jaxspec\.processors\.grammar\.(GrammarState|Tables)"),  # what a grammar keeps during a call
    ("py:class", r"jaxspec\.generation\.history\.(Texts|HasTexts)"),  # what a history reads of an output
    ("py:class", r"jaxspec\.train\.placement\.Placement"),  # made by OnlineHeads.of, from settings
    ("py:obj", r".*"),  # names in backquotes become links where they can
]

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
autodoc_class_signature = "mixed"
napoleon_numpy_docstring = False
napoleon_use_ivar = True
napoleon_attr_annotations = False
napoleon_use_rtype = False
python_maximum_signature_line_length = 88
python_display_short_literal_types = True
smartquotes_action = "D"
default_role = "py:obj"
toc_object_entries_show_parents = "hide"


def _name_publicly() -> None:
    """Documents public names as `jaxspec.name`, not by the module that defines them."""
    for names in jaxspec._MODULES.values():
        for name in names:
            getattr(jaxspec, name).__module__ = "jaxspec"


def _signature(app, what, name, thing, options, signature, returns):
    """Shortens the name of JAX's arrays, and drops the signature of protocols, which are not called."""
    if what == "class" and getattr(thing, "_is_protocol", False):
        return "", None
    short = [part and part.replace("jaxlib._jax.Array", "Array") for part in (signature, returns)]
    return tuple(short)


PAGE = re.compile(r"(?<![\w/`])docs/([\w-]+)\.md\b")


def _link_pages(app, what, name, thing, options, lines):
    """Makes a page that a docstring names, as in "see docs/gpu.md", a link."""
    lines[:] = [PAGE.sub(r":doc:`/docs/\1`", line) for line in lines]


def _skip(app, what, name, thing, skip, options):
    """Leaves out the fields of named tuples that have no words of their own."""
    return skip or (getattr(thing, "__doc__", None) or "").startswith("Alias for field number") or None


def setup(app):
    """Connects the above; called by Sphinx."""
    _name_publicly()
    app.connect("autodoc-process-signature", _signature)
    app.connect("autodoc-process-docstring", _link_pages)
    app.connect("autodoc-skip-member", _skip)
