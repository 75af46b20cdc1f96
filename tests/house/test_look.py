"""Tests that looking at pages finds what is cut off, what scrolls sideways and pictures that are not shown."""

import pytest

from scripts.docs import look

PAGE = '<!doctype html><meta charset="utf-8"><style>body {{ margin: 8px }} {style}</style><body>{body}</body>'
LINE = "x" * 40
FOLD = "pre { overflow: auto }"
FITS = (
    ("", "<p>plain text that is as wide as the window and wraps where it ends, " + "word " * 200),
    (FOLD, f"<pre>{LINE}</pre>"),
    (FOLD, f"<details><summary>more</summary><pre>{LINE}</pre></details>"),
    (FOLD, f"<div style='width: 100%'><pre>{LINE}\n{LINE}</pre></div>"),
    ("div { overflow: auto }", f"<div><table><tr><td>{'cell' * 200}</table></div>"),
    ("", "<img src='data:image/svg+xml,<svg xmlns=%22http://www.w3.org/2000/svg%22 width=%2210%22 height=%2210%22/>'>"),
)
"""Style and body of pages without a fault."""


def broken(number):
    """Returns a page with one fault: its style, its body, the width at which it shows, and what is said."""
    kind, size = number % 4, number // 4
    if kind == 0:
        code = "\n".join([LINE, f"{LINE * (8 + size)} # {number}", LINE])
        folded = f"<details><summary>more</summary><pre>{code}</pre></details>"
        return FOLD, folded if size % 2 else f"<pre>{code}</pre>", look.DESKTOP, "cut off"
    if kind == 1:
        return "", f"<p><img src='missing-{number}.png'>", look.DESKTOP, "not shown"
    if kind == 2:
        return "", f"<div style='width: {look.PHONE + 10 + 15 * size}px'>wide</div>", look.PHONE, "sideways"
    return "", f"<table><tr><td>{'cell' * (60 + 10 * size)}</table>", look.TABLET, "sideways"


@pytest.fixture(scope="module")
def driver():
    if what := look.missing():
        pytest.skip(f"no {what}")
    with look.browser() as opened:
        yield opened


def faults(driver, folder, style, body):
    page = folder / "page.html"
    page.write_text(PAGE.format(style=style, body=body))
    return list(look.look(driver, page, "page"))


@pytest.mark.parametrize("number", range(52))
def test_a_fault_is_found(number, driver, tmp_path):
    style, body, width, said = broken(number)
    assert (width, True) in {(fault.width, said in fault.what) for fault in faults(driver, tmp_path, style, body)}


@pytest.mark.parametrize(("style", "body"), FITS)
def test_a_page_that_fits_has_none(style, body, driver, tmp_path):
    assert faults(driver, tmp_path, style, body) == []


def test_pictures_have_the_width_of_the_window(driver, tmp_path):
    page = tmp_path / "page.html"
    page.write_text(PAGE.format(style="", body="text"))
    list(look.look(driver, page, "docs/page.html", tmp_path / "pictures"))
    for width in (look.DESKTOP, look.TABLET, look.PHONE):
        header = (tmp_path / "pictures" / str(width) / "docs-page.png").read_bytes()[:24]
        assert int.from_bytes(header[16:20], "big") == width


def test_without_a_browser_one_line_says_how_to_get_one(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(look.shutil, "which", lambda name: None)
    monkeypatch.setattr(look.sys, "argv", ["look", str(tmp_path)])
    assert look.main() == 0
    out = capsys.readouterr().out
    assert out.count("\n") == 1
    assert "apt install chromium" in out


def test_a_site_without_pages_is_a_failure(driver, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(look.sys, "argv", ["look", str(tmp_path)])
    assert look.main() == 1
    assert "0 pages" in capsys.readouterr().out
