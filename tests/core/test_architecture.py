"""What imports what, what `import headtilt` costs, and what the package may never do."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

import headtilt

SOURCE = Path(headtilt.__file__).parent
HEAVY = {"matplotlib", "PIL", "sklearn", "transformers", "ray", "gradio", "typer", "rich"}
# Each may import those above it; modules within one package may import one another.
ORDER = [
    "errors",
    "progress",
    "weights",
    "groups",
    "warp",
    "back",
    "borrow",
    "pace",
    "evidence",
    "outputs",
    "padding",
    "taps",
    "predictor",
    "confidence",
    "calibrate",
    "distances",
    "result",
    "gate",
    "search",
    "sampler",
    "head",
    "blocks",
    "fit_input",
    "verdict",
    "fit",
    "bundle",
    "export",
    "wrapper",
    "pipeline",
    "presets",
    "plot",
    "data",
    "models",
    "adapters",  # one door opens the zoo as well
    "pretrained",
    "baselines",
    "experiments",
    "apps",
    "cli",
]
FILES = sorted(SOURCE.rglob("*.py"))


def layer(path: Path) -> str:
    """First part of a file's place in the package: "search" for search/tree.py, "warp" for warp.py."""
    return path.relative_to(SOURCE).parts[0].removesuffix(".py")


