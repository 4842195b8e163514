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
# Each room may import those before it. Modules within one room may import one another, as long as none needs itself.
ROOMS = [
    "version",
    "errors",
    "progress",
    "geometry",
    "model",
    "search",
    "result",
    "calibration",
    "io",
    "cost",
    "estimator",
    "its",
    "presets",
    "sources",
    "plot",
    "paper",
    "apps",
    "cli",
]
FILES = sorted(SOURCE.rglob("*.py"))
CORE = [path for path in FILES if path.parent != SOURCE or path.stem not in ("__init__", "__main__")]
CORE = [
    path for path in CORE if path.relative_to(SOURCE).parts[0].removesuffix(".py") in ROOMS[: ROOMS.index("sources")]
]


def module_of(path: Path) -> str:
    """Name of a file's module inside the package: "search.tree", "errors", "sources"."""
    parts = path.relative_to(SOURCE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_of(path) for path in FILES}
CORE = [path for path in FILES if module_of(path).split(".")[0] in ROOMS[: ROOMS.index("sources")]]


def imported(text: str) -> set[str]:
    """Modules of headtilt that a source imports, wherever in the file it does so: in functions and for types, too."""
    found = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        for name in names:
            whole = name.removeprefix("headtilt.") if name.startswith("headtilt.") else None
            if whole is not None:  # a module, or a name inside of one
                found.add(whole if whole in MODULES else whole.rpartition(".")[0])
    return found


def room(module: str) -> str:
    return module.split(".")[0]


def upward(module: str, text: str) -> list[str]:
    """Imports of rooms that come after the module's own."""
    place = ROOMS.index(room(module))
    return [other for other in sorted(imported(text)) if other and ROOMS.index(room(other)) > place]


def circles(graph: dict[str, set[str]]) -> list[str]:
    """Modules that import themselves by way of others."""
    reach = {module: set(others) for module, others in graph.items()}
    for middle in graph:
        for others in reach.values():
            if middle in others:
                others |= reach[middle]
    return sorted(module for module, others in reach.items() if module in others)


def test_every_file_has_a_room():
    assert {room(module) for module in MODULES} - {"", "__main__"} == set(ROOMS)


def test_imports_go_one_way_through_the_rooms():
    wrong = {}
    for path in FILES:
        module = module_of(path)
        if room(module) in ROOMS and (found := upward(module, path.read_text(encoding="utf-8"))):
            wrong[module] = found
    assert wrong == {}


def test_no_module_needs_itself():
    graph = {module_of(path): imported(path.read_text(encoding="utf-8")) - {module_of(path)} for path in FILES}
    assert circles({module: {other for other in others if other in graph} for module, others in graph.items()}) == []


def test_an_import_that_goes_the_wrong_way_would_be_seen():
    assert upward("geometry.warp", "from headtilt.its import ITS") == ["its"]
    assert upward("geometry.warp", "def f():\n    import headtilt.result") == ["result"]
    assert upward("model.taps", "from headtilt.search import confidence") == ["search.confidence"]
    assert upward("search.joint", "from headtilt.search.tree import Tree\nfrom headtilt.geometry import groups") == []
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}}) == ["a", "b", "c"]


@pytest.fixture(scope="module")
def modules_after_import() -> set[str]:
    """All that a fresh interpreter has loaded after `import headtilt`, beyond what torch loads by itself."""
    program = (
        "import sys, json, torch, numpy; before = set(sys.modules); import headtilt; "
        "headtilt.from_pretrained, headtilt.ITS; "
        "print(json.dumps(sorted(set(sys.modules) - before)))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=120)
    return set(json.loads(done.stdout.splitlines()[-1]))


def test_importing_headtilt_imports_nothing_heavy(modules_after_import):
    assert {name.split(".")[0] for name in modules_after_import} & HEAVY == set()
    assert "headtilt.its" in modules_after_import


@pytest.mark.parametrize("program", ["import headtilt", "import headtilt.cli", "from headtilt.__main__ import main"])
def test_torch_is_imported_where_it_is_first_needed(program):
    """The command line can say what it does without it."""
    asked = f"import sys; {program}; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", asked], capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout.strip() == "False"


def test_a_name_that_does_not_exist_is_an_attribute_error():
    with pytest.raises(AttributeError, match="module 'headtilt' has no attribute 'Its'"):
        headtilt.Its  # noqa: B018
    assert set(headtilt.__all__) <= set(dir(headtilt))


def test_importing_headtilt_leaves_what_needs_extras_alone(modules_after_import):
    rooms = {name.split(".")[1] for name in modules_after_import if name.startswith("headtilt.")}
    assert rooms & {"plot", "paper", "apps", "cli"} == set()
    assert not any(f"headtilt.sources.{name}" in modules_after_import for name in ("images", "registry", "hf", "zoo"))


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


def test_nothing_is_unpickled():
    found = {module_of(path): unsafe(path.read_text(encoding="utf-8")) for path in FILES}
    assert {module: what for module, what in found.items() if what} == {}


def test_unpickling_would_be_seen():
    assert unsafe("import pickle") == ["pickle"]
    assert unsafe("from pickle import loads") == ["pickle"]
    assert unsafe("import torch\ntorch.load('x', weights_only=True)") == ["torch.load"]
    assert unsafe("from torch import load") == ["load"]
    assert unsafe("np.load('x', allow_pickle=True)") == ["allow_pickle"]
    assert unsafe("eval('1')") == ["eval"]
    assert unsafe("model.eval()\nnp.load('x', allow_pickle=False)") == []


def test_modules_of_the_core_load_torch_and_numpy_only_and_print_nothing():
    """Extras may be imported inside a function, where they are used."""
    allowed = {"torch", "numpy", "headtilt", "__future__"} | set(sys.stdlib_module_names)
    for path in CORE:
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for node in tree.body:
            if isinstance(node, ast.Import):
                assert {alias.name.split(".")[0] for alias in node.names} <= allowed, path
            elif isinstance(node, ast.ImportFrom):
                assert (node.module or "").split(".")[0] in allowed, path
        calls = [node.func for node in ast.walk(tree) if isinstance(node, ast.Call)]
        assert not any(isinstance(name, ast.Name) and name.id == "print" for name in calls), path


def unseeded(text: str) -> list[str]:
    """Draws from the global random stream."""
    drawing = {"rand", "randn", "randint", "randperm", "multinomial", "bernoulli"}
    return [
        f"torch.{node.func.attr} on line {node.lineno}"
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and isinstance(node.func.value, ast.Name)
        and node.func.value.id == "torch"
        and node.func.attr in drawing
        and not any(keyword.arg == "generator" for keyword in node.keywords)
    ]


def test_nothing_of_the_core_draws_from_the_global_random_stream():
    """Randomness is an argument: a seed or a generator."""
    found = {module_of(path): unseeded(path.read_text(encoding="utf-8")) for path in CORE}
    assert {module: what for module, what in found.items() if what} == {}
    assert unseeded("torch.rand(3)") == ["torch.rand on line 1"]
