"""
Makes the models known to the Auto classes of transformers, the pipelines to `pipeline` and the environments to
gymnasium, without loading those first: that takes seconds, which `import mamba3_nplr` should not cost a program that
never asks for them.

What is entered there is only where ours are; they are loaded when they are looked up. So nothing is loaded while a
module of transformers is: one thread in the middle of theirs and another in ours would wait for each other. And an
entry is made in a moment and may be made again, whatever interrupted the first attempt.
"""

import sys
from collections import UserDict
from collections.abc import Callable
from functools import partial
from importlib import import_module
from importlib.abc import MetaPathFinder

from .families import FAMILIES, HEADS, in_transformers, load, own_name

TASKS = ("state-tracking", "behavior-cloning")
# Environments of gymnasium, by their ids; where they are is written with a colon before the class.
ENVIRONMENTS = {
    f"mamba3_nplr/{name}-v0": f"mamba3_nplr.datasets_scripts.shell_game_environment:{name}"
    for name in ("ShellGame", "ShellHand")
}


def register() -> None:
    """Registers at once with what is loaded already, and with the rest as soon as it is loaded."""
    if AFTER_IMPORT not in sys.meta_path:
        sys.meta_path.insert(0, AFTER_IMPORT)
    for name, action in AFTER_IMPORT.actions.items():
        if name in sys.modules:
            action(import_module(name))  # which waits for another thread that is still loading it


class Entries(UserDict):
    """
    The entries of a dictionary and, after them, some that are loaded when they are asked for.

    Args:
        entries: Stays what it is for all who know it, and is written into.
        later: Functions by the names of their keys; a class is named by its module and its own name.
        load_key: The key of a name.
    """

    def __init__(self, entries: dict, later: dict[str, Callable[[], object]], load_key: Callable = str):
        self.data, self.later, self.load_key = entries, later, load_key

    def __contains__(self, key) -> bool:
        return key in self.data or name_of(key) in self.later

    def __getitem__(self, key):
        return self.data[key] if key in self.data else self.later[name_of(key)]()

    def __iter__(self):
        named = {name_of(key) for key in self.data}
        return iter([*self.data, *(self.load_key(name) for name in self.later if name not in named)])

    def __len__(self) -> int:
        return len({name_of(key) for key in self.data} | self.later.keys())


def name_of(key) -> str:
    return f"{key.__module__}.{key.__qualname__}" if isinstance(key, type) else key


def load_pipeline(task: str) -> dict:
    """A task as `pipeline` looks it up."""
    from .pipelines import PIPELINES

    pipeline_class = PIPELINES[task]
    auto_class = load(HEADS[pipeline_class.heads[0]])
    return {"impl": pipeline_class, "pt": (auto_class,), "type": pipeline_class.input_type}


def forward_attributes(module) -> None:
    """
    transformers puts another module in its own place. Threads that import it while it is loaded are left with the
    first, which has none of its classes; now it asks the other for them.
    """
    other = sys.modules["transformers"]
    if other is not module:
        module.__getattr__ = partial(getattr, other)


def register_configurations(module) -> None:
    mapping = module.CONFIG_MAPPING
    if not isinstance(mapping._extra_content, Entries):
        later = {family.model_type: partial(load, family.config) for family in FAMILIES}
        mapping._extra_content = Entries(mapping._extra_content, later)


def register_models(module) -> None:
    for head in filter(in_transformers, HEADS):
        add_models(getattr(module, own_name(HEADS[head]))._model_mapping, head)


def add_models(mapping, head: str) -> None:
    """Enters the models of all families with a head in the mapping of an Auto class."""
    if not isinstance(mapping._extra_content, Entries):
        later = {family.config: partial(load, family.model(head)) for family in FAMILIES}
        mapping._extra_content = Entries(mapping._extra_content, later, load)


def register_pipelines(module) -> None:
    registry = module.PIPELINE_REGISTRY
    if not isinstance(registry.supported_tasks, Entries):
        later = {task: partial(load_pipeline, task) for task in TASKS}
        registry.supported_tasks = Entries(registry.supported_tasks, later)


def register_environments(module) -> None:
    for name, place in ENVIRONMENTS.items():
        if name not in module.registry:
            module.register(name, entry_point=f"{place}Env", vector_entry_point=f"{place}VectorEnv")


class AfterImport(MetaPathFinder):
    """
    Calls an action with each of some modules that has been loaded, by whomever, before anyone else sees it. Where
    either is interrupted the module is not there, and its next import does both again.
    """

    def __init__(self, actions: dict[str, Callable]):
        self.actions = actions

    def find_spec(self, name, path=None, target=None):
        if name not in self.actions:
            return None
        finders = [finder for finder in sys.meta_path if finder is not self and hasattr(finder, "find_spec")]
        spec = next(filter(None, (finder.find_spec(name, path, target) for finder in finders)), None)
        if spec is None:
            return None
        execute = spec.loader.exec_module

        def execute_then_act(module):
            execute(module)
            self.actions[name](module)

        spec.loader.exec_module = execute_then_act
        return spec


AFTER_IMPORT = AfterImport(
    {
        "transformers": forward_attributes,
        "transformers.models.auto.configuration_auto": register_configurations,
        "transformers.models.auto.modeling_auto": register_models,
        "transformers.pipelines": register_pipelines,
        "gymnasium.envs": register_environments,
    }
)