def imported_layers(tree: ast.AST) -> set[str]:
    """Parts of headtilt that a module imports, wherever in the file it does so."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        found |= {name.split(".")[1] for name in names if name.split(".")[0] == "headtilt" and "." in name}
    return found


def violations(name: str, text: str) -> list[str]:
    place = ORDER.index(name)
    known = [other for other in imported_layers(ast.parse(text)) if other in ORDER]
    return [f"{name} imports {other}" for other in known if ORDER.index(other) > place]


LAYERED = [path for path in FILES if path.parent != SOURCE or path.name not in ("__init__.py", "__main__.py")]


@pytest.mark.parametrize("path", LAYERED, ids=lambda path: str(path.relative_to(SOURCE)))
def test_imports_point_upward(path):
    assert layer(path) in ORDER, f"give {layer(path)} its place in ORDER"
    assert violations(layer(path), path.read_text(encoding="utf-8")) == []


def test_an_import_that_points_downward_would_be_seen():
    assert violations("warp", "from headtilt.wrapper import ITS") == ["warp imports wrapper"]
    assert violations("warp", "def f():\n    import headtilt.result") == ["warp imports result"]
    assert violations("warp", "from headtilt import confidence") == ["warp imports confidence"]
    assert violations("search", "from headtilt.search.tree import Tree\nfrom headtilt.groups import rotation") == []


@pytest.fixture(scope="module")
def modules_after_import() -> set[str]:
    """All that a fresh interpreter has loaded after `import headtilt`, beyond what torch loads by itself."""
    program = (
        "import sys, json, torch, numpy; before = set(sys.modules); import headtilt; "
        "print(json.dumps(sorted(set(sys.modules) - before)))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=120)
    return set(json.loads(done.stdout.splitlines()[-1]))


def test_importing_headtilt_imports_nothing_heavy(modules_after_import):
    assert {name.split(".")[0] for name in modules_after_import} & HEAVY == set()
    assert "headtilt.wrapper" in modules_after_import


@pytest.mark.parametrize("lazy", ["plot", "adapters", "data", "models", "baselines", "experiments", "apps", "cli"])
def test_importing_headtilt_leaves_what_needs_extras_alone(modules_after_import, lazy):
    assert not any(name == f"headtilt.{lazy}" or name.startswith(f"headtilt.{lazy}.") for name in modules_after_import)


def test_public_names_exist_once_and_are_sorted():
    names = headtilt.__all__
    for name in names:
        assert getattr(headtilt, name) is not None
    assert len(names) == len(set(names))

    def constants_then_classes_then_functions(name: str) -> tuple[int, str]:
        return (0 if name.isupper() else 1 if name[0].isupper() else 2), name

    assert names == sorted(names, key=constants_then_classes_then_functions)


def test_public_names_are_documented_and_come_from_headtilt():
    for name in headtilt.__all__:
        value = getattr(headtilt, name)
        if callable(value):
            assert value.__doc__, f"{name} has no docstring"
            assert value.__module__.startswith("headtilt."), name


def test_the_version_is_a_version():
    assert headtilt.__version__.split(".")[:2] == [
        part for part in headtilt.__version__.split(".")[:2] if part.isdigit()
    ]


def test_the_package_says_that_it_is_typed():
    assert (SOURCE / "py.typed").exists()


UNSAFE_MODULES = {"pickle", "cPickle", "dill", "cloudpickle", "joblib", "shelve", "marshal"}
UNSAFE_CALLS = {("torch", "load"), ("torch", "save"), ("builtins", "eval"), ("builtins", "exec")}


def unsafe(text: str) -> list[str]:
    """Ways of running code that came with data, by what they are called."""
    found = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names if alias.name.split(".")[0] in UNSAFE_MODULES]
        elif isinstance(node, ast.ImportFrom):
            found += [node.module] if (node.module or "").split(".")[0] in UNSAFE_MODULES else []
            found += [alias.name for alias in node.names if (node.module, alias.name) in UNSAFE_CALLS]
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            found += [f"{node.value.id}.{node.attr}"] if (node.value.id, node.attr) in UNSAFE_CALLS else []
        elif isinstance(node, ast.Call):
            named = node.func.id if isinstance(node.func, ast.Name) else ""
            found += [named] if ("builtins", named) in UNSAFE_CALLS else []
            for keyword in node.keywords:
                allowed = isinstance(keyword.value, ast.Constant) and keyword.value.value is False
                found += ["allow_pickle"] if keyword.arg == "allow_pickle" and not allowed else []
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_nothing_is_unpickled(path):
    assert unsafe(path.read_text(encoding="utf-8")) == []


def test_unpickling_would_be_seen():
    assert unsafe("import pickle") == ["pickle"]
    assert unsafe("from pickle import loads") == ["pickle"]
    assert unsafe("import torch\ntorch.load('x', weights_only=True)") == ["torch.load"]
    assert unsafe("from torch import load") == ["load"]
    assert unsafe("np.load('x', allow_pickle=True)") == ["allow_pickle"]
    assert unsafe("eval('1')") == ["eval"]
    assert unsafe("model.eval()\nnp.load('x', allow_pickle=False)") == []


CORE = [path for path in FILES if layer(path) in ORDER[: ORDER.index("plot")]]


@pytest.mark.parametrize("path", CORE, ids=lambda path: str(path.relative_to(SOURCE)))
def test_modules_of_the_core_load_torch_and_numpy_only_and_print_nothing(path):
    """Extras may be imported inside a function, where they are used."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    allowed = {"torch", "numpy", "headtilt", "__future__"} | set(sys.stdlib_module_names)
    for node in tree.body:
        if isinstance(node, ast.Import):
            assert {alias.name.split(".")[0] for alias in node.names} <= allowed
        elif isinstance(node, ast.ImportFrom):
            assert (node.module or "").split(".")[0] in allowed
    calls = [node.func for node in ast.walk(tree) if isinstance(node, ast.Call)]
    assert not any(isinstance(name, ast.Name) and name.id == "print" for name in calls)


@pytest.mark.parametrize("path", CORE, ids=lambda path: str(path.relative_to(SOURCE)))
def test_nothing_of_the_core_draws_from_the_global_random_stream(path):
    """Randomness is an argument: a seed or a generator, or a stream forked beforehand."""
    text = path.read_text(encoding="utf-8")
    drawing = {"rand", "randn", "randint", "randperm", "multinomial", "bernoulli"}
    for node in ast.walk(ast.parse(text)):
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and isinstance(node.func.value, ast.Name)
            and node.func.value.id == "torch"
            and node.func.attr in drawing
        ):
            seeded = any(keyword.arg == "generator" for keyword in node.keywords)
            assert seeded or "fork_rng" in text, f"torch.{node.func.attr} on line {node.lineno}"
