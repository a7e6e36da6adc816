"""Digests of code change with the code of a system, and with nothing else."""

from __future__ import annotations

import ast

import pytest
from cmab_models.systems import SYSTEMS
from cmab_models.tasks import TASKS
from cmab_models.training import code

CMANP = SYSTEMS["cmanp"].__module__


def test_what_a_system_is_made_of() -> None:
    """Through packages that import from everywhere, a system's own modules are reached, and no other system's."""
    found = code.reached((CMANP, TASKS["gp-rbf"].__module__))
    assert {
        "cmab_models.neural_processes.parts",
        "cmab_kernels.nn.cmab.stack",
        "cmab_kernels.layers.reference",
    } <= found
    assert not {"cmab_models.neural_processes.cnp", "cmab_models.systems", "cmab_kernels.nystrom.reference"} & found


def test_a_digest_follows_what_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    """The digest changes with the system's own modules and their imports, but not with the kernels."""
    tree, before, of_cnp = code._tree, code.digest(CMANP), code.digest(SYSTEMS["cnp"].__module__)

    def changed(module: str) -> bool:
        code._text.cache_clear()
        more = ast.parse("more = 1").body
        with monkeypatch.context() as patch:
            patch.setattr(
                code, "_tree", lambda name: ast.Module([*tree(name).body, *(more if name == module else [])], [])
            )
            found = code.digest(CMANP) != before
            assert (code.digest(SYSTEMS["cnp"].__module__) != of_cnp) == (module == "cmab_models.pretrained")
        code._text.cache_clear()
        return found

    assert changed(CMANP)
    assert changed("cmab_models.pretrained")
    assert changed("cmab_kernels.nn.cmab.block")
    assert changed("cmab_kernels.attention.prefix.reference")
    assert not changed("cmab_kernels.attention.native")


@pytest.mark.parametrize(
    ("other", "same"),
    [
        ('"""Another."""\n\ndef f(x):\n    """More."""\n    return x + 1  # a comment\n', True),
        ("def f( x ):\n    return (x\n        + 1)", True),
        ("def f(x):\n    return x + 2", False),
        ('def f(x):\n    return x + "1"', False),
    ],
)
def test_comments_docstrings_and_layout_do_not_count(other: str, same: bool) -> None:
    source = '"""One."""\n\ndef f(x):\n    return x + 1\n'
    assert (code._written(ast.parse(other)) == code._written(ast.parse(source))) == same


def test_modules_of_a_caller_are_left_out() -> None:
    """They may have no file: `__main__` of a notebook."""
    ours = "cmab_models.tasks.base"
    assert code.reached((ours, "__main__", "builtins", "nowhere.at_all")) == code.reached((ours,))
