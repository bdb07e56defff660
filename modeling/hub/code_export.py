"""
The code of a model as the files of a checkpoint: flat, and few.

transformers copies the files that it finds by relative imports with a name, and runs the one that it is asked for even
if it is loaded already. So the modules that the configuration names, and those that functions import when they run,
give their names to files of their own; other modules share one with those of their folder, in the order in which they
are loaded. A module shares a file only where its names mean the same there and nothing is loaded sooner than before,
save what has to be loaded anyway: see `Plan.fits`.
"""

import re
from collections.abc import Iterable
from functools import cache
from itertools import takewhile

from .module_source import IMPORTS, Module, RelativeImport

# Before the names of code files in a checkpoint, except for those that name a family of models: someone may have a
# losses.py or heads.py of their own in that folder.
PREFIX, FAMILY_PREFIXES = "mamba3_nplr_", ("modeling_", "configuration_")
HEAD_OF_IMPORT = re.compile(r" *from [.\w]+ import\b")
# How statements begin that mean nothing in a file that is joined from several.
OF_A_FILE = ("__all__", 'if __name__ == "__main__":')


@cache
def source_files(*entries: str) -> dict[str, str]:
    """
    The source of some modules, and of all that they and their functions import relatively, by the names of the files in
    a checkpoint. `entries` are the modules that its configuration names.
    """
    modules, late = read_modules(entries)
    if exported_name(__name__) == __name__.rpartition(".")[2]:  # in a checkpoint, whose code stays as it is
        return {f"{exported_name(name)}.py": module.source for name, module in modules.items()}
    plan = Plan(modules, entries, late)
    names = plan.names()
    file_of = {module: names[index] for module, index in plan.file_of.items()}
    return {f"{name}.py": joined(file, file_of) for name, file in zip(names, plan.files, strict=True)}


def exported_name(module_name: str) -> str:
    """The name of a file in a checkpoint that is called after a module, or a folder; it may be there already."""
    parts = module_name.split(".")
    # Those of a checkpoint are flat already; those of the package are in it and in one of its parts.
    return parts[-1] if parts[-1].startswith((PREFIX, *FAMILY_PREFIXES)) else PREFIX + "_".join(parts[2:] or parts[-1:])


def read_modules(entries: Iterable[str]) -> tuple[dict[str, Module], list[str]]:
    """Modules by name, each after those that it loads; and the names of those that only functions load."""
    modules, late = {}, []

    def read(name: str, importers: tuple[str, ...] = ()) -> None:
        if name in importers:
            circle = " -> ".join([*importers[importers.index(name) :], name])
            raise ValueError(f"Modules load each other in a circle, which files of a checkpoint cannot do: {circle}.")
        if name in modules:
            return
        module = Module(name)
        for loaded in module.loads:
            read(loaded, (*importers, name))
        late.extend(target for x in module.imports if x.late for target in x.targets)
        modules[name] = module

    for name in entries:
        read(name)
    at_once = set(modules)
    for name in late:  # which grows by what those load late
        read(name)
    return modules, [name for name in dict.fromkeys(late) if name not in at_once]


class Plan:
    """
    Which modules share which file.

    Args:
        modules: All, each after those that it loads.
        entries: Those that the configuration of a checkpoint names.
        late: Those that functions load.
    """

    def __init__(self, modules: dict[str, Module], entries: Iterable[str], late: list[str]):
        self.modules, self.apart = modules, {*entries, *late}
        imports = [(module, x) for module in modules.values() for x in module.imports]
        self.held_whole = {target for _, x in imports if x.whole for target in x.targets}
        self.importers = {name: {module.name for module, x in imports if name in x.targets} for name in modules}
        # What is to be loaded later, or not at all where a package is missing, must not join what is loaded at once.
        at_once = set().union(*map(self.loaded_by, entries))
        self.waits_for = {
            name: frozenset(x for x in late if name in self.loaded_by(x) and name not in at_once) for name in modules
        }
        self.files: list[list[Module]] = []
        self.file_of: dict[str, int] = {}
        for module in modules.values():
            index = next((i for i in range(len(self.files)) if self.fits(module, i)), len(self.files))
            if index == len(self.files):
                self.files.append([])
            self.files[index].append(module)
            self.file_of[module.name] = index

    def loaded_by(self, name: str) -> set[str]:
        """A module and all that its import loads."""
        found = [name]
        for loaded in found:
            found.extend(x for x in self.modules[loaded].loads if x not in found)
        return set(found)

    def fits(self, module: Module, index: int) -> bool:
        """Whether a module may join a file, at its end."""
        file = self.files[index]
        names = {x.name for x in file}
        if module.folder != file[0].folder or self.waits_for[module.name] != self.waits_for[file[0].name]:
            return False
        if any(x.needs_own_namespace or x.name in self.held_whole for x in (module, *file)):
            return False
        # What transformers may run again must hold nothing that others have from it already.
        shared = {importer for name in names for importer in self.importers[name]} - names - {module.name}
        if names & self.apart or (module.name in self.apart and shared):
            return False
        # No two files may load each other.
        needed = {self.file_of[x] for x in module.loads} - {index}
        return index not in self.loaded_files(needed) and all(self.same_names(module, x) for x in file)

    def loaded_files(self, indices: Iterable[int]) -> set[int]:
        """Some files and all that those load."""
        found = list(indices)
        for index in found:
            loads = [self.file_of[x] for module in self.files[index] for x in module.loads]
            found.extend(x for x in loads if x not in found)
        return set(found)

    def same_names(self, a: Module, b: Module) -> bool:
        """Whether no global name stands for one thing here and another there."""
        common = a.meanings.keys() & b.meanings.keys() - {"__all__"}
        if any(self.origin(a.meanings[name]) != self.origin(b.meanings[name]) for name in common):
            return False
        return not (a.meanings.keys() & b.assumed or b.meanings.keys() & a.assumed)

    def origin(self, meaning: tuple) -> tuple:
        """The meaning of a name where it was bound first."""
        while meaning[0] == "import" and meaning[1] in self.modules:
            there = self.modules[meaning[1]].meanings
            if meaning[2] not in there:
                break
            meaning = there[meaning[2]]
        return meaning

    def names(self) -> list[str]:
        """
        After a single module, or one that must keep its name; else after the folder. Where a folder has given its name
        already, after the last module.
        """
        sources = []
        for file in self.files:
            *others, last = file
            after_module = not others or last.name in self.apart or last.folder in sources
            sources.append(last.name if after_module else last.folder)
        names = [exported_name(source) for source in sources]
        for name in names:
            same = [source for source, other in zip(sources, names, strict=True) if name == other]
            if len(same) > 1:
                raise ValueError(f"{' and '.join(same)} would both be {name}.py in a checkpoint; rename one of them.")
        return names


