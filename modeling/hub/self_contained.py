"""Checkpoints that carry their own code, so that they load with `trust_remote_code=True` where this package is not."""

import json
import sys
from pathlib import Path

from safetensors import SafetensorError

from .atomic_files import write_atomically
from .code_export import exported_name, source_files
from .downloads import discard_damaged_weights, refuse_damaged
from .errors import NOTHING_LOADED, clear_errors
from .folder_lock import only_writer

PUSHED_OR_NOT = "The repository holds all of this push or nothing; push again."


class SelfContainedMixin:
    """
    For a base class of models: `save_pretrained`, and with it `push_to_hub` and the Trainer, writes the code beside the
    weights and lists all classes in the configuration's `auto_map`.

    Models define `auto_classes`, and have all classes that it names in one module; and `custom_pipelines`.
    """

    @classmethod
    def auto_classes(cls) -> dict[str, str]:
        """The name of each Auto class -> the name of the class that it loads."""
        raise NotImplementedError

    @classmethod
    def custom_pipelines(cls) -> dict[str, dict]:
        """The tasks of the pipelines that run such a model -> what a configuration says about them."""
        raise NotImplementedError

    @classmethod
    def importable_class(cls) -> type:
        """This class, or the one that it stands for: FSDP gives a model a class made up in torch."""
        ours = [x for x in cls.__mro__ if issubclass(x, SelfContainedMixin)]
        return next(x for x in ours if getattr(sys.modules.get(x.__module__), x.__name__, None) is x)

    @classmethod
    def auto_map(cls) -> dict[str, str]:
        cls = cls.importable_class()
        config_module = exported_name(cls.config_class.__module__)
        model_module = exported_name(cls.__module__)
        entries = {"AutoConfig": f"{config_module}.{cls.config_class.__name__}"}
        return entries | {auto: f"{model_module}.{name}" for auto, name in cls.auto_classes().items()}

    def save_pretrained(self, save_directory, is_main_process: bool = True, **kwargs):
        """As in transformers, and in addition writes the code files. Of several at once into a folder, each waits."""
        self.config.auto_map = self.auto_map()
        # A pipeline that saves itself writes them there; they are about the checkpoint, and not about this model.
        vars(self.config).pop("custom_pipelines", None)
        repository = kwargs.get("repo_id") or Path(save_directory).name
        # Other processes of one training take part in a save, and must not wait for the one that writes. Before
        # transformers 5.22 the caller alone knew which that is.
        writes = getattr(self, "should_save_on_this_rank", bool)(is_main_process)
        with only_writer(save_directory if writes else None):
            with clear_errors(repository, "pushed", PUSHED_OR_NOT, kwargs.get("token")):
                super().save_pretrained(save_directory, is_main_process=is_main_process, **kwargs)
            if writes:
                self.write_code(save_directory)

    def push_to_hub(self, repo_id: str, *args, **kwargs):
        """As in transformers, with errors that say what to do."""
        with clear_errors(repo_id, "pushed", PUSHED_OR_NOT, kwargs.get("token")):
            return super().push_to_hub(repo_id, *args, **kwargs)

    def _upload_modified_files(self, working_dir, *args, **kwargs):
        # With push_to_hub=True transformers uploads from here what the save has written: the code has to be there.
        self.write_code(working_dir)
        return super()._upload_modified_files(working_dir, *args, **kwargs)

    def write_code(self, folder) -> None:
        """The code files, and in the configuration the pipelines that run them."""
        cls = self.importable_class()
        files = dict(source_files(cls.__module__, cls.config_class.__module__))
        config = Path(folder) / "config.json"
        if config.exists():  # beside an adapter there is none
            # Written here, for an attribute of the configuration would be seen by all threads that use the model.
            entries = json.loads(config.read_text(encoding="utf-8"))
            entries["custom_pipelines"] = cls.custom_pipelines()
            files[config.name] = json.dumps(entries, indent=2, sort_keys=True) + "\n"
        for name, text in files.items():
            path = Path(folder) / name
            # As for the weights, it is left to the caller to wait for the disk: each file may take it a while.
            write_atomically(path, lambda part, text=text: part.write_text(text, encoding="utf-8"), wait=False)

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path, *args, **kwargs):
        """As in transformers; weights that were damaged on their way from the Hub are refused."""
        name = pretrained_model_name_or_path
        try:
            with clear_errors(name, "loaded", NOTHING_LOADED, kwargs.get("token")):
                loaded = super().from_pretrained(name, *args, **kwargs)
        except SafetensorError as error:
            refuse_damaged(name, discard_damaged_weights(name, kwargs), error)
            raise OSError(
                f"The weights of {name} are damaged or only partly there ({error}). Copy or download the checkpoint "
                "again."
            ) from error
        refuse_damaged(name, discard_damaged_weights(name, kwargs))
        return loaded

    @classmethod
    def register_for_auto_class(cls, auto_class="AutoModel"):
        """Does nothing: `save_pretrained` writes the code itself, as transformers copies only flat packages."""


__all__ = ["SelfContainedMixin"]
