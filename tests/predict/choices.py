"""What predictors hear of a layer's choice."""

from collections import Counter


def chosen(ids):
    """The experts of this rank that occur in ids, each with how often."""
    return Counter(expert for expert in ids.flatten().tolist() if expert >= 0)
