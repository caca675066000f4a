"""Pages to Markdown: tables, code and formulas come through exactly; hostile pages cost little."""

import gc
import time

import numpy as np
import pytest
from markdown_pages import page, parsed

from sabia.core.web.extraction import extract
from sabia.core.web.extraction.markdown.render import Cell, markdown_of, pipe_table
from sabia.kernels.html.interface import scan

TEX = "<annotation encoding='application/x-tex'>{}</annotation>"


def whole(source):
    """Markdown of all text of a page."""
    data = source.encode()
    found = scan(np.frombuffer(data, np.uint8))
    return markdown_of(found, data, np.ones(len(found.blocks), bool))


def markdown(source):
    return extract.extract(source.encode(), "text/html", "http://h/", False, markdown=True)


@pytest.mark.parametrize("first", range(0, 200, 40))
def test_tables_code_and_formulas_of_generated_pages(first):
    for seed in range(first, first + 40):
        made = page(seed)
        text = markdown(made.source).text
        assert parsed(text) == (made.tables, made.code), seed
        for tex, display in made.formulas:
            assert (f"\n$${tex}$$\n" if display else f" ${tex}$") in text, (seed, tex)
        plain = extract.extract(made.source.encode(), "text/html", "http://h/", False).text
        assert "| --- |" not in plain, seed
        for furniture in ("Menu 3", "Home", "All rights", "Imprint"):
            assert furniture not in text or furniture in plain, seed


def test_pages_in_doubt(monkeypatch):
    monkeypatch.setattr(extract, "DOUBT", -1.0)
    made = page(5)
    found = markdown(made.source)
    assert found.extractor == "trafilatura"
    assert parsed(found.text) == (made.tables, made.code)


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("<h2>A <code>b</code><br>c</h2><p>d", "## A `b` c\n\nd"),
        ("<ul><li>a<li>b<ul><li>c<p>d</ul><li>e</ul>f", "- a\n- b\n  - c\n\n    d\n- e\n\nf"),
        ("<ol start=9><li>a<li>b<pre>c\n\n d</pre></ol>", 
         "9. a\n10. b\n\n    ```\n    c\n\n     d\n    ```"),
        ("<ul><li>a</ul><ol><li>b</ol>", "- a\n\n1. b"),
        ("<ul><li>a<ol start=2><li>b</ol></ul>", "- a\n\n  2. b"),
        ("<blockquote>a<p>b<ul><li>c</ul></blockquote>d", "> a\n>\n> b\n>\n> - c\n\nd"),
        ("a <i>b</i><a href=x>c</a> <img src=d alt=e>", "a bc"),
        ("10<sup>6</sup> H<sub>2</sub>O a<sup>[1]</sup>", "10<sup>6</sup> H<sub>2</sub>O a[1]"),
        ("<code>a</code><kbd>b</kbd> <code>`c</code>", "`ab` `` `c ``"),
        ("*a* * b_c _d_ &lt;e&gt; 1 &lt; 2 &amp;amp; `", r"\*a\* * b_c \_d\_ \<e> 1 < 2 \&amp; \`"),
        ("$a_1*b_2*$ \\(a*b*\\) \\[_c_\\] $5*6 or $7*",
         r"$a_1*b_2*$ \(a*b*\) \[_c_\] $5\*6 or $7\*"),
        ("# a<br>---<br>| -- |<br>~~~<br>==<br>#b<br>- c",
         "\\# a\n\\---\n\\| -- |\n\\~~~\n\\==\n#b\n- c"),
        ("<span hidden>a</span>b<span style='display: none'>c<span>d</span></span>e", "be"),
        (f"<p>a <math>{TEX.format('x &lt; 1')}</math> b</p>", "a $x < 1$ b"),
        (f"<p>a</p><div><math display=block>{TEX.format('x')}</math></div><p>b", "a\n\n$$x$$\n\nb"),
        ("<p>a <math alttext='y'><mi>y</mi></math>", "a $y$"),
        ("<p>a <script type='math/tex'>x <% 1\ny</script>", "a $x < y$"),
        ("<p>a <script>var b = '<math alttext=c></math>'</script> d", "a d"),
        ("<p>a <!-- <math alttext=c></math> --> d", "a d"),
        ("<p>a <math alttext='y'></math><img class=tex alt='y'> <img class=tex alt='y'>", "a $y$"),
        ("<div>a<p></p>b</div>", "a\n\nb"),
        ("<pre>\n a&nbsp;\u00a0b\r\nc\rd</pre>", "```\n a  b\nc\nd\n```"),
        ("<pre>\n\n  a\n</pre>", "```\n  a\n```"),
        ("<pre>a<button>Copy</button>\nb<br>c</pre>", "```\na\nb\nc\n```"),
        ("<pre><ol><li>a</li><li></li><li>  b</li></ol></pre>", "```\na\n\n  b\n```"),
        ("<pre><div>a</div>\n<div>b</div></pre>", "```\na\nb\n```"),
        ("<pre>````</pre>", "`````\n````\n`````"),
        ("<div class='highlight-py3'><pre>a</pre></div>", "```py3\na\n```"),
        ("<pre>a<pre>b", "a\n\n```\nb\n```"),
        ("<table><tr><td>1<td><code>a</code><tr><td>2<td><code>  b</code></table>",
         "```\na\n  b\n```"),
        ("<table><tr><td>7<td><code>a</code><tr><td>2<td><code>b</code></table>",
         "| 7 | `a` |\n| --- | --- |\n| 2 | `b` |"),
        ("<table><caption>c</caption><tr><th>a<th>b<tr><td>1|2<td>3\\|4</table>",
         "c\n\n| a | b |\n| --- | --- |\n| 1\\|2 | 3\\\\\\|4 |"),
        ("<table><tr><td>a<td>b<tr><td><table><tr><td>1<td>2<tr><td>3<td>4</table><td>c"
         "<tr><td>d<td>e<tr><td>f<td>g</table>",
         "a\n\nb\n\n| 1 | 2 |\n| --- | --- |\n| 3 | 4 |\n\nc\n\n"
         "| d | e |\n| --- | --- |\n| f | g |"),
        ("<table><tr><td>a<td>b</table>", "a\n\nb"),
        ("<table><tr><td>a<tr><td>b</table>", "a\n\nb"),
        ("<table><tr><td><h2>a</h2><td>b<tr><td>c<td>d</table>", "## a\n\nb\n\nc\n\nd"),
        ("a\0b<br>\0<pre>c\0</pre>", "ab\n\n```\nc\n```"),
    ],
)  # fmt: skip
def test_markdown_of(source, expected):
    assert whole(source) == expected


