"""
Makes the models known to the Auto classes of transformers, and the pipelines to `pipeline`, without loading those
first: that takes seconds, which `import mamba3_nplr` should not cost a program that never asks for them.
"""

import sys
from collections.abc import Callable
from importlib import import_module
from importlib.abc import MetaPathFinder
from importlib.util import find_spec

PACKAGE = __name__.rpartition(".")[0]
CONFIGURATIONS = "transformers.models.auto.configuration_auto"
MODELS = "transformers.models.auto.modeling_auto"
PIPELINES, OUR_PIPELINES = "transformers.pipelines", f"{PACKAGE}.pipelines"
OUR_MODELS = tuple(
    f"{PACKAGE}.{name}" for name in ("sequence_model", "modeling_mamba3_nplr", "modeling_delta_family", "modeling_ids4")
)


def register() -> None:
    """Registers at once with what is loaded already, and with the rest as soon as it is loaded."""
    actions = {CONFIGURATIONS: register_configurations} | dict.fromkeys((MODELS, *OUR_MODELS), register_models)
    actions |= dict.fromkeys((PIPELINES, OUR_PIPELINES), register_pipelines)
    waiting = {name: action for name, action in actions.items() if name not in sys.modules}
    sys.meta_path.insert(0, AfterImport(waiting))
    for name, action in actions.items():
        if name not in waiting:
            action()


def register_configurations() -> None:
    from transformers.models.auto.configuration_auto import AutoConfig

    from ..configuration.configuration_delta_family import DeltaFamilyConfig
    from ..configuration.configuration_ids4 import IDS4Config
    from ..configuration.configuration_mamba3_nplr import Mamba3NPLRConfig

    for config_class in (Mamba3NPLRConfig, DeltaFamilyConfig, IDS4Config):
        AutoConfig.register(config_class.model_type, config_class)


def register_models() -> None:
    import_module(f"{PACKAGE}.auto")


def register_pipelines() -> None:
    from transformers import AutoModelForSequenceClassification
    from transformers.pipelines import PIPELINE_REGISTRY

    from .auto import AutoModelForBehaviorCloning
    from .pipelines import PIPELINES

    loaders = {"AutoModel": AutoModelForBehaviorCloning}
    for task, (pipeline_class, auto_class, input_type) in PIPELINES.items():
        if PIPELINE_REGISTRY.supported_tasks.get(task, {}).get("impl") is pipeline_class:
            continue
        loader = loaders.get(auto_class, AutoModelForSequenceClassification)
        PIPELINE_REGISTRY.register_pipeline(task, pipeline_class, loader, type=input_type)


class AfterImport(MetaPathFinder):
    """
    Calls an action once after a module has been imported, by whomever, and when no other of the modules is still being
    loaded: ours load those of transformers, and could not be imported from there. One action ends before the next.
    """

    def __init__(self, actions: dict[str, Callable[[], None]]):
        self.actions = actions
        self.loading = set()
        self.due = []
        self.acting = False

    def find_spec(self, name, path=None, target=None):
        # Taken out first, so that the search below finds the module's own loader.
        action = self.actions.pop(name, None)
        if action is None:
            return None
        spec = find_spec(name)
        if spec is None:
            return None
        execute = spec.loader.exec_module

        def execute_then_act(module):
            self.loading.add(name)
            try:
                execute(module)
            finally:
                self.loading.discard(name)
            self.due.append(action)
            self.act()

        spec.loader.exec_module = execute_then_act
        return spec

    def act(self) -> None:
        if self.acting or self.loading:
            return
        self.acting = True
        try:
            while self.due:
                self.due.pop(0)()
        finally:
            self.acting = False
