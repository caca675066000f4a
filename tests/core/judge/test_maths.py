"""The verifier `math`: answers of any notation, compared as SymPy compares them."""

import os
import random
import signal
import subprocess
import sys

import pytest
import sympy as sp

from sabia.core.judge import maths
from sabia.core.judge.maths import children, final_answer, same_answer
from sabia.core.judge.maths_child import compared
from sabia.core.judge.verifiers import explained, verify
from sabia.core.sandbox.limits import Child, Pool


@pytest.mark.parametrize(
    ("text", "reference", "met"),
    [
        (r"so it is \boxed{\frac{1}{2}}", "0.5", True),
        ("It is $0.5$.", r"\frac{1}{2}", True),
        (r"\boxed{x+5}", "5", False),
        (r"\boxed{\sqrt{8}}", r"2\sqrt2", True),
        (r"\boxed{2\frac12}", "2.5", True),
        (r"\boxed{(x-1)(x+1)}", "x^2-1", True),
        (r"\boxed{(x-1)(x+2)}", "x^2-1", False),
        (r"\boxed{\{1, 2\}}", "2, 1", True),
        (r"\boxed{\{1, 2, 3\}}", "2, 1", False),
        (r"\boxed{(1, 2)}", "(2, 1)", False),
        (r"\boxed{(1, 2)}", "(1, 2]", False),
        (r"\boxed{(1,\tfrac{4}{2})}", "(1, 2)", True),
        (r"\boxed{(-\infty,1)\cup(2,\infty)}", r"(2, \infty) \cup (-\infty, 1)", True),
        (r"\boxed{[1,2) \cup [2,3]}", "[1,3]", True),
        (r"\boxed{1 \le x < 2}", "[1,2)", True),
        (r"\boxed{x \in [1,2)}", "[1,2)", True),
        (r"\boxed{x > 3}", r"(3,\infty)", True),
        (r"\boxed{x \ge 3}", r"(3,\infty)", False),
        (r"\boxed{\begin{pmatrix}1&2\\ 3&\frac{4}{2}\end{pmatrix}}",
         r"\begin{bmatrix} 1 & 2 \\ 3 & 2 \\ \end{bmatrix}", True),
        (r"\boxed{\begin{pmatrix}1&2\end{pmatrix}}", r"\begin{pmatrix}1\\2\end{pmatrix}", False),
        (r"\boxed{x = 5}", "5", True),
        (r"\boxed{2x+4y=8}", "x+2y=4", True),
        (r"\boxed{2x+4y=8}", "x+2y=5", False),
        (r"\boxed{1 \pm \sqrt 2}", r"1+\sqrt2, 1-\sqrt2", True),
        (r"\boxed{90^\circ}", "90", True),
        (r"\boxed{12\text{ cm}}", "12", True),
        (r"\boxed{\$10,000}", "10000", True),
        (r"\boxed{\text{Evelyn}}", r"\text{Evelyn}", True),
        (r"\boxed{\text{Paul}}", r"\text{Evelyn}", False),
        (r"\boxed{Evelyn}", r"\text{Evelyn}", True),
        (r"\boxed{\text{(B)}}", "B", True),
        (r"\boxed{0}", r"\int_0^0 x dx", None),
        (r"\boxed{\frac{1}{0}}", r"\frac{2}{0}", False),
        (r"\boxed{0.333}", r"\frac13", False),
        (r"\boxed{0.3333333}", r"\frac13", True),
        (r"\boxed{3.1415927}", r"\pi", True),
        (r"\boxed{\pi}", "pi", True),
        (r"\boxed{3i + 2}", "2+3i", True),
        (r"\boxed{e^{i\pi}}", "-1", True),
        (r"\boxed{}", "1", False),
        ("", "1", False),
        ("no idea", "1", False),
        (r"\boxed{__import__('os').abort()}", "1", False),
        (r"\boxed{((((((((((1}", "1", False),
        ("first\nx^2 + x", "x(x+1)", True),
        ("12\n#### 13", "13", True),
    ],
)  # fmt: skip
def test_answers(text, reference, met):
    assert verify("math", text, reference) is met


