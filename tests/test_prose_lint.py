"""tests/prose_lint.py: it finds listed phrases and what proselint finds, and leaves code and output alone."""

from tests.prose_lint import docstrings, listed_phrases, names_and_comments, plurals_of_code, prose, proselint_results, texts, without_glossary


def test_phrases_are_found_across_lines_and_outside_code_and_output():
    page = "A loss of\nyour own.\n`by hand`\n[x](by hand)\n```\nby hand\n```\n```python\n# by hand\n```\nof your own-ness, to blame-x\n"
    assert list(listed_phrases(prose(page))) == [(1, "'of your own'; write: custom"), (9, "'by hand'; write: hand-written, or: yourself")]
    assert [line for line, _ in listed_phrases(texts('"""A loss\nof one\'s own."""\nx = f"{1} by hand", "anew"  # Anew.\n'))] == [2, 3, 3]
    assert [line for line, _ in listed_phrases(names_and_comments('def test_a_loop_by_hand():\n    x = "by hand"  # By hand.\n'))] == [1, 2]


def test_the_glossary_may_contain_listed_phrases():
    page = "## Words\n\nGo on.\n\n| run | by hand |\n\n## Style\n\nby hand\n"
    assert sorted(line for line, _ in listed_phrases(without_glossary("\n" + page))) == [4, 10]


def test_proselint_reads_pages_and_docstrings_without_code_and_examples():
    page = 'The the loss.\n\nA "straight" quote\n```python\n# very very\n```\nrepeat the same\n`very`\n'
    assert [line for line, _ in proselint_results(prose(page, keeps_code=False))] == [1, 7]
    module = '"""Repeat the same."""\n\n\ndef f():\n    """Does `very`.\n\n    >>> f()\n    very\n\n    Very often.\n    """\n'
    assert [line for line, _ in proselint_results(docstrings(module))] == [1, 10]


def test_a_letter_after_a_closing_backtick_in_a_docstring_is_a_fault():
    assert [line for line, _ in plurals_of_code('def f():\n    """Takes `a`.\n\n    Returns `Array`s, or `a` as it is.\n    """\n')] == [4]


def test_a_heading_may_precede_the_same_word_and_numbers_may_repeat():
    assert not list(proselint_results(prose("# NaN\n\nNaN is 0 0.\n", keeps_code=False)))
    assert not list(proselint_results(""))
