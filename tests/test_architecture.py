"""Rules of the house that ruff and the import contract cannot state. Each fault names its line."""

import ast
import json
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import qerl_jax

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "qerl_jax"
KERNELS = ROOT / "kernels_pallas"

MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60

# Imported inside the functions that use them: a GPU machine may lack them, and --help is quick.
IMPORTED_LATE = {
    "accelerate",
    "datasets",
    "gguf",
    "reasoning_gym",
    "safetensors",
    "torch",
    "transformers",
}
KERNEL_IMPORTS = {"jax", "jaxtyping", "kernels_pallas", "ml_dtypes", "numpy"}
VAGUE_NAMES = {"common", "helpers", "lib", "misc", "util", "utils"}
PURE_BASES = {"Exception", "NamedTuple", "Protocol", "TypedDict", "ValueError"}

Modules = dict[Path, ast.Module]


def _parse(*folders: Path) -> Modules:
    paths = sorted(path for folder in folders for path in folder.rglob("*.py"))
    return {path: ast.parse(path.read_text(), str(path)) for path in paths}


ALL = _parse(PACKAGE, KERNELS)
OURS = {path: tree for path, tree in ALL.items() if PACKAGE in path.parents}
KERNEL_MODULES = {path: tree for path, tree in ALL.items() if KERNELS in path.parents}


def _place(path: Path, node: ast.AST | None = None) -> str:
    return f"{path.relative_to(ROOT)}:{getattr(node, 'lineno', 1)}"


