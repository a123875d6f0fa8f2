"""What else serves a model, an adapter each; one that is not installed is left out with a sentence."""
