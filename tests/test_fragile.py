"""
What this package uses of others without their promise to keep it: private names, and where modules are. When a library
changes one of them this fails first, and says which of our files relies on it and what for.
"""

import ast
import ctypes
import inspect
import re
import sys
from importlib.util import find_spec
from pkgutil import resolve_name

import pytest

from helpers.places import ROOT
from mamba3_nplr.modeling import registration
from mamba3_nplr.modeling.families import HEADS, in_transformers, own_name

PRIVATE = re.compile(r"_[A-Za-z]\w*")
PUBLIC = {"_asdict", "_exit", "_fields", "_replace"}  # for all their underscores
OWN = {
    "_check_labels",
    "_check_num_labels",
    "_check_ranges",
    "_init_mixer",
    "_refuse_other_format",
    "_refuse_unknown_keywords",
    "_require",
}

BY_REFERENCE = "what ctypes.byref gives"

# Whose -> name -> what it is used for.
RELIED_ON = {
    "transformers.models.auto.auto_factory": {
        "_BaseAutoModelClass": "an Auto class for the heads that transformers has none for",
        "_LazyAutoMapping": "the models that such an Auto class loads",
    },
    "transformers.AutoModel": {"_model_mapping": "where an Auto class finds our models"},
    "transformers.models.auto.auto_factory._LazyAutoMapping": {
        "_extra_content": "what users register, to which our models are added without being loaded",
    },
    "transformers.PreTrainedModel": {
        "_can_compile_fullgraph": "says that torch.compile meets no graph breaks",
        "_can_record_outputs": "says which modules give the hidden states",
        "_init_weights": "the first weights of every module",
        "_input_embed_layer": "the name of the map of observations, for get_input_embeddings",
        "_is_stateful": "says that a state cannot be cut back to an earlier token",
        "_keep_in_fp32_modules_strict": "parameters that half precision would spoil",
        "_no_split_modules": "blocks that stay on one device",
        "_skip_keys_device_placement": "a cache is not moved to the device of each block",
    },
    "transformers.utils.PushToHubMixin": {
        "_upload_modified_files": "writes a checkpoint's code before save_pretrained(push_to_hub=True) uploads it",
    },
    "transformers.utils.hub.cached_files": dict.fromkeys(
        ("_raise_exceptions_for_connection_errors", "_raise_exceptions_for_missing_entries"),
        "looks for a file that may not be there",
    ),
    "transformers.Pipeline": {
        "_forward": "runs the model",
        "_sanitize_parameters": "refuses unknown options",
        **dict.fromkeys(("_load_feature_extractor", "_load_tokenizer", "_load_processor"), "says that there is none"),
        **dict.fromkeys(("_load_image_processor", "_load_video_processor"), "says that there is none"),
    },
    "transformers.GenerationConfig": {
        "_get_default_generation_params": "fields of other configurations, which transformers hands to every one",
    },
    "transformers.Trainer": {
        "_get_grad_norm": "stops at numbers that are not finite, before the optimizer's step",
        "_get_output_dir": "checkpoints are written under another name",
        "_globalstep_last_logged": "the next logged loss of a resumed run is the mean since the last one",
        "_load_rng_state": "the last thing that is read from a checkpoint, after which we read our own",
        "_save": "leaves out training_args.bin, a pickle",
        "_save_checkpoint": "a checkpoint gets its name once it is whole",
        "_save_rng_state": "every process writes a file there, to which we add one",
        "_total_loss_scalar": "the mean loss at the end of a resumed run",
        "_tr_loss": "the losses since the last log entry",
    },
    "transformers.Trainer.save_model": {"_internal_call": "saves without an upload"},
    "transformers.TrainingArguments": {"_n_gpu": "keeps Trainer from splitting batches over GPUs in one process"},
    "transformers.HfArgumentParser": {"_argument_group_name": "headings of the help"},
    "argparse.ArgumentParser": {
        "_actions": "changes what the help says about single options",
        "_option_string_actions": "options with a value that may be left out",
    },
    "torch": {"_C": "holds the functions below", "_higher_order_ops": "holds the loop operator below"},
    "torch._higher_order_ops.scan": {"scan": "the loop of graphs whose length stays open"},
    "torch._C": {
        "_dynamo": "TensorGuards compares all of a list of tensors but their numbers in one call",
        "_functorch": "holds peek_interpreter_stack, which tells whether a transform of torch.func is at work",
        "_get_tracing_state": "compiled code stands aside while torch.jit.trace records operators",
        **dict.fromkeys(
            ("_len_torch_dispatch_stack", "_len_torch_function_stack"), "compiled code stands aside in modes of torch"
        ),
    },
    "torch._C._dynamo.guards": {"TensorGuards": "tells whether tensors are still of the kind that they were"},
    "torch._C._functorch": {"peek_interpreter_stack": "tells whether a transform of torch.func is at work"},
    "torch.ops.mkldnn": {"_linear_pointwise": "matrix products by oneDNN where MKL is slower"},
    "torch.autograd.forward_ad": {"_current_level": "tells whether forward-mode differentiation is at work"},
    "torch.nn.Module": {
        **dict.fromkeys(("_forward_hooks", "_forward_pre_hooks"), "compiled code stands aside for them"),
        **dict.fromkeys(("_backward_hooks", "_backward_pre_hooks"), "gradients do not go past them"),
        **dict.fromkeys(("_modules", "_parameters"), "finds what it holds in less time than the attribute"),
    },
    "torch.nn.modules.module": {
        **dict.fromkeys(("_global_forward_hooks", "_global_forward_pre_hooks"), "compiled code stands aside for them"),
        **dict.fromkeys(("_global_backward_hooks", "_global_backward_pre_hooks"), "gradients do not go past them"),
    },
    "ctypes": {"_CFuncPtr": "the type of a function of a library"},
    BY_REFERENCE: {"_obj": "what a function of a library was given, for its error message"},
}
USES = [(owner, name) for owner, names in RELIED_ON.items() for name in names]
# Methods that are ours in place of those of a library: ours -> theirs.
OVERRIDDEN = {
    "mamba3_nplr.training.trainer.ResumableTrainer": "transformers.Trainer",
    "mamba3_nplr.modeling.hub.self_contained.SelfContainedMixin": "transformers.utils.PushToHubMixin",
    "mamba3_nplr.modeling.sequence_model.SequencePreTrainedModel": "transformers.PreTrainedModel",
    "mamba3_nplr.modeling.pipelines.SequencePipeline": "transformers.Pipeline",
}


