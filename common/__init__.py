"""What the technique folders share."""

import logging
import warnings

# PEFT imports bitsandbytes wherever it is installed, which then advises on 4-bit kernels that LoRA never calls.
logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
# Checkpoints saved within a second of each other are ordered by their step numbers, as the Trainer then warns.
logging.getLogger("transformers.trainer_utils").setLevel(logging.ERROR)

# Transformers 5.23 prefers another name for the same setting, which 5.17 does not know yet.
warnings.filterwarnings("ignore", message=r"`\w*gradient_checkpointing\w*` is deprecated", category=FutureWarning)
