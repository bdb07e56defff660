"""An Auto class for policies, which transformers has not. `registration` enters the models in those that it has."""

from collections import OrderedDict

from transformers.models.auto.auto_factory import _BaseAutoModelClass, _LazyAutoMapping
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

from . import modeling_delta_family, modeling_ids4, modeling_mamba3_nplr


class AutoModelForBehaviorCloning(_BaseAutoModelClass):
    """Loads a behaviour-cloning policy by its configuration."""

    _model_mapping = _LazyAutoMapping(CONFIG_MAPPING_NAMES, OrderedDict())


for policy in (
    modeling_mamba3_nplr.Mamba3NPLRForBehaviorCloning,
    modeling_delta_family.DeltaFamilyForBehaviorCloning,
    modeling_ids4.IDS4ForBehaviorCloning,
):
    AutoModelForBehaviorCloning.register(policy.config_class, policy)