def test_final_answers():
    assert final_answer(r"\boxed{1} then \boxed{\frac{1}{2}}") == r"\frac{1}{2}"
    assert final_answer("$1$ and \\(2\\)") == "2"
    assert final_answer("\\[ x\n= 2 \\] is it") == "x\n= 2"
    assert final_answer("costs \\$5\nx + 1\n") == "x + 1"


def expression(draws, depth):
    x, y = sp.symbols("x y", real=True)
    if not depth:
        number = sp.Rational(draws.randint(-9, 9), draws.choice([1, 1, 2, 3]))
        return draws.choice([x, y, x, number, sp.pi, sp.sqrt(2)])
    one, two = (expression(draws, depth - 1) for _ in "12")
    return draws.choice([
        one + two, one - two, one * two, one ** draws.randint(1, 3), sp.sin(one),
        sp.sqrt(one**2 + 1), one / (two**2 + 1), sp.exp(sp.sin(one)), sp.Abs(one),
        sp.log(one**2 + 2),
    ])  # fmt: skip


def test_as_sympy_itself_compares():
    """200 pairs of generated expressions, one of the two rewritten or changed."""
    draws, equal = random.Random(1), 0
    x = sp.Symbol("x", real=True)
    rewritten = (sp.expand, sp.together, sp.factor, lambda e: e + 0, sp.trigsimp)
    changed = (
        lambda e: e + 1,
        lambda e: -e,
        lambda e: 2 * e,
        lambda e: e + x,
    )
    written = (sp.latex, str, lambda e: sp.latex(e, fold_short_frac=True, mul_symbol="dot"))
    for _ in range(200):
        one = expression(draws, 2)
        two = draws.choice(rewritten if draws.random() < 0.6 else changed)(one)
        expected = sp.simplify(one - two) == 0
        texts = [draws.choice(written)(value) for value in (one, two)]
        found = compared({"text": texts[0], "reference": texts[1]}, b"")
        assert found == {"equal": expected, "detail": ""}, texts
        equal += expected
    assert 60 < equal < 180


def test_sets_and_matrices_as_sympy_writes_them():
    draws = random.Random(2)

    def made():
        low, high = sorted(draws.sample(range(-4, 5), 2))
        kind = draws.randrange(3)
        if kind == 0:
            return sp.Interval(low, high, draws.random() < 0.5, draws.random() < 0.5)
        if kind == 1:
            return sp.FiniteSet(low, high, draws.randint(-4, 4))
        return sp.ImmutableMatrix(2, 2, [low, high, low * high, sp.Rational(low, 3)])

    for _ in range(60):
        one = made()
        two = draws.choice([one, made()])
        found = compared({"text": sp.latex(one), "reference": sp.latex(two)}, b"")
        assert found["equal"] is (one == two), (one, two, found)


@pytest.mark.parametrize(
    "text", ["9^{9^{9^{9}}}", "100000000!", "(x+y+z)^{99999} - 1" + "+ (x+1)^{9999}" * 9]
)
def test_past_its_limits_there_is_no_verdict(text, monkeypatch):
    small = Pool(lambda: Child("sabia.core.judge.maths_child", 1.0, 1 << 28))
    monkeypatch.setattr(maths, "children", small)
    tested = same_answer(rf"\boxed{{{text}}}", "x+2y")
    assert tested.passed is None or (tested.passed is False and "x" in text)
    assert tested.passed is False or tested.detail
    assert same_answer("$x^2$", "x x").passed  # the child is replaced
    with small.one() as child:
        child.close()


def test_a_child_that_is_killed_gives_no_verdict():
    with children.one() as child:
        pid = child.running().pid
    os.kill(pid, signal.SIGSTOP)
    os.kill(pid, signal.SIGKILL)
    tested = [explained("math", "$x + x$", "2x") for _ in range(2)]
    assert tested[-1].passed is True
    assert tested[0].passed in (None, True)  # the death was seen before the request, or after


def test_sympy_is_loaded_by_the_child_only():
    script = (
        "import sys\nfrom sabia.core.judge.verifiers import verify\n"
        "assert verify('math', 'x^2', 'x x') is True\nprint('sympy' in sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.stdout == "False\n", done.stderr
