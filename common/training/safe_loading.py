"""Reading checkpoints without running what a stranger may have put in: DCP and DeepSpeed unpickle what they find."""

import os
import pickle
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import FileSystemReader, metadata
from torch.distributed.checkpoint.metadata import Metadata

from common.base.errors import BadInputError, RunStoppedError, reading

os.environ.pop("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", None)  # a user's own would contradict it
# in this process and those that it starts, also where a library asks for less, as DCP does for what is no tensor
os.environ["TORCH_FORCE_WEIGHTS_ONLY_LOAD"] = "1"
ALLOWED = {
    "torch": ("Size",),
    "torch.serialization": ("_get_layout",),
    "torch.distributed.checkpoint.filesystem": ("_StorageInfo",),
    "pathlib": ("Path", "PosixPath", "PurePosixPath", "WindowsPath"),
    "collections": ("OrderedDict",),
}
"""By module, what a list of shards is made of, beside number formats and the classes of DCP's `metadata`."""


class _Unpickler(pickle.Unpickler):
    """Reads a list of shards, and nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        known = name in ALLOWED.get(module, ())
        is_format = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        part = getattr(metadata, name, None) if module == metadata.__name__ else None
        if not known and not is_format and getattr(part, "__module__", None) != metadata.__name__:
            raise pickle.UnpicklingError(f"{module}.{name} has no place in a list of shards")
        return super().find_class(module, name)


class SafeReader(FileSystemReader):
    """PyTorch's reader of shards, which looks at the list before it is unpickled."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return the list of shards; a BadInputError says what in it could run."""
        path = Path(self.path) / ".metadata"
        try:
            with path.open("rb") as file:
                _Unpickler(file).load()
        except pickle.UnpicklingError as error:
            raise BadInputError(f"{path} is not read ({error}): resume from another checkpoint.") from None
        return super().read_metadata(*args, **kwargs)


def load_zero_state(path: str, map_location: Any = None) -> Any:
    """Return what a file of DeepSpeed's checkpoint holds, in its own reader's place; a RunStoppedError says why not."""
    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler  # here: other runs need none
    from deepspeed.runtime.zero.config import ZeroStageEnum
    from deepspeed.utils.tensor_fragment import fragment_address

    known = torch.serialization.safe_globals([DynamicLossScaler, LossScaler, ZeroStageEnum, fragment_address])
    try:
        with reading(path, "Code in it is not run: resume from another checkpoint."), known:
            return torch.load(path, map_location=map_location, weights_only=True)
    except BadInputError as refusal:  # perhaps on this rank alone, which has to say it itself
        raise RunStoppedError(str(refusal)) from refusal
