"""No input becomes code: nothing in the server or the client unpickles, evaluates, or runs a shell."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = sorted([*(ROOT / "server").rglob("*.py"), *(ROOT / "client").rglob("*.py")])

MODULES = {
    "pickle": "unpickling runs what the data says",
    "cPickle": "unpickling runs what the data says",
    "cloudpickle": "unpickling runs what the data says",
    "dill": "unpickling runs what the data says",
    "joblib": "unpickles",
    "jsonpickle": "unpickles",
    "marshal": "loads code",
    "shelve": "unpickles",
    "code": "an interpreter",
    "codeop": "an interpreter",
    "pdb": "an interpreter",
    "commands": "a shell",
    "pty": "a shell",
    "multiprocessing": "its pipes and queues unpickle",
}
CALLS = {
    "eval": "evaluates",
    "exec": "executes",
    "compile": "compiles",
    "__import__": "imports by name",
    "breakpoint": "an interpreter",
    "os.system": "a shell",
    "os.popen": "a shell",
    "subprocess.getoutput": "a shell",
    "subprocess.getstatusoutput": "a shell",
    "asyncio.create_subprocess_shell": "a shell",
    "yaml.load": "builds any object",
    "yaml.unsafe_load": "builds any object",
    "yaml.full_load": "builds any object",
    "logging.config.listen": "evaluates what comes by a socket",
}
TRUE_WITHOUT = {"torch.load": "weights_only"}
"""Calls that unpickle unless this argument is true."""
OWN_PROCESSES = ROOT / "server" / "prefixd_server" / "simulate" / "processes.py"
"""Starts the simulator's workers: their pipes are inherited, so nobody else can write there."""
NEVER_TRUE = {"shell": "a shell", "allow_pickle": "unpickles", "trust_remote_code": "runs a model's own code"}


def findings(source: str) -> Iterator[str]:
    """What is found in a file: "LINE: NAME: why"."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from _imports(node.lineno, [alias.name for alias in node.names])
        elif isinstance(node, ast.ImportFrom):
            module = node.module or ""
            yield from _imports(node.lineno, [module] if node.level == 0 else [])
            names = [f"{module}.{alias.name}" for alias in node.names]
            yield from (f"{node.lineno}: {name}: {CALLS[name]}" for name in names if name in CALLS)
        elif isinstance(node, ast.Call):
            yield from _call(node)


def _imports(line: int, names: list[str]) -> Iterator[str]:
    for name in names:
        top = name.partition(".")[0]
        if top in MODULES:
            yield f"{line}: {name}: {MODULES[top]}"


def _call(node: ast.Call) -> Iterator[str]:
    name = _dotted(node.func)
    if name in CALLS:
        yield f"{node.lineno}: {name}: {CALLS[name]}"
    given = {keyword.arg: keyword.value for keyword in node.keywords if keyword.arg}
    needed = TRUE_WITHOUT.get(name)
    if needed and not _is_true(given.get(needed)):
        yield f"{node.lineno}: {name} without {needed}=True"
    for argument, why in NEVER_TRUE.items():
        value = given.get(argument)
        if value is not None and not (isinstance(value, ast.Constant) and value.value is False):
            yield f"{node.lineno}: {name}({argument}=...): {why}"


def _is_true(value: ast.expr | None) -> bool:
    return isinstance(value, ast.Constant) and value.value is True


def _dotted(node: ast.expr) -> str:
    if isinstance(node, ast.Attribute):
        return f"{_dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_input_becomes_code(path: Path) -> None:
    found = list(findings(path.read_text()))
    if path == OWN_PROCESSES:
        found = [finding for finding in found if ": multiprocessing:" not in finding]
    assert found == []


@pytest.mark.parametrize(
    "line",
    [
        "import pickle",
        "import multiprocessing.connection",
        "from pickle import loads",
        "from os import system",
        "eval(text)",
        "exec(text)",
        "os.system(text)",
        "subprocess.run(text, shell=True)",
        "subprocess.run(text, shell=chosen)",
        "asyncio.create_subprocess_shell(text)",
        "yaml.load(text)",
        "np.load(path, allow_pickle=True)",
        "torch.load(path)",
        "torch.load(path, weights_only=False)",
        "AutoModel.from_pretrained(name, trust_remote_code=True)",
    ],
)
def test_each_way_is_noticed(line: str) -> None:
    assert len(list(findings(f"\n{line}\n"))) == 1


@pytest.mark.parametrize(
    "line",
    [
        "re.compile(text)",
        "model.eval()",
        "subprocess.run([a], shell=False)",
        "torch.load(p, weights_only=True)",
    ],
)
def test_what_only_sounds_so_is_not(line: str) -> None:
    assert list(findings(line)) == []
