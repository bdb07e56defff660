"""
Makes the models known to the Auto classes of transformers without loading those first: that takes seconds, which
`import mamba3_nplr` should not cost a program that never asks for an Auto class.
"""

import sys
from collections.abc import Callable
from importlib import import_module
from importlib.abc import MetaPathFinder
from importlib.util import find_spec

PACKAGE = __name__.rpartition(".")[0]
CONFIGURATIONS = "transformers.models.auto.configuration_auto"
MODELS = "transformers.models.auto.modeling_auto"
OUR_MODELS = f"{PACKAGE}.modeling_mamba3_nplr"


def register() -> None:
    """Registers at once with what is loaded already, and with the rest as soon as it is loaded."""
    actions = {CONFIGURATIONS: register_configuration, MODELS: load_models, OUR_MODELS: register_models}
    waiting = {name: action for name, action in actions.items() if name not in sys.modules}
    sys.meta_path.insert(0, AfterImport(waiting))
    for name, action in actions.items():
        if name not in waiting:
            action()


def register_configuration() -> None:
    from transformers.models.auto.configuration_auto import AutoConfig

    from ..configuration.configuration_mamba3_nplr import Mamba3NPLRConfig

    AutoConfig.register(Mamba3NPLRConfig.model_type, Mamba3NPLRConfig)


def load_models() -> None:
    # If our models are being loaded just now, this was called on their behalf and their own turn comes.
    if OUR_MODELS not in sys.modules:
        import_module(OUR_MODELS)


def register_models() -> None:
    import_module(f"{PACKAGE}.auto")


class AfterImport(MetaPathFinder):
    """Calls an action once after a module has been imported, by whomever."""

    def __init__(self, actions: dict[str, Callable[[], None]]):
        self.actions = actions

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
            execute(module)
            action()

        spec.loader.exec_module = execute_then_act
        return spec
