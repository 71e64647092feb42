"""What only full fine-tuning on one device needs: which layers train."""

import pandas as pd
from transformers import PreTrainedModel


def trained_layers(model: PreTrainedModel) -> pd.DataFrame:
    """Return what is trained of `model`: one line for each name of a weight."""
    trained = [(name, weight.numel()) for name, weight in model.named_parameters() if weight.requires_grad]
    table = pd.DataFrame(trained, columns=["weight", "parameters"])
    table["weight"] = table["weight"].str.replace(r"\.\d+\.", ".N.", regex=True)
    return table.groupby("weight", sort=False)["parameters"].agg(layers="count", parameters="sum").reset_index()