def joined(file: list[Module], file_of: dict[str, str]) -> str:
    """The text of a file: its modules, each under its name. `file_of` has the names of files by those of modules."""
    if len(file) == 1:
        return rewritten(file[0], file_of)
    parts = [f'"""Modules of {file[0].folder}, joined in the order in which they are loaded."""']
    taken = set()
    for module in file:
        parts.append(f"# From {module.name}\n{rewritten(module, file_of, taken).strip()}")
    return "\n\n\n".join(parts) + "\n"


def rewritten(module: Module, file_of: dict[str, str], taken: set[str] | None = None) -> str:
    """
    A module with the imports of a checkpoint. In a file with others, `taken` has the imports before it, and what is
    there already or belongs to a file of its own is left out.
    """
    lines = module.source.split("\n")
    changes = {}  # by first line: the line after the last one, and the new lines
    for x in module.imports:
        changes[x.node.lineno - 1] = x.node.end_lineno, import_lines(x, module, lines, file_of)
    for node in module.tree.body if taken is not None else ():
        start, end = node.lineno - 1, node.end_lineno
        if isinstance(node, IMPORTS):
            text = "\n".join(changes[start][1] if start in changes else lines[start:end])
            if text in taken:
                changes[start] = end, []
            taken.add(text)
        elif lines[start].startswith(OF_A_FILE):
            changes[start] = end, []
    return "\n".join(changed(lines, changes))


def import_lines(x: RelativeImport, module: Module, lines: list[str], file_of: dict[str, str]) -> list[str]:
    """What a relative import becomes."""
    start, end = x.node.lineno - 1, x.node.end_lineno
    indent, rest = lines[start][: x.node.col_offset], lines[end - 1].encode()[x.node.end_col_offset :].decode()
    head = HEAD_OF_IMPORT.match(lines[start])
    if head is None or rest.partition("#")[0].strip():
        raise ValueError(
            f"Line {x.node.lineno} of {module.name} cannot be written into a checkpoint: an import must have lines of "
            "its own, the first of which names the module."
        )
    files = [file_of[target] for target in x.targets]
    if x.whole:
        # transformers does not see the second form, and would not copy the file.
        forms = "{0}from .{1} import __name__ as {2}", "{0}from . import {1} as {2}"
        names = [alias.asname or alias.name for alias in x.node.names]
        return [form.format(indent, *pair) for pair in zip(files, names, strict=True) for form in forms]
    if files[0] == file_of[module.name] and x.node in module.tree.body:
        return [f"{alias.asname} = {alias.name}" for alias in x.node.names if alias.asname not in (None, alias.name)]
    return [f"{indent}from .{files[0]} import{lines[start][head.end() :]}", *lines[start + 1 : end]]


def changed(lines: list[str], changes: dict[int, tuple[int, list[str]]]) -> list[str]:
    """Where lines go without others in their place, the longer of the gaps before and after them stays."""
    result, number = [], 0
    while number < len(lines):
        end, new = changes.get(number, (number + 1, [lines[number]]))
        result += new
        number = end
        if not new:
            del result[len(result) - min(gap(reversed(result)), gap(lines[number:])) :]
    return result


def gap(lines: Iterable[str]) -> int:
    """The number of empty lines at the start."""
    return sum(1 for _ in takewhile(lambda line: not line, lines))