def _imported(node: ast.AST) -> list[str]:
    """Return the absolute names that an import statement brings in, e.g. jax.lax.scan."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom) and node.level == 0:
        return [f"{node.module}.{alias.name}" for alias in node.names]
    return []


def _outside_functions(node: ast.AST) -> Iterator[ast.AST]:
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            yield child
            yield from _outside_functions(child)


def _decorators(node: ast.ClassDef | ast.FunctionDef) -> list[str]:
    return [ast.unparse(decorator) for decorator in node.decorator_list]


def _bases(node: ast.ClassDef) -> set[str]:
    return {ast.unparse(base).split("[")[0].split(".")[-1] for base in node.bases}


def test_every_module_has_a_place_in_the_import_order():
    tools = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]
    (contract,) = tools["importlinter"]["contracts"]
    placed = [name.strip() for layer in contract["layers"] for name in layer.split("|")]
    entries = {path.stem for path in PACKAGE.iterdir() if path.suffix == ".py"}
    entries |= {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
    entries -= {"__init__", "__main__"}
    assert sorted(placed) == sorted({f"qerl_jax.{name}" for name in entries} | {"kernels_pallas"})


def test_every_folder_of_modules_is_a_package():
    folders = {path.parent for path in ALL}
    faults = [str(folder) for folder in folders if not (folder / "__init__.py").exists()]
    assert not faults, "\n".join(faults)


def test_heavy_libraries_are_imported_late():
    faults = [
        f"{_place(path, node)} imports {name}"
        for path, tree in ALL.items()
        for node in _outside_functions(tree)
        for name in _imported(node)
        if name.split(".")[0] in IMPORTED_LATE
    ]
    assert not faults, "\n".join(faults)


def test_package_imports_without_the_heavy_libraries():
    names = [
        ".".join(path.relative_to(ROOT / "src").with_suffix("").parts)
        for path in OURS
        if path.stem not in {"__init__", "__main__"}
    ]
    script = (
        "import importlib, sys\n"
        f"sys.modules.update(dict.fromkeys({sorted(IMPORTED_LATE | {'beartype'})}))\n"
        f"for name in {names}: importlib.import_module(name)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_kernels_depend_on_jax_and_numpy_alone():
    allowed = KERNEL_IMPORTS | set(sys.stdlib_module_names)
    faults = [
        f"{_place(path, node)} imports {name}"
        for path, tree in KERNEL_MODULES.items()
        for node in ast.walk(tree)
        for name in _imported(node)
        if name.split(".")[0] not in allowed
    ]
    assert not faults, "\n".join(faults)


def test_experimental_jax_stays_in_the_kernels():
    faults = [
        _place(path, node)
        for path, tree in OURS.items()
        for node in ast.walk(tree)
        if any(name.startswith("jax.experimental") for name in _imported(node))
        or (isinstance(node, ast.Attribute) and ast.unparse(node) == "jax.experimental")
    ]
    assert not faults, "\n".join(faults)


def test_annotations_stay_objects():
    """The runtime shape checks read annotations, which this import would turn into strings."""
    faults = [
        _place(path, node)
        for path, tree in ALL.items()
        for node in ast.walk(tree)
        if "__future__.annotations" in _imported(node)
    ]
    assert not faults, "\n".join(faults)


def test_keys_are_typed():
    faults = [
        _place(path, node)
        for path, tree in ALL.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and node.attr == "PRNGKey"
    ]
    assert not faults, "\n".join(faults)


def test_containers_skip_the_shape_hook():
    """jax rebuilds containers from shapes and specs, which their array annotations would refuse."""
    faults = [
        f"{_place(path, node)} {node.name}"
        for path, tree in ALL.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
        and any("struct.dataclass" in name for name in _decorators(node))
        and _decorators(node)[0] != "typing.no_type_check"
    ]
    assert not faults, "\n".join(faults)


def test_classes_hold_data_only():
    faults = []
    for path, tree in ALL.items():
        for node in ast.walk(tree):
            if not isinstance(node, ast.ClassDef):
                continue
            if not _bases(node) <= PURE_BASES:
                faults.append(f"{_place(path, node)} {node.name} inherits {_bases(node)}")
            if "Protocol" in _bases(node):
                continue
            faults += [
                f"{_place(path, method)} {node.name}.{method.name} is a method"
                for method in node.body
                if isinstance(method, ast.FunctionDef) and "property" not in _decorators(method)
            ]
    assert not faults, "\n".join(faults)


def test_public_functions_are_documented():
    faults = []
    for path, tree in ALL.items():
        if tree.body and ast.get_docstring(tree) is None:
            faults.append(f"{_place(path)} has no docstring")
        for node in tree.body:
            if not isinstance(node, ast.FunctionDef) or node.name.startswith("_"):
                continue
            if ast.get_docstring(node) is None:
                faults.append(f"{_place(path, node)} {node.name} has no docstring")
            if node.returns is None:
                faults.append(f"{_place(path, node)} {node.name} has no return type")
    assert not faults, "\n".join(faults)


def test_files_and_functions_are_short():
    faults = []
    for path, tree in ALL.items():
        lines = len(path.read_text().splitlines())
        if lines > MAX_FILE_LINES:
            faults.append(f"{_place(path)} has {lines} lines, over {MAX_FILE_LINES}")
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef):
                length = node.end_lineno - node.lineno + 1
                if length > MAX_FUNCTION_LINES:
                    faults.append(f"{_place(path, node)} {node.name} has {length} lines")
    assert not faults, "\n".join(faults)


def test_module_names_say_something_and_shadow_nothing():
    refused = VAGUE_NAMES | IMPORTED_LATE | set(sys.stdlib_module_names) | {"flax", "jax", "optax"}
    faults = [_place(path) for path in ALL if path.stem in refused]
    assert not faults, "\n".join(faults)


def test_exported_names_exist():
    for name in qerl_jax.__all__:
        assert getattr(qerl_jax, name) is not None
    for name, home in qerl_jax._HOMES.items():
        assert hasattr(import_module(home), name), f"{home}.{name}"


def test_notebooks_carry_no_outputs():
    faults = [
        f"{path.name}, cell {index}"
        for path in sorted((ROOT / "notebooks").glob("*.ipynb"))
        for index, cell in enumerate(json.loads(path.read_text())["cells"])
        if cell.get("outputs") or cell.get("execution_count")
    ]
    assert not faults, "\n".join(faults)
