"""What only full fine-tuning on one device needs: which layers train."""

import pandas as pd
from transformers import PreTrainedModel

from common.base.run_config import RunConfig
from common.models.trained_weights import train_linear_layers


def set_trained_layers(model: PreTrainedModel, run: RunConfig) -> pd.DataFrame:
    """Freeze `model` but for what `run.target_modules` names, and list what was chosen: one line for each name.

    Raises:
        BadInputError: a name matches no linear layer.
    """
    train_linear_layers(model, run.target_modules)
    trained = [(name, weight.numel()) for name, weight in model.named_parameters() if weight.requires_grad]
    table = pd.DataFrame(trained, columns=["weight", "parameters"])
    table["weight"] = table["weight"].str.replace(r"\.\d+\.", ".N.", regex=True)
    return table.groupby("weight", sort=False)["parameters"].agg(layers="count", parameters="sum").reset_index()