def test_spans():
    row = [Cell("a", 2), Cell("b", 1, 2), Cell("long " * 30, 2)]
    assert pipe_table([row, [Cell("c"), Cell("")]]) == [
        f"| a | a | b | {'long ' * 30} |  |", "| --- | --- | --- | --- | --- |",
        "| c |  | b |  |  |",
    ]  # fmt: skip
    assert pipe_table([[Cell("t", 2)], [Cell("a"), Cell("b")]])[0] == "| t |  |"
    assert pipe_table([[Cell("a", 1, 0), Cell("b")], [Cell("c")]])[2] == "| a | c |"
    many = [[Cell("a", 99_999, 99_999), Cell("b")] for _ in range(50)]
    assert pipe_table(many) == ["| a | b |", "| --- | --- |", *["| a | b |"] * 49]
    ragged = [[Cell("a")], *([[Cell("b")] * 500] + [[Cell("c")]] * 500)]
    lines = pipe_table(ragged)
    assert lines[0].count("|") == lines[2].count("|") == 501 and lines[3] == "| c |"


def hostile(unit, count):
    source = "<p>Some text. " + unit * count
    gc.disable()  # it would read the objects of all tests again and again
    try:
        started = time.process_time()
        text = whole(source)
        return time.process_time() - started, len(text) / len(source)
    finally:
        gc.enable()


@pytest.mark.parametrize(
    "unit",
    [
        "<div><span hidden><code><sup>x", "<table><tr><td>a<td>b", "<tr><td>a<td>b", "<pre>a\n",
        "<blockquote><ul><li>a", "<span hidden>a", "`", "<", "<a b=\"", "<math><annotation ", "\\(",
        "$a", "<!--", "<sup>a", "<table><tr><td>a<td><pre>b\nc</pre><tr><td>d<td>e",
        "<ol><li>a</ol>",
        "<script type=math/tex>", "<img class=tex alt=a>", "<pre>a</pre>b", "<pre><div>a", "\0",
        "<div><math alttext=x></math></div>a", 
        "<table><tr><td colspan=999 rowspan=999>a<td>b<tr>",
    ],
)  # fmt: skip
def test_time_and_size_grow_no_faster_than_the_page(unit):
    count = 2_000
    least = min(hostile(unit, count)[0] for _ in range(2))
    spent, share = hostile(unit, 8 * count)
    assert spent < 30 * least + 0.3
    assert share < 60


def test_wrong_encodings_and_cut_pages():
    source = page(0).source.encode()
    for body in (source[:-1000], source.decode().encode("utf-16"), source + b"\xff\xfe\0" * 100):
        for cut in range(1, len(body), len(body) // 7):
            found = extract.extract(body[:cut], "text/html", "http://h/", False, markdown=True)
            assert "\0" not in found.text
            found.text.encode()


@pytest.mark.parametrize(
    ("mathml", "tex"),
    [
        ("<mi>E</mi><mo>=</mo><msup><mi>c</mi><mn>2</mn></msup>", "E = c^{2}"),
        ("<mfrac><mi>a</mi><msqrt><mi>b</mi></msqrt></mfrac>", r"\frac{a}{\sqrt{b}}"),
        (
            "<munderover><mo>&sum;</mo><mi>i</mi><mi>n</mi></munderover>"
            "<msub><mi>&alpha;</mi><mi>i</mi></msub>",
            r"\sum_{i}^{n} \alpha_{i}",
        ),
        (
            "<mover><mi>x</mi><mo>→</mo></mover><mo>≤</mo><mi>sin</mi><mo>&#x2061;</mo><mi>θ</mi>",
            r"\vec{x} \le \sin \theta",
        ),
        (
            "<mfenced open='['><mtable><mtr><mtd><mn>1</mn></mtd><mtd><mi>Λ</mi></mtd></mtr>"
            "<mtr><mtd/><mtd><mn>0</mn></mtd></mtr></mtable></mfenced>",
            r"\left[ \begin{matrix} 1 & \Lambda \\ & 0 \end{matrix} \right)",
        ),
        (
            "<mmultiscripts><mi>X</mi><mi>a</mi><mi>b</mi><mprescripts/><mi>c</mi><none/>"
            "</mmultiscripts><mroot><mi>x</mi><mn>3</mn></mroot>",
            r"{}_{c}{X}_{a}^{b} \sqrt[3]{x}",
        ),
        ("<mo>{</mo><mtext>50% se</mtext><mspace/><mi>x", r"\{ \text{50\% se} x"),
        ("<mrow>" * 100 + "<mi>x</mi>", ""),
    ],
)
def test_formulas_without_tex_are_converted(mathml, tex):
    text = whole(f"<p>Before <math>{mathml}</math> after.</p>")
    assert text.split("Before")[1].split("after")[0].strip() == (f"${tex}$" if tex else "")
