"""Every block of Python and console on a page is run by a test, or says why it is not."""

from __future__ import annotations

import ast

import pytest

from tests.pages import DOCS, KINDS, ROOT, Block, blocks, pages, steps, without_runner

ALL = [block for page in pages() for block in blocks(page)]


def test_every_fenced_block_was_found() -> None:
    for page in pages():
        text = (DOCS / page).read_text()
        opened = sum(line.strip() in [f"```{kind}" for kind in KINDS] for line in text.splitlines())
        assert opened == len(blocks(page)), page


def test_every_block_is_run_or_says_why_it_is_not() -> None:
    for block in ALL:
        assert block.is_general or block.other_test or len(block.reason) > 8, (
            f"{block.where}: a note that is unknown: {block.note!r}"
        )


def test_the_tests_that_run_blocks_read_the_page() -> None:
    for block in ALL:
        if block.other_test:
            file, name = block.other_test
            text = (ROOT / file).read_text()
            assert f"def {name}(" in text, block.where
            assert block.page in text, block.where


def test_a_program_says_the_name_of_its_file() -> None:
    for block in ALL:
        if block.kind == "python" and block.is_general and block.text.startswith('"""'):
            assert block.name, f"{block.where}: the paragraph before names no `file.py`"


def test_every_block_of_python_is_python() -> None:
    for block in ALL:
        if block.kind == "python" and not block.reason:
            text = block.program if block.is_general and not block.name else block.text
            compile(text, block.where, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)


def test_every_block_of_commands_begins_with_a_command() -> None:
    for block in ALL:
        if block.kind == "console":
            assert block.text.startswith("$ "), block.where
            assert steps(block.text), block.where


@pytest.mark.parametrize(
    ("note", "expected"),
    [
        ("", "await x\n"),
        ("run\nx = 1", "x = 1\nawait x\n"),
        ("run\nwith y:\n    ...\n    z()", "with y:\n    await x\n    z()\n"),
    ],
)
def test_the_code_of_a_note(note: str, expected: str) -> None:
    block = Block("a.md", 1, "python", "await x\n", note, "")
    assert block.program.lstrip("\n") == expected


def test_steps_with_continued_lines_and_here_documents() -> None:
    text = "$ a \\\n    b\nsaid\n$ cat > x <<'EOF'\nline\nEOF\n$ c\n"
    assert [(step.command, step.lines) for step in steps(text)] == [
        ("a \\\n    b", ["said"]),
        ("cat > x <<'EOF'\nline\nEOF", []),
        ("c", []),
    ]


def test_the_commands_of_a_page_are_run_without_the_runner() -> None:
    commands = [
        step.command
        for block in ALL
        if block.kind == "console" and block.is_general
        for step in steps(block.text)
    ]
    behind = [command for command in commands if "softroce" in command]
    assert len(behind) > 5
    for command in behind:
        assert without_runner(command) != command
        assert "softroce" not in without_runner(command)
    command = "python -m aiordma_softroce --hosts 2 --virtual-time -- a -- b"
    assert without_runner(command) == "a -- b"
