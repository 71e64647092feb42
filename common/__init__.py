"""Code that the technique folders share."""

import logging
import os
import warnings

# PEFT imports bitsandbytes wherever it is installed, which then advises on 4-bit kernels that LoRA never calls.
logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
# Checkpoints saved within a second of each other are ordered by their step numbers, as the Trainer then warns.
logging.getLogger("transformers.trainer_utils").setLevel(logging.ERROR)

# Read when CUDA starts, which importing PEFT does where bitsandbytes is installed; so before any library is imported.
os.environ.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")  # CUDA counts GPUs as the driver's tools do
if "PYTORCH_CUDA_ALLOC_CONF" not in os.environ:
    # batches differ in length: without it, freed blocks of one length do not serve the next one
    os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")

# Transformers 5.23 prefers another name for the same setting, which 5.17 does not know yet.
warnings.filterwarnings("ignore", message=r"`\w*gradient_checkpointing\w*` is deprecated", category=FutureWarning)
