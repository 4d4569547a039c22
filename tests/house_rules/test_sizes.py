"""R5: limits on the size of files and functions."""

from tests.house_rules.source import PROGRAM, Source, functions, report, source, sources

FILE_LINES, FUNCTION_LINES, ENTRY_POINT_LINES, TOOL_LINES = 600, 100, 160, 250


def file_findings(files: tuple[Source, ...]) -> list[str]:
    return [f"{file.path}: {file.num_lines} lines" for file in files if file.num_lines > _allowed(file.path)]


def _allowed(path: str) -> int:
    if path == "pretrain_moe.py":
        return ENTRY_POINT_LINES
    return TOOL_LINES if path.startswith("tools/") else FILE_LINES


def function_findings(files: tuple[Source, ...]) -> list[str]:
    return [
        f"{file.path}:{node.lineno} {node.name}: {length} lines"
        for file in files
        for node in functions(file)
        if (length := (node.end_lineno or node.lineno) - node.lineno + 1) > FUNCTION_LINES
    ]


def test_files_are_short():
    rule = f"R5: files at most {FILE_LINES} lines, pretrain_moe.py {ENTRY_POINT_LINES}, tools {TOOL_LINES} each"
    report(file_findings(sources(*PROGRAM, "tests")), rule)


def test_functions_are_short():
    report(function_findings(sources(*PROGRAM, "tests")), f"R5: functions at most {FUNCTION_LINES} lines")


def test_the_checks_find_what_is_too_large():
    long_file = source("megatron_moe/moe/router.py", "x = 1\n" * 601)
    long_entry_point = source("pretrain_moe.py", "x = 1\n" * 161)
    long_tool = source("tools/generate.py", "x = 1\n" * 251)
    assert len(file_findings((long_file, long_entry_point, long_tool))) == 3
    assert function_findings((source("a.py", "def f():\n" + "    x = 1\n" * 100),)) == ["a.py:1 f: 101 lines"]
