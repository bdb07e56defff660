"""What it takes to write a module into a checkpoint: its source, what it imports, and what its names stand for."""

import ast
import symtable
import sys
from collections.abc import Iterator
from functools import cached_property
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

PACKAGE = __name__.partition(".")[0]
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
IMPORTS = (ast.Import, ast.ImportFrom)


class RelativeImport(NamedTuple):
    node: ast.ImportFrom
    targets: list[str]  # the module that it imports from or, if `whole`, those that it imports themselves
    whole: bool
    late: bool  # whether it stands in a function, and loads them when that runs


class Module:
    """
    A module by its dotted name, which need not be loaded: some wait for their first use.

    `source` is the text of its file. A module that reads other files of the package has a function `exported_module`,
    which returns a text that does not.
    """

    def __init__(self, name: str):
        self.name, self.folder = name, name.rpartition(".")[0]
        self.source = module_file(name).read_text(encoding="utf-8")
        self.tree = ast.parse(self.source)
        if any(isinstance(node, ast.FunctionDef) and node.name == "exported_module" for node in self.tree.body):
            self.source = import_module(name).exported_module()
            self.tree = ast.parse(self.source)
        self.imports = list(self.relative_imports(self.tree))
        self.loads = [target for x in self.imports if not x.late for target in x.targets]

    def relative_imports(self, node: ast.AST, late: bool = False) -> Iterator[RelativeImport]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.ImportFrom) and child.level:
                yield self.resolve(child, late)
            elif isinstance(child, IMPORTS):
                self.refuse_full_names(child)
            yield from self.relative_imports(child, late or isinstance(child, FUNCTIONS))

    def resolve(self, node: ast.ImportFrom, late: bool) -> RelativeImport:
        base = ".".join([*self.name.split(".")[: -node.level], *filter(None, [node.module])])
        names = [alias.name for alias in node.names]
        if names == ["*"]:
            raise ValueError(f"{self.name} imports * from {base}; the code of a checkpoint must name what it imports.")
        if not is_package(base):
            return RelativeImport(node, [base], whole=False, late=late)
        targets = [f"{base}.{name}" for name in names]
        for target in targets:
            if find_spec(target) is None:
                raise ValueError(
                    f"{self.name} imports {target}, which is no module: a checkpoint gets the modules of a package, "
                    "and not what its __init__.py holds."
                )
        return RelativeImport(node, targets, whole=True, late=late)

    def refuse_full_names(self, node: ast.Import | ast.ImportFrom) -> None:
        for name in [node.module] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names]:
            if self.name.startswith(f"{PACKAGE}.") and name.partition(".")[0] == PACKAGE:
                raise ValueError(
                    f"{self.name} imports {name} by its full name, which is unknown where a checkpoint is loaded "
                    "without this package; import it relatively."
                )

    @cached_property
    def scopes(self) -> list[symtable.SymbolTable]:
        """That of the module, then those in it."""
        found = [symtable.symtable(self.source, self.name, "exec")]
        for scope in found:
            found.extend(scope.get_children())
        return found

    @cached_property
    def meanings(self) -> dict[str, tuple]:
        """
        What its global names stand for. Names of equal meaning, in whatever modules, may share one place:

            ("import", module, name in it, or None for the module itself)
            ("value", expression for what cannot change)
            ("own", this module, name)
        """
        bindings = {}
        for node in outer_nodes(self.tree):
            for name, meaning in self.bound_by(node):
                bindings.setdefault(name, set()).add(meaning)
        names = [x.get_name() for x in self.scopes[0].get_symbols() if x.is_assigned() or x.is_imported()]
        own = {name: ("own", self.name, name) for name in names}
        return own | {name: next(iter(bindings[name])) for name in names if len(bindings.get(name, ())) == 1}

    def bound_by(self, node: ast.AST) -> list[tuple[str, tuple]]:
        """The names that a statement of the module itself binds, and their meanings."""
        if isinstance(node, ast.Import):
            parts = [(alias.asname, alias.name, alias.name.partition(".")[0]) for alias in node.names]
            return [(own or top, ("import", whole if own else top, None)) for own, whole, top in parts]
        if isinstance(node, ast.ImportFrom):
            found = next((x for x in self.imports if x.node is node), None)
            if found and found.whole:
                origins = [(target, None) for target in found.targets]
            else:
                origins = [(found.targets[0] if found else node.module, alias.name) for alias in node.names]
            names = [alias.asname or alias.name for alias in node.names]
            return [(name, ("import", *origin)) for name, origin in zip(names, origins, strict=True)]
        if is_constant(node):
            return [(node.targets[0].id, ("value", ast.unparse(node.value)))]
        is_stored = isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load)
        name = node.id if is_stored else getattr(node, "name", None)
        return [(name, ("own", self.name, name))] if isinstance(name, str) else []

    @cached_property
    def assumed(self) -> set[str]:
        """Global names that it uses and does not bind: those of Python's own functions, and the like."""
        used = set()
        for scope in self.scopes:
            # What a class binds may be made from the global of that name.
            in_class = isinstance(scope, symtable.Class)
            used |= {x.get_name() for x in scope.get_symbols() if x.is_global() or (in_class and x.is_referenced())}
        return used - self.meanings.keys()

    @cached_property
    def needs_own_namespace(self) -> bool:
        """Whether its globals are more than names that are bound once: it changes them later, or computes names."""
        if any(isinstance(x, ast.ImportFrom) and x.module == "__future__" for x in self.tree.body):
            return True
        if {"__getattr__", "__dir__"} & self.meanings.keys() or {"globals", "exec", "eval"} & self.assumed:
            return True
        deleted = [x for x in outer_nodes(self.tree) if isinstance(x, ast.Name) and isinstance(x.ctx, ast.Del)]
        return bool(deleted) or any(isinstance(node, ast.Global) for node in ast.walk(self.tree))


def outer_nodes(node: ast.AST) -> Iterator[ast.AST]:
    """What is run in the scope of a module itself, down to names."""
    for child in ast.iter_child_nodes(node):
        yield child
        if not isinstance(child, (*FUNCTIONS, *IMPORTS, ast.ClassDef)) and not is_constant(child):
            yield from outer_nodes(child)


def is_constant(node: ast.AST) -> bool:
    """Whether it is an assignment of what is the same wherever in a file it is computed."""
    if not isinstance(node, ast.Assign) or len(node.targets) > 1 or not isinstance(node.targets[0], ast.Name):
        return False
    try:
        hash(ast.literal_eval(node.value))  # a list could be changed
        return True
    except (TypeError, ValueError):
        return ast.unparse(node.value) == "logging.get_logger(__name__)"


def is_package(name: str) -> bool:
    spec = getattr(sys.modules.get(name), "__spec__", None) or find_spec(name)
    return spec is not None and spec.submodule_search_locations is not None


def module_file(name: str) -> Path:
    known, attribute = (sys.modules[name], "__file__") if name in sys.modules else (find_spec(name), "origin")
    path = getattr(known, attribute, None)
    if path is None:
        raise ValueError(f"There is no file with the source of {name}, so that a checkpoint cannot carry it.")
    return Path(path)
