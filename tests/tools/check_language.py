"""Check the language of the project: words, names of variables, and constants of the source.

Run it from the project's root: ``python tests/tools/check_language.py``. It prints one line for
each finding, and exits with 1 if there is one. CONTRIBUTING.md has the rules.
"""

import ast
import re
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

CODE_PATTERNS = ("*.py", "engine/**/*.py", "benchmarks/*.py", "examples/*.py", "docs/*.py")
TEST_PATTERNS = ("tests/**/*.py",)
TEXT_PATTERNS = ("*.md", "docs/*.md", "config/*.toml", "pyproject.toml")
TEXT_PATTERNS += ("engine/report/web/*.html", "engine/report/web/[!u]*.js")
# They use the words.
UNCHECKED_FILES = {"tests/tools/check_language.py", "tests/test_documents.py"}

PRONOUNS_AND_PARTICIPLES = (
    "asked begun found given gone known left one other others said some these told whole"
)
PRONOUN_VARIABLES = {*PRONOUNS_AND_PARTICIPLES.split(" ")}
OBSOLETE_WORDS = (
    "sooner|whoever|likeliest|told|said|stretch(?:es)?|patience|in vain|give word|gives word"
    "|goes on|went on|go on|asked for|so many|so much|told apart|the way back|by the hour"
    "|quicker hour|slower hour|is no (?:dataset|checkpoint|number|text|file|run|folder)"
)
BRITISH_SPELLINGS = (
    r"\w*colour\w*|\w*behaviour\w*|neighbour\w*|favourite|licence|centre\w*|artefact\w*"
    r"|(?:normal|optim|memor|synchron|initial|token|real|serial|parallel|general)is(?:e|ed|es|ing|ation)"
)
FORBIDDEN_TEXT = re.compile(rf"\b(?:{OBSOLETE_WORDS}|{BRITISH_SPELLINGS})\b", re.IGNORECASE)

Finding = tuple[int, str]  # line and description


def check_text(text: str) -> Iterator[Finding]:
    """Yield the forbidden words of a file."""
    for number, line in enumerate(text.splitlines(), 1):
        for match in FORBIDDEN_TEXT.finditer(line):
            yield number, f"write {match[0]!r} in other words"


def module_constants(tree: ast.Module) -> Iterator[tuple[str, ast.expr, int]]:
    """Yield the name, value and line of each constant that a module defines."""
    for node in tree.body:
        targets: list[ast.expr] = []
        if isinstance(node, ast.Assign):
            targets = node.targets
        elif isinstance(node, ast.AnnAssign) and node.value is not None:
            targets = [node.target]
        for target in targets:
            if isinstance(target, ast.Name) and target.id.isupper():
                assert isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None
                yield target.id, node.value, node.lineno


def check_constants(tree: ast.Module) -> Iterator[Finding]:
    """Yield constants of one word."""
    for name, _, line in module_constants(tree):
        if "_" not in name.strip("_"):
            yield line, f"constant {name} must say quantity, bound or unit"


def check_variables(tree: ast.Module) -> Iterator[Finding]:
    """Yield variables that are pronouns or participles."""
    for node in ast.walk(tree):
        is_assigned = isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
        if is_assigned and node.id in PRONOUN_VARIABLES:
            yield node.lineno, f"variable {node.id} must say its role"


def check_duplicates(trees: dict[str, ast.Module]) -> Iterator[str]:
    """Yield constants that several modules define with different values."""
    values: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for path, tree in trees.items():
        for name, value, line in module_constants(tree):
            values[name][ast.unparse(value)].append(f"{path}:{line}")
    for name, places in values.items():
        if len(places) > 1:
            where = ", ".join(place for group in places.values() for place in group)
            yield f"{where}: constant {name} has several meanings"


def check_project(root: Path) -> Iterator[str]:
    """Yield a line for each finding in the files of a project."""

    def list_files(*patterns: str) -> list[Path]:
        paths = {path for pattern in patterns for path in root.glob(pattern)}
        names = {str(path.relative_to(root)): path for path in paths}
        return [names[name] for name in sorted(names) if name not in UNCHECKED_FILES]

    code = list_files(*CODE_PATTERNS)
    for path in list_files(*CODE_PATTERNS, *TEST_PATTERNS, *TEXT_PATTERNS):
        if path.name.endswith(".zh.md"):
            continue
        text = path.read_text(encoding="utf-8")
        findings = list(check_text(text))
        if path.suffix == ".py":
            findings += check_variables(ast.parse(text))
            findings += check_constants(ast.parse(text)) if path in code else ()
        for line, description in findings:
            yield f"{path.relative_to(root)}:{line}: {description}"
    trees = {str(path.relative_to(root)): ast.parse(path.read_text("utf-8")) for path in code}
    yield from check_duplicates(trees)


def main() -> None:
    """Print the findings of the project in the current directory."""
    findings = list(check_project(Path()))
    print("\n".join([*findings, f"{len(findings)} findings"]))
    sys.exit(bool(findings))


if __name__ == "__main__":
    main()
