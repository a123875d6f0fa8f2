"""What the package ships: a small trained model with its tokenizer, prompts and held-out texts."""
