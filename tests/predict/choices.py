"""What predictors hear of a layer's choice."""

from collections import Counter


def chosen(ids):
    return Counter(expert for expert in ids.flatten().tolist() if expert >= 0)
