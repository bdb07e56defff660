"""Auto classes that transformers has not. `registration` enters the models in those that it has."""

from collections import OrderedDict

from transformers.models.auto.auto_factory import _BaseAutoModelClass, _LazyAutoMapping
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

from .registration import add_models


def models_with(head: str) -> _LazyAutoMapping:
    mapping = _LazyAutoMapping(CONFIG_MAPPING_NAMES, OrderedDict())
    add_models(mapping, head)
    return mapping


class AutoModelForBehaviorCloning(_BaseAutoModelClass):
    """Loads a behaviour-cloning policy by its configuration."""

    _model_mapping = models_with("ForBehaviorCloning")
