"""Check the words, names of variables and constants of the project: CONTRIBUTING.md has the rules.

Run it from the project's root. It prints a line for each finding, and exits with 1 if there is one.
"""

import ast
import re
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

CODE_PATTERNS = ("*.py", "engine/**/*.py", "benchmarks/*.py", "examples/*.py", "docs/*.py")
TEXT_PATTERNS = ("tests/**/*.py", "*.md", "docs/*.md", "config/*.toml", "pyproject.toml")
TEXT_PATTERNS += ("engine/report/web/*.html", "engine/report/web/[!u]*.js")
UNCHECKED_FILES = ("check_language.py", "test_documents.py")  # they use the words

FORBIDDEN_NAMES = "asked begun found given gone known left one other others some these whole"
FORBIDDEN_TEXT = re.compile(
    r"\b(?:sooner|whoever|likeliest|told|said|stretch(?:es)?|patience|in vain|give word|gives word"
    "|goes on|went on|go on|asked for|so many|so much|told apart|the way back|by the hour"
    "|quicker hour|slower hour|is no (?:dataset|checkpoint|number|text|file|run|folder)"
    r"|\w*colour\w*|\w*behaviour\w*|neighbour\w*|favourite|licence|centre\w*|artefact\w*"
    r"|(?:normal|optim|memor|synchron|initial|token|real|serial|parallel|general)is(?:e|ed|es|ing|ation))\b",
    re.IGNORECASE,
)


def check_constants(trees: dict[str, ast.Module]) -> Iterator[str]:
    """Yield a finding for each constant of one word, or that several modules define differently."""
    places: dict[str, dict[str, str]] = defaultdict(dict)  # by name and value
    for path, tree in trees.items():
        for node in tree.body:
            targets = node.targets if isinstance(node, ast.Assign) else []
            targets = [node.target] if isinstance(node, ast.AnnAssign) else targets
            for target in targets:
                value = ast.unparse(node.value) if node.value else "None"  # which has no unit
                if isinstance(target, ast.Name) and target.id.isupper() and value != "None":
                    place = f"{path}:{node.lineno}"
                    places[target.id][value] = place
                    if "_" not in target.id.strip("_"):
                        yield f"{place}: constant {target.id} must say quantity, bound or unit"
    for name, place_of_value in places.items():
        if len(place_of_value) > 1:
            yield f"{', '.join(place_of_value.values())}: constant {name} has several meanings"


def check_project() -> Iterator[str]:
    """Yield the findings in the files of the current directory: words, variables and constants."""
    trees = {}
    code = {path for pattern in CODE_PATTERNS for path in Path().glob(pattern)}
    texts = {path for pattern in TEXT_PATTERNS for path in Path().glob(pattern)}
    for path in sorted(code | texts):
        if path.name in UNCHECKED_FILES or path.name.endswith(".zh.md"):
            continue
        text = path.read_text(encoding="utf-8")
        for number, line in enumerate(text.splitlines(), 1):
            for match in FORBIDDEN_TEXT.finditer(line):
                yield f"{path}:{number}: write {match[0]!r} in other words"
        tree = ast.parse(text if path.suffix == ".py" else "")
        for node in ast.walk(tree):
            is_assigned = isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
            if is_assigned and node.id in FORBIDDEN_NAMES.split():
                yield f"{path}:{node.lineno}: variable {node.id} must say its role"
        if path in code:
            trees[str(path)] = tree
    yield from check_constants(trees)


if __name__ == "__main__":
    findings = [*check_project()]
    print("\n".join([*findings, f"{len(findings)} findings"]))
    sys.exit(bool(findings))