def private_names(tree: ast.AST) -> set[str]:
    """The private names in a file: attributes, imports and their modules, keywords, and names that classes define."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            found.add(node.attr)
        elif isinstance(node, ast.keyword):
            found.add(node.arg or "")
        elif isinstance(node, ast.ImportFrom):
            found.update((node.module or "").split("."), (alias.name for alias in node.names))
        elif isinstance(node, ast.Import):
            found.update(part for alias in node.names for part in alias.name.split("."))
        elif isinstance(node, ast.FunctionDef):
            found.add(node.name)
        elif isinstance(node, ast.ClassDef):
            assigned = [x for statement in node.body if isinstance(statement, ast.Assign) for x in statement.targets]
            found.update(target.id for target in assigned if isinstance(target, ast.Name))
    return {name for name in found if PRIVATE.fullmatch(name)} - PUBLIC - OWN


def files_by_name() -> dict[str, list[str]]:
    """Private name -> our files that use it."""
    found = {}
    for folder in ("mamba3_nplr", "configuration", "modeling", "datasets_scripts", "training"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            for name in private_names(ast.parse(path.read_text(encoding="utf-8"))):
                found.setdefault(name, []).append(path.relative_to(ROOT).as_posix())
    return found


FILES = files_by_name()


def find(owner: str):
    return ctypes.byref(ctypes.c_int64()) if owner == BY_REFERENCE else resolve_name(owner)


def has(owner, name: str) -> bool:
    """Whether it is an attribute, an argument of a function, or what the code of a class calls an instance's own."""
    if hasattr(owner, name):
        return True
    if inspect.isclass(owner):
        return re.search(rf"\b{name}\b", inspect.getsource(owner)) is not None
    return callable(owner) and name in inspect.signature(owner).parameters


@pytest.mark.parametrize(("owner", "name"), USES)
def test_private_names_are_still_there(owner, name):
    files = ", ".join(FILES.get(name, [])) or "a file of ours"
    assert has(find(owner), name), f"{owner} has no {name} any more. {files} relies on it: {RELIED_ON[owner][name]}."


def test_every_private_name_of_others_is_listed_above():
    listed = {name for _, name in USES}
    unlisted = {name: files for name, files in FILES.items() if name not in listed}
    assert not unlisted, f"Not in RELIED_ON with what they are used for: {unlisted}"
    unused = {name for name in listed if PRIVATE.fullmatch(name)} - FILES.keys()
    assert not unused, f"In RELIED_ON, but no file uses them: {unused}"


@pytest.mark.parametrize(("ours", "theirs"), OVERRIDDEN.items())
def test_private_methods_that_are_overridden_are_still_called_so(ours, theirs):
    own_class, other_class = resolve_name(ours), resolve_name(theirs)
    methods = [name for name, x in vars(own_class).items() if PRIVATE.fullmatch(name) and inspect.isfunction(x)]
    assert set(methods) - OWN
    for name in set(methods) - OWN:
        reason = f"{ours} overrides {theirs}.{name}: {RELIED_ON[theirs][name]}."
        expected = list(inspect.signature(getattr(other_class, name)).parameters.values())
        for mine, other in zip(inspect.signature(getattr(own_class, name)).parameters.values(), expected, strict=False):
            variable = mine.kind in (mine.VAR_POSITIONAL, mine.VAR_KEYWORD)
            assert variable or mine.name == other.name, f"{other.name} is an argument of it now. {reason}"
        calls = inspect.getsource(sys.modules[other_class.__module__])
        assert re.search(rf"\.{name}\b", calls), f"It is never called. {reason}"


def test_the_import_hook_finds_what_it_registers_with():
    """`registration` puts our models there when these modules are loaded, by whomever."""
    for name in registration.AFTER_IMPORT.actions:
        assert find_spec(name) is not None, f"{name}, after whose import we register, is no module any more."
    auto = resolve_name("transformers.models.auto.modeling_auto")
    mappings = {own_name(HEADS[head]): getattr(auto, own_name(HEADS[head])) for head in filter(in_transformers, HEADS)}
    mappings = {name: auto_class._model_mapping for name, auto_class in mappings.items()}
    mappings["CONFIG_MAPPING"] = resolve_name("transformers.models.auto.configuration_auto.CONFIG_MAPPING")
    for name, mapping in mappings.items():
        assert isinstance(mapping._extra_content, registration.Entries), f"{name} does not have our models."
        # What transformers itself registers there would else be lost.
        assert "self._extra_content[key] = value" in inspect.getsource(type(mapping)), name
    tasks = resolve_name("transformers.pipelines.PIPELINE_REGISTRY").supported_tasks
    assert isinstance(tasks, registration.Entries) and set(registration.TASKS) <= set(tasks)
