"""Measures policies, budgets and batches side by side on one model, as the papers' tables have them."""
